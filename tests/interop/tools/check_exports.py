"""Exports plans of many kinds to every target and has each file read by the parser of the tool that it is for.

    python tests/interop/tools/check_exports.py [--target NAME]... [--python INTERPRETER]... [--path FOLDER]... [--json]

Tools are looked for in this interpreter and in those of --python, since some exclude each other (torchtitan 0.2 and
0.3). --path names checkouts, such as one of Megatron-LM, whose parser is in no package. What a tool reads is laid
beside the plan; fields that the export owned up to be missing are left out of the comparison. What is not installed
is "not checked". Ends with status 1 where a tool refuses a file or reads another plan from it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paraplan.interop.export import TARGETS, export_plan
from paraplan.interop.exported import Exported, Subject
from paraplan.plan.files import ClusterReference, ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec

_READERS = Path(__file__).with_name("export_readers.py")
_PIPELINE: dict[str, object] = {"pp": 4, "tp": 2, "sequence_parallel": True, "num_microbatches": 8}

PLANS: dict[str, dict[str, object]] = {
    "one process": {},
    "DDP": {"dp": 8, "num_microbatches": 2},
    "DDP, compiled": {"dp": 8, "compiled": True},
    "DDP, full recompute": {"dp": 16, "recompute": "full"},
    "ZeRO-1": {"dp": 16, "zero_stage": 1},
    "ZeRO-2": {"dp": 8, "zero_stage": 2, "micro_batch_size": 2},
    "ZeRO-3, compiled": {"dp": 8, "zero_stage": 3, "num_microbatches": 4, "compiled": True},
    "ZeRO-3, full recompute": {"dp": 8, "zero_stage": 3, "recompute": "full"},
    "hybrid ZeRO-1": {"dp": 16, "zero_stage": 1, "zero_shards": 8},
    "hybrid ZeRO-2": {"dp": 16, "zero_stage": 2, "zero_shards": 8},
    "hybrid ZeRO-3": {"dp": 16, "zero_stage": 3, "zero_shards": 8, "num_microbatches": 2},
    "hybrid ZeRO-3 and tp": {"dp": 8, "tp": 2, "zero_stage": 3, "zero_shards": 4, "sequence_parallel": True},
    "hybrid ZeRO-3 and cp": {"dp": 4, "cp": 2, "zero_stage": 3, "zero_shards": 2},
    "optimizer offloaded": {"dp": 8, "zero_stage": 1, "offload": "optimizer"},
    "optimizer offloaded, ZeRO-2": {"dp": 8, "zero_stage": 2, "offload": "optimizer"},
    "parameters offloaded": {"dp": 8, "zero_stage": 3, "offload": "parameters"},
    "tp": {"tp": 8, "sequence_parallel": True},
    "tp without sequence parallelism": {"dp": 2, "tp": 4},
    "ZeRO-3 and tp": {"dp": 4, "tp": 2, "zero_stage": 3},
    "ZeRO-3, tp and cp": {"dp": 2, "tp": 2, "cp": 2, "zero_stage": 3, "sequence_parallel": True},
    "cp": {"dp": 2, "cp": 4},
    "ZeRO-1 and cp": {"dp": 2, "cp": 4, "zero_stage": 1},
    "pipeline, GPipe": {"pp": 4, "pipeline_schedule": "gpipe", "num_microbatches": 8},
    "pipeline, 1F1B": {"pp": 2, "pipeline_schedule": "1f1b", "num_microbatches": 4, "recompute": "selective"},
    "pipeline, zero bubble": {"dp": 2, "pp": 4, "pipeline_schedule": "zero_bubble", "num_microbatches": 4},
    "3D": _PIPELINE | {"dp": 4, "zero_stage": 1, "pipeline_schedule": "1f1b"},
    "3D, uneven stages": _PIPELINE | {"dp": 2, "pipeline_schedule": "1f1b", "stage_blocks": (9, 8, 8, 7)},
    "3D, interleaved": _PIPELINE | {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_size": 2},
    "3D, dp outermost": _PIPELINE | {"dp": 2, "pipeline_schedule": "1f1b", "rank_order": ("dp", "pp", "cp", "tp")},
    "experts, ZeRO-1": {"dp": 8, "tp": 2, "ep": 4, "zero_stage": 1, "sequence_parallel": True},
    "experts, ZeRO-3": {"dp": 8, "ep": 4, "zero_stage": 3},
    "LoRA, DDP": {"dp": 2, "train": "lora:r=16", "recompute": "full", "optimizer": "adamw_8bit"},
    "LoRA of some layers, one process": {"train": "lora:r=8,targets=q|v,dropout=0.1", "loss": "chunked"},
    "QLoRA, one process": {"train": "lora:r=16", "base_weights": "nf4:double", "optimizer": "paged_adamw_8bit"},
    "QLoRA, ZeRO-3": {"dp": 2, "zero_stage": 3, "train": "lora:r=64", "base_weights": "nf4", "recompute": "full"},
    "DoRA in 8 bits": {"dp": 2, "train": "dora:r=16,targets=q|k|v|o", "base_weights": "int8", "loss": "liger"},
    "full in pure bf16": {"precision": "bf16-pure", "optimizer": "paged_adamw_8bit", "recompute": "full"},
}
"""Fields of the plan, and of the training where they are its own, by a name for each."""

_SIXTEEN_BITS = {"hf-trainer": "fp32", "transformers": "fp32"}
"""TrainingArguments refuse 16 bits where there is no GPU, so theirs are written for 32."""

_PYTHON = ("torchtitan-python", "transformers")

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""`subprocess.run` for the reader, or what does the same."""

_UNSAID = {"DDP beside": ("zero_stage", "zero_shards"), "stages": ("stage_blocks",)}
"""Fields that gaps of other names stand for."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this target; may be repeated")
    parser.add_argument("--python", action="append", default=[], help="another interpreter that has tools")
    parser.add_argument("--path", action="append", default=[], help="a checkout to import tools from")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    interpreters = [sys.executable, *options.python]
    rows = [check(target, interpreters, options.path) for target in options.target or TARGETS]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows)
    sys.exit(1 if any(row["refused"] or row["differs"] for row in rows) else 0)


def check(target: str, interpreters: list[str], paths: list[str], *, run: Run = subprocess.run) -> dict[str, Any]:
    """Return what the tool of one target says to every plan: its version, and the plans by outcome."""
    row: dict[str, Any] = {"target": target, "tool": None, "equal": [], "refused": {}, "differs": {}, "not_checked": {}}
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, tuple[str, Subject, Exported]] = {}
        for number, (name, fields) in enumerate(PLANS.items()):
            made = subject(fields, precision=_SIXTEEN_BITS.get(target, "bf16"))
            exported = export_plan(made, target, partial=True)
            path = Path(folder, f"{number}-{made.plan.world_size}.{'py' if target in _PYTHON else 'txt'}")
            if target in ("axolotl", "torchtune"):
                path = path.with_suffix(".yaml")
            elif target == "torchtitan":
                path = path.with_suffix(".toml")
            elif target == "accelerate":
                path = path.with_suffix(".yaml")
            path.write_text(exported.text)
            files[str(path)] = (name, made, exported)
        tool, lines = _read(target, list(files), interpreters, paths, run)
    row["tool"] = tool
    row["whole"] = [name for name, _, exported in files.values() if not exported.gaps]
    for line in lines:
        name, made, exported = files[line["file"]]
        if "missing" in line:
            row["not_checked"][name] = line["missing"]
        elif "refused" in line:
            row["refused"][name] = line["refused"]
        else:
            found = _differences(made, exported, line["says"])
            row["equal"] += [name] * (not found)
            row["differs"] |= {name: found} if found else {}
    if not lines:
        row["not_checked"] = dict.fromkeys(PLANS, "not installed")
    return row


def subject(fields: dict[str, object], *, precision: str) -> Subject:
    """Return the plan file of a plan for Llama-3-8B, or for a mixture of experts as long, on DGX H100 machines."""
    trained = {key: value for key, value in fields.items() if key in TrainingSpec.model_fields}
    plan = ParallelPlan.model_validate({key: value for key, value in fields.items() if key not in trained})
    per_node = min(8, plan.world_size)
    values = {"global_batch_size": plan.global_batch_size, "seq_length": 4096, "precision": precision} | trained
    file = PlanFile(
        plan=plan,
        model=ModelReference(name="mixtral-8x7b" if plan.ep > 1 else "llama-3-8b", num_blocks=32),
        training=TrainingSpec.model_validate(values),
        cluster=ClusterReference(name="dgx-h100", num_nodes=plan.world_size // per_node, gpus_per_node=per_node),
    )
    return Subject(file=file, image="registry/image:tag")


def _read(
    target: str, files: list[str], interpreters: list[str], paths: list[str], run: Run
) -> tuple[str | None, list[Any]]:
    """Return the tool and its lines, from the first interpreter that has it; of several, one that has all it needs."""
    best: tuple[str | None, list[Any]] = (None, [])
    searched = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": searched, "PYTHONWARNINGS": "ignore"}
    for interpreter in interpreters:
        command = [interpreter, str(_READERS), target, *files]
        finished = run(command, capture_output=True, text=True, check=False, env=environment)
        if finished.returncode:
            sys.exit(f"{interpreter} cannot read {target}:\n{finished.stderr[-2000:]}")
        head, *lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
        if "tool" not in head:
            continue
        if best[0] is None or sum("missing" in line for line in lines) < sum("missing" in line for line in best[1]):
            best = (head["tool"], lines)
        if not any("missing" in line for line in lines):
            break
    return best


def _differences(made: Subject, exported: Exported, says: dict[str, Any]) -> list[str]:
    """Return the fields that the tool reads otherwise than the plan has them, but for those owned up to."""
    plan, training, layout = made.plan, made.training, made.layout
    assert training is not None
    expected: dict[str, Any] = json.loads(plan.model_dump_json()) | {"world_size": plan.world_size}
    expected |= {"num_nodes": layout.num_nodes, "gpus_per_node": layout.gpus_per_node}
    expected |= {name: getattr(training, name) for name in ("precision", "seq_length", "compiled", "train", "loss")}
    expected["mixed_precision"] = "no" if training.precision in ("fp32", "bf16-pure") else training.precision
    expected["base_weights"] = training.frozen_weights if training.train != "full" else None
    expected["plan"] = json.loads(plan.model_dump_json())
    unsaid = {gap.part.partition("=")[0] for gap in exported.gaps}
    for part, fields in _UNSAID.items():
        if any(gap.part.startswith(part) for gap in exported.gaps):
            unsaid.update(fields)
    if "cp" in unsaid:
        unsaid.add("zero_stage")  # torchtitan shards over cp where the plan does not
    if unsaid & {"tp", "pp", "cp"}:
        unsaid.add("dp")  # the ranks of an axis that a tool lacks are data-parallel there
    return [
        f"{field}: {says[field]!r}, and the plan has {expected[field]!r}"
        for field in says
        if field not in unsaid and says[field] != expected[field]
    ]


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{len(PLANS)} plans for every target; 'whole' are written without a gap\n")
    tools = {row["target"]: row["tool"] or "not checked: not installed" for row in rows}
    width = max(map(len, tools.values()))
    print(f"{'target':18} {'read by':{width}} whole equal refused differs not checked")
    for row in rows:
        counts = [len(row[key]) for key in ("whole", "equal", "refused", "differs", "not_checked")]
        print("{:18} {:{}} {:5} {:5} {:7} {:7} {:11}".format(row["target"], tools[row["target"]], width, *counts))
    for row in rows:
        for name, reason in row["refused"].items():
            print(f"\n{row['target']} refuses '{name}': {reason}")
        for name, found in row["differs"].items():
            print(f"\n{row['target']} reads '{name}' otherwise: {'; '.join(found)}")
        if row["tool"] and row["not_checked"]:
            reason = next(iter(row["not_checked"].values()))
            print(f"\n{row['target']}, not checked, since {reason}: {', '.join(row['not_checked'])}")


if __name__ == "__main__":
    main()
