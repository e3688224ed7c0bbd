"""Whether `loss_fn` computes with weights of the model: under most plans a rank has some of them, or parts of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from paraplan.errors import UnsupportedPlanError
from paraplan.runtime.checks.trials import first_rank
from paraplan.runtime.mesh import Mesh
from paraplan.runtime.structure.ends import ParameterReads


class WeightReads:
    """Notes which parameters of `module` are computed with in the contexts that it is called for.

    Those of `heads` are not noted, of which the runtime itself makes logits there.
    """

    def __init__(self, module: nn.Module, heads: Sequence[nn.Module] = ()) -> None:
        self.found: set[str] = set()
        self._module = module
        self._heads = heads

    def __call__(self) -> ParameterReads:
        """Return a context that notes them: of parameters as they are now, gathered or not."""
        of_heads = {id(one) for head in self._heads for one in head.parameters()}
        held = [(name, one) for name, one in self._module.named_parameters() if id(one) not in of_heads]
        return ParameterReads(held, self.found)

    def check(self, mesh: Mesh, plan_words: str) -> None:
        """Raise `UnsupportedPlanError` on every rank where one has found some."""
        rank = first_rank(bool(self.found), mesh)
        if rank is not None:
            raise weights_in_loss(min(self.found, default=f"a weight of rank {rank}"), plan_words)


def weights_in_loss(name: str, plan_words: str) -> UnsupportedPlanError:
    """Return what is said of a loss that computes with the weight `name`."""
    return UnsupportedPlanError(
        f"loss_fn computes with {name}, of which a rank has a part, a copy or nothing under '{plan_words}', and "
        "nothing compares its gradient with that of one process",
        hint="compute it in the model's forward, use weight_decay of the optimizer in place of a penalty, or leave out "
        "verify='off'",
    )
