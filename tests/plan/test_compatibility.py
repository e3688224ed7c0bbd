"""One rule for "does this plan suit this model, training and machine", and every door asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.cost.estimate import estimate_plan, why_unsuitable
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.hardware.link_speed import load_link_speeds
from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields, read_model
from paraplan.model.spec import ModelSpec
from paraplan.plan.compatibility import why_incompatible
from paraplan.plan.executor import ANYTHING
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.search.comparison import step_here
from paraplan.search.space import PlanSpace
from paraplan.search.verification import check_plan

MakeWorkload = Callable[..., Workload]
LLAMA: dict[str, Any] = {"model": "llama-3-8b", "global_batch_size": 64, "seq_length": 8192}


def pipeline(**fields: Any) -> ParallelPlan:
    return ParallelPlan(**{"pipeline_schedule": "1f1b", "num_microbatches": 64} | fields)


@pytest.mark.parametrize(
    ("plan", "training", "rule", "words"),
    [
        (
            ParallelPlan(tp=8, sequence_parallel=True, num_microbatches=64),
            {"seq_length": 8193},
            "sequence_parallel",
            "tp=8 does not divide the 8193 tokens",
        ),
        (ParallelPlan(dp=2, cp=4, num_microbatches=32), {"seq_length": 8190}, "cp", "does not divide the 8190 tokens"),
        (ParallelPlan(dp=4, zero_stage=3, num_microbatches=3), {}, "global_batch", "12 .* and 64 is wanted"),
        (pipeline(pp=4, stage_blocks=(1, 1, 1, 1)), {}, "stages", "sum to 4, and llama-3-8b has 32 blocks"),
        (ParallelPlan(dp=64, zero_stage=3), {}, "ranks", "64 ranks, and 1 x dgx-h100 has 8 GPUs"),
        (ParallelPlan(tp=3, num_microbatches=64), {}, "tp", "3 does not divide the 32 attention and 8 key-value heads"),
        (ParallelPlan(dp=8, ep=8, num_microbatches=8), {}, "ep", "llama-3-8b has no experts"),
        (ParallelPlan(tp=2, cp=8, num_microbatches=64), {}, "ranks", "16 ranks"),
        (pipeline(pp=5, virtual_pipeline_size=7, pipeline_schedule="interleaved_1f1b"), {}, "stages", "35 pipeline"),
        (ParallelPlan(devices_per_process=9, num_microbatches=64), {}, "devices_per_process", "over 9 GPUs"),
    ],
)
def test_what_does_not_suit_is_refused_with_the_rule_the_value_and_the_limit(
    plan: ParallelPlan, training: dict[str, int], rule: str, words: str, workload: MakeWorkload
) -> None:
    made = workload(**LLAMA | training)
    found = why_incompatible(plan, made.model, made.training, made.cluster)
    assert found is not None
    assert found.rule == rule
    assert found.hint
    with pytest.raises(PlanError, match=words):
        estimate_plan(made, plan)
    check = check_plan(made, plan, tolerance=1.0)
    assert [(finding.name, finding.passed) for finding in check.findings] == [("suits", False)]


def test_the_gate_refuses_what_an_estimate_refuses(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = ParallelPlan(tp=8, sequence_parallel=True, num_microbatches=64)
    path.write_text(PlanFile(plan=plan).to_json())
    job = ["llama-3-8b", "--profile", "dgx-h100", "--seq-len", "8193"]
    estimate = CliRunner().invoke(app, ["estimate", *job, "--plan", str(path)])
    check = CliRunner().invoke(app, ["verify", str(path), "--model", *job, "--global-batch", "64"])
    assert (estimate.exit_code, check.exit_code) == (2, 1)
    message = "tp=8 does not divide the 8193 tokens of a rank"
    assert message in estimate.stderr
    assert message in check.stdout


def test_a_plan_that_leaves_gpus_idle_can_be_estimated_and_fails_the_gate(workload: MakeWorkload) -> None:
    made, plan = workload(global_batch_size=64), ParallelPlan(dp=4, num_microbatches=16)
    assert estimate_plan(made, plan).step.step_time_s > 0
    assert [finding.name for finding in check_plan(made, plan, tolerance=1.0).findings if not finding.passed] == [
        "gpus"
    ]


def test_values_that_would_do_are_listed_and_do(workload: MakeWorkload) -> None:
    made = workload(**LLAMA)
    found = why_incompatible(ParallelPlan(tp=3, num_microbatches=64), made.model, made.training, made.cluster)
    assert found is not None
    assert found.allowed == (1, 2, 4, 8)
    assert not [tp for tp in found.allowed if why_unsuitable(made, ParallelPlan(tp=int(tp), num_microbatches=64))]


@cache
def _llama(layers: int, heads: int, kv_heads: int, experts: int) -> ModelSpec:
    fields: dict[str, Any] = {
        "model_type": "mixtral" if experts > 1 else "llama",
        "hidden_size": heads * 64,
        "intermediate_size": heads * 160,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    if experts > 1:
        fields |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    return read_fields(ModelConfig(source="random", fields=fields, name="random"))


@cache
def _machines(name: str, nodes: int, gpus: int | None) -> Any:
    return cluster_from_profile(name, num_nodes=nodes, gpus_per_node=gpus)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    model = draw(
        st.one_of(
            st.builds(
                _llama,
                layers=st.integers(1, 9),
                heads=st.sampled_from([1, 2, 4]).map(lambda group: group * kv_heads),
                kv_heads=st.just(kv_heads),
                experts=st.sampled_from([1, 1, 4, 6]),
            ),
            st.sampled_from(["gpt2", "llama-3.2-1b", "gpt2-medium"]).map(read_model),
        )
    )
    name = draw(st.sampled_from(["dgx-h100", "dgx-1-p100", "aws-g4dn-12xlarge", "rtx-3090-x2"]))
    gpus = draw(st.sampled_from([None, 1, 2]))
    training = TrainingSpec(
        global_batch_size=draw(st.sampled_from([1, 4, 6, 8, 12, 64])),
        seq_length=draw(st.sampled_from([128, 510, 512, 513, 1024, 2048])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
    )
    return Workload.of(model, training, _machines(name, draw(st.sampled_from([1, 2])), gpus), load_link_speeds())


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    degree = st.sampled_from([1, 1, 1, 2, 3, 4, 8])
    dp, tp, pp, cp = (draw(degree) for _ in range(4))
    virtual = draw(st.sampled_from([1, 1, 2, 3])) if pp > 1 else 1
    blocks = st.none() | st.lists(st.integers(1, 3), min_size=pp * virtual, max_size=pp * virtual).map(tuple)
    try:
        return ParallelPlan(
            dp=dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=draw(st.sampled_from([1, 1, 1, dp, 2])),
            zero_stage=draw(st.sampled_from([0, 1, 1, 3])) if dp * cp > 1 and pp == 1 else 0,
            sequence_parallel=tp > 1 and draw(st.booleans()),
            micro_batch_size=draw(st.sampled_from([1, 1, 2, 4])),
            num_microbatches=draw(st.sampled_from([1, 2, 4, 6, 8, 12, 64])),
            pipeline_schedule=None if pp == 1 else "interleaved_1f1b" if virtual > 1 else "1f1b",
            virtual_pipeline_size=virtual,
            stage_blocks=draw(blocks),
        )
    except PlanError:
        return ParallelPlan(dp=dp, num_microbatches=draw(st.sampled_from([1, 2, 8])))


@given(made=workloads(), plan=plans(), suits=st.booleans())
@settings(max_examples=50)
def test_all_doors_agree_and_no_model_flops_utilization_is_above_1(
    made: Workload, plan: ParallelPlan, suits: bool
) -> None:
    if suits:  # else most plans break the rule of the batch
        made = replace(made, training=made.training.replace(global_batch_size=plan.global_batch_size))
    found = why_unsuitable(made, plan)
    here_s, because = step_here(made, PlanFile(plan=plan))
    if found is None:
        estimate = estimate_plan(made, plan)
        assert 0 < estimate.step.mfu <= 1
        assert here_s == (estimate.step.step_time_s if estimate.fits else None)
        return  # the gate would search for a better plan
    with pytest.raises(PlanError) as refused:
        estimate_plan(made, plan)
    assert refused.value.message == found.message
    (finding,) = check_plan(made, plan, tolerance=0.0).findings
    assert (finding.name, finding.passed, finding.message) == ("suits", False, found.message)
    assert here_s is None
    assert found.message in because


@given(made=workloads(), plan=plans())
@settings(max_examples=12)
def test_the_command_line_agrees_on_plan_files(made: Workload, plan: ParallelPlan, tmp_path_factory: Any) -> None:
    made = replace(made, model=read_model("gpt2"))
    folder = tmp_path_factory.mktemp("plan")
    path = folder / "plan.json"
    path.write_text(PlanFile(plan=plan, training=made.training).to_json())
    words = ["gpt2", "--profile", made.cluster.name, "--nodes", str(made.cluster.num_nodes)]
    words += ["--gpus-per-node", str(made.cluster.gpus_per_node), "--seq-len", str(made.training.seq_length)]
    words += ["--precision", made.training.precision]
    batch = ["--global-batch", str(made.training.global_batch_size)]
    own = replace(made, training=made.training.replace(global_batch_size=plan.global_batch_size))
    found, of_own = why_unsuitable(made, plan), why_unsuitable(own, plan)
    estimate = CliRunner().invoke(app, ["estimate", *words, "--plan", str(path)])
    assert (estimate.exit_code, of_own is None or of_own.message in estimate.stderr) == (2 * (of_own is not None), True)
    check = CliRunner().invoke(app, ["verify", str(path), "--model", *words, *batch])
    assert found is None or (check.exit_code == 1 and found.message in check.stdout), check.stdout


@given(made=workloads())
@settings(max_examples=20)
def test_the_space_of_plans_holds_only_plans_that_suit(made: Workload) -> None:
    try:
        space = PlanSpace(made, executor=ANYTHING)
    except PlanError:
        return  # nothing can be trained so on these GPUs: `why_untrainable`
    for chunk in space.chunks():
        step = max(1, len(chunk.table) // 10)
        for row in range(0, len(chunk.table), step):
            found = why_unsuitable(made, chunk.table.plan(row))
            assert found is None, (found, chunk.table.plan(row))
