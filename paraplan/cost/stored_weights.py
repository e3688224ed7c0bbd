"""Notes on frozen weights in fewer bits: those that the format does not reach, and methods that train over none."""

from __future__ import annotations

from collections.abc import Iterator

from paraplan.cost.workload import Workload
from paraplan.model.expert_adapters import EXPERTS, converts, expert_adapter, peft
from paraplan.model.quantizers import Quantizer, is_reached, quantizer_of, quantizers
from paraplan.model.spec import Parameter
from paraplan.model.trainable import ALL_LINEAR
from paraplan.model.weight_formats import is_stored_below_16_bits
from paraplan.units import format_bytes, format_count

_LOADS_INTO_PEFT = ("transformers", "axolotl", "unsloth")
"""Quantizers of tools whose models peft adapts as transformers 5 builds them."""


def storage_notes(workload: Workload) -> tuple[str, ...]:
    """Return what to know of how the base of adapters is stored, a sentence each."""
    training, model = workload.training, workload.model
    weights = training.frozen_weights
    tool = quantizer_of(training.quantizer or workload.framework.storage.quantizer)
    notes = [*_of_all_linear(workload)] if tool.name in _LOADS_INTO_PEFT else []
    if training.train == "full" or not is_stored_below_16_bits(weights):
        return tuple(notes)
    notes += [
        f"{words}, and dequantizes them to 16 bits for that: --base-weights bf16, or nf4 with a --quantizer that "
        "stores experts so"
        for words in untrainable_notes(workload)
    ]
    experts = _left_out(workload)
    if experts:
        elements = sum(one.num_elements * count for one, count in experts)
        kept = format_bytes(sum((one.frozen_bytes or 0.0) * count for one, count in experts))
        ways = [f"{other.way} (--quantizer {other.name})" for other in wider_quantizers(workload)]
        way = f"; {' or '.join(ways)} stores them in {weights} too" if ways else ""
        has_older = quantizer_of("transformers-4").stores_experts(weights, model.model_type)
        older = ", as transformers 4 does (--quantizer transformers-4)" if has_older else ""
        notes.append(
            f"{tool.title} stores linear layers in {weights}, not fused experts: {format_count(elements)} of "
            f"{format_count(model.parameters.total)} parameters stay in 16 bits, {kept}{way}{older}"
        )
    return tuple(notes)


def _of_all_linear(workload: Workload) -> Iterator[str]:
    """Yield what peft itself makes of all-linear where that is more than linear layers."""
    training, model = workload.training, workload.whole_model or workload.model
    adapter = training.trainable.adapter
    if adapter is None or adapter.kind != "lora" or ALL_LINEAR not in adapter.targets or EXPERTS in adapter.targets:
        return
    if not converts(model.model_type):
        return
    experts = ((one, run.count) for run in model.runs for one in run.block.matmuls if one.num_experts > 1)
    added = sum(n * each.num_elements for one, n in experts for each in expert_adapter(one, adapter).parameters)
    wider = training.trainable.replace(adapter=adapter.replace(targets=(*adapter.targets, EXPERTS))).text
    yield (
        f"all-linear is read as linear layers alone, as axolotl's lora_target_linear and LLaMA-Factory's all are; peft "
        f"{peft().version} itself, and so TRL, adapts the experts of {model.model_type} too, {format_count(added)} "
        f"parameters more: --train '{wider}' prices that"
    )


def untrainable_notes(workload: Workload) -> tuple[str, ...]:
    """Return that a tool trains no adapters over the format of the base, where it does not."""
    training = workload.training
    tool = quantizer_of(training.quantizer or workload.framework.storage.quantizer)
    is_refused = training.train != "full" and training.frozen_weights in tool.untrainable
    return (f"{tool.title} trains no adapters over {training.frozen_weights} weights",) if is_refused else ()


def wider_quantizers(workload: Workload) -> tuple[Quantizer, ...]:
    """Return the tools that store experts in the format of the base, where the one of the workload does not."""
    weights = workload.training.frozen_weights
    known = quantizers().values() if _left_out(workload) else ()
    return tuple(one for one in known if one.way is not None and "experts" in one.formats.get(weights, ()))


def _left_out(workload: Workload) -> list[tuple[Parameter, int]]:
    """Return the frozen experts, with their counts, that the format of the base does not reach."""
    training, model = workload.training, workload.model
    if training.train == "full" or not is_stored_below_16_bits(training.frozen_weights):
        return []
    tool = quantizer_of(training.quantizer or workload.framework.storage.quantizer)
    if "experts" in tool.reached(training.frozen_weights, model.model_type):
        return []
    return [(one, n) for one, n in model.all_parameters if is_reached(one, frozenset({"experts"})) and not one.trains]
