"""Checkpoints that somebody has tampered with, or that are damaged: one sentence, quickly, and no code is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from paraplan import runtime
from paraplan.runtime.checkpoints.safe_reader import INDEX_NAME
from paraplan.runtime.checkpoints.saving import CheckpointError
from paraplan.runtime.checkpoints.weight_files import export_weights
from paraplan.runtime.engine import Engine

WEIGHT = "model.0.weight"
CANARY = "harmed"


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
    if "values of model" not in str(raised.value):
        for name, value in engine.parameters.items():
            assert torch.equal(value, before[name]), name


def named(module: str, name: str, *arguments: str) -> bytes:
    """Return a pickle of protocol 4 that calls `name` of `module`."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + b"".join(map(text, arguments)) + b"\x85R."


PICKLES: dict[str, Callable[[], bytes]] = {
    "calls a function": lambda: pickle.dumps(Harmful()),
    "calls by a dotted name": lambda: named("torch.distributed.checkpoint.filesystem", "os.system", f"mkdir {CANARY}"),
    "calls by a dotted name of metadata": lambda: named(
        "torch.distributed.checkpoint.metadata", "os.system", f"mkdir {CANARY}"
    ),
    "calls an import of an allowed module": lambda: named("torch.distributed.checkpoint.filesystem", "os"),
    "calls in protocol 0": lambda: f"cos\nmkdir\n(S'{CANARY}'\ntR.".encode(),
    "makes an old instance": lambda: f"(S'{CANARY}'\nios\nmkdir\n.".encode(),
    "asks for a persistent object": lambda: b"\x80\x04P1\n.",
    "asks for an extension": lambda: b"\x80\x04\x82\x01.",
    "calls a path": lambda: pickle.dumps(Path("/etc/passwd")),
    "is nothing": lambda: b"",
    "is no pickle": lambda: b"not a pickle" * 20,
    "is a number": lambda: pickle.dumps(7),
    "is a dictionary": lambda: pickle.dumps({"state_dict_metadata": {}}),
    "announces a gigabyte of text": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"short.",
    "announces a huge frame": lambda: b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b".",
    "asks for a huge memo": lambda: b"\x80\x04Nr\xff\xff\xff\x7f.",
    "is nested too deeply": lambda: b"\x80\x04)" + b"\x85" * 200_000 + b".",
    "hashes a deep nest": lambda: b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",
    "holds itself": lambda: b"\x80\x04]\x94h\x00a.",
    "builds a class": lambda: b"\x80\x04\x8c\x05torch\x8c\x04Size\x93}b.",
    "takes from an empty stack": lambda: b"\x80\x04\x93R.",
    "makes a layout of nonsense": lambda: named("torch.serialization", "_get_layout", "sparse"),
    "has numbers as keys": lambda: pickle.dumps({1: 2}),
    "is an ordered dictionary of harm": lambda: pickle.dumps(OrderedDict(a=Harmful())),
}


@pytest.mark.parametrize("attack", PICKLES)
def test_an_index_is_refused_that(attack: str, folder: Path) -> None:
    (folder / INDEX_NAME).write_bytes(PICKLES[attack]())
    assert_refused(folder)
    with pytest.raises(CheckpointError):
        export_weights(folder, "model.safetensors")


def tensor(size: tuple[int, ...], dtype: torch.dtype = torch.float32, **chunk: tuple[int, ...]) -> Any:
    """Return the description of a tensor in one piece, which lies as `chunk` says."""
    piece = {"offsets": (0,) * len(size), "sizes": size} | chunk
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"]))],
    )


def change_entry(index: Metadata, entry: Any) -> None:
    index.state_dict_metadata[WEIGHT] = entry


def change_place(index: Metadata, **fields: Any) -> None:
    key = next(key for key in index.storage_data if key.fqn == WEIGHT)
    index.storage_data[key] = _StorageInfo(**(vars(index.storage_data[key]) | fields))


def halves(*offsets: int) -> Any:
    whole = tensor((4, 4))
    whole.chunks = [ChunkStorageMetadata(torch.Size((offset, 0)), torch.Size((2, 4))) for offset in offsets]
    return whole


def rename(index: Metadata) -> None:
    index.state_dict_metadata[3] = index.state_dict_metadata.pop(WEIGHT)  # type: ignore[index]


def drop_place(index: Metadata) -> None:
    del index.storage_data[next(key for key in index.storage_data if key.fqn == WEIGHT)]


def copy_place(index: Metadata) -> None:
    """Have two tensors lie in one place."""
    places = {key.fqn: key for key in index.storage_data}
    index.storage_data[places[WEIGHT]] = index.storage_data[places["optimizer.exp_avg.0.weight"]]


INDEXES: dict[str, Callable[[Metadata], Any]] = {
    "a tensor of an exabyte": lambda index: change_entry(index, tensor((2**30, 2**30))),
    "a tensor larger than its place": lambda index: change_entry(index, tensor((2**20, 4))),
    "a text of a terabyte": lambda index: index.state_dict_metadata.update(progress=tensor((2**40,), torch.uint8)),
    "a text that is a matrix": lambda index: index.state_dict_metadata.update(progress=tensor((2, 4), torch.uint8)),
    "a negative offset": lambda index: change_entry(index, tensor((4, 4), offsets=(-1, 0))),
    "a piece that sticks out": lambda index: change_entry(index, tensor((4, 4), offsets=(1, 0))),
    "a piece of other dimensions": lambda index: change_entry(index, tensor((4, 4), sizes=(16,), offsets=(0,))),
    "pieces that overlap": lambda index: change_entry(index, halves(0, 0)),
    "pieces that overlap and leave a gap": lambda index: change_entry(index, halves(0, 1)),
    "no pieces": lambda index: change_entry(index, halves()),
    "an object": lambda index: change_entry(index, BytesStorageMetadata()),
    "an object for the progress": lambda index: index.state_dict_metadata.update(progress=BytesStorageMetadata()),
    "nothing for a tensor": lambda index: change_entry(index, None),
    "a wrong type": lambda index: change_entry(index, tensor((4, 4), torch.int64)),
    "another type of one size": lambda index: change_entry(index, tensor((4, 4), torch.int32)),
    "a number for a name": rename,
    "no place for a tensor": drop_place,
    "one place for two tensors": copy_place,
    "a file above the folder": lambda index: change_place(index, relative_path="../__0_0.distcp"),
    "a file of the machine": lambda index: change_place(index, relative_path="/etc/passwd"),
    "a file that is no text": lambda index: change_place(index, relative_path=7),
    "a file that is not there": lambda index: change_place(index, relative_path="__9_9.distcp"),
    "a place before the file": lambda index: change_place(index, offset=-5),
    "a place behind the file": lambda index: change_place(index, offset=2**40),
    "a place of no length": lambda index: change_place(index, length=0),
    "a place in another tensor": lambda index: change_place(index, offset=1),
    "values to transform": lambda index: change_place(index, transform_descriptors=["stream.zstd"]),
    "no tensors": lambda index: index.state_dict_metadata.clear(),
    "no places": lambda index: setattr(index, "storage_data", None),
    "a list of tensors": lambda index: setattr(index, "state_dict_metadata", [1]),
    "an attribute that runs code": lambda index: setattr(index, "planner_data", Harmful()),
    "twelve more dimensions": lambda index: change_entry(index, tensor((1,) * 14)),
    "places that are no places": lambda index: index.storage_data.update({MetadataIndex("a"): 3}),
}


@pytest.mark.parametrize("attack", INDEXES)
def test_an_index_is_refused_that_has(attack: str, folder: Path) -> None:
    path = folder / INDEX_NAME
    index = pickle.loads(path.read_bytes())  # noqa: S301 (written above)
    INDEXES[attack](index)
    path.write_bytes(pickle.dumps(index))
    assert_refused(folder)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def packed(data: bytes) -> bytes:
    """Return a file of torch.save with its parts compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


def in_old_format() -> bytes:
    file = io.BytesIO()
    torch.save(torch.zeros(4, 4), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


VALUES: dict[str, Callable[[], bytes]] = {
    "harm": lambda: saved(Harmful()),
    "harm in a tensor": lambda: saved([torch.zeros(4, 4), Harmful()]),
    "a pickle": lambda: pickle.dumps(Harmful()),
    "the old format": in_old_format,
    "a dictionary": lambda: saved({"a": torch.zeros(4, 4)}),
    "a parameter": lambda: saved(nn.Parameter(torch.zeros(4, 4))),
    "a sparse tensor": lambda: saved(torch.zeros(4, 4).to_sparse()),
    "another shape": lambda: saved(torch.zeros(2, 8)),
    "a stretched tensor": lambda: saved(torch.zeros(1).expand(2**20, 2**20)),
    "another type": lambda: saved(torch.zeros(4, 4, dtype=torch.float64)),
    "no values": lambda: saved(torch.zeros(4, 4, device="meta")),
    "packed values": lambda: packed(saved(torch.zeros(4, 4))),
    "a text": lambda: b"not a tensor" * 100,
    "nothing": lambda: b"\0" * 2000,
    "half of a tensor": lambda: saved(torch.zeros(4, 4))[:900],
}


def put(folder: Path, name: str, data: bytes) -> None:
    """Have entry `name` lie in a file of its own that holds `data`."""
    path = folder / INDEX_NAME
    index = pickle.loads(path.read_bytes())  # noqa: S301 (written above)
    key = next(key for key in index.storage_data if key.fqn == name)
    index.storage_data[key] = _StorageInfo("__7_7.distcp", 0, len(data))
    path.write_bytes(pickle.dumps(index))
    (folder / "__7_7.distcp").write_bytes(data)


@pytest.mark.parametrize("attack", VALUES)
def test_values_are_refused_that_are(attack: str, folder: Path) -> None:
    put(folder, WEIGHT, VALUES[attack]())
    assert_refused(folder, match="the values of model.0.weight|0.weight is larger than")
    with pytest.raises(CheckpointError):
        export_weights(folder, "model.safetensors")


def put_text(folder: Path, name: str, text: bytes) -> None:
    value = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    put(folder, name, saved(value))
    path = folder / INDEX_NAME
    index = pickle.loads(path.read_bytes())  # noqa: S301 (written above)
    index.state_dict_metadata[name] = tensor((len(text),), torch.uint8)
    path.write_bytes(pickle.dumps(index))


PROGRESS: dict[str, Any] = {
    "num_steps": 1,
    "plan": {"dp": 1},
    "seed": 0,
    "scheduler": None,
    "loss_scale": None,
}
TEXTS: dict[str, bytes] = {
    "no JSON": b"{num_steps",
    "no text": b"\xff\xfe\xfa",
    "a number": b"3",
    "a deep nest": b"[" * 100_000,
    "a number of many digits": b'{"num_steps": ' + b"9" * 10_000 + b"}",
    "no steps": json.dumps({key: value for key, value in PROGRESS.items() if key != "num_steps"}).encode(),
    "a text for the steps": json.dumps(PROGRESS | {"num_steps": "1"}).encode(),
    "fewer than no steps": json.dumps(PROGRESS | {"num_steps": -1}).encode(),
    "a list for a plan": json.dumps(PROGRESS | {"plan": [1]}).encode(),
    "a plan of no ranks": json.dumps(PROGRESS | {"plan": {"dp": 0}}).encode(),
    "a plan of other fields": json.dumps(PROGRESS | {"plan": {"run": "rm"}}).encode(),
    "a text for the seed": json.dumps(PROGRESS | {"seed": "x"}).encode(),
    "a list for the scheduler": json.dumps(PROGRESS | {"scheduler": [1]}).encode(),
    "a scheduler without its method": json.dumps(PROGRESS | {"scheduler": {"step": 3}}).encode(),
    "a scheduler of texts": json.dumps(PROGRESS | {"scheduler": {"last_epoch": "x"}}).encode(),
    "a loss scale without a number": json.dumps(PROGRESS | {"loss_scale": {"scale": "x"}}).encode(),
    "a loss scale that overwrites a method": json.dumps(PROGRESS | {"loss_scale": {"update": 3}}).encode(),
}


@pytest.mark.parametrize("damage", TEXTS)
def test_a_progress_is_refused_that_is(damage: str, folder: Path) -> None:
    put_text(folder, "progress", TEXTS[damage])
    assert_refused(folder, match="the checkpoint is damaged: ")


OPTIONS: dict[str, Any] = {
    "no object": 3,
    "without options": {"numbers": {}},
    "other parameters": {"options": {"params": []}, "numbers": {}},
    "a text for the rate": {"options": {"lr": "fast"}, "numbers": {}},
    "a number for the betas": {"options": {"betas": 3}, "numbers": {}},
    "a nest": {"options": {"lr": {"a": 1}}, "numbers": {}},
    "a list of lists": {"options": {"betas": [[1], [2]]}, "numbers": {}},
}


@pytest.mark.parametrize("damage", OPTIONS)
def test_options_are_refused_that_are(damage: str, folder: Path) -> None:
    put_text(folder, "options.0.weight", json.dumps(OPTIONS[damage]).encode())
    assert_refused(folder, match="the checkpoint is damaged: options of 0.weight ")


def test_random_numbers_of_another_size_are_refused(folder: Path) -> None:
    put_text(folder, "random.cpu.0", b"1234")
    assert_refused(folder, match="the checkpoint is damaged: the state of the random numbers")


def test_a_file_that_leads_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (values,) = folder.glob("*.distcp")
    values.rename(tmp_path / "elsewhere")
    values.symlink_to(tmp_path / "elsewhere")
    assert_refused(folder, match="__0_0.distcp is not a file of this folder")


def test_an_index_that_is_no_file_is_refused(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    os.mkfifo(folder / INDEX_NAME)
    assert_refused(folder, match="it is not a file")


def test_what_was_not_tampered_with_is_loaded(folder: Path) -> None:
    engine, other = prepared(), prepared(seed=1)
    other.load(folder)
    for name, value in engine.parameters.items():
        assert torch.equal(value, other.parameters[name])
    assert export_weights(folder, "model.safetensors") == 9
