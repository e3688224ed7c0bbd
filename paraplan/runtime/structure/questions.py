"""Questions that code asks of values while it runs without any: yes or no, and numbers drawn by Python itself.

A branch on a value may use other weights on either side: both answers are followed. Every stage of a pipeline runs the
code around the blocks, so that each must come to the same answer: from inputs it does, and from weights that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.seeds import python_numbers
from paraplan.runtime.structure.dataflow import NOTHING, Dataflow, Mark, Sources

_HINT = "use pp=1 for this model"
_MOST_FLIPPED = 6
_READS = ("__bool__", "__contains__", "__float__", "__index__", "__int__", "item", "tolist")


class Questions(TorchFunctionMode):
    """Notes what code reads out of tensors while it is followed by `flow`, and answers otherwise where it is `flipped`.

    Answers are those of the modes around this one. `everywhere` are the weights and buffers that an answer was computed
    from which code around `num_blocks` blocks asked for: every stage needs these.
    """

    def __init__(self, flow: Dataflow, num_blocks: int, flipped: Collection[int] = ()) -> None:
        super().__init__()
        self.num_asked = 0
        self.everywhere: Sources = NOTHING
        self._flow = flow
        self._num_blocks = num_blocks
        self._flipped = flipped
        self._python = python_numbers()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`; note what it reads."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _READS or not args or not isinstance(args[0], torch.Tensor):
            return result
        self._note(self._flow.sources(args[0]))
        if not args[0].is_meta or not isinstance(result, bool):
            return result
        self.num_asked += 1
        return result != (self.num_asked - 1 in self._flipped)

    def _note(self, sources: Sources) -> None:
        place = self._flow.place
        self._flow.read(sources)
        if place.inside is not None or place.done == self._num_blocks:
            return  # one stage runs this
        marks = [source for source in sources if isinstance(source, Mark)]
        if marks:
            what = "random numbers" if marks[0].kind == "random" else "a value of hidden states"
            raise UnsupportedPlanError(
                f"code outside of the blocks branches on {what} ({place.done} blocks have run), which stages of a "
                "pipeline do not share",
                hint=_HINT,
            )
        self.everywhere |= sources

    def check_drawn(self) -> None:
        """Raise `UnsupportedPlanError` where code around the blocks has drawn numbers that every stage would draw."""
        if self._flow.place.done < self._num_blocks and python_numbers() != self._python:
            raise UnsupportedPlanError(
                "code outside of the blocks draws random numbers by Python's random or NumPy, and every stage of a "
                "pipeline would draw its own",
                hint="draw them in the blocks or in the data set, turn layer drop and masks of inputs off, or use pp=1",
            )

    def allow_drawn(self) -> None:
        """Forget what a block has drawn."""
        self._python = python_numbers()


def flips(num_asked: int) -> Iterator[frozenset[int]]:
    """Yield which of so many answers to turn round: each by itself, of many only some, and all."""
    if num_asked > 1:
        yield from (frozenset({one}) for one in range(min(num_asked, _MOST_FLIPPED)))
    if num_asked:
        yield frozenset(range(num_asked + _MOST_FLIPPED))
