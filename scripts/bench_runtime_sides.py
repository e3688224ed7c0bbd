"""What `bench_runtime.py` compares: cases, what all sides share, and the sides by the engine and by other libraries.

Every side trains the same weights on the same sequences with AdamW, clips the norm of the whole gradient, and returns
the mean loss over the global batch on every rank.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the name that all of PyTorch uses
from torch import nn
from train_lm import ByteModel

from paraplan import runtime
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingPrecision

LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
VOCABULARY = 256

Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Size:
    """The model and the micro-batch, in sequences, of a comparison."""

    layers: int
    hidden: int
    heads: int
    tokens: int
    micro_batch: int
    experts: int = 0
    """Experts of each block, of which a token goes to two: Qwen3-MoE of transformers in place of `ByteModel`."""


CPU_SIZE = Size(layers=6, hidden=384, heads=8, tokens=128, micro_batch=2)
LARGER_CPU_SIZE = Size(layers=8, hidden=512, heads=8, tokens=128, micro_batch=2)
GPU_SIZE = Size(layers=24, hidden=1024, heads=16, tokens=1024, micro_batch=8)


@dataclass(frozen=True)
class Case:
    """A plan at a size, and what the engine is set against: the name of a side in `bench_runtime.SIDES`."""

    name: str
    plan: ParallelPlan
    rival: str
    size: Size = CPU_SIZE
    precision: TrainingPrecision = "fp32"
    compile_backend: str | None = None

    @property
    def share(self) -> int:
        """Sequences of a step on one rank."""
        return self.plan.micro_batch_size * self.plan.num_microbatches


def device() -> torch.device:
    """Return the GPU of a comparison in one process where there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all sides."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def build(size: Size) -> nn.Module:
    """Return the model of all sides, with the same weights."""
    torch.manual_seed(0)
    if size.experts:
        return Mixture(size)
    return ByteModel(num_layers=size.layers, hidden_size=size.hidden, num_heads=size.heads)


class Mixture(nn.Module):
    """A decoder with experts of transformers, whose outputs are logits alone."""

    def __init__(self, size: Size) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = AutoConfig.for_model(
            "qwen3_moe",
            vocab_size=VOCABULARY,
            hidden_size=size.hidden,
            moe_intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads // 2,
            head_dim=size.hidden // size.heads,
            num_experts=size.experts,
            num_experts_per_tok=2,
            tie_word_embeddings=False,
        )
        config.use_cache = False
        self.decoder = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next byte at every position."""
        logits: torch.Tensor = self.decoder(input_ids=tokens).logits
        return logits


def batch_of(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the share of one rank; ranks of one copy of the model have the same."""
    generator = torch.Generator().manual_seed(rank if case.plan.dp > 1 else 0)
    ids = torch.randint(VOCABULARY, (case.share, case.size.tokens + 1), generator=generator)
    return ids[:, :-1].contiguous().to(device()), ids[:, 1:].contiguous().to(device())


def micro_batches_of(case: Case, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the share of one rank in micro-batches."""
    inputs, targets = batch_of(case, rank)
    count = case.plan.num_microbatches
    return list(zip(inputs.chunk(count), targets.chunk(count), strict=True))


def engine_step(case: Case) -> Step:
    """Return a step of the engine."""
    job = runtime.init(case.plan, precision=case.precision, shows_progress=False)
    engine = job.prepare(
        build(case.size),
        loss_fn=loss_fn,
        optimizer=adamw,
        max_grad_norm=MAX_GRAD_NORM,
        compile_backend=case.compile_backend,
        verify_every=0,  # the steps that are compared have no check
    )
    inputs, targets = batch_of(case, job.world.rank)
    return lambda: engine.step(inputs, targets)


def accelerate_step(case: Case) -> Step:
    """Return a step through accelerate's DDP with its gradient accumulation.

    Its FSDP2 is not compared: for ranks without a GPU `AcceleratorState` leaves an FSDP plugin aside (1.15, state.py).
    """
    from accelerate import Accelerator

    assert not case.plan.zero_stage
    count = case.plan.num_microbatches
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count)
    model = build(case.size)
    wrapped, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    batches = micro_batches_of(case, dist.get_rank())

    def losses() -> Iterable[torch.Tensor]:
        for inputs, targets in batches:
            with accelerator.accumulate(wrapped):
                yield (loss := loss_fn(wrapped(inputs), targets))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return lambda: _mean_over_ranks(losses(), count * case.plan.dp)


def deepspeed_step(case: Case) -> Step:
    """Return a step through DeepSpeed at the case's ZeRO stage, with torch's AdamW as on all sides."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

        count = case.plan.num_microbatches
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": case.plan.micro_batch_size,
            "gradient_accumulation_steps": count,
            "gradient_clipping": MAX_GRAD_NORM,
            "zero_optimization": {"stage": case.plan.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        model = build(case.size)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    batches = micro_batches_of(case, dist.get_rank())

    def losses() -> Iterable[torch.Tensor]:
        for inputs, targets in batches:
            yield (loss := loss_fn(engine(inputs), targets))
            engine.backward(loss)
            engine.step()

    return lambda: _mean_over_ranks(losses(), count * case.plan.dp)


def transformers_step(case: Case) -> Step:
    """Return a step through transformers' expert parallelism, which leaves all else to the caller, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ep", "tp"))
    model: Any = build(case.size)
    decoder = model.decoder
    plan = decoder._expand_parallel_plan(dict(decoder.ep_plan))
    apply_expert_parallelism(decoder, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all")
    optimizer = adamw(model.parameters())
    experts = [one for one in model.parameters() if isinstance(one, DTensor)]
    others = [one for one in model.parameters() if not isinstance(one, DTensor)]
    batches = micro_batches_of(case, dist.get_rank())

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for inputs, targets in batches:
            losses.append(loss_fn(model(inputs), targets))
            (losses[-1] / (len(batches) * size)).backward()  # type: ignore[no-untyped-call]
        whole: Any = [one.grad for one in others]
        flat = torch.cat([one.flatten() for one in whole])
        dist.all_reduce(flat)
        for held, summed in zip(whole, torch.split(flat, [one.numel() for one in whole]), strict=True):
            held.copy_(summed.view_as(held))
        own: Any = [one.grad.to_local() if isinstance(one.grad, DTensor) else one.grad for one in experts]
        squares = torch.nn.utils.get_total_norm(own).square()
        dist.all_reduce(squares)
        norm = (squares + torch.nn.utils.get_total_norm(whole).square()).sqrt()
        torch._foreach_mul_(own + whole, float((MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0)))
        optimizer.step()
        return _mean_over_ranks(losses, len(batches) * size)

    return step


def _mean_over_ranks(losses: Iterable[torch.Tensor], count: int) -> torch.Tensor:
    total = torch.zeros(())
    for loss in losses:
        total += loss.detach() / count
    dist.all_reduce(total)
    return total
