"""Training arguments of transformers' Trainer, read back: `TrainingArguments.to_json_string()`, or a script's command.

Keys and defaults as in transformers 5.24 (training_args.py); those of models and data as its examples name them
(examples/pytorch/language-modeling/run_clm.py).
"""

from __future__ import annotations

from paraplan.interop.fields import Fields
from paraplan.interop.known_keys import key_table
from paraplan.interop.setup import Given, Setup
from paraplan.interop.sources import trainer
from paraplan.interop.sources.launches import content_of
from paraplan.interop.sources.liger import with_trainers_liger
from paraplan.plan.training import TrainingPrecision

_MICRO_BATCH = 8
_LENGTHS = ("block_size", "max_seq_length", "model_max_length", "max_length", "cutoff_len")


def read_hf_trainer(text: str, *, source: str, given: Given, read_file: trainer.ReadFile) -> Setup:
    """Return the training that a Trainer's arguments describe; how the script loads its model they do not say.

    Raises `PlanError` naming the file and key for what is broken.
    """
    command = content_of(text, source, read_file, hint="TrainingArguments.to_json_string() writes one")
    fields, notes = Fields(command.values, source=source), command.notes
    batches = trainer.Batches(
        micro_batch=fields.count("per_device_train_batch_size") or _MICRO_BATCH,
        steps=fields.count("gradient_accumulation_steps") or 1,
        recompute=trainer.recomputes(fields) or False,
    )
    setup = trainer.sharded_setup(
        fields, given, batches, tool="transformers' Trainer", target="hf-trainer", read_file=read_file
    )
    lengths = [fields.count(name) for name in _LENGTHS]
    length = next((found for found in lengths if found is not None), None)
    if length is None:
        notes.append("the length of sequences is in the script: --seq-len says it")
    words = fields.text("dtype") or fields.text("torch_dtype")
    if words is None:
        notes.append("how the script loads weights is not said: in fp32 here, --precision bf16-pure is in 16 bits")
    optimizer, found = trainer.trainer_optimizer(fields, "optim")
    is_pure = words in ("bfloat16", "float16", "auto") and not setup.keeps_fp32
    precision = _precision(fields, is_pure=is_pure, launched=setup.precision)
    setup = setup.replace(
        precision=precision,
        optimizer=optimizer,
        attention=trainer.attention_of(fields.text("attn_implementation"), notes),
        compiled=fields.flag("torch_compile"),
        offloads_activations=trainer.offloads_checkpoints(fields),
        seq_length=length,
        model_name=fields.text("model_name_or_path"),
        notes=(*setup.notes, *notes, *found, *trainer.tf32_note(fields, precision)),
    )
    setup = with_trainers_liger(setup, fields)
    return setup.replace(notes=(*setup.notes, *key_table("hf-trainer").notes(fields)))


def _precision(fields: Fields, *, is_pure: bool, launched: TrainingPrecision | None) -> TrainingPrecision:
    """Return the type of the arithmetic: by the script's own flags, else by what `accelerate launch` is told."""
    words = fields.text("mixed_precision")
    if fields.flag("fp16") or (words == "fp16" and not fields.flag("bf16")):
        return "fp16"
    if is_pure:
        return "bf16-pure"
    if fields.flag("bf16") or words == "bf16":
        return "bf16"
    return launched if launched in ("bf16", "fp16") else "fp32"
