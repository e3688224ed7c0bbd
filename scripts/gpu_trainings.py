"""What the scripts that measure on a GPU share: the machine's facts, and trainings of bundled models by the engine."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from paraplan.hardware.cpus import this_cpu
from paraplan.model.config_file import ModelConfig, load_config
from paraplan.model.reader import find_config
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import OptimizerName, TrainingPrecision

Step = Callable[[], Any]
PACKAGES = ("paraplan", "transformers", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
QUERY = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]


def machine_facts() -> dict[str, Any]:
    """Return what measurements depend on: the date, the GPU (None without one), the host's CPU, and versions."""
    import torch

    facts: dict[str, Any] = {
        "date": dt.date.today().isoformat(),
        "gpu": None,
        "cpu": this_cpu(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        asked = subprocess.run(QUERY, capture_output=True, text=True, check=False)
        facts |= {"gpu": gpu.name, "memory_bytes": gpu.total_memory, "driver, clock, power": asked.stdout.strip()}
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def bundled_config(name: str, changes: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration of a bundled model or of a file with some fields changed; of fewer layers the first."""
    config = load_config(find_config(name))
    fields = {**config.fields, **changes}
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    return replace(config, fields=fields)


@contextmanager
def engine_step(
    config: ModelConfig,
    plan: ParallelPlan,
    *,
    seq_length: int,
    precision: TrainingPrecision = "bf16",
    attention: str = "sdpa",
    optimizer: OptimizerName = "adamw",
    is_compiled: bool = False,
) -> Iterator[Step]:
    """Build the model in this process, on the GPU where there is one, and yield a step that returns the loss."""
    import torch

    from paraplan import runtime
    from paraplan.model.transformers_model import library_factory
    from paraplan.runtime.fake.run import make_optimizer
    from paraplan.runtime.step.loss import token_loss

    build = library_factory(config, attention="eager" if attention == "eager" else "sdpa")
    job = runtime.init(plan, precision=precision, shows_progress=False)
    with torch.device(job.device):
        model = build()
    engine = job.prepare(
        model.bfloat16() if precision == "bf16-pure" else model,
        loss_fn=token_loss,
        optimizer=lambda parameters: make_optimizer(optimizer, parameters),
        compile_backend="inductor" if is_compiled else None,
        verify="off",
    )
    del model
    ids = torch.randint(config.count("vocab_size"), (plan.global_batch_size, seq_length), device=job.device)
    yield partial(engine.step, ids, ids)
    job.close()
