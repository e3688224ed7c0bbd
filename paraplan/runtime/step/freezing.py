"""Parameters that a script freezes and unfreezes between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from paraplan.errors import UnsupportedPlanError


class Freezing:
    """Follows `requires_grad` of `parameters` between steps, without what a plan has built around them.

    DDP, FSDP and pipelines take note at the start of what trains. So a parameter that is frozen later still gets its
    gradient, which is dropped before anything reads it. What was frozen at the start has no gradients to sum: training
    it later is refused where there are other ranks (`is_parallel`).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, is_parallel: bool) -> None:
        self._parameters = parameters
        self._trained = {name: one.requires_grad for name, one in parameters.items()} if is_parallel else {}
        self._frozen: list[nn.Parameter] = []

    @contextmanager
    def as_prepared(self) -> Iterator[None]:
        """Have all that trained at the start train in this context: passes of the model run in it.

        Raises `UnsupportedPlanError` where a parameter trains that did not at the start.
        """
        changed = [name for name, trained in self._trained.items() if self._parameters[name].requires_grad != trained]
        begun = next((name for name in changed if not self._trained[name]), None)
        if begun is not None:
            raise UnsupportedPlanError(
                f"{begun} was frozen in job.prepare and now trains, and the ranks do not sum its gradient",
                hint="let it require a gradient in job.prepare, and freeze it behind that until it is to train",
            )
        self._frozen = frozen = [self._parameters[name] for name in changed]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def drop_gradients(self) -> None:
        """Drop the gradients of what is frozen for now: nothing clips by them, and the optimizer leaves it out."""
        for parameter in self._frozen:
            parameter.grad = None
