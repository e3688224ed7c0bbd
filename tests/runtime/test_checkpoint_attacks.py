"""Checkpoints that somebody has tampered with, or that are damaged: one sentence, quickly, and nothing is changed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paraplan import runtime
from paraplan.runtime.checkpoints.boxes import CheckpointError
from paraplan.runtime.checkpoints.index import INDEX_NAME
from paraplan.runtime.checkpoints.weight_files import export_weights
from paraplan.runtime.engine import Engine

WEIGHT = "model.0.weight"
FILE = "rank-00000.safetensors"
CANARY = "harmed"
GIGABYTE = 2**30


class Harmful:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (CANARY,)


def prepared(seed: int = 0) -> Engine:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    engine = runtime.init(shows_progress=False).prepare(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
    )
    engine.step(torch.ones(4, 4), torch.ones(4, 2))
    return engine


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "checkpoint"
    prepared().save(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


def assert_refused(folder: Path, *, match: str = "checkpoint") -> None:
    """Loading says what is wrong, runs nothing, and leaves the training as it was."""
    engine = prepared(seed=1)
    before = {name: value.detach().clone() for name, value in engine.parameters.items()}
    with pytest.raises(CheckpointError, match=match) as raised:
        engine.load(folder)
    assert len(str(raised.value).replace(str(Path.cwd()), "")) < 1000
    assert not Path(CANARY).exists()
    assert not (folder / CANARY).exists()
    assert engine.num_steps == 1
    for name, value in engine.parameters.items():
        assert torch.equal(value, before[name]), name


INDEX_FILES: dict[str, Callable[[], bytes]] = {
    "calls a function when it is unpickled": lambda: pickle.dumps(Harmful()),
    "is nothing": lambda: b"",
    "is no JSON": lambda: b"{not JSON" * 20,
    "is no text": lambda: b"\xff\xfe\xfa",
    "is a number": lambda: b"7",
    "is a list": lambda: b"[]",
    "has no tensors": lambda: b'{"format": "paraplan checkpoint", "version": 1, "state": {}}',
    "is nested too deeply": lambda: b"[" * 200_000,
    "has a number of many digits": lambda: b'{"version": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("attack", INDEX_FILES)
def test_an_index_is_refused_that(attack: str, folder: Path) -> None:
    (folder / INDEX_NAME).write_bytes(INDEX_FILES[attack]())
    assert_refused(folder, match=r"checkpoint cannot be read: checkpoint.json: ")
    with pytest.raises(CheckpointError):
        export_weights(folder, "model.safetensors")


Words = dict[str, Any]


def change(folder: Path, damage: Callable[[Words], Any]) -> None:
    """Have the index be what `damage` makes of it."""
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    damage(index)
    path.write_text(json.dumps(index))


def weight(dtype: str = "float32", shape: Any = (4, 4), **box: Any) -> Callable[[Words], None]:
    """Have the index describe a weight so, in one box, which lies as `box` says."""
    fields = {"rank": 0, "offsets": [0] * len(shape), "shape": shape} | box

    def damage(index: Words) -> None:
        index["tensors"][WEIGHT] = {"dtype": dtype, "shape": shape, "boxes": [[*fields.values()]]}

    return damage


def halves(*offsets: int) -> Callable[[Words], None]:
    def damage(index: Words) -> None:
        index["tensors"][WEIGHT]["boxes"] = [[0, [offset, 0], [2, 4]] for offset in offsets]

    return damage


INDEXES: dict[str, Callable[[Words], Any]] = {
    "a tensor of an exabyte": weight(shape=(GIGABYTE, GIGABYTE)),
    "a tensor larger than its file": weight(shape=(2**20, 4)),
    "a state of a terabyte": lambda index: index["tensors"].update(
        {"optimizer.more.0.weight": {"dtype": "uint8", "shape": [2**40], "boxes": [[0, [0], [2**40]]]}}
    ),
    "a negative offset": weight(offsets=(-1, 0)),
    "a box that sticks out": weight(offsets=(1, 0)),
    "a box of other dimensions": weight(shape=(4, 4), offsets=(0,)),
    "boxes that overlap": halves(0, 0),
    "boxes that overlap and leave a gap": halves(0, 1),
    "no boxes": halves(),
    "boxes that the file has not": halves(0, 2),
    "no tensor": lambda index: index["tensors"].update({WEIGHT: None}),
    "an unknown type": weight("float3"),
    "a type with code": weight("__class__"),
    "a wrong type": weight("int64"),
    "another type of one size": weight("int32"),
    "another shape of one size": weight(shape=(2, 8)),
    "a type that safetensors lacks": weight("complex128"),
    "a file of a rank that is not there": weight(rank=9),
    "a file that is not of a rank": weight(rank="../../etc/passwd"),
    "a rank below all": weight(rank=-1),
    "more dimensions than there are": weight(shape=(1,) * 14),
    "numbers that are texts": weight(shape=("4", "4")),
    "numbers that are broken": weight(shape=(4.5, 4)),
    "the name of another tensor": lambda index: index["tensors"].update({"model.9": index["tensors"].pop(WEIGHT)}),
    "no tensors": lambda index: index["tensors"].clear(),
    "a list of tensors": lambda index: index.update(tensors=[1]),
    "no state": lambda index: index["state"].clear(),
    "another format": lambda index: index.update(format="zip"),
    "a later version": lambda index: index.update(version=2),
    "more than is known": lambda index: index.update(run="rm"),
}


@pytest.mark.parametrize("attack", INDEXES)
def test_an_index_is_refused_that_has(attack: str, folder: Path) -> None:
    change(folder, INDEXES[attack])
    assert_refused(folder)


def with_header(**fields: Any) -> Callable[[bytes], bytes]:
    """Have the header of a file describe the weight so."""

    def damage(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        header[WEIGHT] |= fields
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return damage


FILES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-4],
    "cut off in the header": lambda data: data[:100],
    "longer than its tensors": lambda data: data + b"more",
    "empty": lambda data: b"",
    "a pickle": lambda data: pickle.dumps(Harmful()),
    "a file with a huge header": lambda data: struct.pack("<Q", 2**60) + data[8:],
    "a file whose header is no JSON": lambda data: data[:8] + b"x" * (len(data) - 8),
    "a file with another shape": with_header(shape=[2, 8]),
    "a file with another type": with_header(dtype="I32"),
    "a file with an unknown type": with_header(dtype="F3"),
    "a file with a tensor of an exabyte": with_header(shape=[GIGABYTE, GIGABYTE]),
    "a file with values that overlap": with_header(data_offsets=[0, 64]),
    "a file with values behind it": with_header(data_offsets=[2**40, 2**40 + 64]),
}


@pytest.mark.parametrize("damage", FILES)
def test_values_are_refused_that_lie_in(damage: str, folder: Path) -> None:
    file = folder / FILE
    file.write_bytes(FILES[damage](file.read_bytes()))
    assert_refused(folder, match=r"checkpoint|rank-00000.safetensors")
    with pytest.raises(CheckpointError):
        export_weights(folder, "model.safetensors")


def test_a_file_without_a_tensor_of_the_index_is_refused(folder: Path) -> None:
    held = load_file(folder / FILE)
    held["model.0.height"] = held.pop(WEIGHT)
    save_file(held, folder / FILE)
    assert_refused(folder, match=r"rank-00000.safetensors cannot be read: .*model\.0\.weight")


def test_a_checkpoint_of_before_is_named(folder: Path) -> None:
    (folder / INDEX_NAME).rename(folder / ".metadata")
    assert_refused(folder, match=r"is a checkpoint of torch.distributed.checkpoint, which an older paraplan wrote")
    engine = prepared()
    with pytest.raises(CheckpointError, match="older paraplan"):
        engine.resume(folder)  # where none is there a training begins


PROGRESS: dict[str, Any] = {
    "num_steps": 1,
    "plan": {"dp": 1},
    "seed": 0,
    "scheduler": None,
    "loss_scale": None,
}
VALUES: dict[str, Any] = {
    "a number": 3,
    "no steps": {key: value for key, value in PROGRESS.items() if key != "num_steps"},
    "a text for the steps": PROGRESS | {"num_steps": "1"},
    "fewer than no steps": PROGRESS | {"num_steps": -1},
    "a list for a plan": PROGRESS | {"plan": [1]},
    "a plan of no ranks": PROGRESS | {"plan": {"dp": 0}},
    "a plan of other fields": PROGRESS | {"plan": {"run": "rm"}},
    "a text for the seed": PROGRESS | {"seed": "x"},
    "a list for the scheduler": PROGRESS | {"scheduler": [1]},
    "a scheduler without its method": PROGRESS | {"scheduler": {"step": 3}},
    "a scheduler of texts": PROGRESS | {"scheduler": {"last_epoch": "x"}},
    "a loss scale without a number": PROGRESS | {"loss_scale": {"scale": "x"}},
    "a loss scale that overwrites a method": PROGRESS | {"loss_scale": {"update": 3}},
}


@pytest.mark.parametrize("damage", VALUES)
def test_a_progress_is_refused_that_is(damage: str, folder: Path) -> None:
    change(folder, lambda index: index["state"].update(progress=VALUES[damage]))
    assert_refused(folder, match="the checkpoint is damaged: ")


OPTIONS: dict[str, Any] = {
    "no object": 3,
    "without options": {"numbers": {}},
    "other parameters": {"options": {"params": []}, "numbers": {}},
    "a text for the rate": {"options": {"lr": "fast"}, "numbers": {}},
    "a number for the betas": {"options": {"betas": 3}, "numbers": {}},
    "a nest": {"options": {"lr": {"a": 1}}, "numbers": {}},
    "a list of lists": {"options": {"betas": [[1], [2]]}, "numbers": {}},
    "a container without its items": {"options": {}, "numbers": {"rows#": ["list", 0, 1]}},
}


@pytest.mark.parametrize("damage", OPTIONS)
def test_options_are_refused_that_are(damage: str, folder: Path) -> None:
    change(folder, lambda index: index["state"].update({"options.0.weight": OPTIONS[damage]}))
    assert_refused(folder, match="the checkpoint is damaged: options of 0.weight ")


def test_random_numbers_of_another_size_are_refused(folder: Path) -> None:
    held = load_file(folder / FILE) | {"random.cpu.0": torch.zeros(4, dtype=torch.uint8)}
    save_file(held, folder / FILE)
    box = {"dtype": "uint8", "shape": [4], "boxes": [[0, [0], [4]]]}
    change(folder, lambda index: index["tensors"].update({"random.cpu.0": box}))
    assert_refused(folder, match="the checkpoint is damaged: the state of the random numbers")


def test_a_file_that_leads_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    values = folder / FILE
    values.rename(tmp_path / "elsewhere")
    values.symlink_to(tmp_path / "elsewhere")
    assert_refused(folder, match="rank-00000.safetensors is not a file of this folder")


def test_an_index_that_is_no_file_is_refused(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    os.mkfifo(folder / INDEX_NAME)
    assert_refused(folder, match="is not a file")


def test_what_was_not_tampered_with_is_loaded(folder: Path) -> None:
    engine, other = prepared(), prepared(seed=1)
    other.load(folder)
    for name, value in engine.parameters.items():
        assert torch.equal(value, other.parameters[name])
    assert export_weights(folder, "model.safetensors") == 9
