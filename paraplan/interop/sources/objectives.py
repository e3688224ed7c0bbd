"""Tasks of other tools, in the words of `--task`."""

from __future__ import annotations

from typing import NamedTuple

from paraplan.plan.task import parse_task

_WITHOUT_REFERENCE = ("orpo", "simpo", "cpo")
_PLAIN = ("sft", "pt", "pretrain", "clm", "causal_lm")


class Objective(NamedTuple):
    """A tool's objective in the words of `--task`."""

    task: str | None
    """None for training on given sequences."""
    notes: list[str]
    """Notes on parts that are priced otherwise."""

    @property
    def group(self) -> int:
        """Sequences of what the tool's batch counts as one: the two of a pair."""
        return 1 if self.task is None else parse_task(self.task).group


def objective_of(
    name: str | None,
    *,
    key: str,
    precomputed: bool = False,
    completion: int | None = None,
    beta: object = None,
) -> Objective:
    """Return the objective that `name`, the value of `key`, stands for.

    `precomputed`: the reference's log-probabilities are. `completion`: generated tokens. `beta`: GRPO's distance to a
    reference model.
    """
    words = (name or "sft").lower()
    if words in _PLAIN:
        return Objective(None, [])
    if words in ("dpo", "ipo"):
        return Objective(
            "dpo:precomputed" if precomputed else "dpo", [f"{key} {name}: a batch counts pairs, two sequences each"]
        )
    if words in _WITHOUT_REFERENCE:
        note = f"{key} {name}: priced as orpo, without a reference model; a batch counts pairs, two sequences each"
        return Objective("orpo", [note])
    if words in ("kto", "bco"):
        note = f"{key} {name}: priced as kto, of single answers and a reference model"
        return Objective("kto", [note])
    if words in ("embedding", "contrastive", "retrieval"):
        return Objective(
            "embedding", [f"{key} {name}: a batch counts pairs, two sequences each; more negatives no more"]
        )
    if words in ("reranker", "generative_reranker", "cross-encoder"):
        return Objective("reranker", [f"{key} {name}: a batch is priced as single sequences, without negatives"])
    if words in ("reward", "rm", "reward_model"):
        return Objective("reward", [f"{key} {name}: a batch counts pairs, two sequences each"])
    if words in ("grpo", "gdpo", "rloo", "dapo", "gspo"):
        fields = [f"completion={completion}"] if completion else []
        is_weight = isinstance(beta, int | float) and not isinstance(beta, bool) and beta > 0
        fields += [f"beta={beta:g}"] if is_weight else []
        notes = [] if words == "grpo" else [f"{key} {name}: priced as grpo"]
        return Objective(":".join(["grpo", ",".join(fields)] if fields else ["grpo"]), notes)
    what = {
        "ppo": "ppo: the generation, the reward, value and reference models and their passes are not priced",
        "gkd": "gkd: the teacher and the generation are not priced",
        "distillation": "distillation: the teacher and its passes are not priced",
        "kd": "kd: the teacher and its passes are not priced",
    }.get(words, f"{name}: priced as training on given sequences, its other passes are not priced")
    return Objective(None, [f"{key} {what}"])
