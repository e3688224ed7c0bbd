"""peft's adapter_config.json, read back. Keys as in peft 0.21 (tuners/lora/config.py, tuners/ia3/config.py)."""

from __future__ import annotations

from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup, make_plan, steps_of
from paraplan.interop.sources.adapters import trainable_of
from paraplan.interop.sources.documents import load_document
from paraplan.model.trainable import AdapterKind

_HINT = "peft writes it beside the adapters: model.save_pretrained"


def read_peft(text: str, *, source: str, given: Given) -> Setup:
    """Return the training of the adapters that a configuration describes: DDP over the GPUs that are given.

    It says what trains, and nothing of batches and GPUs. Raises `PlanError` for adapters that are not modelled.
    """
    fields = Fields(load_document(text, source, hint=_HINT), source=source)
    words = (fields.text("peft_type") or "LORA").upper()
    if words not in ("LORA", "IA3"):
        raise fields.error("peft_type", "LORA or IA3, the adapters that are priced")
    kind: AdapterKind = "ia3" if words == "IA3" else "dora" if fields.flag("use_dora") else "lora"
    rank = fields.value("r")
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise fields.error("r", "a whole number above 0")
    train, notes = trainable_of(
        fields,
        kind=kind,
        rank=rank if isinstance(rank, int) else None,
        targets=fields.value("target_modules"),
        dropout=fields.value("lora_dropout") or 0.0,
        by_root=bool(fields.flag("use_rslora")),
        saved=fields.value("modules_to_save"),
        parameters=fields.value("target_parameters"),
    )
    for key in ("exclude_modules", "layers_to_transform", "rank_pattern", "layer_replication"):
        if fields.value(key):
            notes.append(f"{key}: not priced, the adapters of all blocks are taken to be alike")
    least = given.least_micro_batch
    if given.micro_batch_size is None:
        notes.append(
            f"peft's file says what trains and not how: micro-batches of {least} assumed, --micro-batch says otherwise"
        )
    model_name = fields.text("base_model_name_or_path")
    micro, dp = given.micro_batch_size or least, given.num_gpus or 1
    steps = steps_of(source, given.global_batch_size, micro=micro, dp=dp) or 1
    plan = make_plan(source, dp=dp, micro_batch_size=micro, num_microbatches=steps, recompute=given.recompute or "none")
    return Setup(
        plan=plan,
        tool="peft, DDP",
        target="hf-trainer",
        framework="hf",
        attention="sdpa",
        train=train,
        says_gpus=False,
        model_name=model_name,
        notes=(*notes, *key_table("peft").notes(fields)),
    )
