"""The plans of `bench_runtime.py` written by hand in plain torch, as one who knows it well writes them.

One process, DDP, ZeRO-2 and ZeRO-3 (FSDP2), a 1F1B pipeline, tensor parallelism as Megatron-LM does it, and context
parallelism that exchanges tokens for heads (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from bench_runtime_sides import (
    MAX_GRAD_NORM,
    Case,
    Step,
    adamw,
    batch_of,
    build,
    device,
    loss_fn,
    micro_batches_of,
)
from torch import nn


def plain_step(case: Case) -> Step:
    """Return a step of the parallelism of `case` by hand."""
    plan, model = case.plan, build(case.size).to(device())
    if plan.pp > 1:
        return _pipeline_step(case, model)
    if plan.cp > 1:
        _exchange_heads(model, plan.cp)
    if plan.tp > 1:
        _split_by_hand(model, plan.tp)
    elif plan.zero_stage:
        _shard_by_hand(model, frees=plan.zero_stage == 3)
    elif plan.dp * plan.cp > 1:
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if case.compile_backend is not None:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend=case.compile_backend)
    return _step_of(case, model)


def _step_of(case: Case, wrapped: Any) -> Step:
    plan = case.plan
    optimizer = adamw(wrapped.parameters())
    loss_of = loss_fn if plan.tp == 1 else _loss_of_classes
    pieces = micro_batches_of(case, dist.get_rank() if dist.is_initialized() else 0)
    if plan.cp > 1:
        pieces = [(ids.chunk(plan.cp, 1)[dist.get_rank()], of.chunk(plan.cp, 1)[dist.get_rank()]) for ids, of in pieces]

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device())
        for index, (piece, target) in enumerate(pieces):
            is_last = index == len(pieces) - 1
            with ExitStack() as stack:
                if plan.zero_stage:
                    wrapped.set_is_last_backward(is_last)
                    if plan.zero_stage < 3:
                        wrapped.set_reshard_after_backward(is_last)
                elif plan.dp * plan.cp > 1 and not is_last:
                    stack.enter_context(wrapped.no_sync())
                with torch.autocast(device().type, dtype=torch.bfloat16, enabled=case.precision == "bf16"):
                    loss = loss_of(wrapped(piece), target) / len(pieces)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if plan.tp > 1:
            _clip_parts(wrapped)
        else:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if plan.dp * plan.cp > 1:
            dist.all_reduce(total)
        return total / (plan.dp * plan.cp)

    return step


def _clip_parts(model: nn.Module) -> None:
    """Clip by the norm over parts, which count on every rank, and whole parameters, which count once."""
    parts = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _Split | _Rows)
        for parameter in module.parts()
    }
    norms = torch.zeros(2)
    for is_part in (False, True):
        gradients = [p.grad for p in model.parameters() if p.grad is not None and (id(p) in parts) == is_part]
        norms[int(is_part)] = torch.nn.utils.get_total_norm(gradients)
    squares = norms.square()
    dist.all_reduce(squares[1])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), MAX_GRAD_NORM, squares.sum().sqrt())


def _shard_by_hand(model: Any, *, frees: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=frees)
    of_block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    for end in (model.byte_embedding, model.position_embedding, model.head):
        if end.weight.numel() >= of_block:
            fully_shard(end, mesh=mesh, reshard_after_forward=frees and end is not model.head)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


class _Copy(torch.autograd.Function):
    """The input of a column layer: gradients of the ranks are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    """The output of a row layer: what the ranks have computed is summed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Split(nn.Module):
    """A linear layer of which this rank has some outputs (`rows` of its weight) or some inputs (`columns`)."""

    def __init__(self, linear: nn.Linear, rows: torch.Tensor | None, columns: torch.Tensor | None = None) -> None:
        super().__init__()
        weight, bias = linear.weight.detach(), linear.bias
        self.is_row_layer = rows is None
        self.weight = nn.Parameter((weight[:, columns] if rows is None else weight[rows]).clone())
        self.bias = None if bias is None else nn.Parameter((bias if rows is None else bias[rows]).detach().clone())

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not self.is_row_layer:
            return F.linear(_Copy.apply(given), self.weight, self.bias)  # type: ignore[no-untyped-call]
        summed: torch.Tensor = _Sum.apply(F.linear(given, self.weight))  # type: ignore[no-untyped-call]
        return summed if self.bias is None else summed + self.bias

    def parts(self) -> list[nn.Parameter]:
        """Return the parameters of which other ranks have other parts."""
        return [self.weight] if self.is_row_layer or self.bias is None else [self.weight, self.bias]


class _Rows(nn.Module):
    """An embedding of which this rank has the rows of some tokens."""

    def __init__(self, embedding: nn.Embedding, rows: torch.Tensor) -> None:
        super().__init__()
        self.first = int(rows[0])
        self.weight = nn.Parameter(embedding.weight.detach()[rows].clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        local = tokens - self.first
        is_here = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local * is_here, self.weight) * is_here[..., None]
        summed: torch.Tensor = _Sum.apply(rows)  # type: ignore[no-untyped-call]
        return summed

    def parts(self) -> list[nn.Parameter]:
        """Return the parameters of which other ranks have other parts."""
        return [self.weight]


class _LossOfClasses(torch.autograd.Function):
    """The mean cross-entropy of logits of which this rank has some classes."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        first = logits.shape[1] * dist.get_rank()
        largest = logits.max(dim=1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        local = targets - first
        is_here = (local >= 0) & (local < logits.shape[1])
        local = local * is_here
        exponents = shifted.exp()
        both = torch.stack([exponents.sum(dim=1), shifted.gather(1, local[:, None])[:, 0] * is_here])
        dist.all_reduce(both)
        ctx.save_for_backward(exponents.div_(both[0][:, None]), local, is_here)
        return (both[0].log() - both[1]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        shares, local, is_here = ctx.saved_tensors
        shares[torch.arange(len(local)), local] -= is_here.to(shares.dtype)
        return shares.mul_(gradient / len(local)), None


def _loss_of_classes(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = _LossOfClasses.apply(logits.flatten(0, 1), targets.flatten())  # type: ignore[no-untyped-call]
    return loss


def _split_by_hand(model: Any, size: int) -> None:
    """Split attention by heads, the MLP by its inner units, and the ends by vocabulary, as Megatron-LM does."""

    def share(count: int) -> torch.Tensor:
        return torch.arange(count).chunk(size)[dist.get_rank()]

    vocabulary = share(model.head.out_features)
    model.byte_embedding, model.head = _Rows(model.byte_embedding, vocabulary), _Split(model.head, vocabulary)
    for block in model.blocks:
        hidden = block.qkv.in_features
        heads, inner = share(hidden), share(4 * hidden)
        block.qkv = _Split(block.qkv, torch.cat([heads + part * hidden for part in range(3)]))
        block.attention_out = _Split(block.attention_out, None, heads)
        block.mlp_up, block.mlp_down = _Split(block.mlp_up, inner), _Split(block.mlp_down, None, inner)
        block.num_heads //= size
        block.forward = _split_forward(block)


def _split_forward(block: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    b: Any = block

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        heads = b.qkv(b.attention_norm(hidden)).view(batch, tokens, 3, b.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + b.attention_out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        result: torch.Tensor = hidden + b.mlp_down(F.gelu(b.mlp_up(b.mlp_norm(hidden))))
        return result

    return forward


def _exchange_heads(model: Any, size: int) -> None:
    """Have the model run on this rank's tokens, and attention on all of them for its share of the heads."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    def exchanged(given: torch.Tensor) -> torch.Tensor:
        return all_to_all_single_autograd(given.contiguous(), None, None, list(range(size)))

    def attention(block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            batch, tokens, width = hidden.shape
            parts = block.qkv(block.attention_norm(hidden)).view(batch, tokens, 3, size, block.num_heads // size, -1)
            heads = exchanged(parts.permute(3, 2, 0, 4, 1, 5))  # [ranks, 3, batch, heads, tokens, width of a head]
            query, key, value = heads.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            own = exchanged(attended.view(batch, -1, size, tokens, attended.shape[-1]).permute(2, 0, 1, 3, 4))
            joined = own.permute(1, 3, 0, 2, 4).reshape(batch, tokens, width)
            hidden = hidden + block.attention_out(joined)
            result: torch.Tensor = hidden + block.mlp_down(F.gelu(block.mlp_up(block.mlp_norm(hidden))))
            return result

        return forward

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        first = dist.get_rank() * tokens.shape[1]
        hidden = model.byte_embedding(tokens) + model.position_embedding(torch.arange(tokens.shape[1]) + first)
        for block in model.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = model.head(model.norm(hidden))
        return logits

    model.forward = forward
    for block in model.blocks:
        block.forward = attention(block)


class _Stage(nn.Module):
    """Some consecutive blocks, with the embeddings before the first and the head after the last."""

    def __init__(self, model: Any, start: int, end: int) -> None:
        super().__init__()
        self.byte_embedding = model.byte_embedding if start == 0 else None
        self.position_embedding = model.position_embedding if start == 0 else None
        self.blocks = model.blocks[start:end]
        is_last = end == len(model.blocks)
        self.norm: Any = model.norm if is_last else None
        self.head: Any = model.head if is_last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.byte_embedding is not None and self.position_embedding is not None:
            positions = torch.arange(hidden.shape[1])
            hidden = self.byte_embedding(hidden) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


def _pipeline_step(case: Case, model: nn.Module) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size, count = dist.get_rank(), dist.get_world_size(), case.plan.num_microbatches
    bounds = [round(case.size.layers * stage / size) for stage in range(size + 1)]
    part = _Stage(model, bounds[rank], bounds[rank + 1])
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=loss_fn, scale_grads=True)
    optimizer = adamw(part.parameters())
    inputs, targets = batch_of(case, rank)
    is_last = rank == size - 1

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        last: dict[str, Any] = {"target": targets, "losses": losses} if is_last else {}
        schedule.step(*arguments, return_outputs=False, **last)
        square = torch.nn.utils.get_total_norm([p.grad for p in part.parameters() if p.grad is not None]).square()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(part.parameters(), MAX_GRAD_NORM, square.sqrt())
        optimizer.step()
        total = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        dist.all_reduce(total)
        return total

    return step
