from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from paraplan.errors import ModelError
from paraplan.model.config_file import load_config
from paraplan.model.factory import CALLED_BY_TRACES
from paraplan.model.freezing import FrozenStorage, freeze
from paraplan.model.reader import bundled_models, read_fields, read_model
from paraplan.model.saved import saved_bytes
from paraplan.model.spec import Layer, ModelSpec
from paraplan.model.tensor_split import split_reason
from paraplan.model.trainable import parse_trainable
from paraplan.model.transformers_model import trace_config

torch = pytest.importorskip("torch", reason="tracing a module needs torch")

SOURCE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden=64, heads=4, rate=0.0):
        super().__init__()
        self.heads, self.rate = heads, rate
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        batch, length, hidden = x.shape
        query, key, value = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, hidden))
        y = self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return x + nn.functional.dropout(y, self.rate, self.training)


class EagerBlock(nn.Module):
    def __init__(self, hidden=64, heads=4):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(hidden, 3 * hidden)

    def forward(self, x):
        batch, length, hidden = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
        return x + (scores @ value).transpose(1, 2).reshape(batch, length, hidden)


class Model(nn.Module):
    def __init__(self, block=Block, blocks=4, tied=True, **options):
        super().__init__()
        self.words, self.places = nn.Embedding(256, 64), nn.Embedding(128, 64)
        self.blocks = nn.ModuleList(block(**options) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 256, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make():
    return Model()


def make_untied():
    return Model(tied=False)


def make_with_dropout():
    return Model(rate=0.1)


def make_eager():
    return Model(block=EagerBlock)


def make_image_model():
    model = nn.Sequential(nn.Flatten(1), nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)))
    model.example_inputs = lambda batch, seq_length: torch.zeros(batch, 3, 4, 4, dtype=torch.bfloat16)
    return model


def make_with_check():
    class Checked(Model):
        def forward(self, ids):
            if not (ids < 256).all() or (ids < 0).any():
                raise ValueError("ids outside the vocabulary")
            return super().forward(ids)

    return Checked()


def make_with_mask():
    class Masking(Model):
        def forward(self, ids):
            x = super().forward(ids)
            return x[:, (ids == ids).all(0)]

    return Masking()


def make_reader_of_values():
    class Reading(Model):
        def forward(self, ids):
            return super().forward(ids)[:, : int(ids.max())]

    return Reading()


def needs(size):
    return Model()


def make_on_gpu():
    return Model().to("cuda:0")


def make_of_one_block():
    return Model(blocks=1)


def make_badly():
    raise KeyError("no such dataset")


def make_nothing():
    return 7


if __name__ == "__main__":
    raise SystemExit("training must not start on import")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


def _trace(script: str, factory: str, *, seq_length: int = 128, micro_batch_size: int = 2) -> ModelSpec:
    return read_model(f"{script}:{factory}", seq_length=seq_length, micro_batch_size=micro_batch_size)


def test_a_plain_module_is_read_part_by_part(script: str) -> None:
    model = _trace(script, "make")
    block = 12 * 64 * 64 + 13 * 64  # two norms, fused qkv, output, two MLP matrices, all with biases
    assert (model.num_blocks, model.hidden_size, model.vocab_size, model.tied_embeddings) == (4, 64, 256, True)
    assert model.parameters.embedding == (256 + 128) * 64
    assert model.parameters.blocks == 4 * block
    assert model.parameters.head == 2 * 64
    assert [run.count for run in model.runs] == [4]
    assert {run.block.tp_limit for run in model.runs} == {1}


def test_of_tensor_parallelism_a_trace_says_that_it_knows_nothing(script: str) -> None:
    traced, read = _trace(script, "make"), read_model("llama-3-8b")
    assert split_reason(traced, 1) is None
    assert "traced module" in (split_reason(traced, 2) or "")
    assert split_reason(read, 8) is None
    assert split_reason(read, 16) == "16 does not divide the 32 attention and 8 key-value heads of llama-3-8b"


def test_an_untied_head_brings_its_own_matrix(script: str) -> None:
    tied, untied = _trace(script, "make"), _trace(script, "make_untied")
    assert untied.parameters.head - tied.parameters.head == 256 * 64
    assert not untied.tied_embeddings


def test_traced_flops_are_those_of_torchs_own_counter(script: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from paraplan.model.factory import load_factory

    for factory in ("make", "make_eager"):
        with torch.device("meta"):
            module = load_factory(f"{script}:{factory}")()
            with FlopCounterMode(display=False) as counter:
                module(torch.zeros(2, 128, dtype=torch.long))
        model = _trace(script, factory)
        assert model.flops_per_token(128) * 2 * 128 == counter.get_total_flops()


def test_a_block_keeps_its_inputs_products_and_the_attention_output(script: str) -> None:
    # By hand, elements a token for h = 64: two norm inputs and outputs 4h, qkv 3h, attention output h, before and after
    # GELU 8h in half precision; two statistics a norm and one a head in fp32.
    block = _trace(script, "make").blocks[1]
    kept = saved_bytes(block.saved, seq_length=128, micro_batch_size=2, kernel="flash")
    assert kept == pytest.approx(2 * 128 * (2 * 16 * 64 + 4 * (2 * 2 + 4)), rel=1e-3)


def test_dropout_keeps_a_mask_of_one_byte_as_on_a_gpu(script: str) -> None:
    plain, dropped = (_trace(script, name).blocks[1] for name in ("make", "make_with_dropout"))
    masks = [tensor for tensor in dropped.saved if tensor.element_type == "mask"]
    assert [tensor.elements_per_token for tensor in masks] == [64]
    assert not [tensor for tensor in plain.saved if tensor.element_type == "mask"]


def test_eager_attention_is_found_and_grows_with_the_square(script: str) -> None:
    block = _trace(script, "make_eager").blocks[1]
    assert block.attention is not None
    assert (block.attention.num_heads, block.attention.qk_head_dim) == (4, 16)
    assert sum(tensor.elements_per_token_pair for tensor in block.saved) == 4


def test_one_length_tells_what_another_needs(script: str) -> None:
    for factory in ("make", "make_eager"):
        short, long = (_trace(script, factory, seq_length=length) for length in (64, 128))
        assert short.flops_per_token(128) == pytest.approx(long.flops_per_token(128))
        told, measured = (
            saved_bytes(model.blocks[1].saved, seq_length=128, micro_batch_size=1, kernel="eager")
            for model in (short, long)
        )
        assert told == pytest.approx(measured, rel=1e-3)


def test_a_module_may_bring_its_own_inputs(script: str) -> None:
    model = _trace(script, "make_image_model")
    assert model.num_blocks == 2
    assert model.vocab_size is None
    assert model.flops_per_token(128) * 128 == pytest.approx(2 * 2 * 48 * 48)


def test_a_model_of_one_block_is_cut_as_one_of_several(script: str) -> None:
    one, four = _trace(script, "make_of_one_block"), _trace(script, "make")
    assert (one.parameters.embedding, one.parameters.head) == (four.parameters.embedding, four.parameters.head)
    assert 4 * one.parameters.blocks == four.parameters.blocks


def test_checks_of_values_find_a_plain_batch(script: str) -> None:
    assert _trace(script, "make_with_check").parameters == _trace(script, "make").parameters


def test_tokens_that_a_mask_picks_are_counted_as_all(script: str) -> None:
    masked, plain = _trace(script, "make_with_mask"), _trace(script, "make")
    assert (masked.parameters, masked.num_blocks) == (plain.parameters, plain.num_blocks)
    assert masked.flops_per_token(128) == plain.flops_per_token(128)


@pytest.mark.parametrize(
    ("factory", "message", "line"),
    [
        ("needs", "cannot be called without arguments: missing a required argument: 'size'", None),
        ("absent", "defines no 'absent'", None),
        ("make_badly", "failed while the model was built: KeyError: 'no such dataset'", 'raise KeyError("no such'),
        ("make_on_gpu", "failed while the model was built", 'return Model().to("cuda:0")'),
        ("make_nothing", "returned int, expected an nn.Module", None),
        ("make_reader_of_values", "failed while the model was run without values", "int(ids.max())"),
    ],
)
def test_a_failing_factory_is_shown_with_its_own_error_and_line(
    script: str, factory: str, message: str, line: str | None
) -> None:
    with pytest.raises(ModelError) as caught:
        _trace(script, factory)
    assert message in caught.value.message
    assert line is None or (line in caught.value.message and "train.py, line" in caught.value.message)


def test_a_script_that_fails_on_import_is_shown_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import sys\n\nsys.exit(3)\n", encoding="utf-8")
    with pytest.raises(ModelError, match=r"broken\.py, line 3: sys\.exit\(3\)") as caught:
        read_model(f"{path}:make")
    assert "__name__" in str(caught.value.hint)


def test_a_missing_script_or_module_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        read_model(f"{tmp_path}/absent.py:make")
    with pytest.raises(ModelError, match=r"there is no module absent_package\.module; hint: give file\.py:factory"):
        read_model("absent_package.module:make")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "own.py").write_text("import absent_library\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [one for one in sys.path if one])
    with pytest.raises(ModelError, match=r"hint: give parts/own\.py:make"):
        read_model("parts.own:make")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="No module named 'absent_library'"):
        read_model("parts.own:make")


@pytest.mark.parametrize("reference", ["qwen3-30b-a3b", "gpt-oss-20b", "gpt2"])
def test_a_trace_and_a_reader_agree_on_the_kind_of_module_that_holds_each_parameter(reference: str) -> None:
    config = load_config(bundled_models()[reference])
    small = replace(config, fields={**config.fields, "num_hidden_layers": 2, "n_layer": 2, "layer_types": None})
    counts = []
    for model in (read_fields(small), trace_config(small)):
        count = Counter(dict.fromkeys(get_args(Layer), 0))
        for parameter, times in model.all_parameters:
            count[parameter.layer] += parameter.num_elements * times
        counts.append(count)
    assert counts[0] == counts[1]


@cache
def read_and_traced() -> tuple[ModelSpec, ModelSpec]:
    """Return three layers of Qwen3-8B as they are read and as they are traced."""
    config = load_config(bundled_models()["qwen3-8b"], seq_length=512)
    small = replace(config, fields={**config.fields, "num_hidden_layers": 3})
    return read_fields(small), trace_config(small)


@pytest.mark.parametrize("words", ["full", "lora:r=16", "lora:r=16,targets=q|v,dropout=0.1", "norms", "layers:last1"])
@pytest.mark.parametrize("storage", [FrozenStorage(), FrozenStorage(weights="nf4", input_copies="shared")])
def test_what_trains_of_a_traced_model_keeps_and_computes_what_it_does_of_one_that_is_read(
    words: str, storage: FrozenStorage
) -> None:
    read, traced = (freeze(model, parse_trainable(words), storage) for model in read_and_traced())
    sizes = {"seq_length": 512, "micro_batch_size": 1, "kernel": "flash"}
    assert traced.num_trained == read.num_trained
    assert traced.training_flops_per_token(512) == pytest.approx(read.training_flops_per_token(512))
    for ours, theirs in ((traced.runs[-1].block, read.runs[-1].block), (traced.head, read.head)):
        assert saved_bytes(ours.saved, **sizes) == pytest.approx(saved_bytes(theirs.saved, **sizes), rel=1e-3)
    frozen = [sum((one.frozen_bytes or 0) * count for one, count in model.all_parameters) for model in (traced, read)]
    assert frozen[0] == frozen[1]


def test_tensor_parallelism_divides_a_traced_model_as_its_own_plan_says() -> None:
    config = load_config(bundled_models()["qwen3-30b-a3b"], seq_length=512)
    small = replace(config, fields={**config.fields, "num_hidden_layers": 2})
    read, traced = read_fields(small), trace_config(small)
    assert traced.tp_limits == read.tp_limits == {4}
    divided = [
        {(one.name, one.tp_dim) for one, _ in model.all_parameters if one.tp_dim is not None}
        for model in (traced, read)
    ]
    assert divided[0] == divided[1]
    products = [sorted((one.k, one.n, one.split) for one in model.runs[0].block.matmuls) for model in (traced, read)]
    assert products[0] == products[1]
    assert split_reason(traced, 8) == "8 does not divide the 32 attention and 4 key-value heads of qwen3-30b-a3b"


SHADOWS = """
import warnings

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, ids):
        warnings.warn("said while it runs")
        nn.functional.dropout2d(torch.zeros(2, 3))
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Planned(Net):
    @property
    def tp_plan(self):
        raise RuntimeError("no plan today")


def make():
    return Net()


def make_planned():
    return Planned()


def of_module(name):
    net = Net()
    setattr(net, name, nn.Linear(16, 16))
    return net


def of_value(name):
    net = Net()
    setattr(net.blocks[1], name, 5)
    return net
"""


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    path = tmp_path / "shadows.py"
    methods = [name for name in dir(torch.nn.Module) if not name.startswith("_")]
    lines = [f"def module_{name}(): return of_module({name!r})" for name in methods]
    lines += [f"def value_{name}(): return of_value({name!r})" for name in methods]
    path.write_text("\n".join([SHADOWS, *lines]))
    return path


METHODS = [
    name for name in dir(torch.nn.Module) if not name.startswith("_") and callable(getattr(torch.nn.Module, name))
]


@pytest.mark.parametrize("name", METHODS)
def test_a_layer_that_hides_a_method_of_torchs_modules_is_one_sentence(shadows: Path, name: str) -> None:
    words = rf"Net \(.*shadows.py, line \d+\) sets self.{name}, which is a method of nn.Module"
    with pytest.raises(ModelError, match=words):
        read_model(f"{shadows}:module_{name}", seq_length=8)


@pytest.mark.parametrize("name", sorted(CALLED_BY_TRACES))
def test_a_value_in_the_place_of_a_method_that_a_trace_calls_is_one_sentence(shadows: Path, name: str) -> None:
    with pytest.raises(ModelError, match=f"Linear .*sets self.{name} in its part blocks.1, which is a method"):
        read_model(f"{shadows}:value_{name}", seq_length=8)


@pytest.mark.parametrize("name", sorted({*METHODS} - CALLED_BY_TRACES))
def test_a_value_in_the_place_of_any_other_method_is_as_good_as_another_name(shadows: Path, name: str) -> None:
    assert read_model(f"{shadows}:value_{name}", seq_length=8).num_blocks == 3


def test_errors_of_a_models_own_code_are_told_with_its_line_wherever_they_come(shadows: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_model(f"{shadows}:make_planned", seq_length=8)
    assert "failed while the model was traced: RuntimeError: no plan today" in caught.value.message
    assert "shadows.py, line" in caught.value.message


def test_a_traced_model_has_the_name_of_its_class_and_says_nothing_while_it_runs(
    shadows: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = read_model(f"{shadows}:make", seq_length=8)
    assert (model.name, model.source) == ("Net", f"{shadows}:make")
    assert not recwarn.list
