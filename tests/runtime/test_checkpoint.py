"""Checkpoints: what one plan wrote, another one goes on from as if nothing had happened."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness, RanksFailedError
from torch import nn
from training_cases import GLOBAL_BATCH, MODELS, TOKENS, Decoder, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.boxes import Box, CheckpointError, boxes_of
from paraplan.runtime.checkpoints.index import Index, SavedTensor, file_of, write_index
from paraplan.runtime.checkpoints.loading import FolderReader
from paraplan.runtime.checkpoints.tensor_files import DTYPES, opened, write_tensors
from paraplan.runtime.engine import Engine
from paraplan.runtime.shards.sharding import Sharding, ShardLocation

FIRST_STEPS, LAST_STEPS = 1, 2

PLANS = {
    "one process": None,
    "ddp": ParallelPlan(dp=2, micro_batch_size=6),
    "zero 3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6),
    "pipeline": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=3),
    "zero 1 and pipeline": ParallelPlan(
        dp=2, pp=2, zero_stage=1, pipeline_schedule="gpipe", micro_batch_size=2, num_microbatches=3
    ),
}


class Counting(nn.Sequential):
    """A model with a buffer that training changes: running statistics."""

    def __init__(self) -> None:
        linear = nn.Linear(8, 8)
        blocks = [nn.Sequential(linear, nn.BatchNorm1d(TOKENS)) for _ in range(2)]
        super().__init__(nn.Embedding(24, 8), *blocks, nn.Linear(8, 24))


SMALL = {"counting": Counting, "short tied": lambda: Decoder(2, tied=True)}
"""A stage has a block of the second one, and files as few tensors as that takes."""


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    return torch.optim.AdamW(
        [{"params": vectors, "lr": 5e-3, "weight_decay": 0.0}, {"params": matrices, "lr": 1e-2}], eps=1e-4
    )


def prepared(model_name: str, plan: ParallelPlan | None, seed: int) -> tuple[runtime.Job, Engine]:
    job = runtime.init(plan)
    torch.manual_seed(seed)
    engine = job.prepare(
        (MODELS | SMALL)[model_name](),
        loss_fn=loss_fn,
        optimizer=two_groups,
        max_grad_norm=1.0,
        verify="off",  # one plan's losses are compared with another's
        example_inputs=torch.zeros(2, TOKENS, dtype=torch.long),
    )
    return job, engine


def losses_of(job: runtime.Job, engine: Engine, num_steps: int) -> list[float]:
    batches = job.shard(TokenPairs(), batch_size=GLOBAL_BATCH, skip=engine.num_steps)
    return [engine.step(*batch).item() for batch, _ in zip(batches, range(num_steps), strict=False)]


def train_and_save(model_name: str, plan: ParallelPlan | None, folder: str) -> list[float]:
    job, engine = prepared(model_name, plan, seed=0)
    losses = losses_of(job, engine, FIRST_STEPS)
    engine.save(folder)
    return losses + losses_of(job, engine, LAST_STEPS)


def train_save_and_load(
    model_name: str, plan: ParallelPlan | None, folder: str, other: str
) -> tuple[list[float], int, list[float]]:
    """Return what `train_and_save` does, and what the same engine goes on with from `other`."""
    job, engine = prepared(model_name, plan, seed=0)
    losses = losses_of(job, engine, FIRST_STEPS)
    engine.save(folder)
    losses += losses_of(job, engine, LAST_STEPS)
    engine.load(other)
    num_steps = engine.num_steps
    return losses, num_steps, losses_of(job, engine, LAST_STEPS)


def load_and_train(model_name: str, plan: ParallelPlan | None, folder: str) -> tuple[int, list[float]]:
    job, engine = prepared(model_name, plan, seed=9)
    engine.load(folder)
    num_steps = engine.num_steps
    return num_steps, losses_of(job, engine, LAST_STEPS)


def run(ranks: RankHarness, work: object, plan: ParallelPlan | None, model_name: str, folder: Path) -> list[object]:
    if plan is None:
        return [ranks.run_alone(work, model_name, None, str(folder))]
    return ranks.run(work, model_name, plan, str(folder), size=plan.world_size)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "written_under", [*PLANS][::3] + with_all([name for name in PLANS if name not in [*PLANS][::3]])
)
def test_what_one_plan_wrote_others_go_on_from(written_under: str, ranks: RankHarness, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    whole = run(ranks, train_and_save, PLANS[written_under], "short tied", folder)[0]
    names = [*PLANS]
    place = names.index(written_under)
    # All of them read, over the whole of this test: a file has whole tensors, whoever reads it.
    for name in (names[place - 1], *with_all([names[place - 3]])):
        for num_steps, losses in run(ranks, load_and_train, PLANS[name], "short tied", folder):
            assert num_steps == FIRST_STEPS
            assert losses == pytest.approx(whole[FIRST_STEPS:], rel=1e-5), name


EIGHT_RANKS = "split tokens, layers and stages"
EXPERTS_AND_SHARDS = "split layers and experts, zero 3"
SPLIT_PLANS = {
    "split layers": ParallelPlan(tp=2, sequence_parallel=True, micro_batch_size=12),
    EXPERTS_AND_SHARDS: ParallelPlan(tp=2, dp=2, ep=2, zero_stage=3, micro_batch_size=6),
    "split tokens, zero 3, dp innermost": ParallelPlan(
        dp=2, cp=2, zero_stage=3, micro_batch_size=6, rank_order=("pp", "cp", "tp", "dp")
    ),
    "split layers and pipeline": ParallelPlan(
        tp=2, pp=2, pipeline_schedule="1f1b", micro_batch_size=6, num_microbatches=2
    ),
    EIGHT_RANKS: ParallelPlan(
        cp=2, tp=2, pp=2, zero_stage=1, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=3
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    # Others have one of the axes, or split layers beside another one; averages are written by these alone.
    [pytest.param(name, marks=[pytest.mark.with_all] * (name != EXPERTS_AND_SHARDS)) for name in SPLIT_PLANS],
)
def test_split_layers_are_written_and_read_whole(name: str, ranks: RankHarness, tmp_path: Path) -> None:
    """Fused projections, experts, and a vocabulary that tp does not divide; what has no `tp` writes them whole."""
    plan = SPLIT_PLANS[name]
    model = "two blocks" if plan.tp == 1 or plan.cp > 1 else "odd vocabulary" if plan.pp > 1 else "mixture"
    folder, alone = str(tmp_path / "checkpoint"), str(tmp_path / "alone")
    whole = ranks.run_alone(train_and_save, model, None, alone)
    by_rank = ranks.run(train_save_and_load, model, plan, folder, alone, size=plan.world_size)
    for _, num_steps, after in by_rank:
        assert num_steps == FIRST_STEPS
        assert after == pytest.approx(whole[FIRST_STEPS:], rel=1e-5)
    num_steps, after = ranks.run_alone(load_and_train, model, None, folder)
    assert num_steps == FIRST_STEPS
    assert after == pytest.approx(by_rank[0][0][FIRST_STEPS:], rel=1e-5)


@pytest.mark.ranks
def test_buffers_that_training_changes_are_part_of_a_checkpoint(ranks: RankHarness, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    plan = ParallelPlan(pp=2, pipeline_schedule="gpipe", micro_batch_size=12)
    ranks.run(train_and_save, "counting", plan, str(folder), size=2)
    before, after = ranks.run_alone(_running_means, str(folder))
    assert torch.count_nonzero(before) == 0
    assert torch.count_nonzero(after) == TOKENS
    alone = tmp_path / "alone"
    ranks.run_alone(train_and_save, "counting", ParallelPlan(micro_batch_size=12), str(alone))
    assert torch.allclose(after, ranks.run_alone(_running_means, str(alone))[1], rtol=1e-5)


def _running_means(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    _, engine = prepared("counting", None, seed=1)
    mean = engine.module.get_submodule("2.1").running_mean
    before = mean.clone()
    engine.load(folder)
    return before, mean.clone()


def test_options_of_the_optimizer_come_back_parameter_by_parameter(tmp_path: Path) -> None:
    _, engine = prepared("decoder", None, seed=0)
    for group in engine.optimizer.param_groups:
        group["lr"] /= 2  # as a scheduler does
    engine.save(tmp_path / "checkpoint")
    _, other = prepared("decoder", None, seed=0)
    other.load(tmp_path / "checkpoint")
    assert [group["lr"] for group in other.optimizer.param_groups] == [2.5e-3, 5e-3]


def test_an_option_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    _, engine = prepared("decoder", None, seed=0)
    engine.optimizer.param_groups[0]["callback"] = print
    with pytest.raises(CheckpointError, match="option of type builtin_function_or_method"):
        engine.save(tmp_path / "checkpoint")


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    job, engine = prepared("decoder", None, seed=0)
    for expected in (1, 2):
        losses_of(job, engine, 1)
        engine.save(tmp_path / "deep" / "checkpoint")
        _, other = prepared("decoder", None, seed=0)
        other.load(tmp_path / "deep" / "checkpoint")
        assert other.num_steps == expected
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["checkpoint"]


def _save_and_die(folder: str) -> None:
    job, engine = prepared("decoder", None, seed=0)
    losses_of(job, engine, 1)
    engine.save(folder)
    losses_of(job, engine, 1)

    class Dying(dict[str, torch.Tensor]):
        """A state of the optimizer that ends the process when the writer looks at it."""

        def items(self) -> Any:
            os._exit(9)

    last = next(reversed(engine.parameters.values()))
    engine.optimizer.state[last] = Dying()
    Path(f"{folder}.partial").mkdir()
    engine.save(folder)


@pytest.mark.ranks
def test_a_kill_while_saving_leaves_the_last_whole_checkpoint(ranks: RankHarness, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with pytest.raises(RanksFailedError, match="exit code 9"):
        ranks.run_alone(_save_and_die, str(folder))
    num_steps, _ = ranks.run_alone(load_and_train, "decoder", None, str(folder))
    assert num_steps == 1


def test_a_kill_between_the_two_renames_leaves_the_previous_one_readable(tmp_path: Path) -> None:
    job, engine = prepared("decoder", None, seed=0)
    losses_of(job, engine, 1)
    engine.save(tmp_path / "checkpoint")
    written = {name: value.detach().clone() for name, value in engine.parameters.items()}
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.previous")
    losses_of(job, engine, 1)
    assert not torch.equal(engine.parameters["head.weight"], written["head.weight"])
    _, other = prepared("decoder", None, seed=9)
    for loading in (engine, other):
        loading.load(tmp_path / "checkpoint")
        assert loading.num_steps == 1
        assert all(torch.equal(value, written[name]) for name, value in loading.parameters.items())


def test_a_folder_without_a_checkpoint_and_one_of_another_model_are_refused(tmp_path: Path) -> None:
    _, engine = prepared("decoder", None, seed=0)
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        engine.load(tmp_path / "absent")
    engine.save(tmp_path / "checkpoint")
    for model_name, words in (("sequential", "holds no 0.weight"), ("shared scale", "holds no sharpness")):
        _, other = prepared(model_name, None, seed=0)
        with pytest.raises(CheckpointError, match=words):
            other.load(tmp_path / "checkpoint")


def test_every_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        data = torch.randint(0, 2, (6, 4 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        whole = data.view(dtype)
        tensors |= {
            name: whole,
            f"{name} columns": whole[:, 1:3],
            f"{name} none": whole[:0],
            f"{name} one": whole[0, 0],
        }
    write_tensors(tmp_path / "tensors", tensors)
    with opened(tmp_path / "tensors") as file:
        for name, expected in tensors.items():
            place = Box.of(name, (0,) * expected.ndim, expected.shape, expected).place
            file.check(place)
            found = file.tensor(place)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            bits = [each.reshape(-1).clone().view(torch.uint8) for each in (found, expected)]
            assert torch.equal(*bits), name


def test_boxes_of_any_split_are_read_as_those_of_any_other(tmp_path: Path) -> None:
    whole = torch.arange(24.0 * 24).view(24, 24)
    cuts = (((24,), 1), ((8, 8, 8), 1), ((16, 4, 4), 1), ((8, 4), 2))
    shardings = [
        Sharding(dim, segments, size, repeats)
        for dim, size, (segments, repeats) in itertools.product((0, 1), (1, 4, 5), cuts)
        if len(segments) == 1 or all(segment % size == 0 for segment in segments)
    ]

    def parts(sharding: Sharding) -> list[torch.Tensor]:
        pieces = [sharding.pieces(rank) for rank in range(sharding.size)]
        return [
            torch.cat([whole.narrow(sharding.dim, start, n) for start, _, n in each], sharding.dim) for each in pieces
        ]

    files: list[dict[str, torch.Tensor]] = [{} for _ in range(5)]
    tensors: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {str(each): [] for each in shardings}
    for sharding in shardings:
        for rank, part in enumerate(parts(sharding)):
            for place, values in (
                (box.place, box.values) for box in boxes_of(str(sharding), part, ShardLocation(sharding, rank))
            ):
                files[rank][place.key_in_file] = values
                tensors[place.name].append((rank, place.offsets, place.shape))
    for rank, held in enumerate(files):
        write_tensors(tmp_path / file_of(rank), held)
    saved = {name: SavedTensor(dtype="float32", shape=(24, 24), boxes=tuple(boxes)) for name, boxes in tensors.items()}
    write_index(tmp_path, Index(state={}, tensors=saved))
    reader = FolderReader(tmp_path)
    for written, read in itertools.product(shardings, shardings):
        for rank, part in enumerate(parts(read)):
            target = torch.full_like(part, -1.0)
            reader.read(boxes_of(str(written), target, ShardLocation(read, rank)))
            assert torch.equal(target, part), (written, read, rank)
