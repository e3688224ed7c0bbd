"""Tasks: a step learns from single sequences, pairs of answers, or answers that the model itself has generated."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import Field

from paraplan.errors import PlanError
from paraplan.records import Record

TaskKind = Literal["sft", "dpo", "orpo", "kto", "reward", "grpo", "embedding", "reranker"]
FORMS = "sft, dpo, dpo:precomputed, orpo, kto, reward, embedding, reranker or "
FORMS += "grpo:completion=512,gpus=2,beta=0.04,reserve=0.5"
_OTHER_NAMES: dict[str, TaskKind] = {
    **dict.fromkeys(("pt", "pretrain", "pretraining", "clm"), "sft"),
    **dict.fromkeys(("ipo",), "dpo"),
    **dict.fromkeys(("simpo", "cpo"), "orpo"),
    **dict.fromkeys(("bco",), "kto"),
    **dict.fromkeys(("rm", "reward_model"), "reward"),
    **dict.fromkeys(("contrastive", "retrieval"), "embedding"),
    **dict.fromkeys(("cross-encoder", "cross_encoder"), "reranker"),
}
"""Names of objectives that take the passes and the memory of another one."""
_UNPRICED = {
    "ppo": ("reward, value and reference models beside the policy", "grpo"),
    "gkd": ("the teacher beside the student and what that generates", "grpo"),
    "distillation": ("the teacher beside the student", "sft"),
    "kd": ("the teacher beside the student", "sft"),
}
"""Objectives that are not priced: the parts that are missing, and the nearest one that is."""
TRL_RESERVE = 0.3
"""Share of a GPU's memory that vLLM reserves beside a trainer, by TRL's default (`vllm_gpu_memory_utilization`)."""
_RUN_BY_TRL = frozenset({"sft", "dpo", "kto", "reward", "grpo"})


class Task(Record):
    """Objective of a step, with the passes and the memory that this takes beside the training itself."""

    kind: TaskKind = "sft"
    """sft: sequences (also pretraining). dpo: pairs of a chosen and a rejected answer, compared with a reference model
    (Rafailov et al. 2023). orpo: pairs without a reference model (Hong et al. 2024; SimPO and CPO too). kto: single
    answers, compared with a reference model, and with answers to other prompts (Ethayarajh et al. 2024). reward: pairs,
    by a model whose head has one output. grpo: answers that the model generates (Shao et al. 2024). embedding: pairs of
    texts, whose pooled hidden states are compared within a micro-batch. reranker: texts of a question and an answer, by
    a model whose head has one output."""
    is_precomputed: bool = False
    """The reference model's log-probabilities were computed before the training (TRL, precompute_ref_log_probs)."""
    completion: int | None = Field(default=None, ge=1)
    """Tokens of a sequence that are generated; None: half of it."""
    generator_gpus: int = Field(default=0, ge=0, le=1_000_000)
    """Further GPUs that generate; 0: those that train do."""
    reserve: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the memory of GPUs that train which the generator holds meanwhile; None: TRL's default.
    0 where it holds nothing then: vLLM asleep or on a server, the model's own generation."""
    beta: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the distance to a reference model in GRPO; 0 has none, as in TRL."""

    @property
    def text(self) -> str:
        """The words of `--task` that say this."""
        fields = ["precomputed"] if self.is_precomputed else []
        fields += [f"completion={self.completion}"] if self.completion else []
        fields += [f"gpus={self.generator_gpus}"] if self.generator_gpus else []
        fields += [f"beta={self.beta:g}"] if self.beta else []
        fields += [f"reserve={self.reserve:g}"] if self.reserve is not None else []
        return ":".join([self.kind, ",".join(fields)] if fields else [self.kind])

    @property
    def has_reference(self) -> bool:
        """Whether a step runs a reference model: a copy as it was before, or the base model without its adapters."""
        return (self.kind == "dpo" and not self.is_precomputed) or self.kind == "kto" or self.beta > 0

    @property
    def extra_forwards(self) -> int:
        """Forward passes without gradients of each sequence, beside the one of the training.

        GRPO's trainer computes the log-probabilities of what another engine has generated once more: its kernels round
        otherwise (TRL, vllm_importance_sampling_correction). KTO estimates its distance to the reference on answers to
        other prompts, by a pass of both models (TRL, experimental/kto/kto_trainer.py, calculate_KL).
        """
        return int(self.has_reference) + int(self.kind == "grpo") + 2 * int(self.kind == "kto")

    @property
    def output(self) -> Literal["vocabulary", "score", "hidden"]:
        """Output of the head for a token: logits, one score, or nothing beside the hidden state that is pooled."""
        return {"reward": "score", "reranker": "score", "embedding": "hidden"}.get(self.kind, "vocabulary")  # type: ignore[return-value]  # words of the annotation

    @property
    def is_run_by_trl(self) -> bool:
        """Whether a command of TRL trains so."""
        return self.kind in _RUN_BY_TRL

    def completion_tokens(self, seq_length: int) -> int:
        """Return how many tokens of a sequence are generated."""
        return min(seq_length, self.completion or max(1, seq_length // 2))

    @property
    def group(self) -> int:
        """Sequences that belong together, and so to one micro-batch: the two of a pair."""
        return 2 if self.kind in ("dpo", "orpo", "reward", "embedding") else 1


@lru_cache(maxsize=64)
def parse_task(text: str) -> Task:
    """Return what the words of `--task` say. Raises `PlanError` for others, with what would do."""
    kind, _, rest = text.strip().lower().partition(":")
    if kind in _UNPRICED:
        missing, nearest = _UNPRICED[kind]
        raise PlanError(
            f"--task {kind} is not priced: it has {missing}", hint=f"--task {nearest} is the nearest that is priced"
        )
    kind = _OTHER_NAMES.get(kind, kind)
    values: dict[str, object] = {"kind": kind}
    known = {"dpo": {"precomputed"}, "grpo": {"completion", "gpus", "beta", "reserve"}}.get(kind, set())
    for word in filter(None, rest.split(",")):
        name, _, value = word.partition("=")
        if name not in known:
            raise PlanError(f"--task {kind} does not know {word!r}", hint=f"use {FORMS}")
        if name == "precomputed" and not value:
            values["is_precomputed"] = True
            continue
        field = {"gpus": "generator_gpus"}.get(name, name)
        try:
            in_thousands = name == "completion" and value.endswith("k")
            values[field] = (
                float(value) if name in ("beta", "reserve") else int(value[:-1]) * 1024 if in_thousands else int(value)
            )
        except ValueError:
            raise PlanError(f"--task {text}: {value!r} is not a number", hint=f"use {FORMS}") from None
    try:
        return Task.model_validate(values)
    except ValueError:
        raise PlanError(f"--task does not know {text!r}", hint=f"use {FORMS}") from None
