from __future__ import annotations

import os

import pytest

from paraplan.errors import PlanError
from paraplan.launch.planning import PlannerRequest, make_plan
from paraplan.plan.files import PlanFile

GPT2 = PlannerRequest("gpt2", {"global_batch_size": 8, "seq_length": 64, "precision": "fp32"}, profile="cpu")


def test_a_plan_is_made_for_the_nodes_and_ranks_that_are_there() -> None:
    text = make_plan(GPT2, num_nodes=2, ranks_per_node=2, environment=dict(os.environ))
    file = PlanFile.from_json(text, source="test")
    assert file.plan.world_size == 4
    assert file.cluster is not None
    assert (file.cluster.num_nodes, file.cluster.gpus_per_node) == (2, 2)


def test_the_planners_own_words_say_why_there_is_no_plan() -> None:
    request = PlannerRequest("no-such-model", GPT2.training, profile="cpu")
    with pytest.raises(PlanError, match=r"no plan for 2 ranks: .*no-such-model") as caught:
        make_plan(request, num_nodes=1, ranks_per_node=2, environment=dict(os.environ))
    assert caught.value.hint
    assert caught.value.exit_status == 2
