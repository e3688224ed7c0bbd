"""Checkpoints that are cut off, written beside the training, exported, or not to be trusted."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from case_selection import with_all
from rank_harness import RankHarness, RanksFailedError
from script_module import load_script
from test_checkpoint import SPLIT_PLANS, load_and_train, losses_of, prepared
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from training_cases import GLOBAL_BATCH, TOKENS, VOCABULARY, TokenPairs, loss_fn

from paraplan import runtime
from paraplan.errors import UsageError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.checkpoints.boxes import CheckpointError, boxes_of
from paraplan.runtime.checkpoints.index import INDEX_NAME
from paraplan.runtime.checkpoints.loading import FolderReader
from paraplan.runtime.checkpoints.weight_files import export_weights

TWO_RANKS = {
    "zero 3": ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6),
    "split layers": SPLIT_PLANS["split layers"],
    "pipeline": ParallelPlan(pp=2, pipeline_schedule="1f1b", micro_batch_size=4, num_microbatches=3),
}


def save_until_killed(folder: str, num_saves: int, seconds: float) -> None:
    """Train and save after every step, now waiting and now not, until this rank is killed after so many and a while."""
    job, engine = prepared("short tied", ParallelPlan(dp=2, zero_stage=3, micro_batch_size=6), seed=0)
    batches = list(job.shard(TokenPairs(), batch_size=GLOBAL_BATCH))
    engine.save(folder)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    while True:
        if engine.num_steps == num_saves:
            timer.start()
        engine.step(*batches[engine.num_steps % len(batches)])
        engine.save(folder, wait=engine.num_steps % 2 == 0)


@pytest.mark.ranks
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(ranks: RankHarness, tmp_path: Path) -> None:
    generator = random.Random(7)  # noqa: S311 (moments, not secrets)
    for trial in range(4 if with_all([True]) else 2):
        folder = tmp_path / str(trial)
        with pytest.raises(RanksFailedError, match="exit code -9"):
            ranks.run(save_until_killed, str(folder), trial + 1, generator.uniform(0.0, 0.2), size=2, timeout_s=120.0)
        _, engine = prepared("short tied", None, seed=5)
        engine.load(folder)
        _, reference = prepared("short tied", None, seed=0)
        batches = list(runtime.init().shard(TokenPairs(), batch_size=GLOBAL_BATCH))
        for step in range(engine.num_steps):
            reference.step(*batches[step % len(batches)])
        for name, value in engine.parameters.items():
            torch.testing.assert_close(value, reference.parameters[name], rtol=1e-3, atol=1e-4)
        assert engine.num_steps >= trial
        engine.save(folder)  # the remains of the killed run are in nobody's way
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(str(trial))] == [str(trial)]


def save_beside_training(plan: ParallelPlan, folder: str) -> tuple[list[float], list[float]]:
    job, engine = prepared("two blocks", plan, seed=0)
    losses_of(job, engine, 2)
    engine.save(f"{folder}/waiting")
    engine.save(f"{folder}/passing", wait=False)
    losses = losses_of(job, engine, 2)  # changes the weights while a thread writes those of before
    engine.save(f"{folder}/second", wait=False)
    engine.load(f"{folder}/passing")
    return losses, losses_of(job, engine, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", with_all(TWO_RANKS) or [*TWO_RANKS][:1])
def test_a_checkpoint_written_beside_the_training_is_of_the_moment_when_it_was_asked_for(
    kind: str, ranks: RankHarness, tmp_path: Path
) -> None:
    for losses, again in ranks.run(save_beside_training, TWO_RANKS[kind], str(tmp_path), size=2, timeout_s=120.0):
        assert again == pytest.approx(losses, rel=1e-6)
    num_steps, alone = load_and_train("two blocks", None, str(tmp_path / "passing"))
    assert num_steps == 2
    assert alone == pytest.approx(losses, rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["passing", "second", "waiting"]


def test_what_fails_while_a_thread_writes_is_raised_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, engine = prepared("decoder", None, seed=0)
    engine.save(tmp_path / "checkpoint", wait=False)
    engine.finish()
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with pytest.raises(CheckpointError, match=r"file/checkpoint was not written: \w+"):
        engine.save(blocked / "checkpoint", wait=False)
    engine.save(tmp_path / "later", wait=False)
    (tmp_path / "later").mkdir(exist_ok=True)  # or it is there already; both are replaced
    engine.finish()
    (tmp_path / "later.partial").write_text("in the way")
    capsys.readouterr()
    said = f"the checkpoint {tmp_path / 'later'} was not written: File exists: {tmp_path / 'later.partial'}"
    engine.save(tmp_path / "later", wait=False)
    with pytest.raises(CheckpointError, match=said):
        engine.finish()
    with pytest.raises(CheckpointError, match=said):
        engine.save(tmp_path / "later")
    assert capsys.readouterr().err == f"paraplan: {said}\n"  # of the thread, which nobody need ask how it fared
    assert (tmp_path / "later" / INDEX_NAME).exists()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.embedding(tokens)))


def train_with_dropout(plan: ParallelPlan, folder: str) -> tuple[list[float], list[float]]:
    job = runtime.init(plan)
    torch.manual_seed(3)
    engine = job.prepare(Noisy(), loss_fn=loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    losses_of(job, engine, 1)
    engine.save(folder)
    first = losses_of(job, engine, 2)
    torch.rand(17)
    engine.load(folder)
    return first, losses_of(job, engine, 2)


@pytest.mark.ranks
def test_random_numbers_go_on_where_the_checkpoint_was_written(ranks: RankHarness, tmp_path: Path) -> None:
    plan = ParallelPlan(dp=2, micro_batch_size=6)
    for first, second in ranks.run(train_with_dropout, plan, str(tmp_path / "checkpoint"), size=2):
        assert first == second
    other = runtime.init()
    engine = other.prepare(Noisy(), loss_fn=loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    draws = []
    for _ in range(2):
        engine.load(tmp_path / "checkpoint")  # another plan: new numbers, the same ones each time
        draws.append(losses_of(other, engine, 1))
    assert draws[0] == draws[1]


def save_and_export(plan: ParallelPlan, folder: str) -> dict[str, torch.Tensor]:
    job, engine = prepared("two blocks", plan, seed=0)
    losses_of(job, engine, 1)
    engine.export(f"{folder}/model.safetensors")
    return {name: engine.whole(name).clone() for name in engine.parameters}


@pytest.mark.ranks
def test_weights_are_exported_to_one_file_in_the_models_own_names(ranks: RankHarness, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    parts = ranks.run(save_and_export, TWO_RANKS["pipeline"], str(tmp_path), size=2)
    expected = {name: value for part in parts for name, value in part.items()}
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        export_weights(tmp_path / "absent", tmp_path / "other.safetensors")
    _, engine = prepared("decoder", None, seed=0)
    engine.save(tmp_path / "checkpoint")
    with pytest.raises(UsageError, match="cannot write"):
        export_weights(tmp_path / "checkpoint", tmp_path / "no folder" / "model.safetensors")


def test_a_damaged_checkpoint_is_said_to_be_damaged(tmp_path: Path) -> None:
    _, engine = prepared("decoder", None, seed=0)
    engine.save(tmp_path / "checkpoint")
    (values,) = (tmp_path / "checkpoint").glob("*.safetensors")
    values.write_bytes(values.read_bytes()[:200])
    with pytest.raises(
        CheckpointError, match=r"checkpoint cannot be read: its files have 200 bytes, and its tensors \d+"
    ):
        engine.load(tmp_path / "checkpoint")
    values.unlink()
    with pytest.raises(
        CheckpointError, match=r"checkpoint cannot be read: No such file or directory: .*rank-00000.safetensors"
    ):
        export_weights(tmp_path / "checkpoint", tmp_path / "model.safetensors")


def test_the_position_in_the_data_goes_on_through_epochs_and_short_batches(tmp_path: Path) -> None:
    _, engine = prepared("decoder", None, seed=0)

    def data(skip: int) -> list[list[list[int]]]:
        shards = runtime.init().shard(
            TokenPairs(), batch_size=GLOBAL_BATCH + 1, epochs=3, skip=skip, drop_last=False, seed=1
        )
        return [inputs.tolist() for inputs, _ in shards]

    batches = data(0)
    for inputs in batches[:8]:
        engine.step(torch.tensor(inputs), torch.tensor(inputs))
    engine.save(tmp_path / "checkpoint")
    _, other = prepared("decoder", None, seed=1)
    other.load(tmp_path / "checkpoint")
    assert data(other.num_steps) == batches[8:]
    assert {len(batch) for batch in batches} == {GLOBAL_BATCH + 1, 72 % (GLOBAL_BATCH + 1)}
    assert all(len(row) == TOKENS for batch in batches for row in batch)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_before_is_converted(tmp_path: Path) -> None:
    convert = load_script("convert_checkpoint").convert
    _, engine = prepared("decoder", None, seed=0)
    engine.save(tmp_path / "checkpoint")
    reader = FolderReader(tmp_path / "checkpoint")
    tensors = {name: torch.empty(there.shape, dtype=there.dtype) for name, there in reader.tensors.items()}
    reader.read([box for name, held in tensors.items() for box in boxes_of(name, held)])
    texts = {
        name: torch.frombuffer(bytearray(json.dumps(it).encode()), dtype=torch.uint8)
        for name, it in reader.values.items()
    }
    save(tensors | texts, checkpoint_id=tmp_path / "old")
    assert convert(tmp_path / "old", tmp_path / "new") == len(tensors)
    _, other = prepared("decoder", None, seed=1)
    other.load(tmp_path / "new")
    for name, value in engine.parameters.items():
        assert torch.equal(value, other.parameters[name])
