"""Errors of the Python interface name its fields and arguments, not options of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paraplan
from paraplan import Constraints, ParallelPlan, ParaplanError, TrainingSpec
from paraplan.cli.main import app
from paraplan.python_words import _COMMANDS, _FLAGS, _NUMBERS, _TEXTS, in_python_words

NAMES = _NUMBERS | _TEXTS | {option: words.partition("=")[0] for option, words in _FLAGS.items()}


def test_every_option_is_one_and_has_a_name_in_python() -> None:
    group: Any = typer.main.get_command(app)
    assert set(_COMMANDS.split("|")) == set(group.list_commands(None))
    commands = [group.get_command(None, name) for name in ("recommend", "estimate", "check")]
    parameters = [one for command in commands for one in command.params]
    options = {word for one in parameters for word in (*one.opts, *one.secondary_opts)}
    assert {f"--{name}" for name in NAMES} <= options
    records = (*TrainingSpec.model_fields, *ParallelPlan.model_fields, *vars(Constraints()))
    functions = (paraplan.load_workload, paraplan.recommend, paraplan.check_script)
    known = {*records, *(name for one in functions for name in inspect.signature(one).parameters)}
    assert set(NAMES.values()) <= known


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("use --tp 1, 2", "use tp=1, 2"),
        ("or --global-batch 1,024, or fewer", "or global_batch_size=1_024, or fewer"),
        ("give --seq-len", "give seq_length"),
        ("give --profile NAME and --nodes N", "give num_gpus=N"),
        ("give --profile NAME, or --nodes N", "give profile='NAME', or num_nodes=N"),
        ("Megatron-LM's --task MSDP-EVAL-F1 trains nothing", "Megatron-LM's --task MSDP-EVAL-F1 trains nothing"),
        ("--train 'lora:r=16,targets=q|v' prices that", "train='lora:r=16,targets=q|v' prices that"),
        ("--train does not know 'qlora'", "train does not know 'qlora'"),
        ("leave --link out, or use --link pcie", "leave link out, or use link='pcie'"),
        ("--optimizer adamw_8bit: 16.8 GiB", "optimizer='adamw_8bit': 16.8 GiB"),
        ("leave out --sequence-parallel", "leave out sequence_parallel=True"),
        ("Megatron's --micro-batch-size 4", "Megatron's --micro-batch-size 4"),
        ("paraplan recommend --tp 2 -o plan.json, or tp 4", "paraplan recommend --tp 2 -o plan.json, or tp 4"),
        ("paraplan writes no --offload-activations for ray", "paraplan writes no offloads_activations=True for ray"),
        ("no option - none", "no option - none"),
    ],
)
def test_options_are_fields_and_arguments(sentence: str, words: str) -> None:
    assert in_python_words(sentence) == words


def workload(**training: Any) -> paraplan.Workload:
    return paraplan.load_workload("gpt2", "dgx-h100", seq_length=1024, global_batch_size=8, **training)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: paraplan.estimate(workload(), ParallelPlan(dp=8, micro_batch_size=3)),
        lambda: paraplan.estimate(workload(), ParallelPlan(tp=5)),
        lambda: paraplan.recommend(workload(), constraints=Constraints(tp=3)),
        lambda: paraplan.recommend(workload(), constraints=Constraints(dp=8, micro_batch_size=2)),
        lambda: workload(train="qlorra"),
        lambda: workload(task="dance"),
        lambda: workload(link="telepathy"),
        lambda: workload(precision="bf16", fp8_recipe="tensorwise"),
        lambda: paraplan.load_workload("gpt2", "dgx-h1000"),
        lambda: paraplan.load_cluster("dgx-h100", num_nodes=0),
        lambda: paraplan.load_cluster("dgx-h100", gpus_per_node=9),
        lambda: paraplan.recommend(paraplan.load_workload("llama-3-8b", "1xrtx-3060")),
    ],
)
def test_errors_of_python_name_no_option_that_has_a_field(wrong: Callable[[], object]) -> None:
    with pytest.raises(ParaplanError) as caught:
        wrong()
    said = str(caught.value)
    assert not [name for name in NAMES if f"--{name} " in said.replace(":", " ").replace(",", " ") + " "], said


def test_a_file_that_does_not_say_its_machines_is_read_with_what_the_hint_says(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    words = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 1"
    path.write_text(f"python pretrain_gpt.py --tensor-model-parallel-size 2 --global-batch-size 8 {words}\n")
    with pytest.raises(ParaplanError, match="num_gpus=N"):
        paraplan.import_plan(path)
    assert paraplan.import_plan(path, num_gpus=4).plan.world_size == 4


def test_sentences_that_answers_hold_are_those_of_python() -> None:
    experts = paraplan.load_workload("qwen3-30b-a3b", "8xh100", framework="torchtitan")
    (busiest,) = paraplan.estimate(experts, ParallelPlan(dp=8, ep=8, zero_stage=3, micro_batch_size=8)).warnings
    assert busiest.endswith(": expert_load states another")
