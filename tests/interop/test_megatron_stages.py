"""Stages of Megatron-LM's layouts and options: the ends as layers, or in stages of their own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.api.imported import ImportedPlan, import_plan
from paraplan.api.models import load_model
from paraplan.api.workloads import Workload, training_of
from paraplan.cost.estimate import estimate_plan
from paraplan.errors import PlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.interop.setup import StageRule
from paraplan.interop.stage_rule import stages_of
from paraplan.interop.targets.megatron_lm import pipeline_layout
from paraplan.plan.parallel import ParallelPlan

ENDS_AS_LAYERS = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


def megatron(options: str, *, num_gpus: int) -> ImportedPlan:
    return import_plan(f"--bf16 --micro-batch-size 1 {options}", num_gpus=num_gpus)


@pytest.mark.parametrize(
    ("model", "pp", "virtual", "inner", "ends"),
    [
        ("qwen3-235b-a22b", 32, 3, 1, 0),  # alibaba/Pai-Megatron-Patch, issue 658: 94 blocks and both ends are 96
        ("llama-3-405b", 16, 8, 1, 0),  # Llama 3, section 3.3.2: the ends have one layer less
        ("llama-3-405b", 16, 4, 2, 1),
    ],
)
def test_ends_that_count_as_layers_take_one_off_their_stages(
    model: str, pp: int, virtual: int, inner: int, ends: int
) -> None:
    imported = megatron(
        f"--pipeline-model-parallel-size {pp} --num-virtual-stages-per-pipeline-rank {virtual} {ENDS_AS_LAYERS} "
        f"--global-batch-size {4 * pp}",
        num_gpus=pp,
    )
    assert imported.plan.stage_blocks is None
    assert any("give --model" in note for note in imported.notes)
    told = imported.for_model(load_model(model))
    assert told.plan.stage_blocks == (ends, *(inner,) * (pp * virtual - 2), ends)
    assert told.notes == ()


def test_layers_that_the_command_names_cut_the_stages_without_a_model() -> None:
    plan = megatron(f"--pipeline-model-parallel-size 2 --num-layers 6 {ENDS_AS_LAYERS}", num_gpus=2).plan
    assert plan.stage_blocks is None  # 3 and 3: an even cut
    alone = "--account-for-embedding-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2"
    plan = megatron(f"--pipeline-model-parallel-size 2 --num-layers 7 {alone} --global-batch-size 4", num_gpus=2).plan
    assert (plan.virtual_pipeline_size, plan.stage_blocks) == (2, (1, 2, 2, 2))


@pytest.mark.parametrize(("layout", "num_layers"), [("Et*8|t*8|t*8|t*7L", 31), ("Ettt|ttL", 5), ("Et|t|tL", 3)])
def test_a_layout_of_another_number_of_layers_is_refused_and_is_no_even_cut(layout: str, num_layers: int) -> None:
    """Of as many layers as it has it is read; of a model with one more its stages stay, and cannot be priced."""
    pp = layout.count("|") + 1
    options = f'--pipeline-model-parallel-size {pp} --pipeline-model-parallel-layout "{layout}"'
    imported = megatron(f"{options} --num-layers {num_layers}", num_gpus=pp)
    with pytest.raises(PlanError, match=f"its stages have {num_layers} layers, and the number of layers is"):
        megatron(f"{options} --num-layers {num_layers + 1}", num_gpus=pp)
    model = load_model("llama-2-7b")
    told = imported.for_model(model).plan
    assert told.stage_blocks is not None
    assert sum(told.stage_blocks) == num_layers != model.num_blocks


def test_layers_of_the_first_rank_are_shared_out_over_its_virtual_stages() -> None:
    options = "--decoder-first-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4"
    plan = megatron(f"--pipeline-model-parallel-size 2 --num-layers 12 {options}", num_gpus=2).plan
    assert plan.stage_blocks == (2, 4, 2, 4)


def test_a_layout_with_the_loss_and_a_predicting_layer_in_stages_of_their_own() -> None:
    layout = (
        '--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "Et*3|(tt|)*29m|L" --global-batch-size 8'
    )
    imported = megatron(layout, num_gpus=8)
    expected = (3, *(2,) * 29, 0, 0)
    assert imported.plan.stage_blocks == expected
    deepseek = load_model("deepseek-v3")
    assert imported.for_model(deepseek).plan.stage_blocks == expected
    predicting = deepseek.replace(runs=(*deepseek.runs[:-1], deepseek.runs[-1].replace(count=59)))
    assert imported.for_model(predicting).plan.stage_blocks == (*expected[:-2], 1, 0)


@given(
    pp=st.integers(1, 8),
    virtual=st.integers(1, 4),
    share=st.integers(1, 4),
    embedding=st.booleans(),
    loss=st.booleans(),
)
def test_counted_ends_and_blocks_fill_the_stages_evenly(
    pp: int, virtual: int, share: int, *, embedding: bool, loss: bool
) -> None:
    schedule = None if pp == 1 else "interleaved_1f1b" if virtual > 1 else "1f1b"
    plan = ParallelPlan(
        pp=pp,
        virtual_pipeline_size=virtual if pp > 1 else 1,
        pipeline_schedule=schedule,
        num_microbatches=pp,
    )
    rule = StageRule(option="--account-for", counts_embedding=embedding, counts_loss=loss)
    num_blocks = share * plan.num_stages - embedding - loss
    if num_blocks < 1:
        return
    if plan.num_stages == 1 and share < embedding + loss:
        return
    blocks = list(stages_of(rule, plan, num_blocks))
    blocks[0] += embedding
    blocks[-1] += loss
    assert blocks == [share] * plan.num_stages


@given(blocks=st.lists(st.integers(0, 4), min_size=2, max_size=8).filter(any))
def test_every_layout_that_is_written_is_read_back(blocks: list[int]) -> None:
    plan = ParallelPlan(pp=len(blocks), pipeline_schedule="1f1b", stage_blocks=tuple(blocks), num_microbatches=8)
    layout = pipeline_layout(plan, sum(blocks))
    again = megatron(
        f"--pipeline-model-parallel-size {plan.pp} --pipeline-model-parallel-layout '{layout}' --global-batch-size 8",
        num_gpus=plan.pp,
    ).plan
    assert again.stage_blocks == plan.stage_blocks


def test_layers_that_do_not_divide_are_refused_with_the_option() -> None:
    imported = megatron(f"--pipeline-model-parallel-size 4 {ENDS_AS_LAYERS} --global-batch-size 4", num_gpus=4)
    with pytest.raises(PlanError, match=r"--account-for-embedding.*32 blocks of llama-3-8b.*4 pipeline ranks"):
        imported.for_model(load_model("llama-3-8b"))


def test_a_stage_of_the_embedding_or_the_head_alone_holds_that_alone() -> None:
    model, cluster = load_model("llama-3-8b"), cluster_from_profile("dgx-h100")
    training = training_of(model, seq_length=4096, global_batch_size=64)
    workload = Workload.of(model, training, cluster, framework="megatron-core")
    plan = ParallelPlan(
        pp=4, dp=2, zero_stage=1, pipeline_schedule="1f1b", num_microbatches=32, stage_blocks=(0, 16, 16, 0)
    )
    alone = estimate_plan(workload, plan)
    with_blocks = estimate_plan(workload, plan.replace(stage_blocks=(8, 8, 8, 8)))
    first, inner, _, last = alone.memory
    embedding_bytes = model.vocab_size * model.hidden_size * 2
    assert first.parameter_bytes == pytest.approx(embedding_bytes, rel=0.01)
    assert last.parameter_bytes == pytest.approx(embedding_bytes, rel=0.01)
    assert last.total_bytes < with_blocks.memory[-1].total_bytes
    assert first.activation_bytes < 0.1 * inner.activation_bytes
    # Two stages do all blocks, so a step is longer, and shorter than twice as long.
    assert 1.2 < alone.step.step_time_s / with_blocks.step.step_time_s < 2
