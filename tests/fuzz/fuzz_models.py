#!/usr/bin/env python3
"""Train random models under random plans and in plain torch, and compare.

Every plan that the runtime accepts must give the losses, gradients, parameters and buffers of one process that takes
the whole batch in one piece; or all ranks must refuse it in one sentence before anything has changed. A pair of model
and plan is right, refused, wrong, bare (another exception) or hung. `--seed N --case K` tries one pair again and shows
it. Status 1 if anything is wrong, bare or hung.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from fuzz_plans import Case, make_case, simpler_cases
from fuzz_ranks import FAILURES, Fuzzer, Verdict, shrunk


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=200, help="pairs of a model and a plan (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, nargs="+", help="only these pairs of the seed, each shown in full")
    parser.add_argument("--ranks", type=int, default=8, help="the most ranks of a plan (default 8)")
    parser.add_argument("--only", nargs="+", default=[], help="only pairs whose model or plan has all these words")
    parser.add_argument("--without", nargs="+", default=[], help="no pairs whose model or plan has one of these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="groups of ranks at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one pair (default 60)")
    parser.add_argument("--shrink", action="store_true", help="look for the simplest pair that fails in the same way")
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    return parser.parse_args(arguments)


def words_of(case: Case) -> list[str]:
    """Return all words of a pair: those of its model, its plan and the axes in use."""
    plan = case.plan
    words = [*case.recipe.words(), f"plan:{case.kind}", *case.kind.split("+")]
    words += [f"recompute:{plan.recompute}", f"offload:{plan.offload}", f"ranks:{plan.world_size}"]
    words += ["dp"] if plan.dp > 1 else []
    words += [f"schedule:{plan.pipeline_schedule}"] if plan.pipeline_schedule else []
    words += ["sequence parallel"] if plan.sequence_parallel else []
    words += ["micro-batches"] if plan.num_microbatches > 1 else []
    words += [] if case.gives_example else ["no example"]
    return words


def chosen_cases(options: argparse.Namespace, *, new_forms: bool) -> list[Case]:
    """Return the cases that the options ask for."""

    def make(number: int) -> Case:
        return make_case(options.seed, number, largest=options.ranks, new_forms=new_forms)

    if options.case is not None:
        return [make(number) for number in options.case]
    cases: list[Case] = []
    number = 0
    while len(cases) < options.pairs and number < 200 * options.pairs:
        case = make(number)
        words = words_of(case)
        if set(options.only) <= set(words) and not set(options.without) & set(words):
            cases.append(case)
        number += 1
    return cases


def signature(verdict: Verdict) -> str:
    """Return the failure or refusal without the values of this case: what many cases have in common."""
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)|'[^']*'", "...", verdict.message)
    text = re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "N", text)
    if verdict.status == "wrong":
        text = text.split(" off by")[0]
    return text[:150]


def show(case: Case, verdict: Verdict | None = None) -> None:
    """Print a case as source text, with what came of it."""
    print(f"--seed {case.seed} --case {case.number}\n  recipe = {case.recipe!r}")
    print(
        f"  plan = {case.plan!r}\n  {case.plan.describe()}; example_inputs {'' if case.gives_example else 'not '}given"
    )
    if verdict is not None:
        print(f"  {verdict.status}: {verdict.message}\n{verdict.detail}")


def print_summary(verdicts: list[Verdict], seconds: float) -> None:
    """Print how many pairs came out how, and what failures have in common."""
    counts = Counter(verdict.status for verdict in verdicts)
    print(f"\n{len(verdicts)} pairs in {seconds:.0f} s ({seconds / max(1, len(verdicts)):.2f} s a pair)")
    for status in ("right", "refused", *FAILURES):
        print(f"{status:<8} {counts[status]:>5}")
    for status in ("refused", *FAILURES):
        groups: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in verdicts:
            if verdict.status == status:
                groups[signature(verdict)].append(verdict)
        for text, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            print(f"\n{status} x {len(members)}: {text}")
            if status != "refused":
                shared = Counter(word for member in members for word in words_of(member.case))
                common = [word for word, count in shared.most_common() if count == len(members)]
                print(f"    all have: {', '.join(common[:12])}")
                print(f"    cases: {' '.join(str(member.case.number) for member in members[:16])}")


def write_json(path: Path, verdicts: list[Verdict]) -> None:
    """Write the verdicts as a list of objects."""
    rows = [
        {
            "seed": verdict.case.seed,
            "case": verdict.case.number,
            "status": verdict.status,
            "message": verdict.message,
            "detail": verdict.detail,
            "seconds": round(verdict.seconds, 2),
            "recipe": repr(verdict.case.recipe),
            "plan": verdict.case.plan.describe(),
            "words": words_of(verdict.case),
        }
        for verdict in verdicts
    ]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def main() -> None:
    """Try the pairs of the command line."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # all processes are ended then too
    began, verdicts = time.monotonic(), []
    try:
        with Fuzzer(jobs=options.jobs, limit_s=options.limit) as fuzzer:
            cases = chosen_cases(options, new_forms=fuzzer.new_forms())
            for verdict in fuzzer.verdicts(cases):
                verdicts.append(verdict)
                if options.case is not None:
                    show(verdict.case, verdict)
                elif verdict.is_failure:
                    plan = verdict.case.plan.describe()
                    print(f"case {verdict.case.number} ({plan}) {verdict.status}: {verdict.message}", flush=True)
            if options.shrink:
                for verdict in [one for one in verdicts if one.is_failure]:
                    print("\nsimplest:")
                    smallest = shrunk(fuzzer, verdict, simpler_cases)
                    show(smallest.case, smallest)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    print_summary(verdicts, time.monotonic() - began)
    if options.json is not None:
        write_json(options.json, verdicts)
    if any(verdict.is_failure for verdict in verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
