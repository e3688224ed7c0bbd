"""Faults of parallel training that were reported in public, each rebuilt in a few lines of one of the scripts here.

`words` are of the cause that a check is to tell: with the kind and the parameter they say whether a fault is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
_GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Fault:
    """One fault: its name in a script, what was wrong, where it was reported, and what is to be told of it."""

    script: str
    name: str
    what: str
    framework: str
    thread: str
    kind: str
    words: str = ""
    parameter: str = ""
    num_ranks: int = 2

    @property
    def source(self) -> str:
        return _GITHUB + self.thread

    @property
    def path(self) -> str:
        return str(FOLDER / f"{self.script}.py")


def _data(name: str, what: str, framework: str, thread: str, kind: str, words: str = "", parameter: str = "") -> Fault:
    return Fault("data", name, what, framework, thread, kind, words, parameter)


def _sharded(name: str, what: str, framework: str, thread: str, kind: str, words: str, parameter: str = "") -> Fault:
    return Fault("sharded", name, what, framework, thread, kind, words, parameter)


def _split(
    script: str, name: str, what: str, framework: str, thread: str, kind: str, words: str, parameter: str = ""
) -> Fault:
    return Fault(script, name, what, framework, thread, kind, words, parameter, num_ranks=4)


FAULTS = (
    _data(
        "one seed",
        "every rank draws its rows with one seed",
        "diffusers script",
        "pixeli99/SVD_Xtend/issues/75",
        "same rows",
    ),
    _data(
        "no sampler",
        "a sampler that knows nothing of ranks",
        "Lightning",
        "openspeech-team/openspeech/issues/149",
        "same rows",
    ),
    _data(
        "unlike seeds",
        "each rank's sampler shuffles with a seed of its own",
        "DDP",
        "NVlabs/LongLive/issues/71",
        "note",
        "read the same row",
    ),
    _data(
        "unlike start",
        "weights drawn with a seed of each rank, never broadcast",
        "FSDP",
        "pytorch/pytorch/issues/75870",
        "unlike start",
        "",
        "embedding.weight",
    ),
    _data(
        "synchronized late",
        "DDP is told to reduce between forward and backward",
        "DDP",
        "karpathy/build-nanogpt/pull/30",
        "not reduced",
        "their mean is the gradient",
    ),
    _data(
        "unused later",
        "what the last micro-batch does not use is not reduced",
        "DDP",
        "pytorch/pytorch/issues/69031",
        "not reduced",
        "their mean is the gradient",
        "branches.1.weight",
    ),
    _data(
        "wrapper bypassed",
        "the module inside of DDP is called",
        "DDP",
        "OpenTSLM/OpenTSLM/pull/49",
        "not reduced",
        "their mean is the gradient",
    ),
    _data(
        "loss times ranks",
        "the loss is multiplied by ranks although it is a mean of each",
        "NeMo Automodel",
        "NVIDIA-NeMo/Automodel/pull/3830",
        "scaled",
        "2 times too large, the number of ranks",
    ),
    _data(
        "reduced loss",
        "a loss that is reduced without gradient, and averaged again",
        "verl",
        "verl-project/verl-SpeCo/pull/29",
        "scaled",
        "one by the number of ranks",
    ),
    _data(
        "local targets",
        "each rank divides by the number of its own targets",
        "speculators",
        "vllm-project/speculators/pull/942",
        "mean of shares",
        "unlike numbers of targets",
    ),
    _data(
        "scaler of its own",
        "loss scales of ranks drift apart",
        "DDP, GradScaler",
        "pytorch/pytorch/issues/136009",
        "scaled",
        "as a loss scale",
    ),
    _data(
        "reduced in bf16",
        "gradients are reduced in bf16 where fp32 was asked for",
        "FSDP2",
        "pytorch/pytorch/issues/190626",
        "16 bits",
        "bfloat16",
    ),
    _data(
        "empty gradients",
        "a rank that has no gradient leaves it out of the reduction",
        "DeepSpeed",
        "deepspeedai/DeepSpeed/pull/291",
        "no gradient",
        "none on rank 1",
        "branches.0.weight",
    ),
    _data(
        "averaged twice",
        "gradients are averaged by trainer and updater",
        "SINGA",
        "apache/singa/pull/65",
        "scaled",
        "one by the number of ranks: it is divided once too often",
    ),
    _data(
        "skips a step",
        "one rank skips a step for its own gradients",
        "GradScaler",
        "dylanyunlon/Neuron_SP/issues/2",
        "unlike steps",
        "skipped on some ranks",
    ),
    _data(
        "owner keeps it",
        "ZeRO-1 leaves some updates with their owner",
        "RamTorch",
        "lodestone-rock/RamTorch/issues/13",
        "not stepped",
        "no other rank sends",
        "branches.0.bias",
    ),
    _data(
        "schedule of all ranks",
        "the schedule steps once a rank",
        "Trainer, accelerate",
        "huggingface/transformers/pull/24088",
        "note",
        "the optimizer's lr is",
    ),
    Fault(
        "contrast",
        "gathered without gradient",
        "features of other ranks are gathered without gradient",
        "open_clip",
        "mlfoundations/open_clip/issues/616",
        "scaled",
        "one by the number of ranks",
    ),
    Fault(
        "trainer",
        "tokens of each rank",
        "the Trainer counts the tokens of each rank alone",
        "transformers",
        "huggingface/transformers/issues/34242",
        "mean of shares",
        "unlike numbers of targets",
    ),
    _sharded(
        "one rank a shard",
        "hybrid shards of one rank are never reduced",
        "verl, FSDP",
        "verl-project/verl/issues/7493",
        "not reduced",
        "each rank of replicate has its own",
    ),
    _sharded(
        "ignored module",
        "gradients of ignored modules are not reduced",
        "FSDP",
        "pytorch/pytorch/issues/98281",
        "not reduced",
        "their mean is the gradient",
        "adapter.weight",
    ),
    _sharded(
        "decay by dimensions",
        "weight decay by dimensions, which shards do not have",
        "FSDP",
        "pytorch/pytorch/issues/101343",
        "rates",
        "weight_decay is 0 on ranks and 0.1",
        "embedding.weight",
    ),
    Fault(
        "sharded",
        "unlike replicas",
        "replicas of hybrid shards start unlike",
        "HSDP",
        "pytorch/pytorch/pull/108331",
        "unlike start",
        "",
        "embedding.weight",
        num_ranks=4,
    ),
    _sharded(
        "added later",
        "adapters that are added after sharding are not reduced",
        "FastVideo",
        "hao-ai-lab/FastVideo/pull/1666",
        "not reduced",
        "their mean is the gradient",
        "adapter.weight",
    ),
    _sharded(
        "mean of each rank",
        "a mean over each rank's targets",
        "prime-rl",
        "PrimeIntellect-ai/prime-rl/pull/1957",
        "mean of shares",
        "unlike numbers of targets",
    ),
    _sharded(
        "norm of a shard",
        "each rank clips by the norm of its shards",
        "torchtitan",
        "pytorch/torchtitan/issues/766",
        "norm",
        "the parts are not summed over ranks",
    ),
    _sharded(
        "own clipping",
        "code of its own clips by the norm of its shards",
        "LoongForge",
        "baidu-baige/LoongForge/pull/152",
        "scaled",
        "clips by the norm of its part",
    ),
    _sharded(
        "orthogonal shards",
        "Muon makes each shard orthogonal",
        "DeepSpeed",
        "deepspeedai/DeepSpeed/issues/8437",
        "update",
        "needs more than the part of it that a rank holds",
        "embedding.weight",
    ),
    _split(
        "tensor",
        "exchange left out",
        "the gradient of a layer's input is not summed over tp",
        "torchtitan",
        "pytorch/torchtitan/issues/1805",
        "not reduced",
        "ranks of tp differ",
        "attention.bias",
    ),
    _split(
        "tensor",
        "norm of a part of the tokens",
        "gradients of a norm under sequence parallelism stay apart",
        "Megatron-LM",
        "NVIDIA/Megatron-LM/issues/1446",
        "not reduced",
        "ranks of tp differ (0, 2 | 1, 3), and their sum is the gradient",
        "norm.weight",
    ),
    _split(
        "tensor",
        "one key for all heads",
        "the key and value that heads share are not reduced over tp",
        "Megatron-LM",
        "bigcode-project/Megatron-LM/issues/11",
        "not reduced",
        "ranks of tp differ (0, 2 | 1, 3), and their sum is the gradient",
        "attention.key_value",
    ),
    _split(
        "tensor",
        "bias on every rank",
        "a bias is added on every rank before the sum",
        "Paddle",
        "PaddlePaddle/Paddle/pull/35186",
        "another output",
        "that of attention",
    ),
    _split(
        "tensor",
        "bias divided",
        "a bias is divided by tp, and so is its gradient",
        "torchtitan",
        "pytorch/torchtitan/pull/4332",
        "scaled",
        "tp: it is divided once too often",
        "attention.bias",
    ),
    _split(
        "tensor",
        "fused in halves",
        "a fused weight is divided across what is fused",
        "DTensor",
        "pytorch/pytorch/pull/149701",
        "another output",
        "that of gated",
    ),
    _split(
        "tensor",
        "gradient of the owner alone",
        "only the rank that holds the target gets a gradient",
        "ms-swift",
        "modelscope/ms-swift/pull/9947",
        "another direction",
        "the loss is right, so it goes wrong on the way back",
    ),
    _split(
        "tensor",
        "labels smoothed over a part",
        "labels are smoothed over a rank's part of the vocabulary",
        "Megatron-LM",
        "NVIDIA/Megatron-LM/issues/7452",
        "another direction",
        "which read the same, have unlike losses",
    ),
    _split(
        "tensor",
        "norm counts copies",
        "the norm counts what ranks hold alike tp times",
        "NeMo RL",
        "NVIDIA-NeMo/RL/pull/3788",
        "norm",
        "what ranks hold alike is counted more than once",
    ),
    _split(
        "context",
        "keys of others without gradient",
        "attention sends no gradient to keys of other ranks",
        "Megatron-LM",
        "NVIDIA/Megatron-LM/issues/1464",
        "another direction",
        "value.weight is the last of the model that is wrong",
        "value.weight",
    ),
    _split(
        "context",
        "positions from zero",
        "each part of a sequence counts its positions from 0",
        "speculators",
        "vllm-project/speculators/pull/871",
        "another output",
        "that of position",
    ),
    _split(
        "context",
        "mean of each part",
        "each part of a sequence divides by its own targets",
        "prime-rl",
        "PrimeIntellect-ai/prime-rl/pull/1960",
        "another loss",
        "divides by the number of its own targets",
    ),
    _split(
        "context",
        "scaled by cp",
        "the loss is multiplied by cp, and gradients are not averaged",
        "Megatron-LM",
        "NVIDIA/Megatron-LM/issues/906",
        "scaled",
        "2 times too large, the size of dp or cp",
    ),
    _split(
        "context",
        "divided by cp",
        "the loss leaves the ranks of a sequence out",
        "VeOmni",
        "ByteDance-Seed/VeOmni/pull/338",
        "scaled",
        "one by the size of dp or cp",
    ),
    _split(
        "context",
        "reduced over dp alone",
        "gradients are not reduced over cp",
        "slime",
        "THUDM/slime/pull/1366",
        "not reduced",
        "ranks of cp differ (0, 2 | 1, 3), and their sum is the gradient",
    ),
    _split(
        "experts",
        "slots of other ranks",
        "the router's gradient counts experts of other ranks",
        "transformers",
        "huggingface/transformers/issues/48687",
        "another direction",
        "router.weight is the last of the model that is wrong",
        "router.weight",
    ),
    _split(
        "experts",
        "empty slots are NaN",
        "slots of other ranks' experts make NaN on the way back",
        "transformers",
        "huggingface/transformers/pull/48205",
        "not finite",
        "finite in one process",
    ),
    _split(
        "experts",
        "gate not reduced",
        "the router's gradient is not reduced",
        "torchtitan",
        "pytorch/torchtitan/issues/2387",
        "not reduced",
        "their mean is the gradient",
        "router.weight",
    ),
    _split(
        "experts",
        "times ep",
        "gradients of experts are divided by dp alone",
        "Megatron-LM",
        "NVIDIA/Megatron-LM/pull/5956",
        "scaled",
        "2 times too large, the size of dp or ep",
        "experts.weights",
    ),
    _split(
        "experts",
        "norm of its own experts",
        "each rank clips by the norm of its own experts",
        "NeMo Automodel",
        "NVIDIA-NeMo/Automodel/pull/3817",
        "norm",
        "the parts are not summed over ranks",
    ),
    _split(
        "experts",
        "gate never stepped",
        "ZeRO-2 loses the gradient of gates",
        "DeepSpeed",
        "deepspeedai/DeepSpeed/issues/4482",
        "no gradient",
        "none on any rank",
        "router.weight",
    ),
)
