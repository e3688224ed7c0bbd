"""What no other node holds of the state goes to the next node's memory too: a node that dies does not take it along."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from paraplan.runtime.checkpoints.boxes import Place
from paraplan.runtime.checkpoints.entries import State
from paraplan.runtime.recovery.memory_copies import CopyName, Slot

_MOST_AT_ONCE = 1 << 28


@dataclass
class Neighbour:
    """The rank of the next node that keeps what this one holds alone, and that of the node before, for which it does.

    `slots` are written in turn. `group` is a group of gloo that nothing else uses: copies run beside the training.
    """

    to_rank: int
    from_rank: int
    slots: list[Slot]
    group: Any = field(repr=False)

    def exchange(self, state: State, *, name: CopyName, writer: int) -> Slot:
        """Send what `writer` has copied of `state`; return the slot with what has come, which is not whole yet.

        Every rank calls it, from the thread that copies.
        """
        places = [box.place.words for box in state.boxes]
        words = json.dumps({"writer": writer, "places": places, "values": state.values}).encode()
        text = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        size = torch.tensor([len(words)], device="cpu")  # whatever torch's default device is
        other_size = torch.empty_like(size)
        self._swap([size], [other_size])
        other_text = torch.empty(int(other_size), dtype=torch.uint8, device="cpu")
        self._swap([text], [other_text])
        told = json.loads(other_text.numpy().tobytes())
        slot = self.slots.pop(0)
        self.slots.append(slot)
        coming = [Place.of_words(each) for each in told["places"]]
        room = slot.lay_out(coming, told["values"], name=name, writer=told["writer"])
        self._swap([box.bytes for box in state.boxes], [box.bytes for box in room.boxes])
        return slot

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Send to the one and receive from the other, both at once."""
        works = [
            start(piece, rank, group=self.group)
            for start, rank, tensors in ((dist.isend, self.to_rank, sent), (dist.irecv, self.from_rank, received))
            for tensor in tensors
            for piece in torch.split(tensor.view(torch.uint8), _MOST_AT_ONCE)
            if len(piece)
        ]
        for work in works:
            assert work is not None
            work.wait()
