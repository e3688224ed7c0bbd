"""`paraplan recommend`: the decision tree and the search, as a ranked table and a plan file."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paraplan.api.plans import load_plan
from paraplan.api.recommendations import SEQUENCES_PER_GPU, SearchRequest, largest_model, nothing_fits_dict
from paraplan.api.workloads import OWN_RUNTIME, Workload, training_of
from paraplan.cli import completion
from paraplan.cli.choices import HardwareOptions, TrainingChoices
from paraplan.cli.ci import check_plan_file, read_percent
from paraplan.cli.groups import grouped
from paraplan.cli.models import load_shown
from paraplan.cli.old_spellings import OldCheckOptions
from paraplan.cli.options import SEARCH_PANEL, FindName, JsonOption, ObjectiveName, OptionalModelArgument, amount, count
from paraplan.cli.outputs import MANY_KINDS, HtmlOption, TraceOption, recommended, require_files, write_files
from paraplan.cli.plan_choices import PlanChoices
from paraplan.cli.terminal import show_note
from paraplan.cli.usual_precision import with_precision
from paraplan.errors import NoPlanFitsError, UsageError

if TYPE_CHECKING:
    from paraplan.api.workloads import Cluster
    from paraplan.model.spec import ModelSpec
    from paraplan.plan.training import TrainingSpec

app = typer.Typer(add_completion=False)
MONEY_PANEL = "Time and money"
MOST_DAYS = 1e6
MOST_MONEY = 1e18
"""Tokens, and a price: far beyond any, and finite."""

_search = partial(typer.Option, rich_help_panel=SEARCH_PANEL)
_money = partial(typer.Option, rich_help_panel=MONEY_PANEL)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of the search and of its answer."""

    framework: Annotated[
        str,
        _search(
            "--framework",
            metavar="NAME|FILE",
            help="Plan for another framework: a profile's name (megatron-core, torchtitan, deepspeed, ...) or JSON "
            "file. paraplan does not launch it.",
            autocompletion=completion.frameworks,
        ),
    ] = OWN_RUNTIME
    memory_margin: Annotated[
        str,
        _search(
            "--memory-margin",
            metavar="PERCENT",
            help="Keep so much of the usable memory free; 6 % of a GPU is left for fragmentation in any case.",
        ),
    ] = "0%"
    objective: Annotated[
        ObjectiveName,
        _search(
            "--objective",
            metavar="WHAT",
            help="What makes a plan better. throughput: the simplest plan within 10 % of the fastest (what predictions "
            "cannot tell apart); simplicity: within 20 %; fastest: no matter how complex; memory: the least; "
            "cost tries fewer GPUs too.",
        ),
    ] = ObjectiveName.throughput
    find: Annotated[
        FindName | None,
        _search(
            "--find",
            metavar="WHAT",
            help="fewest-gpus: that fit; by-date: that end --tokens in --days; largest-model: of those that come with "
            "paraplan; largest-batch: in one micro-batch; longest-sequence.",
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(
            "--top", metavar="N", parser=count(1, 1000), help="Rows of the table of plans: 5 by default, 10 with -v."
        ),
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show more plans, the decision tree, memory and step by parts.")
    ] = False
    explain: Annotated[
        bool,
        _search(
            "--explain",
            help="Show everything: also the best plan and the second part by part, and more that would help, searched.",
        ),
    ] = False
    pareto: Annotated[bool, _search("--pareto", help="Show the Pareto-optimal plans of time and memory.")] = False
    like: Annotated[
        Path | None, _search("--like", metavar="PLAN", help="Say what changes from an earlier plan, and why.")
    ] = None
    anywhere: Annotated[
        bool,
        _money(
            "--anywhere",
            help="Compare all machines that a price is known of, up to --nodes of them (8 by default): what trains on "
            "--tokens cheapest, fastest, or in --days. -o FOLDER writes their plans.",
        ),
    ] = False
    tokens: Annotated[
        float | None,
        _money(
            "--tokens",
            metavar="N",
            parser=amount(1, MOST_MONEY),
            help="Tokens to train on, as 1e12 or 1T: time and GPU-hours.",
        ),
    ] = None
    days: Annotated[
        float | None,
        _money(
            "--days",
            metavar="N",
            parser=amount(0.001, MOST_DAYS),
            help="With --find by-date or --anywhere: days that training on --tokens may take.",
        ),
    ] = None
    price: Annotated[
        float | None,
        _money(
            "--price",
            metavar="N",
            parser=amount(0, MOST_MONEY),
            help="Price of a GPU-hour, in any currency; of 1e9 tokens without --tokens.",
        ),
    ] = None
    prices: Annotated[
        Path | None,
        _money(
            "--prices",
            metavar="FILE",
            help="Prices of machines in place of those that come with paraplan (profiles/prices).",
        ),
    ] = None
    spot: Annotated[bool, _money("--spot", help="Take prices of machines that may be taken back; see --mtbf.")] = False
    budget: Annotated[
        float | None,
        _money(
            "--budget",
            metavar="MONEY",
            parser=amount(0.01, MOST_MONEY),
            help="Say what so much money trains on; with --find largest-model, the largest model that it trains.",
        ),
    ] = None
    mtbf: Annotated[
        str | None,
        _money(
            "--mtbf",
            metavar="TIME[/gpu|/node]",
            help="Mean time between failures: of the whole job (3h), or of one GPU or node (50000h/gpu, 400d/node). "
            "Shows how often to write a checkpoint, and the expected goodput.",
        ),
    ] = None
    costs_of: Annotated[
        Path | None,
        _money(
            "--costs-of",
            metavar="RUN",
            help="With --mtbf: take the times of checkpoints and restarts from this folder of an earlier launch.",
        ),
    ] = None

    def require(self, reference: str | None) -> None:
        """Raise `UsageError` where no model is named, or one where a model is to be found, and for days of nothing."""
        if self.spot and self.mtbf is None:
            show_note("spot machines may be taken back: --mtbf 6h/node counts what that costs")
        if self.days is not None and self.find is not FindName.by_date and not self.anywhere:
            raise UsageError("--days belongs to --find by-date and to --anywhere", hint="add --find by-date --tokens N")
        if self.anywhere and self.tokens is None:
            raise UsageError("--anywhere asks what training on so many tokens costs", hint="add --tokens 20B")
        if self.costs_of is not None and self.mtbf is None:
            raise UsageError("--costs-of without --mtbf changes nothing", hint="add --mtbf 3h")
        if reference is None and self.find is not FindName.largest_model:
            raise UsageError("no MODEL given", hint="paraplan profiles list --kind model shows the bundled ones")
        if reference is not None and self.find is FindName.largest_model:
            raise UsageError(f"--find largest-model looks for a model, and {reference} is one", hint="leave it out")

    def require_comparable(self, reference: str | None, *written: Path | None) -> None:
        """Raise `UsageError` for what a comparison of machines cannot do: find something, write one plan."""
        if reference is None or self.find is not None:
            raise UsageError(
                "several machines are compared for one MODEL, without --find", hint="name one machine with --profile"
            )
        if any(path is not None for path in written):
            raise UsageError(
                "several machines make no one plan to write", hint="name one machine with --profile, with -o"
            )

    def machines(self, hardware: HardwareOptions) -> tuple[HardwareOptions, ...]:
        """Return the options for each machine that is asked about."""
        if not self.anywhere:
            return hardware.each()
        from paraplan.api.profiles import load_prices, machines_for_rent

        if hardware.profile is not None or hardware.gpu is not None or self.price is not None:
            raise UsageError("--anywhere takes every machine, each at its price", hint="leave out what says others")
        found = machines_for_rent(load_prices(self.prices), most_nodes=hardware.nodes or 8)
        return tuple(replace(hardware, profile=name, nodes=nodes) for name, nodes in found)

    def model(
        self, reference: str | None, training: TrainingChoices, plan: PlanChoices, hardware: HardwareOptions
    ) -> ModelSpec:
        """Return the model that is named, or the largest bundled one that fits where that is asked for."""
        if reference is not None:
            return load_shown(
                reference, seq_length=training.seq_len, finds_length=self.find is FindName.longest_sequence
            )
        cluster = hardware.cluster()
        price = self.price_on(cluster)
        found = largest_model(
            cluster,
            money=self.budget,
            price_per_gpu_hour=price[0],
            tokens=self.tokens,
            seq_length=training.seq_len,
            global_batch_size=training.global_batch,
            framework=self.framework,
            constraints=plan.constraints(),
            memory_margin=read_percent(self.memory_margin, option="--memory-margin", most=90),
            **training.fields,
        )
        if self.budget is not None:
            tokens = "20 tokens a parameter" if self.tokens is None else f"{self.tokens:g} tokens"
            show_note(f"{found.name} is the largest that {self.budget:,.0f} trains on {tokens}")
        return found

    @property
    def num_candidates(self) -> int:
        """Plans that are ranked."""
        return self.top or 10

    def price_on(self, cluster: Cluster) -> tuple[float | None, str | None]:
        """Return the price of a GPU-hour and whose it is: as said, else the one known where money is asked about."""
        if self.price is not None or not (self.budget or self.spot or self.prices):
            return self.price, None
        from paraplan.api.profiles import known_price, load_prices

        found = known_price(cluster, load_prices(self.prices), is_spot=self.spot)
        return found.per_gpu_hour, f"{found}, {found.currency}"

    def request(self, plan: PlanChoices, cluster: Cluster | None, *, for_report: bool) -> SearchRequest:
        """Return what is asked of the search on a cluster, None for several; a report ranks many plans."""
        price, source = (self.price, None) if cluster is None else self.price_on(cluster)
        is_rate = self.tokens is None and price is not None and self.budget is None and cluster is not None
        return SearchRequest(
            objective=self.objective.value,
            find=None if self.find is None else self.find.value,
            framework=None if self.framework == OWN_RUNTIME else self.framework,
            fixed=plan.constraints(),
            memory_margin=read_percent(self.memory_margin, option="--memory-margin", most=90),
            num_candidates=max(self.num_candidates, MANY_KINDS) if for_report else self.num_candidates,
            explains=self.explain,
            uses_all_gpus=False,
            prices_changes=self.explain or for_report,
            with_front=self.pareto or for_report,
            earlier=None if self.like is None else load_plan(self.like),
            days=self.days,
            tokens=1e9 if is_rate else self.tokens,
            price_per_gpu_hour=price,
            price_source=source,
            money=self.budget,
            **self._failures,
        )

    @property
    def _failures(self) -> dict[str, Any]:
        """The fields of a `SearchRequest` that say how often the job fails, and what that costs."""
        if self.mtbf is None:  # and then no costs are given either
            return {}
        from paraplan.api.goodput import FailureRate, read_measured_costs

        return {
            "failures": FailureRate.parse(self.mtbf),
            "failure_costs": None if self.costs_of is None else read_measured_costs(self.costs_of),
        }


def _workloads(
    spec: ModelSpec, asked: TrainingSpec, choices: list[TrainingChoices], machines: list[tuple[Cluster, str]]
) -> list[Workload]:
    """Return the workload of each machine, with the precision that its GPUs have."""
    sizes = {"seq_length": asked.seq_length, "global_batch_size": asked.global_batch_size}
    return [
        Workload.of(spec, training_of(spec, **sizes, **each.fields), cluster, framework=framework)
        for each, (cluster, framework) in zip(choices, machines, strict=True)
    ]


@app.command()
@grouped
def recommend(
    model: OptionalModelArgument = None,
    *,
    hardware: HardwareOptions,
    training: TrainingChoices,
    plan: PlanChoices,
    search: SearchOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the recommended plan to this file.")
    ] = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
    old: OldCheckOptions,
    as_json: JsonOption = False,
) -> None:
    """Choose how to train MODEL on these GPUs: memory by parts, the decision tree, and ranked plans.

    What is given of a plan is kept: --tp 4 searches plans with four tensor-parallel ranks.

    Example: paraplan recommend llama-3-8b --profile dgx-h100 --seq-len 4096 --global-batch 64 -o plan.json
    """
    require_files(html, output, trace)
    old.require(html, output, trace)
    started = time.perf_counter()
    search.require(model)
    named = None if model is None else search.model(model, training, plan, hardware)  # before what else is missing
    clusters = [each.cluster() for each in search.machines(hardware)]
    training, *_ = choices = [with_precision(training, each) for each in clusters]
    if len(clusters) > 1:
        search.require_comparable(model, None if search.anywhere else output, trace)
    spec = named or search.model(model, training, plan, hardware)
    cluster = max(clusters, key=lambda each: each.num_gpus)
    batch = training.global_batch or SEQUENCES_PER_GPU * cluster.num_gpus
    if training.global_batch is None:
        assumed = f"a global batch of {batch} is assumed, {SEQUENCES_PER_GPU} sequences a GPU"
        show_note(f"{assumed}: --global-batch says otherwise")
    asked = training_of(spec, seq_length=training.seq_len, global_batch_size=batch, **training.fields)
    training.say_length(spec, asked.seq_length)
    if len(clusters) > 1:
        from paraplan.cli.machine_tables import Anywhere, compare

        workloads = _workloads(spec, asked, choices, [(each, search.framework) for each in clusters])
        workloads = [hardware.calibrated(each) for each in workloads]
        question = search.request(plan, None, for_report=False)
        choice = Anywhere(search.days, output, search.num_candidates) if search.anywhere else None
        compare(
            workloads, question, prices=search.prices, is_spot=search.spot, html=html, as_json=as_json, choice=choice
        )
        return
    request = search.request(plan, cluster, for_report=html is not None)
    workload = hardware.calibrated(Workload.of(spec, asked, cluster, framework=search.framework))
    if old.check is not None:
        check_plan_file(
            workload, old.check, tolerance=old.tolerance, github=old.github, junit=old.junit, as_json=as_json
        )
        return
    try:
        whole = recommended(workload, request, html)
    except NoPlanFitsError as error:
        if as_json:
            typer.echo(json.dumps(nothing_fits_dict(error), indent=2))
        raise
    seconds = time.perf_counter() - started
    write_files(whole, plan_path=output, trace=trace, html=html)
    answer = whole.cut(num_candidates=search.num_candidates, with_front=search.pareto)
    if as_json:
        typer.echo(json.dumps(answer.to_dict(plan_path=output, seconds=seconds), indent=2))
        return
    from paraplan.cli.recommend_tables import print_answer  # rich, which --json does without

    print_answer(
        answer, plan_path=output, seconds=seconds, verbose=search.verbose or search.explain, shown_rows=search.top
    )
