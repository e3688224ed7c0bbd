"""Settings of a framework's software beside plan and training: kernels, overlap, how tokens reach experts."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from paraplan.errors import PlanError, near_names
from paraplan.records import Spec

Dispatcher = Literal["alltoall", "deepep", "hybridep"]
Graphs = Literal["none", "layers", "full"]
ContextExchange = Literal["ring", "heads"]
FusedKernels = Literal["unsloth", "foak", "liger", "all"]
OptimizerStep = Literal["foreach", "for_loop", "fused"]
RecomputedOps = Literal["torch", "modules", "experts"]
"""Who chooses. torch: the policy that torchtitan gives to torch's selective checkpointing. It keeps the input of a
block, the outputs of attention kernels and of every second `mm`, in the order in which they run
(torchtitan/distributed/activation_checkpoint.py); products of experts are no `mm`. modules: Megatron-Core's
`--recompute-modules layernorm moe_act mla_up_proj`, which drops the outputs of norms, of activation functions and of
latent attention's up projections (core/transformer/transformer_config.py; Korthikanti et al. 2022 keep them).
experts: its `--recompute-modules layernorm moe`, which runs router, exchanges and experts again, and keeps what
attention has."""

ENGINE_SETTINGS = frozenset(
    {
        *("dispatcher", "etp", "overlaps_experts", "drops_tokens"),
        *("cuda_graphs", "fp8_attention", "engine_loss", "overlaps_products"),
    }
)
"""Settings that a framework has where it was written for them; a user's own script or model brings the others."""


class StackSettings(Spec):
    """Settings of the software that runs a plan. None is what the framework's profile has."""

    dispatcher: Dispatcher | None = None
    """How tokens reach experts: NCCL's all-to-all, DeepEP, HybridEP."""
    etp: int | None = Field(default=None, gt=0)
    """Ranks that split one expert (Megatron-Core's --expert-tensor-parallel-size)."""
    overlaps_experts: bool | None = None
    """Exchanges of experts run beside compute of another micro-batch (overlap_moe_expert_parallel_comm)."""
    drops_tokens: bool = False
    """Rows of experts over a capacity are dropped and fewer padded to it, so that all know how many come."""
    cuda_graphs: Graphs | None = None
    """Content of CUDA graphs: nothing, parts of layers, or the whole iteration."""
    fp8_attention: bool | None = None
    """Attention multiplies in 8 bits (fp8_dot_product_attention)."""
    compiled_loss: bool | None = None
    """torch.compile made the loss (Megatron-LM's --cross-entropy-loss-fusion; torchtitan under compile)."""
    engine_loss: bool = False
    """Transformer Engine's cross-entropy (Megatron-LM's --cross-entropy-fusion-impl te)."""
    model_loss: bool = False
    """The loss is the one that transformers' models return."""
    fused_kernels: FusedKernels | None = None
    """Norms, rotations, MLPs and adapters are one operation each: unsloth's kernels, fms-acceleration's of them (foak),
    Liger's without its loss (liger), or those of anybody with activated gates in them (all)."""
    flash_generation: int | None = Field(default=None, gt=0)
    """Generation of the FlashAttention kernels."""
    ring_attention: bool | None = None
    """Context parallelism passes keys and values around a ring; else it exchanges tokens for heads."""
    overlaps_gradients: bool | None = None
    """Gradients and updated weights are sent beside compute."""
    fuses_accumulation: bool | None = None
    """Products of gradients add to those of earlier micro-batches themselves."""
    overlaps_products: bool | None = None
    """Under sequence parallelism what a product reads is gathered and what it makes is reduced beside it, by chunks
    (Transformer Engine's userbuffers, Megatron-LM's `--tp-comm-overlap`; torch's asynchronous tensor parallelism)."""
    fuses_rotations: bool | None = None
    """Queries and keys of packed samples are turned at once, as all frameworks do today, not one by one: Megatron-Core
    turns them at once unless --no-rope-fusion (training/arguments.py), and what is not fused as well from core 0.15 to
    0.18, and again since a commit of 17 August 2026 (e4ba3a30f2)."""
    gradient_bytes: int | None = Field(default=None, ge=2, le=4, multiple_of=2)
    """Bytes of a gradient between micro-batches and on the wire."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout rate of the hidden states of models whose own is not known."""
    recomputed_ops: RecomputedOps | None = None
    """Who chooses what `selective_ops` runs again."""
    mlp_tile: int | None = Field(default=None, gt=0)
    """MLPs of dense blocks run over tiles of so many tokens of a sequence, and again in the backward pass: `TiledMLP`
    of DeepSpeed and axolotl, Liger's and Unsloth's. Their tiles have as many tokens as a token has features."""
    optimizer_step: OptimizerStep | None = None
    """How the optimizer goes over parameters."""
    steps_in_backward: bool = False
    """Each parameter's step follows its gradient, which is freed."""
    flat_shards: bool = False
    """Shards of parameters are plain tensors, as in FSDP1, which an optimizer goes over as lists; a DTensor, as in
    FSDP2, it takes one by one (torch/optim/optimizer.py, `_default_to_fused_or_foreach`). Where parameters are frozen,
    the hook that frees FSDP1's gathered weights (`register_multi_grad_hook`) keeps a block's graph until the next
    block's is done: the tensors of two blocks stand side by side. The peaks of published runs grow by just that."""
    keeps_quantized_inputs: bool = False
    """Products of weights in four bits keep their inputs, which no gradient needs: bitsandbytes before 0.43.2
    (bitsandbytes/autograd/_functions.py, MatMul4Bit; its commit 9e75374 of July 2024)."""
    whole_experts: bool | None = None
    """Experts of a block are one tensor for each of their matrices, as in transformers 5, which ZeRO-3 gathers at once;
    in transformers 4 most families have modules for them, which it gathers one by one."""
    pads_vocabulary: bool = True
    """The vocabulary is padded as the framework pads it."""
    expandable_segments: bool | None = None
    """torch's allocator grows its segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."""
    context_bytes: int | None = Field(default=None, ge=0)
    """The CUDA context."""
    deterministic: bool = False
    """Matmuls have to repeat bit by bit (CUBLAS_WORKSPACE_CONFIG=:4096:8)."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the settings of a text such as `dispatcher=deepep,etp=1,overlaps_experts`.

        A name alone stands for yes. Raises `PlanError` for a setting or a value that is not known.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            name = name.strip().lower().replace("-", "_")
            if name not in cls.model_fields:
                raise PlanError(f"there is no setting {name!r} of a stack", hint=near_names(name, [*cls.model_fields]))
            values[name] = value.strip().lower() or "true"
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            wrong = error.errors()[0]
            name, reason = str(wrong["loc"][0]), wrong["msg"].removeprefix("Input should be ").partition(",")[0]
            raise PlanError(
                f"{name}={values[name]} of a stack is not {reason}", hint=f"give {name}=VALUE, or leave it out"
            ) from None

    @property
    def of_engines(self) -> dict[str, object]:
        """Settings that are switched on and that only frameworks written for them have, by name."""
        told = self.model_dump(exclude_defaults=True)
        return {name: value for name, value in told.items() if name in ENGINE_SETTINGS and value not in (False, "none")}

    def without(self, names: frozenset[str]) -> Self:
        """Return the settings with those of these names as the framework has them."""
        return self.model_validate(self.model_dump(exclude=set(names)))

    @property
    def text(self) -> str:
        """The settings that differ from what a framework has, as `parse` reads them."""
        told = self.model_dump(exclude_defaults=True)
        return ",".join(f"{name}={str(value).lower()}" for name, value in told.items())
