"""Which `Habits` a framework has, by the words in its name."""

from __future__ import annotations

from paraplan.cost.habits import (
    COMPOSER,
    DEEPSPEED_ZERO,
    FLAGSCALE,
    FSDP,
    FUSED_TRAFFIC,
    HF_TRAINER,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_CORE,
    MEGATRON_CORE_LOCAL,
    MEGATRON_DEEPSPEED,
    NVIDIA_EXAMPLES,
    PADDLE,
    PARAPLAN,
    TORCHTUNE,
    Habits,
)

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

ALL_HABITS = (
    PARAPLAN,
    MEGATRON_CORE,
    MEGATRON_CORE_LOCAL,
    MEGATRON_2021,
    MEGATRON_2022,
    FLAGSCALE,
    MEGATRON_DEEPSPEED,
    FSDP,
    COMPOSER,
    DEEPSPEED_ZERO,
    HF_TRAINER,
    NVIDIA_EXAMPLES,
    TORCHTUNE,
    PADDLE,
    JAX,
    NEMO_AUTOMODEL,
)


def habits_of(framework: str) -> Habits:
    """Return the habits of a framework by the words in its name; those of paraplan's runtime for an unknown one."""
    words = framework.lower()
    for sign, habits in _SIGNS:
        if sign in words:
            return habits
    return PARAPLAN


_SIGNS: tuple[tuple[str, Habits], ...] = (
    ("deepspeed zero", DEEPSPEED_ZERO),
    ("megatron-deepspeed", MEGATRON_DEEPSPEED),
    ("flagscale", FLAGSCALE),
    ("transformer-impl=local", MEGATRON_CORE_LOCAL),
    ("megatron-core", MEGATRON_CORE),
    ("megatron-bridge", MEGATRON_CORE),
    ("automodel", NEMO_AUTOMODEL),
    ("+ te", MEGATRON_CORE),
    ("nemo", MEGATRON_CORE),
    ("megatron-lm (kwai)", MEGATRON_CORE),
    ("megatron", MEGATRON_2021),
    ("composer", COMPOSER),
    ("torchtitan", FSDP),
    ("torchtune", TORCHTUNE),
    ("paddle", PADDLE),
    ("fsdp", FSDP),
    ("deepspeed", DEEPSPEED_ZERO),
    ("gemini", DEEPSPEED_ZERO),
    ("nvidia dle", NVIDIA_EXAMPLES),
    ("jax", JAX),
    ("maxtext", JAX),
    ("pax", JAX),
    ("hf", HF_TRAINER),
)
