"""Hybrids of Mamba-2, attention and experts, against published counts."""

from __future__ import annotations

import pytest

from paraplan.cost.communication.collectives import group_links
from paraplan.cost.communication.exchanges import expert_exchange_s
from paraplan.cost.plan_table import PlanTable
from paraplan.cost.workload import Workload
from paraplan.errors import ModelError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.config_file import ModelConfig
from paraplan.model.named import known_configs
from paraplan.model.reader import read_fields, read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec


@pytest.mark.parametrize(
    ("name", "billions", "flops"),
    [
        ("nemotron-3-nano", 31.6, 905e12 / 40960),  # Megatron-Bridge's page: TFLOP/s over tokens/s of one row
        ("nemotron-3-super", 120.6, None),  # its rows train two layers for multi-token prediction beside it
    ],
)
def test_parameters_and_work_are_the_published_ones(name: str, billions: float, flops: float | None) -> None:
    model = read_model(name)
    assert model.parameters.total == pytest.approx(billions * 1e9, rel=2e-3)
    if flops is not None:
        assert 3 * model.flops_per_token(8192) == pytest.approx(flops, rel=0.02)


def test_tokens_are_sent_in_the_width_of_the_experts() -> None:
    model = read_model("nemotron-3-super")
    cluster = cluster_from_profile("dgx-b200")
    training = TrainingSpec(global_batch_size=8, seq_length=8192, attention="flash")
    made = Workload.of(model, training, cluster, framework="megatron-bridge")
    table = PlanTable.of_plans([ParallelPlan(dp=8, ep=8, zero_stage=1)])
    fields = known_configs()["nemotron3super"] | {"moe_latent_size": None}
    wide = read_fields(ModelConfig("wide", fields, "wide", 8192))
    narrow_s, wide_s = (
        float(expert_exchange_s(each, table, group_links(each, table, "tp"))[0][0])
        for each in (made, Workload.of(wide, training, cluster, framework="megatron-bridge"))
    )
    assert 2.5 < wide_s / narrow_s < 4.0  # 4,096 against 1,024, beside what does not grow


def test_a_tied_head_has_no_matrix_of_its_own() -> None:
    fields = dict(known_configs()["nemotron3nano"])
    apart, tied = (
        read_fields(ModelConfig("config", fields | {"tie_word_embeddings": is_tied})) for is_tied in (False, True)
    )
    assert (apart.tied_embeddings, tied.tied_embeddings) == (False, True)
    assert apart.parameters.total - tied.parameters.total == fields["vocab_size"] * fields["hidden_size"]
    assert tied.vocabulary == apart.vocabulary


def test_a_pattern_with_other_letters_is_refused() -> None:
    fields = known_configs()["nemotron3nano"] | {"hybrid_override_pattern": "MEX"}
    with pytest.raises(ModelError, match="hybrid_override_pattern has 'X'"):
        read_fields(ModelConfig("x", fields, "x", 4096))


@pytest.mark.parametrize("pattern", ["ME*", "", "M" * 20_000])
def test_a_pattern_for_another_number_of_layers_is_refused(pattern: str) -> None:
    fields = known_configs()["nemotron3nano"] | {"hybrid_override_pattern": pattern, "num_hidden_layers": 52}
    with pytest.raises(ModelError, match=f"names {len(pattern)} layers, and num_hidden_layers is 52"):
        read_fields(ModelConfig("odd", fields, "odd", 4096))


def test_a_slip_in_the_number_of_prediction_layers_is_refused() -> None:
    fields = known_configs()["deepseekv3"] | {"mtp_num_layers": 10**12}
    with pytest.raises(ModelError, match="mtp_num_layers=1000000000000, expected at most 10000"):
        read_fields(ModelConfig("odd", fields, "odd", 4096))
