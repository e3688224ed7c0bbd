"""Packing: many short documents in one row, beside each other and apart from each other.

Rows are made from documents in the order in which these are read, by that order alone: so they are the same on every
rank and under every plan, and where the reading stands can be saved. What keeps documents apart is `position_ids`,
which begin anew with each: transformers' attention makes its masks by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.data import IterableDataset

from paraplan.errors import UsageError
from paraplan.runtime.data.batches import IGNORED_TARGET
from paraplan.runtime.data.streams import BatchSettings, StatefulStream, order_of_epoch

_Document = tuple[list[int], list[int]]  # token ids, and labels of which the first is ignored
_State = Mapping[str, Any]


@dataclass(frozen=True)
class Packing:
    """How `job.shard` makes rows of documents: token ids, or dicts with `input_ids` and, where they differ, `labels`.

    A row is a pair: a dict of `input_ids` and `position_ids`, and the next token of each as its target, -100 at the end
    of a document and on padding. Padding stands at the end of a row, as a document of its own. A document that is
    longer than a row is cut, and its parts are documents.
    """

    seq_length: int
    """The tokens of a row."""
    open_rows: int = 8
    """How many rows are filled at a time: a document goes to the first that has room for it. 1 keeps the order."""
    pad_id: int = 0
    """The token that stands on padding."""
    with_labels: bool = False
    """Whether the dict holds `labels` too, not moved: what models of transformers take their own loss of."""

    def __post_init__(self) -> None:
        for name in ("seq_length", "open_rows"):
            if getattr(self, name) < 1:
                raise UsageError(f"Packing({name}={getattr(self, name)})", hint="give a whole number, from 1")


class _Documents(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShuffledDocuments:
    """The documents of a data set with numbered samples, each epoch in an order drawn from `seed` and its number."""

    def __init__(self, dataset: _Documents, settings: BatchSettings) -> None:
        self._dataset = dataset
        self._settings = settings
        self._epoch = self._at = self._start = 0

    def set_epoch(self, epoch: int) -> None:
        """Have the next `iter` give the documents of this epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = order_of_epoch(len(self._dataset), self._settings, self._epoch)
        self._at, self._start = self._start, 0
        for index in order[self._at :]:
            self._at += 1
            yield self._dataset[index]

    def state_dict(self) -> dict[str, int]:
        """Return how many documents of the epoch are read."""
        return {"num_documents": self._at, "seed": self._settings.seed}

    def load_state_dict(self, state: _State) -> None:
        """Begin the next `iter` there; raise `UsageError` where the order was another one."""
        seed = self._settings.seed
        if state.get("seed") != seed:
            raise UsageError(
                f"the saved data was read with seed={state.get('seed')}, and this is read with seed={seed}",
                hint="use the same seed, or begin the data anew",
            )
        self._start = int(state["num_documents"])


class PackedRows(IterableDataset[Any]):
    """Rows of the documents of a stream, which are read as they are needed."""

    def __init__(self, documents: Iterable[Any], packing: Packing) -> None:
        self._documents = documents
        self._packing = packing
        self._open: list[list[_Document]] = []
        self._left: list[_Document] = []  # read, and in no row yet
        self._goes_on = False

    def set_epoch(self, epoch: int) -> None:
        """Tell the documents' stream, where it wants to know."""
        if hasattr(self._documents, "set_epoch"):
            self._documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        if not self._goes_on:
            self._open, self._left = [], []
        self._goes_on = False
        documents = iter(self._documents)
        while True:
            while self._left:
                full = self._place(self._left.pop(0))
                if full is not None:
                    yield self._row(full)
            document = next(documents, None)
            if document is None:
                break
            self._left = self._parts(document)
        while self._open:
            yield self._row(self._open.pop(0))

    def _parts(self, document: Any) -> list[_Document]:
        ids = _numbers(document["input_ids"] if isinstance(document, Mapping) else document)
        given = document.get("labels") if isinstance(document, Mapping) else None
        labels = ids if given is None else _numbers(given)
        if len(labels) != len(ids):
            raise UsageError(
                f"a document has {len(ids)} input_ids and {len(labels)} labels", hint="give each token a label"
            )
        length = self._packing.seq_length
        return [
            (ids[start : start + length], [IGNORED_TARGET, *labels[start + 1 : start + length]])
            for start in range(0, len(ids), length)
        ]

    def _place(self, document: _Document) -> list[_Document] | None:
        """Put a document into the first row with room for it; return the oldest row where there was none."""
        for row in self._open:
            if sum(len(ids) for ids, _ in row) + len(document[0]) <= self._packing.seq_length:
                row.append(document)
                return None
        self._open.append([document])
        return self._open.pop(0) if len(self._open) > self._packing.open_rows else None

    def _row(self, documents: list[_Document]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        missing = self._packing.seq_length - sum(len(ids) for ids, _ in documents)
        padding = ([self._packing.pad_id] * missing, [IGNORED_TARGET] * missing)
        everyone = [*documents, padding]
        inputs = {
            "input_ids": torch.tensor([one for ids, _ in everyone for one in ids]),
            "position_ids": torch.tensor([place for ids, _ in everyone for place in range(len(ids))]),
        }
        labels = torch.tensor([one for _, labels in everyone for one in labels])
        if self._packing.with_labels:
            inputs["labels"] = labels
        return inputs, torch.cat([labels[1:], labels.new_full((1,), IGNORED_TARGET)])


class ResumablePackedRows(PackedRows):
    """Rows of documents whose stream can say where it is: these can too."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the documents' stream is, and what was read of it that no row given so far holds."""
        return {
            "documents": cast("StatefulStream", self._documents).state_dict(),
            "open": [[list(document) for document in row] for row in self._open],
            "left": [list(document) for document in self._left],
        }

    def load_state_dict(self, state: _State) -> None:
        """Begin the next `iter` there."""
        if not isinstance(state, Mapping) or state.keys() != {"documents", "open", "left"}:
            raise UsageError("this is not the state of packed rows", hint="give what state_dict of job.shard returned")
        cast("StatefulStream", self._documents).load_state_dict(state["documents"])
        self._open = [[(list(ids), list(labels)) for ids, labels in row] for row in state["open"]]
        self._left = [(list(ids), list(labels)) for ids, labels in state["left"]]
        self._goes_on = True


def packed(documents: Iterable[Any], packing: Packing) -> PackedRows:
    """Return the rows of `documents`, which can be resumed without reading again where these can."""
    kind = ResumablePackedRows if isinstance(documents, StatefulStream) else PackedRows
    return kind(documents, packing)


def check_keeps_apart(model: nn.Module) -> None:
    """Raise `UsageError` for a model of transformers with a cache: it looks for documents in a row only without one."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            raise UsageError(
                f"{name or type(module).__name__} has config.use_cache=True, and with a cache models of transformers "
                "let the documents of a packed row see each other",
                hint="set model.config.use_cache = False before job.prepare",
            )


def _numbers(tokens: Any) -> list[int]:
    if isinstance(tokens, torch.Tensor) and tokens.ndim == 1 and not tokens.is_floating_point():
        return cast("list[int]", tokens.tolist())
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    if not isinstance(tokens, (list, tuple)) or not all(isinstance(token, int) for token in tokens):
        raise UsageError(
            f"a document must be token ids, found {type(tokens).__name__}",
            hint="give lists or tensors [tokens] of whole numbers, or dicts with input_ids",
        )
    return list(tokens)
