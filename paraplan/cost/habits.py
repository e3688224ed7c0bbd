"""How a training framework lays out memory and time where plans leave it free: `Habits`.

The planner prices paraplan's own runtime. `paraplan validate` prices runs of other frameworks, each by its habits.
"""

from __future__ import annotations

from typing import Literal

from paraplan.plan.parallel import ScheduleName
from paraplan.plan.training import AttentionKind
from paraplan.records import Record
from paraplan.units import MIB

FSDP_GATHER_HOST_S = 0.5e-3
"""What FSDP's hooks need on the host to gather a block for a pass; see `FSDP`."""
FSDP_REDUCE_HOST_S = 0.6e-3
"""What they need to reduce the gradients of a block."""

FUSED_TRAFFIC = 1.6
"""Bytes that a forward pass of fused kernels moves outside of matmuls, for each byte that it keeps; see `Habits`."""


class Habits(Record):
    """One framework's choices. Bytes are per parameter.

    `weight_bytes`, `gradient_bytes` and `master_bytes` hold under mixed precision; training in fp32 keeps 4, 4 and 0.
    `copy_bytes` is the 16-bit copy of matmul weights that autocast keeps from forward to backward.
    `fused_kernels` says that norms, activations and rotations are fused (`BlockSpec.saved_fused`).
    `host_s_per_block` is what the host needs to start the kernels of one block's forward pass: a floor under its time.
    `splits_pipeline_sends`: each tensor-parallel rank sends its share of a boundary (Narayanan et al. 2021, 4.1).
    `boundary_transfers` is how many sends a middle stage waits for in each micro-batch: Megatron-LM exchanges both
    directions with a neighbour at once, DeepSpeed's schedule sends and receives one after the other.
    `overlaps_tensor_backward`: what tensor parallelism sends in backward passes runs beside the gradients of weights.
    `rings_context`: context parallelism passes keys and values around a ring beside the attention core, as Transformer
    Engine does; else it exchanges tokens for heads.
    `overlaps_zero_1`: the distributed optimizer's reduce-scatter and all-gather hide behind compute.
    `flash_generation` is that of the FlashAttention kernels.
    `logit_bytes` is what the loss holds for each logit under mixed precision at its peak: torch's cross-entropy the
    16-bit logit, the fp32 log-probability and its gradient; a fused one the 16-bit logit and one fp32 tensor in place.
    `parallel_logit_bytes` is the same of a loss on logits that tensor parallelism divided, None as `logit_bytes`: in
    paraplan's the fp32 softmax, which its gradient takes the place of, and that in 16 bits.
    `loss_traffic_per_logit` is what the loss moves through memory for each logit, forward and backward, counted by
    operation: 38 bytes in torch's cross-entropy on upcast logits, 52 in Megatron-LM's vocabulary-parallel one.
    `bucket_elements` is the size of each of two communication buckets, to reduce gradients and to gather parameters.
    `uses_tf32`: matmuls of fp32 training run on TF32 tensor cores.
    `matmul_speedup` is how many times faster than in 16 bits the linear layers of blocks run (8-bit training); what is
    kept in memory and sent is that of 16 bits.
    `traffic_per_saved_byte` is what a forward pass moves through memory outside of matmuls, for each byte that it
    keeps: counted by operation, 1.6 where kernels are fused (a GPT block moves 54 bytes and keeps 34 for each hidden
    feature), 2.6 where each operation reads and writes (a Llama block of transformers moves 127 and keeps 49).
    `is_autocast`: 16-bit training runs under autocast over fp32 parameters, which ZeRO gathers in 16 bits.
    `shards_with_fsdp`: every ZeRO stage keeps fp32 shards of the parameters and gathers 16-bit ones, as FSDP does.
    `gathers_ends_alone`: an embedding and a head as large as a block are gathered and reduced for themselves.
    `frees_gradients`: gradients are allocated anew in every step; else they stand in buffers of their own.
    `optimizer_step`: how the optimizer goes over its parameters; foreach makes a copy of all of them, for_loop of one.
    `keeps_gathered_inputs`: under sequence parallelism matmuls keep their gathered inputs; Megatron-LM keeps a share of
    them and gathers it again (Korthikanti et al. 2022, section 4.2.2).
    `allocates_every_receive`: a pipeline rank allocates what it receives of all micro-batches at the start.
    `prefetch_elements` is how many parameters ZeRO-3 gathers ahead of their use; what is more is waited for.
    `gathers_each_weight`: ZeRO-3 gathers and scatters the weights of each matmul by themselves, not those of a block.
    `keeps_dummy_gradients`: Transformer Engine keeps a 16-bit tensor for each distinct shape of weight, where gradients
    are accumulated elsewhere.
    `writes_out_gates`: where other kernels are fused, gated activations are not, and keep the activated gate too;
    `repeats_key_heads`: there, keys and values of grouped queries are repeated to all heads and kept so.
    `writes_out_gelu`: GELUs are transformers' gelu_new, where kernels are not fused.
    `dropout` is the rate in GPT-like models whose own is not known.
    `state_bytes` is the size of an element of the optimizer's state.
    `matmul_workspaces` names whose workspaces matmuls have (`cost.workspaces`).
    `is_deterministic`: CUBLAS_WORKSPACE_CONFIG=:4096:8, which torch asks for where matmuls must repeat bit by bit.
    `keeps_score_buffer`: eager attention keeps a buffer of one micro-batch's scores for good.
    `keeps_both_boundaries`: a pipeline keeps what a stage received and what it sent until the backward pass.
    `live_elements` is how many parameters ZeRO-3 leaves gathered at most.
    `flat_step_bytes` are copies of an own parameter's gradient that an optimizer step makes, all at once.
    `takes_loss_in_model`: labels are inputs of the model, which gives its loss, and fp32 logits, as outputs.
    `accumulates_apart`: gradients in fp32 are accumulated beside those that backward passes make.
    `fuses_accumulation`: the product that makes a gradient adds it to those of earlier micro-batches.
    `gather_traffic` and `replica_traffic` are the bytes that a gathered 16-bit parameter, and a gradient that replicas
    reduce, move through a GPU's own memory; `reduce_traffic` those of a gradient that is reduced into shards, in
    16 bits and in fp32. `gather_host_s` and `reduce_host_s` is the host's time to gather and to reduce a block.
    `has_expert_parallel`: experts may go over ranks of dp and cp, which send tokens to each other (`ep` of a plan).
    `fused_softmax_heads`: eager attention's fused softmax takes as many scores (heads times sequences) as a multiple of
    it; others go through torch's operations, one after the other. 1 takes all.
    `schedules` are those that its pipelines have.
    `context_bytes` is the CUDA context where a framework's software has another than `CostConstants` names.
    """

    name: str
    weight_bytes: float
    gradient_bytes: float
    master_bytes: float
    copy_bytes: float
    fused_kernels: bool
    host_s_per_block: float
    overlaps_gradients: bool = True
    overlaps_tensor_backward: bool = False
    rings_context: bool = False
    overlaps_zero_1: bool = False
    splits_pipeline_sends: bool = False
    boundary_transfers: int = 2
    default_attention: AttentionKind = "flash"
    flash_generation: int = 2
    logit_bytes: float = 10.0
    parallel_logit_bytes: float | None = None
    loss_traffic_per_logit: float = 38.0
    keeps_dummy_gradients: bool = False
    bucket_elements: float = 0.0
    uses_tf32: bool = False
    matmul_speedup: float = 1.0
    traffic_per_saved_byte: float = 2.6
    prefetch_elements: float = float("inf")
    gathers_each_weight: bool = False
    is_autocast: bool = False
    shards_with_fsdp: bool = False
    gathers_ends_alone: bool = False
    frees_gradients: bool = False
    optimizer_step: Literal["foreach", "for_loop", "fused"] = "fused"
    allocates_every_receive: bool = False
    keeps_gathered_inputs: bool = False
    writes_out_gelu: bool = True
    writes_out_gates: bool = False
    repeats_key_heads: bool = False
    dropout: float = 0.1
    state_bytes: float = 4.0
    matmul_workspaces: Literal["none", "torch", "transformer_engine"] = "torch"
    is_deterministic: bool = False
    keeps_score_buffer: bool = False
    keeps_both_boundaries: bool = False
    live_elements: float = 0.0
    flat_step_bytes: float = 0.0
    takes_loss_in_model: bool = False
    accumulates_apart: bool = False
    fuses_accumulation: bool = False
    gather_traffic: float = 0.0
    reduce_traffic: tuple[float, float] = (0.0, 0.0)
    replica_traffic: float = 0.0
    gather_host_s: float = 0.0
    reduce_host_s: float = 0.0
    has_expert_parallel: bool = False
    fused_softmax_heads: int = 1
    schedules: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
    context_bytes: int | None = None
    source: str

    def compiled(self) -> Habits:
        """Return the habits of blocks that torch.compile compiles: what stands between matmuls is fused.

        What the host needs to start a block is left as it is: nobody has measured it for compiled ones.
        """
        return self.replace(fused_kernels=True, traffic_per_saved_byte=FUSED_TRAFFIC)


PARAPLAN = Habits(
    name="paraplan",
    weight_bytes=4,
    gradient_bytes=4,
    master_bytes=0,
    copy_bytes=2,
    is_autocast=True,
    shards_with_fsdp=True,
    gathers_ends_alone=True,
    frees_gradients=True,
    optimizer_step="foreach",
    allocates_every_receive=True,
    keeps_gathered_inputs=True,
    fused_kernels=False,
    host_s_per_block=0.3e-3,
    default_attention="sdpa",
    parallel_logit_bytes=6.0,
    gather_traffic=4,
    reduce_traffic=(4, 6),
    replica_traffic=8,
    gather_host_s=FSDP_GATHER_HOST_S,
    reduce_host_s=FSDP_REDUCE_HOST_S,
    source="paraplan.runtime: fp32 parameters under autocast, DDP with gradients as views of buckets, FSDP2",
)

MEGATRON_CORE = Habits(
    name="Megatron-Core",
    weight_bytes=2,
    gradient_bytes=4,
    master_bytes=4,
    copy_bytes=0,
    fused_kernels=True,
    host_s_per_block=2.0e-3,
    overlaps_tensor_backward=True,
    fuses_accumulation=True,
    rings_context=True,
    overlaps_zero_1=True,
    splits_pipeline_sends=True,
    flash_generation=3,
    uses_tf32=True,
    traffic_per_saved_byte=FUSED_TRAFFIC,
    logit_bytes=6,
    loss_traffic_per_logit=52,
    keeps_dummy_gradients=True,
    matmul_workspaces="transformer_engine",
    has_expert_parallel=True,
    schedules=("1f1b", "interleaved_1f1b"),
    source="Megatron-LM: 18 bytes per parameter, 6 + 12/d with the distributed optimizer (its README); "
    "Transformer Engine kernels; --overlap-grad-reduce and --overlap-param-gather; host: 53 ms for a step of 12 layers "
    "of 512 on H100 in its own tests (tests/functional_tests, golden values), over 26 passes of blocks and ends",
)

MEGATRON_CORE_LOCAL = MEGATRON_CORE.replace(
    name="Megatron-Core without Transformer Engine",
    default_attention="eager",
    keeps_dummy_gradients=False,
    matmul_workspaces="torch",
    keeps_score_buffer=True,
    fused_softmax_heads=4,
    source="Megatron-LM --transformer-impl local: its own fused softmax, attention scores kept; a global buffer for "
    "the product of queries and keys (core/transformer/dot_product_attention.py)",
)

MEGATRON_2021 = Habits(
    name="Megatron-LM before Megatron-Core, Megatron-DeepSpeed",
    weight_bytes=2,
    gradient_bytes=2,
    master_bytes=4,
    copy_bytes=0,
    fused_kernels=True,
    host_s_per_block=0.6e-3,
    overlaps_gradients=False,
    splits_pipeline_sends=True,
    default_attention="eager",
    uses_tf32=True,
    traffic_per_saved_byte=FUSED_TRAFFIC,
    logit_bytes=6,
    loss_traffic_per_logit=52,
    fused_softmax_heads=4,
    source="Narayanan et al. 2021, section 3; fused scale-mask-softmax and bias-GeLU, attention scores kept; the "
    "softmax is fused where is_kernel_available says so (megatron/model/fused_softmax.py)",
)

MEGATRON_2022 = MEGATRON_2021.replace(
    name="Megatron-LM with sequence parallelism or selective recompute",
    overlaps_tensor_backward=True,
    fuses_accumulation=True,
    source="Korthikanti et al. 2022; Megatron-LM v3.0, megatron/core/tensor_parallel/layers.py: all-reduces of input "
    "gradients, and what sequence parallelism gathers and scatters, beside the gradients of weights; "
    "gradient_accumulation_fusion",
)

FLAGSCALE = MEGATRON_2022.replace(
    name="FlagScale",
    default_attention="flash",
    writes_out_gates=True,
    repeats_key_heads=True,
    source="FlagScale ed55532 (October 2023) and 26cd664 (January 2024), megatron/model/transformer.py, which scripts "
    "take with --transformer-impl local, the default: SwiGLU of torch's own operations, keys and values by "
    "repeat_interleave, apex's RMSNorm; gradients in fp32 buffers under bf16 (megatron/arguments.py)",
)

MEGATRON_DEEPSPEED = MEGATRON_2021.replace(
    name="Megatron-DeepSpeed",
    host_s_per_block=1.2e-3,
    boundary_transfers=4,
    bucket_elements=5e8,
    keeps_both_boundaries=True,
    flat_step_bytes=6,
    accumulates_apart=True,
    context_bytes=1271 * MIB,
    source="as Megatron-LM of 2021, with DeepSpeed's pipeline engine: boundaries are divided over tp and sent one "
    "after the other, and every stage recomputes (runtime/pipe); "
    "host: between 0.7 ms (62 torch calls of a forward pass, at 11 us, the middle of 5 to 25 us a call) and the "
    "2.0 ms of Megatron-Core, whose blocks make more calls. "
    "Memory, DeepSpeed 0.5 to 0.6: "
    "runtime/pipe/engine.py clones what it receives and keeps outputs; runtime/zero/stage_1_and_2.py flattens "
    "gradients to reduce them, and its own share of them in 16 bits and in fp32 to step; runtime/bf16_optimizer.py "
    "accumulates in an unsharded fp32 buffer beside 16-bit gradients; context: BigScience's chronicles-prequel.md",
)

FSDP = Habits(
    name="FSDP",
    weight_bytes=4,
    gradient_bytes=4,
    master_bytes=0,
    copy_bytes=0,
    shards_with_fsdp=True,
    frees_gradients=True,
    fused_kernels=False,
    host_s_per_block=0.3e-3,
    gather_traffic=4,
    reduce_traffic=(4, 6),
    gather_host_s=FSDP_GATHER_HOST_S,
    reduce_host_s=FSDP_REDUCE_HOST_S,
    source="torch.distributed.fsdp with mixed precision: fp32 shards, 16-bit all-gathers; FSDP2 copies out of the "
    "buffer that it gathers in and into the one that it reduces (_fully_shard/_fsdp_collectives.py); host: 0.45 to "
    "0.56 ms a gather and 0.5 to 0.7 ms a reduction of a block of 12 parameters of 8 features, more than the block "
    "alone, measured with torch 2.13 on one CPU rank; a user of torch 2.10 reports 1 ms a gather on a Xeon (pytorch "
    "issue 173680), a profile of FSDP1 0.45 ms after a forward pass (huggingface/blog issue 1649)",
)

COMPOSER = FSDP.replace(
    name="Composer",
    fused_kernels=True,
    traffic_per_saved_byte=FUSED_TRAFFIC,
    flash_generation=1,
    dropout=0,
    logit_bytes=4,
    gather_traffic=0,
    reduce_traffic=(8, 18),
    source="MosaicML Composer of 2023 on FSDP: MPT blocks with torch's fused LayerNorm and GELU, and FlashAttention 1; "
    "MPT has no dropout, and its loss is flash-attn's, which keeps the 16-bit logits and makes their gradient "
    "(llm-foundry, models/mpt/modeling_mpt.py); FSDP1 joins the gradients of a flat parameter, casts and divides them "
    "(torch/distributed/fsdp/_flat_param.py, _runtime_utils.py)",
)

DEEPSPEED_ZERO = Habits(
    name="DeepSpeed ZeRO",
    weight_bytes=2,
    gradient_bytes=2,
    master_bytes=4,
    copy_bytes=0,
    fused_kernels=False,
    host_s_per_block=0.6e-3,
    bucket_elements=5e8,
    prefetch_elements=5e7,
    gathers_each_weight=True,
    live_elements=1e9,
    flat_step_bytes=6,
    logit_bytes=12,
    gather_traffic=4,
    reduce_traffic=(12, 12),
    source="Rajbhandari et al. 2020, section 3.1: 2 + 2 + 12 bytes per parameter under Adam; reduce_bucket_size and "
    "allgather_bucket_size (5e8), stage3_prefetch_bucket_size (5e7) and stage3_max_live_parameters (1e9) of "
    "DeepSpeed's configuration; loss of transformers: fp32 logits, shifted ones in a copy, their log-probabilities; "
    "partitions are joined (zero/partition_parameters.py), gradients copied to a bucket, joined by rank and divided "
    "(zero/stage3.py, comm/coalesced_collectives.py)",
)

HF_TRAINER = Habits(
    name="Hugging Face Trainer",
    takes_loss_in_model=True,
    weight_bytes=4,
    gradient_bytes=4,
    master_bytes=0,
    copy_bytes=2,
    is_autocast=True,
    frees_gradients=True,
    optimizer_step="for_loop",
    fused_kernels=False,
    host_s_per_block=0.6e-3,
    default_attention="eager",
    logit_bytes=12,
    replica_traffic=16,
    source="transformers.Trainer: fp32 parameters under autocast; loss: fp32 logits, shifted ones in a copy, their "
    "log-probabilities; AdamW of transformers before 4.30, one parameter after the other; DDP copies gradients into "
    "buckets and back",
)

NVIDIA_EXAMPLES = HF_TRAINER.replace(
    name="NVIDIA DeepLearningExamples",
    fused_kernels=True,
    traffic_per_saved_byte=FUSED_TRAFFIC,
    uses_tf32=True,
    source="NVIDIA/DeepLearningExamples in NVIDIA's containers, which allow TF32 for fp32 matmuls; apex's LayerNorm",
)

TORCHTUNE = FSDP.replace(
    name="torchtune",
    weight_bytes=2,
    gradient_bytes=2,
    state_bytes=2,
    source="torchtune's full fine-tuning recipes: dtype bf16 for parameters, gradients and optimizer states",
)

PADDLE = Habits(
    name="PaddleNLP",
    weight_bytes=2,
    gradient_bytes=2,
    master_bytes=4,
    copy_bytes=0,
    fused_kernels=False,
    host_s_per_block=0.6e-3,
    default_attention="flash",
    writes_out_gelu=False,
    matmul_workspaces="none",
    source="PaddleNLP: AMP level O2, 16-bit parameters and gradients, AdamW with multi_precision (fp32 "
    "master weights); use_fused_rms_norm=false in FlagPerf's configurations, so that blocks run one operation "
    "after the other",
)
