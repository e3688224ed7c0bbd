"""The generators of random numbers that this process uses: torch's are seeded, those of Python and NumPy looked at."""

from __future__ import annotations

import random
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable

import torch

from paraplan.runtime.torch_private import FakeTensor


def seed_generators(seed: int) -> None:
    """Seed the generators of the CPU and, once CUDA is in use, of its devices.

    `torch.manual_seed` also writes down the stack of its caller for each kind of device that is not in use, in case it
    will be: 0.3 ms a call on a virtual CPU, for 1 us.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def python_numbers() -> int:
    """Return a number for the states of Python's random and of NumPy's: another one once code has drawn from either."""
    state = zlib.crc32(array("L", random.getstate()[1]))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *place = numpy.random.get_state()
        state = zlib.crc32(repr(place).encode(), zlib.crc32(keys.tobytes(), state))
    return state


def kept_python_numbers() -> Callable[[], None]:
    """Return what puts the states of Python's random and of NumPy's back to what they are now."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()

    def put_back() -> None:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(of_numpy)

    return put_back


def kept_random_numbers(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return what puts torch's generators of the CPU, and of the GPUs among `devices`, back to what they are now."""
    of_cpu = torch.get_rng_state()
    of_gpus = {one: torch.cuda.get_rng_state(one) for one in devices if one.type == "cuda"}

    def put_back() -> None:
        torch.set_rng_state(of_cpu)
        for gpu, state in of_gpus.items():
            torch.cuda.set_rng_state(state, gpu)

    return put_back


class RandomNumbers:
    """Whether rank `index` of `size` draws the numbers that all of them draw, or its own for what it alone has."""

    def __init__(self, *, size: int, index: int) -> None:
        self._size, self._index = size, index
        self._put_back: Callable[[], None] | None = None

    @property
    def are_apart(self) -> bool:
        """Whether this rank draws its own numbers."""
        return self._put_back is not None

    def apart(self, device: torch.device) -> None:
        """Draw this rank's own numbers on the CPU and on `device` from here on.

        The seed is drawn from the sequence that all ranks share, so that a recomputed block, which starts from the same
        state, draws the same again.
        """
        if self._put_back is not None:
            return
        drawn = torch.randint(2**48, ())
        if isinstance(drawn, FakeTensor):  # a run without values
            return
        self._put_back = kept_random_numbers([device])
        seed_generators(int(drawn) * self._size + self._index)

    def together(self) -> None:
        """Go on with the numbers that all ranks draw."""
        put_back, self._put_back = self._put_back, None
        if put_back is not None:
            put_back()
