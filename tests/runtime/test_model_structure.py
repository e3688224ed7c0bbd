"""Which parameters each piece of a model uses, and models that cannot be cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_cases import HIDDEN, TOKENS, Decoder, Layer, sequential

from paraplan.errors import UnsupportedPlanError, UsageError
from paraplan.runtime.pipeline.stages import StageEndError, cut_stage
from paraplan.runtime.structure.blocks import find_blocks
from paraplan.runtime.structure.dataflow import Dataflow, Mark
from paraplan.runtime.structure.ends import large_ends
from paraplan.runtime.structure.model_structure import BlockChain, ModelStructure

TOKEN_IDS = torch.zeros(2, TOKENS, dtype=torch.long)


def chain_of(model: nn.Module, example: object = TOKEN_IDS) -> BlockChain:
    return ModelStructure(model, find_blocks(model), example).chain


def test_parameters_are_told_apart_by_where_they_are_used_not_by_their_place_in_the_model() -> None:
    chain = chain_of(Decoder(2))
    assert chain.uses.parameters.before == {"embedding.weight", "positions"}
    assert chain.uses.parameters.after == {"head.weight", "norm.weight", "norm.bias"}
    assert {name.split(".")[1] for name in chain.uses.parameters.blocks[1]} == {"1"}
    assert len(chain.uses.parameters.blocks[1]) == 6


def test_a_tied_head_is_used_before_and_after_under_one_name() -> None:
    chain = chain_of(Decoder(2, tied=True))
    assert chain.uses.parameters.before & chain.uses.parameters.after == {"head.weight"}


def test_a_table_that_all_blocks_read_belongs_to_each_of_them() -> None:
    chain = chain_of(Decoder(2, shared_scale=True))
    assert all("scale.weight" in names for names in chain.uses.parameters.blocks)
    assert "scale.weight" not in chain.uses.parameters.after


def test_hidden_shapes_follow_the_micro_batch() -> None:
    shapes = chain_of(Decoder(3)).hidden_shapes(torch.zeros(4, 5, dtype=torch.long))
    assert [[one.shape for one in passed] for passed in shapes] == [[(4, 5, HIDDEN)]] * 3


def test_a_model_names_its_own_example_inputs() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(2))

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                image = layer(image)
            return image

        def example_inputs(self, batch: int, tokens: int) -> torch.Tensor:
            return torch.zeros(batch, 3, tokens, tokens)

    assert chain_of(Image(), None).uses.parameters.blocks[0] == {"layers.0.weight", "layers.0.bias"}


def test_inputs_that_do_not_suit_the_model_are_named_with_a_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"int64\[2, 8\].*example_inputs="):
        chain_of(model, None)


class Skipping(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden) + hidden
        return hidden


class Backwards(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return hidden


class HalfUsed(Decoder):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.embedding(tokens))


class Pair(Layer):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(hidden), hidden * 2


class Pairs(nn.Module):
    def __init__(self, *, adds_second: bool, num_blocks: int = 2) -> None:
        super().__init__()
        self.adds_second = adds_second
        self.embedding = nn.Embedding(9, HIDDEN)
        self.layers = nn.ModuleList(Pair() for _ in range(num_blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden, second = layer(hidden)
        return hidden + second if self.adds_second else hidden


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Skipping(2), "layers.1 does not take the output of the block before it unchanged"),
        (Backwards(2), "layers.1 runs out of turn"),
        (HalfUsed(2), "1 of 2 blocks take part"),
        (Pairs(adds_second=True), "reads what block layers.1 computes beside its hidden state: more than one tensor"),
    ],
)
def test_blocks_that_are_no_chain_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedPlanError, match=words):
        chain_of(model)


def test_a_second_output_that_nothing_uses_does_not_matter() -> None:
    assert chain_of(Pairs(adds_second=False)).num_outputs == 2


def test_tensors_that_are_gone_are_not_taken_for_those_in_their_place() -> None:
    """A new storage lies where one was that is gone: at once, where nothing keeps the number of the old one."""
    flow = Dataflow(nn.Linear(2, 2, device="meta"), num_blocks=1)
    with flow:
        for number in range(100):
            gone = flow.hand_over(torch.empty(64, device="meta"), Mark("output", 0, number))
            assert flow.sources(gone) == {Mark("output", 0, number)}
            del gone
            assert flow.sources(torch.empty(64, device="meta")) == frozenset()
    assert len(chain_of(Pairs(adds_second=False, num_blocks=40)).uses.parameters.blocks) == 40


class ValueReader(Decoder):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None and bool(mask.all()):
            mask = None
        if 0 in tokens[:, 0]:  # as transformers looks for padding
            tokens = tokens.clone()
        return super().forward(tokens)


def test_inputs_whose_values_are_looked_at_are_left_out_of_the_run_without_values() -> None:
    example = {"tokens": TOKEN_IDS, "mask": torch.ones(2, TOKENS)}
    chain = chain_of(ValueReader(2), example)
    assert chain.hidden_shapes(example)[1][0].shape == (2, TOKENS, HIDDEN)


class Reentrant(Layer):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return checkpoint(super().forward, hidden, scale, use_reentrant=True)


def test_recompute_that_hides_what_it_does_is_refused() -> None:
    with pytest.raises(UnsupportedPlanError, match="use_reentrant=True"):
        chain_of(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Reentrant(), Reentrant()), torch.zeros(2, 3, HIDDEN))


class Bf16Shapes(Layer):
    def forward(self, hidden: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if hidden.is_meta and hidden.dtype != torch.bfloat16:
            raise RuntimeError("Expected inputs of BF16 type")
        return super().forward(hidden, scale)


def test_kernels_with_shapes_in_bf16_alone_leave_the_models_own_types() -> None:
    model = Decoder(2)
    model.layers = nn.ModuleList(Bf16Shapes() for _ in range(2))
    chain = chain_of(model)
    assert chain.hidden_shapes(TOKEN_IDS)[1][0].dtype == torch.float32
    stage = cut_stage(model, chain, start=1, end=2, device=torch.device("cpu"))
    assert stage.inject is not None
    assert model.embedding(TOKEN_IDS).dtype == torch.float32


def test_a_stage_keeps_the_names_and_only_its_own_parameters() -> None:
    model = Decoder(5, tied=True)
    chain = chain_of(model)
    stage = cut_stage(model, chain, start=3, end=5, device=torch.device("cpu"))
    held = {name for name, _ in model.named_parameters()}
    assert held == set(stage.names.values())
    assert {name.split(".")[0] for name in held} == {"head", "norm", "layers"}
    assert {name.split(".")[1] for name in held if name.startswith("layers")} == {"3", "4"}
    assert set(stage.names) == chain.uses.parameters.of(3, 5)


def test_stages_in_a_row_compute_what_the_whole_model_computes() -> None:
    expected = sequential()
    example = torch.randint(9, (2, TOKENS))
    output: torch.Tensor | None = None
    for start, end in ((0, 1), (1, 3), (3, 4)):
        model = sequential()
        model.load_state_dict(expected.state_dict())
        stage = cut_stage(model, chain_of(model), start=start, end=end, device=torch.device("cpu"))
        if stage.inject is not None:
            stage.inject.hold((output,))
        try:
            output = model(example)
        except StageEndError as stage_end:
            output = stage_end.hidden
    assert torch.equal(output, expected(example))


def test_blocks_that_share_parameters_across_stages_are_refused() -> None:
    model = Decoder(4)
    model.layers[3].up.weight = model.layers[0].up.weight
    chain = chain_of(model)
    cut_stage(model, chain, start=2, end=4, device=torch.device("cpu"))  # it holds its own copy: a tie
    assert model.layers[3].up.weight.requires_grad

    class Peeking(Decoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            weight = self.layers[0].down.bias
            for layer in self.layers:
                hidden = layer(hidden, weight)
            return hidden

    peeking = Peeking(4)
    with pytest.raises(UnsupportedPlanError, match=r"layers\.0\.down\.bias, which lies in a block of another stage"):
        cut_stage(peeking, chain_of(peeking), start=2, end=4, device=torch.device("cpu"))


class Ends(nn.Module):
    """`reads`: the head's logits are products with the embedding's weight, read outside of its forward pass."""

    def __init__(self, *, tied: bool = False, reads: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.small = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 512, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.reads = reads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.small(hidden)
        return hidden @ self.embedding.weight.T + self.head(hidden) if self.reads else self.head(hidden)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Ends(), ("embedding", "head")),
        (Ends(reads=True), ("head",)),
        (Ends(tied=True), ()),
        (nn.Linear(4, 4), ()),
    ],
)
def test_large_layers_around_the_blocks_are_found_where_only_they_read_their_weights(
    model: nn.Module, names: tuple[str, ...]
) -> None:
    assert large_ends(ModelStructure(model, find_blocks(model), TOKEN_IDS)) == names
