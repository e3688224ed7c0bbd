"""FLOPs of training: what the model needs, and what the hardware does for it.

Model FLOPs are those of one forward and backward pass, whatever the implementation repeats; hardware FLOPs count
recomputed forward passes too (Chowdhery et al. 2022, PaLM, appendix B: the two make MFU and HFU). A backward pass
takes twice the products of the forward pass: one for the gradient of each factor.
"""

from __future__ import annotations

from typing import Literal

from paraplan.model.spec import BlockSpec, ModelSpec
from paraplan.records import Record

Recompute = Literal["none", "selective", "full"]
BACKWARD_PER_FORWARD = 2.0


class TrainingFlops(Record):
    """FLOPs of training on one token of a sequence of `seq_length`, a multiply-add counted as two.

    `linear_flops` are those of products with parameters, forward and backward; `attention_flops` those of QK^T and PV,
    which grow with the sequence, the causal mask's saving not counted; `recompute_flops` those of forward passes done
    again. The published `6 N` per token (Kaplan et al. 2020, section 2.1) is `linear_flops` for N without embeddings.
    """

    seq_length: int
    linear_flops: float
    attention_flops: float
    recompute_flops: float = 0.0

    @property
    def model_flops(self) -> float:
        """FLOPs that the model needs, in which model FLOPs utilisation is counted."""
        return self.linear_flops + self.attention_flops

    @property
    def hardware_flops(self) -> float:
        """FLOPs that are carried out, recomputed ones included."""
        return self.model_flops + self.recompute_flops

    def of_step(self, global_batch_size: int) -> TrainingFlops:
        """Return the FLOPs of a step over `global_batch_size` sequences of `seq_length` tokens."""
        tokens = global_batch_size * self.seq_length
        return TrainingFlops(
            seq_length=self.seq_length,
            linear_flops=self.linear_flops * tokens,
            attention_flops=self.attention_flops * tokens,
            recompute_flops=self.recompute_flops * tokens,
        )


def training_flops(model: ModelSpec, *, seq_length: int, recompute: Recompute = "none") -> TrainingFlops:
    """Return the FLOPs of training `model` on one token.

    For a GPT of width h and L layers with vocabulary V this is equation 3 of Narayanan et al. 2021 (SC'21) divided by
    the tokens: `72 L h^2 (1 + s/(6h) + V/(12 L h))`; full recompute repeats the blocks' forward pass and makes it
    `96 L h^2 (1 + s/(6h) + V/(16 L h))`. Selective recompute repeats the attention core alone (Korthikanti et al.
    2022, section 5).
    """
    linear = model.flops_per_token(seq_length, with_attention=False)
    attention = model.flops_per_token(seq_length) - linear
    passes = 1.0 + BACKWARD_PER_FORWARD
    return TrainingFlops(
        seq_length=seq_length,
        linear_flops=passes * linear,
        attention_flops=passes * attention,
        recompute_flops=sum(_recomputed(run.block, seq_length, recompute) * run.count for run in model.runs),
    )


def _recomputed(block: BlockSpec, seq_length: int, recompute: Recompute) -> float:
    whole = block.flops_per_token(seq_length)
    if recompute == "full":
        return whole
    return whole - block.flops_per_token(seq_length, with_attention=False) if recompute == "selective" else 0.0
