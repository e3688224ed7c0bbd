"""Tasks of other tools, in the words of `--task`."""

from __future__ import annotations

from typing import NamedTuple

from paraplan.interop.fields import Fields
from paraplan.plan.task import TRL_RESERVE, parse_task

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


def reserve_of(fields: Fields, *, usual: float) -> float | None:
    """Return the share of memory that vLLM holds while a step trains, by the options that TRL and ms-swift have.

    None where that is TRL's own; `usual` is the tool's. Nothing is held by the model's own generation, by vLLM asleep
    and by a server.
    """
    sleeps = [fields.is_on(key) for key in ("vllm_enable_sleep_mode", "sleep_level")]
    mode, share = fields.text("vllm_mode"), fields.share("vllm_gpu_memory_utilization")
    if not fields.is_on("use_vllm") or mode == "server" or any(sleeps):
        return 0.0
    share = usual if share is None else share
    return None if share == TRL_RESERVE else share


def objective_of(
    name: str | None,
    *,
    key: str,
    precomputed: bool = False,
    completion: int | None = None,
    beta: object = None,
    reserve: float | None = None,
) -> Objective:
    """Return the objective that `name`, the value of `key`, stands for.

    `precomputed`: the reference's log-probabilities are. `completion`: generated tokens. `beta`: GRPO's distance to a
    reference model. `reserve`: the share of the GPUs that train which its generator holds.
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
        fields += [f"reserve={reserve:g}"] if reserve is not None else []
        notes = [] if words == "grpo" else [f"{key} {name}: priced as grpo"]
        return Objective(":".join(["grpo", ",".join(fields)] if fields else ["grpo"]), notes)
    what = {
        "ppo": "ppo: the generation, the reward, value and reference models and their passes are not priced",
        "gkd": "gkd: the teacher and the generation are not priced",
        "distillation": "distillation: the teacher and its passes are not priced",
        "kd": "kd: the teacher and its passes are not priced",
    }.get(words, f"{name}: priced as training on given sequences, its other passes are not priced")
    return Objective(None, [f"{key} {what}"])
