"""Write a checkpoint of torch.distributed.checkpoint, as engine.save wrote them before, in today's format.

    python scripts/convert_checkpoint.py OLD NEW

One process does it, and needs the memory of the whole state. torch reads OLD by pickle, which runs what stands in it:
convert what you have written yourself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from paraplan.runtime.checkpoints.boxes import boxes_of
from paraplan.runtime.checkpoints.entries import OPTIONS, PROGRESS, State
from paraplan.runtime.checkpoints.saving import write_state


def convert(old: Path, new: Path) -> int:
    """Write the checkpoint `old` to the folder `new`; return the number of its tensors."""
    reader = FileSystemReader(old)
    described: dict[str, Any] = reader.read_metadata().state_dict_metadata
    entries = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in described.items()}
    load(entries, storage_reader=reader, no_dist=True)
    texts = [name for name in entries if name == PROGRESS or name.startswith(OPTIONS)]
    values = {name: json.loads(entries.pop(name).numpy().tobytes()) for name in texts}
    boxes = [box for name, tensor in entries.items() for box in boxes_of(name, tensor)]
    write_state(new, State(boxes, values))
    return len(entries)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args()
    print(f"{convert(given.old, given.new)} tensors")
