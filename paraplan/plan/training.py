"""What is to be trained, apart from the model: batch, sequence, precision, optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paraplan.model.spec import ModelSpec
from paraplan.records import Record

TrainingPrecision = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor", "muon", "sgd_momentum", "sgd"]
AttentionKind = Literal["flash", "sdpa", "eager"]


class TrainingSpec(Record):
    """One training step as the user wants it, whatever the plan."""

    global_batch_size: int = Field(gt=0)
    """Sequences of one optimizer step over all ranks."""
    seq_length: int = Field(gt=0)
    """Tokens of a sequence."""
    precision: TrainingPrecision = "bf16"
    """bf16 and fp16 are mixed: matmuls and activations in 16 bits, optimizer state and master weights in fp32."""
    optimizer: OptimizerName = "adamw"
    """Decides the bytes of state for each parameter."""
    attention: AttentionKind = "sdpa"
    """The attention kernel: flash-attention, torch's scaled_dot_product_attention, or all scores written out."""
    compiled: bool = False
    """True where torch.compile compiles the model's repeated blocks; what stands around them is not compiled."""

    @property
    def title(self) -> str:
        """How a step computes, for people: "bf16, adamw, sdpa attention"."""
        compiled = ", compiled blocks" if self.compiled else ""
        return f"{self.precision}, {self.optimizer}, {self.attention} attention{compiled}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.precision == "fp32" else 2


def training_notes(model: ModelSpec, training: TrainingSpec) -> tuple[str, ...]:
    """Return what to know of a training that is no mistake: sequences longer than the model was made for."""
    longest = model.max_seq_length
    if longest is None or training.seq_length <= longest or model.has_learned_positions:
        return ()
    return (
        f"sequences of {training.seq_length} tokens are longer than the {longest} that {model.name} was made for: "
        "positions are computed and go on, but the model has not learned them; a config with rope scaling says that it "
        "has",
    )
