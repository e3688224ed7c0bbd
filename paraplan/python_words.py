"""Options of the command line in a sentence, as fields of records and arguments of functions: `--tp 2` is `tp=2`."""

from __future__ import annotations

import re

_NUMBERS = {
    "audio-tokens": "audio_tokens",
    "cp": "cp",
    "devices-per-process": "devices_per_process",
    "dp": "dp",
    "ep": "ep",
    "global-batch": "global_batch_size",
    "gpus-per-node": "gpus_per_node",
    "host-memory": "host_memory_bytes",
    "image-tokens": "image_tokens",
    "micro-batch": "micro_batch_size",
    "nodes": "num_nodes",
    "pp": "pp",
    "sample-len": "sample_length",
    "seq-len": "seq_length",
    "tp": "tp",
    "zero": "zero_stage",
}
_FLAGS = {
    "compile": "compiled=True",
    "fp8-gather": "fp8_gather=True",
    "module": "is_module=True",
    "no-sequence-parallel": "sequence_parallel=False",
    "offload-activations": "offloads_activations=True",
    "packed": "packs_samples=True",
    "sequence-parallel": "sequence_parallel=True",
}
_TEXTS = {
    "attention": "attention",
    "base-weights": "base_weights",
    "expert-load": "expert_load",
    "fp8-recipe": "fp8_recipe",
    "framework": "framework",
    "linear-precision": "linear_precision",
    "link": "link",
    "loss": "loss",
    "network": "network",
    "objective": "objective",
    "offload": "offload",
    "optimizer": "optimizer",
    "precision": "precision",
    "profile": "profile",
    "quantizer": "quantizer",
    "recompute": "recompute",
    "schedule": "schedule",
    "task": "task",
    "train": "train",
}
_WORDS = (
    r"full|lora|dora|head|dpo|none|NAME|cost|throughput|fastest|memory|simplicity|cpu|pcie|nvlink-pairs|no-p2p"
    r"|adamw|sgd|muon|flash|eager|sdpa|liger|chunked|cut|selective|parameters|optimizer|tensorwise|rowwise|mxfp8"
    r"|fsdp|transformers|trl|axolotl|deepspeed|torchtitan|unsloth|nemo-automodel|ms-swift|megatron-core|megatron-bridge"
)
"""Values that are words of English too, or could be: after an option these are values, others go on with a sentence."""
_COMMANDS = (
    r"attach|calibrate|cancel|check|compare|config|demo|doctor|estimate|explain|export|import|jobs"
    r"|launch|logs|mcp|profile|profiles|ps|recommend|stacks|status|submit|topo|validate|verify"
)
_VALUE = rf"(?:{_WORDS})(?![\w:=|-])|(?=[\w-]*[\d:=|])\w(?:[\w:=.+|,-]*[\w])?"


def _any_of(names: dict[str, str]) -> str:
    return "|".join(sorted(names, key=len, reverse=True))


_OPTION = re.compile(
    rf"(?P<other>paraplan (?:{_COMMANDS})\b[^;,()]*|'s --[\w-]+)"
    r"|(?P<machines>--profile NAME(?: and)? --nodes N(?: --gpus-per-node G)?)"
    rf"|--(?P<flag>{_any_of(_FLAGS)})(?![\w-])"
    rf"|--(?P<number>{_any_of(_NUMBERS)})(?![\w-])(?:[ =](?P<count>\d[\d,_]*|[A-Z])(?![\w-]))?"
    rf"|--(?P<text>{_any_of(_TEXTS)})(?![\w-])(?:[ =](?P<quote>'?)(?P<value>{_VALUE})(?P=quote))?"
)


def in_python_words(text: str) -> str:
    """Return a sentence with the options that Python has a name for by these.

    Others stay as they are, and so do commands and the options of other tools ("Megatron-LM's --task").
    """
    return _OPTION.sub(_words_of, text)


def _words_of(found: re.Match[str]) -> str:
    if found["other"]:
        return found["other"]
    if found["machines"]:  # `import_plan` needs no more of them
        return "num_gpus=N"
    if found["flag"]:
        return _FLAGS[found["flag"]]
    if found["number"]:
        name, count = _NUMBERS[found["number"]], found["count"]
        if count is None:
            return name
        digits = count.rstrip(",")
        return f"{name}={digits.replace(',', '_')}{count[len(digits) :]}"
    name, value = _TEXTS[found["text"]], found["value"]
    return name if value is None else f"{name}='{value}'"
