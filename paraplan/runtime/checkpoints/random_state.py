"""The random numbers of a rank in a checkpoint: gone on with under the same plan, drawn anew under another one."""

from __future__ import annotations

from typing import Any

import torch

from paraplan.runtime.world import World

RANDOM = "random.cpu."
_MIXER = 1_000_003  # a prime: seeds of neighbouring steps must not meet those of neighbouring ranks


def random_entries(world: World) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators of this rank, by the names of their entries."""
    states = {f"{RANDOM}{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"random.device.{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return states


def restore_random(entries: dict[str, Any], world: World) -> None:
    """Set torch's generators of this rank to what `random_entries` returned."""
    torch.set_rng_state(entries[f"{RANDOM}{world.rank}"])
    device_state = entries.get(f"random.device.{world.rank}")
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, world.device)


def reseed(*, seed: int, num_steps: int, place: int) -> None:
    """Start torch's generators anew after `num_steps` steps of a training that began with `seed`.

    `place` tells apart the ranks that draw different numbers.
    """
    torch.manual_seed((seed + _MIXER * num_steps + place) % 2**63)
