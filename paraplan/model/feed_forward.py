"""Feed-forward layers: plain and gated MLPs, and mixtures of experts."""

from __future__ import annotations

from typing import Literal, NamedTuple

from paraplan.errors import ModelError
from paraplan.model.part import KeptBy, Part, dropout, kept, linear, weight
from paraplan.model.spec import ElementType, Layer, Matmul, Parameter

# How many tensors of the inner width an activation keeps besides its output, run as transformers writes it: torch's own
# kernels keep their input (ReLU its output); gelu_new is written out and keeps x, tanh, x/2 and 1 + tanh; gpt-oss keeps
# gate and up before and the gate behind their clamps, and the sigmoid (DeepSeek-V4's SiLU has no sigmoid of its own);
# a squared ReLU the ReLU's output.
_KEPT_BY_ACTIVATION = {"relu": 0, "gelu_new": 4, "gelu_fast": 4, "quick_gelu": 2, "gpt_oss": 4, "clamped_silu": 3}
# Of these, how many autocast computes in fp32: gelu_new's power, and what is made of it.
_PROMOTED_BY_ACTIVATION = {"gelu_new": 3}


def kept_by_activation(activation: str) -> int:
    """Return how many tensors of its input's size an activation keeps besides its output, run as transformers does."""
    return _KEPT_BY_ACTIVATION.get(activation, 1)


class MlpStyle(NamedTuple):
    """How a family writes its MLP down: names of the projections in, then out; two in, or one fused, make it gated."""

    projections: tuple[str, ...]
    activation: str
    is_gated: bool = False
    bias: bool = False
    output_bias: bool | None = None
    inner_dropout: float = 0.0
    input_first: bool = False


def mlp(hidden: int, inner: int, style: MlpStyle, *, keeps_input: bool = True) -> Part:
    """Return an MLP of inner width `inner`. `keeps_input` is False where another piece keeps the same input."""
    *inputs, output = style.projections
    part, readers = Part(), tuple(inputs)
    if keeps_input:
        part += kept("mlp_input", hidden, split="sequence", num_readers=len(inputs), weights_of=readers)
    width = 2 * inner if style.is_gated and len(inputs) == 1 else inner
    for name in inputs:
        part += linear(name, hidden, width, bias=style.bias, split="column", input_first=style.input_first)
    reads_output = style.activation == "relu" and not style.is_gated and style.inner_dropout == 0  # ReLU does itself
    reader = None if reads_output else (output,)
    part += activation_saved(style.activation, inner, is_gated=style.is_gated, weights_of=reader)
    part += dropout("dropout_mask", style.inner_dropout, inner, split="tensor")
    if style.inner_dropout > 0 and style.activation == "relu":  # kept as ReLU's own output, beside what is left of it
        part += kept("relu_output", inner, split="tensor")
    output_bias = style.bias if style.output_bias is None else style.output_bias
    return part + linear(output, inner, hidden, bias=output_bias, split="row", input_first=style.input_first)


def activation_saved(
    activation: str,
    inner: float,
    *,
    is_gated: bool,
    element_type: ElementType = "activation",
    weights_of: tuple[str, ...] | None = None,
) -> Part:
    """Return what the activation of an MLP keeps, its output (the output projection's input) included.

    Plain: `8sbh + 8sbh` of Korthikanti et al. 2022, section 4.1, for an inner width of 4h. Gated: gate, up and their
    product under a fused kernel; torch's own operations keep the activated gate too. `weights_of` names the layer that
    alone reads the output.
    """
    steps = kept_by_activation(activation)
    fused_steps = 0 if activation == "relu" else 1
    promoted = _PROMOTED_BY_ACTIVATION.get(activation, 0)
    part = kept(
        "activation_internals", (steps - promoted) * inner, element_type=element_type, split="tensor", by="modules"
    )
    for place in range(promoted):
        part += kept("power", inner, element_type="promoted", split="tensor", is_powered=place == 0, by="modules")
    part += kept("activation_input", fused_steps * inner, element_type=element_type, split="tensor", by="fused")
    if is_gated:
        part += kept("up_projection", inner, element_type=element_type, split="tensor")
        by: KeptBy = "modules" if fused_steps else "both"
        part += kept("activated_gate", inner, element_type=element_type, split="tensor", by=by)
    return part + kept("mlp_inner_output", inner, element_type=element_type, split="tensor", weights_of=weights_of)


Router = Literal["softmax", "softmax_in_activations", "softmax_of_chosen", "fp32"]
"""The function of a router's logits: a softmax (or sigmoid) of all of them in fp32 or in the activations' type, a
softmax of the chosen only, or logits computed in fp32 from the cast input."""


class ExpertsStyle(NamedTuple):
    """Routed experts of a block: shapes, and how transformers stores and runs them (packed, grouped matmuls).

    `has_linear_router` says that the router is an nn.Linear, not a parameter of its own. `readers` names other layers
    that read the block's normalised input: those of shared experts. Experts that are not gated have two matrices.
    `group_share` is the share of groups of experts to which a token may go. `owner` is the module that holds them.
    """

    num_experts: int
    experts_per_token: int
    inner: int
    activation: str
    owner: str = "mlp"
    bias: bool = False
    input_first: bool = False
    router_name: str = "mlp.gate"
    router: Router = "softmax"
    has_linear_router: bool = False
    readers: tuple[str, ...] = ()
    group_share: float = 1.0
    is_gated: bool = True


def experts(hidden: int, style: ExpertsStyle) -> Part:
    """Return router and routed experts. Each token makes `experts_per_token` rows of the grouped matmuls.

    Autocast does not know these, and transformers casts rows to the weights' type, in fp32 there (integrations/moe.py).
    """
    if style.experts_per_token > style.num_experts:
        raise ModelError(
            f"num_experts_per_tok={style.experts_per_token} is more than the {style.num_experts} experts",
            hint=f"choose from 1 to {style.num_experts} experts for each token",
        )
    rows = float(style.experts_per_token)
    count, inner = style.num_experts, style.inner
    width = 2 * inner if style.is_gated else inner
    up_shape = (count, hidden, width) if style.input_first else (count, width, hidden)
    down_shape = (count, inner, hidden) if style.input_first else (count, hidden, inner)
    own_reader = () if style.router == "fp32" else (style.router_name,)
    readers = own_reader + style.readers
    part = kept("router_input", hidden, split="sequence", num_readers=len(readers), weights_of=readers)
    layer: Layer = "linear" if style.has_linear_router else "other"
    part += linear(style.router_name, hidden, count, bias=style.bias, layer=layer, weighs=True)
    parameters = [
        _expert_parameter(f"{style.owner}.experts.gate_up_proj", up_shape, 2 if style.input_first else 1),
        _expert_parameter(f"{style.owner}.experts.down_proj", down_shape, 1 if style.input_first else 2),
    ]
    if style.bias:
        parameters.append(_expert_parameter(f"{style.owner}.experts.gate_up_proj_bias", (count, width), 1))
        parameters.append(_expert_parameter(f"{style.owner}.experts.down_proj_bias", (count, hidden), None))
    up = Matmul(
        name="gate_up_proj",
        k=hidden,
        n=width,
        split="column",
        rows_per_token=rows,
        num_experts=count,
        group_share=style.group_share,
    )
    products = (up, up.replace(name="down_proj", k=inner, n=hidden, split="row"))
    part += Part(parameters=tuple(parameters), matmuls=products)
    if style.router == "fp32":
        reader = (style.router_name,)
        part += kept("router_input_in_fp32", hidden, element_type="cast", split="sequence", weights_of=reader)
    if style.router != "softmax_of_chosen":
        narrow = style.router == "softmax_in_activations"
        part += kept("router_probabilities", count, element_type="activation" if narrow else "fp32")
    # Chosen experts, the order of rows by expert and back: four or five 64-bit indices a row; the row's weight twice.
    indices = 5 if style.bias else 4
    part += kept("routing_indices", 2 * indices * rows, element_type="fp32", by="modules")
    part += kept("routing_weights", 2 * rows, element_type="fp32")
    own = kept("tokens_by_expert", rows * hidden, element_type="weights", weights_of=(up.name,))
    own += activation_saved(
        style.activation, rows * inner, is_gated=style.is_gated, element_type="weights", weights_of=("down_proj",)
    )
    # Fused kernels scale rows by their router's weights before the last product, whose output nobody reads again
    # (Yan et al. 2026, arXiv 2603.07685, memory-efficient permutation); a bias after it forbids that.
    own += kept("expert_outputs", rows * hidden, element_type="weights", by="both" if style.bias else "modules")
    saved, fused = (
        tuple(one.replace(is_of_expert_rows=True) for one in tensors) for tensors in (own.saved, own.saved_fused)
    )
    return part + Part(saved=saved, saved_fused=fused)


def _expert_parameter(name: str, shape: tuple[int, ...], tp_dim: int | None) -> Parameter:
    return Parameter(name=name, shape=shape, tp_dim=tp_dim, layer="experts", is_expert=True)


def shared_expert_gate(hidden: int) -> Part:
    """Return the gate of one number that scales a shared expert's output."""
    return weight("mlp.shared_expert_gate.weight", 1, hidden, layer="linear") + Part(
        matmuls=(Matmul(name="mlp.shared_expert_gate", k=hidden, n=1, weighs=True),)
    )
