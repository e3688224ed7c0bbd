"""The repeated block stack of a model: what pipelines cut, shards wrap, and recompute repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn

from paraplan.errors import PlanError, UnsupportedPlanError
from paraplan.model.trace import stack_names
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.support import compiled_reason
from paraplan.runtime.torch_private import keep_compiled_buffers


@dataclass(frozen=True)
class BlockStack:
    """The blocks of a model in order, by the names of their modules."""

    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of `model`, or of a copy of it."""
        return [model.get_submodule(name) for name in self.names]


def find_blocks(model: nn.Module) -> BlockStack | None:
    """Return the block stack nearest to the input embeddings, of equals the largest, and of these the outermost.

    A tower of images may have more parameters than the decoder that it feeds. `paraplan.model.trace.stack_names` says
    what a stack is. The children of an `nn.Sequential` without one are its blocks themselves where the model is nothing
    else. None where the model has none.
    """
    embeddings = _input_embeddings(model)
    best: tuple[tuple[int, int], tuple[str, ...]] = ((0, 0), ())
    for path, container in model.named_modules():
        names = stack_names(container)
        size = sum(parameter.numel() for name in names for parameter in container.get_submodule(name).parameters())
        if names and (rank := (_num_shared(embeddings, path.split(".")), size)) > best[0] and size:
            best = (rank, tuple(f"{path}.{name}" if path else name for name in names))
    if best[1]:
        return BlockStack(names=best[1])
    if isinstance(model, nn.Sequential) and len(model) > 1:
        return BlockStack(names=tuple(name for name, _ in model.named_children()))
    return None


def _num_shared(one: list[str], other: list[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _input_embeddings(model: nn.Module) -> list[str]:
    """Return the path of the module that looks up tokens, where the model names one as transformers' do."""
    try:
        embeddings = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return []
    return next((name.split(".") for name, module in model.named_modules() if module is embeddings), [])


def sharded_alone(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the parts of `module` that can be sharded each by itself, those inside of others first.

    These are `blocks`, and before them the modules that several blocks share, or a block and the code around the
    blocks, once each. A block stays with the root where one of its parameters belongs to another module outside of it.
    """
    holders: dict[int, set[int]] = {id(part): {-1} for part in modules_around(module, blocks)}
    for index, block in enumerate(blocks):
        for part in block.modules():
            holders.setdefault(id(part), set()).add(index)
    shared = [part for part in module.modules() if len(holders.get(id(part), ())) > 1]
    within = {id(inner) for part in shared for inner in part.modules() if inner is not part}
    outermost = [part for part in shared if id(part) not in within and any(True for _ in part.parameters())]
    of_shared = {id(inner) for part in outermost for inner in part.modules()}
    owners: dict[int, set[int]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(owner))

    def is_alone(part: nn.Module) -> bool:
        inside = {id(inner) for inner in part.modules()}
        own = (inner for inner in part.modules() if id(inner) not in of_shared)
        return all(owners[id(one)] <= inside for inner in own for one in inner.parameters(recurse=False))

    blocks_alone = [block for block in blocks if is_alone(block)]
    inside = {id(inner) for block in blocks_alone for inner in block.modules()}
    return [*(part for part in outermost if id(part) in inside), *blocks_alone]


def modules_around(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of `module` that are reached without going through one of `blocks`, which may be in them."""
    ends = {id(block) for block in blocks}
    found: dict[int, nn.Module] = {}
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if id(part) not in found and id(part) not in ends:
            found[id(part)] = part
            waiting.extend(part.children())
    return list(found.values())


def compile_blocks(model: nn.Module, stack: BlockStack | None, backend: str, *, plan: ParallelPlan) -> None:
    """Have torch.compile compile every block of `model` at its first call; code of one class is compiled once.

    Raises `PlanError` where the model has no blocks, or they are to be split or copied.
    """
    reason = compiled_reason(plan, of_any_model=False)
    if reason is not None:
        raise UnsupportedPlanError(f"compile_backend={backend!r} with {reason}", hint="leave out compile_backend")
    if stack is None:
        raise PlanError(
            f"{type(model).__name__} has no repeated blocks to compile",
            hint="keep the blocks in an nn.ModuleList or nn.Sequential, or leave out compile_backend",
        )
    if plan.cp > 1:
        return  # whose blocks are compiled where they are split: what they exchange, not what cuts their arguments
    if plan.pipeline_schedule == "zero_bubble":
        keep_compiled_buffers()
    for block in stack.modules(model):
        block.compile(backend=backend)
