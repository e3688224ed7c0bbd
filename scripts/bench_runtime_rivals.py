"""The plans of `bench_runtime.py` through accelerate and DeepSpeed, as their users write them. Both are optional."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
from typing import Any

import torch
import torch.distributed as dist
from bench_runtime_sides import MAX_GRAD_NORM, Case, Step, adamw, build, loss_fn, micro_batches_of


def is_installed(name: str) -> bool:
    """Whether the package `name` is there."""
    return importlib.util.find_spec(name) is not None


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
    pieces = micro_batches_of(case, dist.get_rank())

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for piece, target in pieces:
            with accelerator.accumulate(wrapped):
                loss = loss_fn(wrapped(piece), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / count
        dist.all_reduce(total)
        return total / case.plan.dp

    return step


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
    pieces = micro_batches_of(case, dist.get_rank())

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for piece, target in pieces:
            loss = loss_fn(engine(piece), target)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / count
        dist.all_reduce(total)
        return total / case.plan.dp

    return step
