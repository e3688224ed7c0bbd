"""The random numbers of a rank: states of torch's generators, and where a training under another plan begins anew."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paraplan.runtime.world import World

_HOST, _DEVICE = "random.cpu.", "random.device."
_MIXER = 1_000_003  # a prime: seeds of neighbouring steps must not meet those of neighbouring ranks


def random_states(world: World) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators of this rank, by the names of their entries."""
    states = {f"{_HOST}{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"{_DEVICE}{world.rank}"] = torch.cuda.get_rng_state(world.device)
    return states


def check_random(states: Mapping[str, torch.Tensor], world: World) -> None:
    """Raise RuntimeError where the state of this rank is that of no generator."""
    torch.Generator().set_state(states[f"{_HOST}{world.rank}"])


def restore_random(states: Mapping[str, torch.Tensor], world: World) -> None:
    """Set torch's generators of this rank to what `random_states` returned."""
    torch.set_rng_state(states[f"{_HOST}{world.rank}"])
    device_state = states.get(f"{_DEVICE}{world.rank}")
    if device_state is not None:
        torch.cuda.set_rng_state(device_state, world.device)


def reseed(*, seed: int, num_steps: int, place: int) -> None:
    """Start torch's generators anew after `num_steps` steps of a training that began with `seed`.

    `place` tells apart the ranks that draw different numbers.
    """
    torch.manual_seed((seed + _MIXER * num_steps + place) % 2**63)
