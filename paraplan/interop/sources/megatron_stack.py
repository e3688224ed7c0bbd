"""Software settings in Megatron-Core's options, beside plan and training (training/arguments.py, August 2026)."""

from __future__ import annotations

from paraplan.interop.fields import Fields
from paraplan.plan.stack import Dispatcher, Graphs, StackSettings

_FLEXIBLE: dict[str, Dispatcher] = {"deepep": "deepep", "hybridep": "hybridep"}
_GRAPHS: dict[str, Graphs] = {
    "none": "none",
    "local": "layers",
    "transformer_engine": "layers",
    "full_iteration": "full",
}
_CAPACITY = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")


def megatron_stack(fields: Fields, *, zero_stage: int, has_whole_experts: bool) -> StackSettings:
    """Return the settings that options name; what is absent is as the framework's profile has it.

    `has_whole_experts` says that each rank of tp holds whole experts. Raises `PlanError` for an unknown value.
    """
    is_fused, kind = fields.is_on("cross_entropy_loss_fusion"), fields.text("cross_entropy_fusion_impl") or "native"
    lacks_fusion = fields.is_on("no_gradient_accumulation_fusion") or _is_refused(
        fields, "gradient_accumulation_fusion"
    )
    in_16_bits = fields.is_on("grad_reduce_in_bf16")
    return StackSettings(
        dispatcher=flexible_dispatcher(fields),
        etp=1 if has_whole_experts else None,
        overlaps_experts=fields.is_on("overlap_moe_expert_parallel_comm") or None,
        # Looked up, not read: what the factor itself adds or drops is not priced, and a note says so.
        drops_tokens=all(fields.values.get(name) for name in _CAPACITY),
        cuda_graphs=_graphs(fields),
        fp8_attention=fields.is_on("fp8_dot_product_attention") or None,
        compiled_loss=(is_fused and kind == "native") or None,
        engine_loss=is_fused and kind == "te",
        overlaps_gradients=False if _is_refused(fields, "overlap_grad_reduce") else None,
        fuses_accumulation=False if lacks_fusion else None,
        overlaps_products=fields.is_on("tp_comm_overlap") or None,
        # Experts that run again as a whole; "modules", what each makes of its inputs, is the profile's own.
        recomputed_ops="experts" if "moe" in recomputed_modules(fields) else None,
        gradient_bytes=2 if in_16_bits and zero_stage < 2 else None,  # Megatron-FSDP's are priced so by default
    )


def recomputed_modules(fields: Fields) -> frozenset[str]:
    """Return the modules that `--recompute-modules` names where recompute is selective."""
    value = fields.value("recompute_modules")
    words = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    return frozenset(map(str, words)) if fields.text("recompute_granularity") == "selective" else frozenset()


def flexible_dispatcher(fields: Fields) -> Dispatcher | None:
    """Return what sends tokens for the dispatcher `flex`; None where it is another, or not priced."""
    backend = fields.text("moe_flex_dispatcher_backend") or "deepep"
    has_switch = fields.is_on("moe_enable_deepep")
    if fields.text("moe_token_dispatcher_type") != "flex":
        return None
    return "deepep" if has_switch else _FLEXIBLE.get(backend)


_OF_REINFORCEMENT = ("rl_", "grpo_", "perform_rl_step")


def _is_refused(fields: Fields, name: str) -> bool:
    return fields.value(name) is not None and not fields.is_on(name)


def _graphs(fields: Fields) -> Graphs | None:
    kind = fields.text("cuda_graph_impl")
    switches = [fields.is_on(name) for name in ("enable_cuda_graph", "external_cuda_graph")]
    if kind is None:
        return "layers" if any(switches) else None
    if kind not in _GRAPHS:
        raise fields.error("cuda_graph_impl", " or ".join(_GRAPHS))
    if any(name.startswith(_OF_REINFORCEMENT) for name in fields) and not fields.is_on("rl_training_cuda_graphs"):
        return None  # generation alone has graphs then (megatron/rl/rl_utils.py)
    is_whole = "full_iteration" in str(fields.values.get("cuda_graph_scope"))  # as core 0.15 spells it
    return "full" if is_whole and kind != "none" else _GRAPHS[kind]
