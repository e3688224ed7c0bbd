"""The product with which a block that runs again stops early, against torch's own checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from paraplan.cost.blocks.recomputed import unread_product
from paraplan.model.config_file import ModelConfig
from paraplan.model.reader import read_fields

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "head_dim": 16}
WIDE = {"intermediate_size": 64, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Products(TorchDispatchMode):
    """Counts matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _PRODUCTS
        return func(*args, **(kwargs or {}))


def products_of_backward(block: torch.nn.Module, call: dict[str, Any], *, stops_early: bool) -> int:
    entry = torch.randn(1, 8, 32, requires_grad=True)
    with set_checkpoint_early_stop(stops_early):
        found = checkpoint(lambda given: block(given, **call), entry, use_reentrant=False)
        found = found[0] if isinstance(found, tuple) else found
        with Products() as seen:
            found.sum().backward()
    return seen.count


@pytest.mark.parametrize(
    ("kind", "fields", "stops"),
    [
        ("llama", WIDE, True),
        ("qwen3", WIDE, True),
        ("gemma2", WIDE, False),
        ("olmo2", WIDE, False),
        ("mixtral", WIDE | EXPERTS, False),
        ("phi", WIDE | {"resid_pdrop": 0.0}, True),
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.1}, False),
        ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0}, True),
    ],
)
def test_the_last_product_is_left_out_where_torch_leaves_it_out(kind: str, fields: dict[str, Any], stops: bool) -> None:
    config = transformers.AutoConfig.for_model(kind, **SMALL | fields, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    layers = model.transformer.h if kind == "gpt2" else model.model.layers
    call: dict[str, Any] = {}
    if kind != "gpt2":
        rotary = model.model.rotary_emb
        call["position_embeddings"] = rotary(torch.zeros(1, 8, 32), torch.arange(8)[None])
    whole, early = (products_of_backward(layers[0], call, stops_early=each) for each in (False, True))
    assert whole - early == stops
    read = read_fields(ModelConfig(kind, config.to_dict() | {"architectures": [type(model).__name__]}, kind, 128))
    assert (unread_product(read.runs[-1].block) is not None) == stops
