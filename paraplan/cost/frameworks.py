"""Frameworks by name: their `Habits`."""

from __future__ import annotations

import re

from paraplan.cost.habits import (
    COMPOSER,
    DEEPSPEED_ZERO,
    FLAGSCALE,
    FSDP,
    FUSED_TRAFFIC,
    HF_TRAINER,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_CORE_LOCAL,
    MEGATRON_DEEPSPEED,
    NVIDIA_EXAMPLES,
    PADDLE,
    PARAPLAN,
    TORCHTUNE,
    Habits,
)
from paraplan.errors import ProfileError, near_names

JAX = FSDP.replace(
    name="JAX (MaxText, Pax)",
    fused_kernels=True,
    traffic_per_saved_byte=FUSED_TRAFFIC,
    host_s_per_block=0.0,
    gather_traffic=0,
    reduce_traffic=(0, 0),
    gather_host_s=0,
    reduce_host_s=0,
    writes_out_gelu=False,
    source="MaxText's base.yml: fp32 parameters and optimizer state, sharded over the fsdp axis, bf16 compute; XLA "
    "fuses what stands between matmuls and runs a step as one program, which costs the host nothing by block "
    "(from memory)",
)

NEMO_AUTOMODEL = FSDP.replace(
    name="NeMo AutoModel",
    fused_kernels=True,
    traffic_per_saved_byte=FUSED_TRAFFIC,
    source="as FSDP, with Transformer Engine's layers (the name under which NVIDIA's tables list it)",
)

PLAIN_PYTORCH = PARAPLAN.replace(
    name="plain PyTorch",
    gathers_ends_alone=False,
    source="torch's own autocast, DDP and FSDP2, which paraplan's runtime assembles: what a run is modelled as whose "
    "framework is not known (assumed)",
)

ALIASES: dict[str, Habits] = {
    "paraplan": PARAPLAN,
    "megatron-core": MEGATRON_CORE,
    "megatron-bridge": MEGATRON_CORE,
    "megatron-lm (kwai)": MEGATRON_CORE,
    "megatron-core transformer-impl=local": MEGATRON_CORE_LOCAL,
    "megatron-lm te": MEGATRON_CORE,
    "nemo megatron": MEGATRON_CORE,
    "nemo": MEGATRON_CORE,
    "nemo automodel": NEMO_AUTOMODEL,
    "automodel": NEMO_AUTOMODEL,
    "megatron": MEGATRON_2021,
    "megatron-lm": MEGATRON_2021,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "flagscale": FLAGSCALE,
    "flagscale megatron-lm": FLAGSCALE,
    "fsdp": FSDP,
    "fsdp1": FSDP,
    "fsdp2": FSDP,
    "torchtitan": FSDP,
    "composer": COMPOSER,
    "deepspeed": DEEPSPEED_ZERO,
    "deepspeed zero": DEEPSPEED_ZERO,
    "deepspeed zero megatron-deepspeed": DEEPSPEED_ZERO,
    "gemini": DEEPSPEED_ZERO,
    "hf": HF_TRAINER,
    "nvidia dle": NVIDIA_EXAMPLES,
    "torchtune": TORCHTUNE,
    "paddle": PADDLE,
    "paddlenlp": PADDLE,
    "jax": JAX,
    "maxtext": JAX,
    "pax": JAX,
    "plain pytorch": PLAIN_PYTORCH,
}
"""Frameworks by the words that name them in tables and in `--framework`. An alias holds where all of its words do."""


def habits_of(framework: str) -> Habits:
    """Return the habits of a framework. Raises `ProfileError` with near names for an unknown one."""
    found = known_habits(framework)
    if found is None:
        raise ProfileError(f"there is no framework {framework!r}", hint=near_names(framework, ALIASES))
    return found


def known_habits(framework: str) -> Habits | None:
    """Return the habits of a framework by the longest alias among the words of its name, None for an unknown one."""
    found = [alias for alias in ALIASES if all(_has_word(framework.lower(), word) for word in alias.split())]
    return ALIASES[max(found, key=len)] if found else None


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9_]){re.escape(word)}(?![a-z0-9_])", text) is not None
