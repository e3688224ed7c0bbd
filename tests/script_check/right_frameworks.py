"""Right scripts of frameworks that train on GPUs, as far as they run without: torchtitan 0.2 and Megatron-Core 0.16.

Started as `python right_frameworks.py torchtitan/tp`. Each divides a small model by the framework's own functions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

VOCABULARY, LENGTH = 64, 16


def batches(replica: int) -> Iterator[torch.Tensor]:
    """Rows of tokens of a replica."""
    random = torch.Generator().manual_seed(3 + replica)
    for _ in range(3):
        yield torch.randint(0, VOCABULARY, (4, LENGTH), generator=random)


def titan_model(family: str) -> Any:
    """A small model of torchtitan, on all ranks alike."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY}
    if family == "llama3":
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer

        model: Any = Transformer(TransformerModelArgs(**sizes, multiple_of=16, max_seq_len=LENGTH))
    else:
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
        from torchtitan.models.qwen3.model.model import Qwen3Model

        histogram: Any = torch.histc
        here: Any = torch
        here.histc = lambda values, *given, **named: histogram(values.float(), *given, **named).to(
            values
        )  # no integers
        experts = MoEArgs(num_experts=4, num_shared_experts=0, top_k=2, score_func="softmax", use_grouped_mm=False)
        sizes |= {"head_dim": 8, "hidden_dim": 64, "max_seq_len": LENGTH, "moe_inter_dim": 32, "moe_args": experts}
        model = Qwen3Model(Qwen3ModelArgs(**sizes, moe_enabled="moe" in family))
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    return model


def titan_divided(model: Any, mesh: DeviceMesh, *, is_recomputed: bool) -> None:
    """Divide the model over the axes `dp_replicate`, `fsdp` and `tp` of a mesh."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra import parallelize as llama3

    if "tp" in mesh.mesh_dim_names and mesh["tp"].size() > 1:
        llama3.apply_tp(model, mesh["tp"], loss_parallel=False, enable_float8_tensorwise_tp=False)
    if is_recomputed:
        apply_ac(model, ActivationCheckpoint(mode="full"))
    of_shards = tuple(name for name in ("dp_replicate", "fsdp") if name in mesh.mesh_dim_names)
    types = {"param_dtype": torch.float32, "reduce_dtype": torch.float32, "pp_enabled": False}
    llama3.apply_fsdp(model, mesh[of_shards], **types)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sums that are scaled before


def titan(family: str, axes: str, *, is_recomputed: bool = False, is_clipped: bool = False) -> None:
    """Train a model of torchtitan, divided over axes of a mesh, by losses that are sums over all tokens."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_

    world = dist.get_world_size()
    shape = {"tp": (1, world), "fsdp": (world,), "fsdp-tp": (world // 2, 2), "hsdp": (world // 2, 2)}[axes]
    names = {
        "tp": ("fsdp", "tp"),
        "fsdp": ("fsdp",),
        "ep": ("fsdp",),
        "fsdp-tp": ("fsdp", "tp"),
        "hsdp": ("dp_replicate", "fsdp"),
    }[axes]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = titan_model(family)
    titan_divided(model, mesh, is_recomputed=is_recomputed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    replica = dist.get_rank() // (mesh["tp"].size() if "tp" in names else 1)
    count = dist.get_world_size() // (mesh["tp"].size() if "tp" in names else 1)
    for tokens in batches(replica):
        optimizer.zero_grad()
        loss = cross_entropy_loss(model(tokens), tokens.roll(-1, 1))
        tokens_of_all = torch.tensor(float(tokens.numel()))
        dist.all_reduce(tokens_of_all)
        (loss / (tokens_of_all / world * count)).backward()
        if is_clipped:
            clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()


def megatron(*, tensor: int) -> None:
    """Train a small GPT of Megatron-Core by its own layers, gradients and their last reductions."""
    current: Any = torch.cuda
    current.current_device = lambda: "cpu"  # the only device that it asks for
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    tensor = min(tensor, dist.get_world_size())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    torch.manual_seed(1)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 64}
    without = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    config = TransformerConfig(
        **sizes,
        **dict.fromkeys((*without, "add_bias_linear"), False),
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    plain = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=False), plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    for tokens in batches(parallel_state.get_data_parallel_rank()):
        model.zero_grad_buffer()
        positions = torch.arange(LENGTH)[None].expand(len(tokens), -1)
        model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean().backward()
        finalize_model_grads([model])
        for parameter in plain.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()


SCRIPTS: dict[str, tuple[int, Callable[[], None]]] = {
    "torchtitan/tp": (2, lambda: titan("llama3", "tp")),
    "torchtitan/fsdp": (2, lambda: titan("llama3", "fsdp", is_recomputed=True)),
    "torchtitan/clipped": (4, lambda: titan("llama3", "fsdp-tp", is_clipped=True)),
    "torchtitan/hsdp": (4, lambda: titan("llama3", "hsdp")),
    "torchtitan/qwen3": (2, lambda: titan("qwen3", "fsdp")),
    "torchtitan/experts": (2, lambda: titan("qwen3-moe", "fsdp")),
    "megatron/dp": (2, lambda: megatron(tensor=1)),
    "megatron/tp": (2, lambda: megatron(tensor=2)),
    "megatron/tp-dp": (4, lambda: megatron(tensor=2)),
}
"""Scripts with their numbers of ranks."""


if __name__ == "__main__":
    dist.init_process_group("gloo")
    SCRIPTS[sys.argv[1]][1]()
