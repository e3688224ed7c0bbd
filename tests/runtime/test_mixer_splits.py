"""Layers that mix tokens without attention, and unusual blocks around attention, split over tp as in one process."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_selection import with_all
from rank_harness import RankHarness
from tiny_transformers import TOKENS, VOCABULARY
from torch import nn
from training_cases import HIDDEN, Transformer

from paraplan import runtime
from paraplan.errors import UnsupportedPlanError
from paraplan.plan.parallel import ParallelPlan
from paraplan.runtime.split.search import refinements

BATCH = 4
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": _SIZES | {"state_size": 4},
    "mamba2": _SIZES | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    # The last two layers attend to the keys and values of those before them.
    "gemma3n_text": _SIZES
    | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "intermediate_size": 48}
    | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "pad_token_id": 0}
    | {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
}


def loss_fn(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def built(family: str, **more: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(family, **(MODELS[family] | more))
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.use_cache = False
    return model.train()


def off(plan: ParallelPlan, model: nn.Module) -> tuple[float, str, set[str]]:
    """Return the largest relative error of loss, norm and gradients, where it lies, and which parameters are cut."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    tokens = torch.randint(1, 24, (BATCH, TOKENS + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
    alone: Any = copy.deepcopy(model)
    expected_loss = loss_fn(alone(inputs), targets)
    expected_loss.backward()
    expected = {name: held.grad for name, held in alone.named_parameters() if held.grad is not None}
    engine = runtime.init(plan).prepare(
        model, loss_fn=loss_fn, optimizer=lambda held: torch.optim.SGD(held, lr=0.0), max_grad_norm=1e9, verify="off"
    )
    errors = {"loss": abs(engine.step(inputs, targets) / expected_loss - 1).item()}
    norm = torch.nn.utils.get_total_norm(expected.values())
    errors["norm"] = abs(engine.grad_norm / norm - 1).item()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, held in engine.parameters.items():
        if name in expected:
            difference = (engine.whole(name, held.grad) - expected[name]).abs().max()
            errors[name] = (difference / max(expected[name].abs().max(), 1e-3 * largest)).item()
    where = max(errors, key=lambda name: errors[name])
    split = {
        name for name, held in engine.parameters.items() if name in expected and held.shape != expected[name].shape
    }
    return errors[where], where, split


def _of_family(family: str, plan: ParallelPlan) -> tuple[float, str, set[str]]:
    logging.disable()
    torch.manual_seed(0)
    return off(plan, built(family))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    # Tokens are gathered before a mixer, whatever it is.
    [("mamba2", True), *with_all([("mamba", False), ("mamba", True), ("mamba2", False)])],
)
def test_state_space_models_are_split_by_channels(ranks: RankHarness, family: str, sequence_parallel: bool) -> None:
    plan = ParallelPlan(tp=2, sequence_parallel=sequence_parallel, micro_batch_size=BATCH)
    for error, where, split in ranks.run(_of_family, family, plan, size=2):
        assert error < 1e-5, where
        layers = ("in", "x", "dt", "out") if family == "mamba" else ("in", "out")
        assert {f"backbone.layers.1.mixer.{name}_proj.weight" for name in layers} <= split


@pytest.mark.ranks
def test_blocks_share_keys_that_are_split(ranks: RankHarness) -> None:
    plan = ParallelPlan(tp=2, micro_batch_size=BATCH)
    for error, where, split in ranks.run(_of_family, "gemma3n_text", plan, size=2):
        assert error < 1e-5, where
        assert {f"model.layers.{index}.self_attn.q_proj.weight" for index in range(4)} <= split


class Filtered(nn.Module):
    """A gated, fused projection, of whose pieces a grouped convolution makes twice as many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(HIDDEN, 5 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.filters = nn.Conv1d(4 * HIDDEN, 8 * HIDDEN, 3, padding=2, groups=2 * HIDDEN)
        self.scale = nn.Parameter(torch.randn(4 * HIDDEN))
        self.gate, self.unused = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.shape[1]
        values, strength = self.into(hidden).split([4 * HIDDEN, HIDDEN], dim=-1)
        one, other = self.filters(values.transpose(1, 2))[..., :tokens].unflatten(1, (-1, 2)).unbind(2)
        state, states = torch.zeros(hidden.shape[0], 4 * HIDDEN), []
        for token in range(tokens):
            state = state * torch.sigmoid(other[:, :, token]) + one[:, :, token]
            states.append(state)
        gate = self.gate.weight @ hidden.transpose(1, 2) + self.gate.bias[:, None]
        mixed = torch.stack(states, dim=1) * self.scale * torch.sigmoid(gate.transpose(1, 2))
        weighed = torch.einsum("bthc,bth->bthc", mixed.unflatten(-1, (HIDDEN, 4)), strength)
        return hidden + self.out(weighed.flatten(-2))


def _filtered(plan: ParallelPlan) -> tuple[float, str, set[str]]:
    torch.manual_seed(0)
    return off(plan, Transformer(Filtered, num_layers=2))


@pytest.mark.ranks
def test_grouped_convolutions_and_scans_keep_to_the_channels_of_a_rank(ranks: RankHarness) -> None:
    for error, where, split in ranks.run(_filtered, ParallelPlan(tp=2, micro_batch_size=BATCH), size=2):
        assert error < 1e-5, where
        names = {"into.weight", "into.bias", "out.weight", "gate.weight", "gate.bias"}
        assert {f"layers.0.{name}" for name in names} == {name for name in split if name.startswith("layers.0.")}


def _refused(family: str, more: dict[str, Any], plan: ParallelPlan) -> str:
    with pytest.raises(UnsupportedPlanError) as refusal:
        off(plan, built(family, **more))
    return str(refusal.value)


@pytest.mark.ranks
def test_scans_that_cannot_be_split_say_so(ranks: RankHarness) -> None:
    for said in ranks.run(_refused, "mamba2", {"n_groups": 1}, ParallelPlan(tp=2, micro_batch_size=BATCH), size=2):
        assert "repeat_interleave mixes what the ranks hold of the output of mixer.in_proj" in said


def test_pieces_of_pieces_of_a_projection_are_found_in_it() -> None:
    assert refinements((64, 96, 8), (64, 16, 16)) == [(64, 64, 16, 16, 8)]
    assert refinements((4, 4, 8), (2, 2, 4))[0] == (2, 2, 4, 2, 2, 4)
    assert refinements((4, 4, 8), (3, 5)) == [(4, 4, 3, 5)]  # which does not end where the first four do
    assert refinements((4, 4), (3, 3)) == [(4, 4)]
    # A gate as long as the states, and both as the values beside them: only what follows tells which run is meant.
    assert (32, 32, 16, 16, 4) in refinements((32, 32, 32, 4), (32, 16, 16))
