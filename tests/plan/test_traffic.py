import pytest

from paraplan.model.reader import read_model
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.placement.traffic import AxisTraffic, axis_traffic
from paraplan.plan.training import TrainingSpec

LLAMA = read_model("llama-3-8b")
TRAINING = TrainingSpec(global_batch_size=64, seq_length=4096)


def traffic(**values: object) -> AxisTraffic:
    return axis_traffic(ParallelPlan.model_validate(values), TRAINING, LLAMA)


def test_traffic_is_asked_by_axis() -> None:
    each = AxisTraffic(tp=1, cp=2, dp=3, pp=4)
    assert [each.bytes_of(axis) for axis in ("tp", "cp", "dp", "pp")] == [1, 2, 3, 4]


def test_tensor_parallelism_sends_four_all_reduces_a_layer() -> None:
    # One micro-batch of one sequence: 4096 x 4096 activations of 2 bytes, 32 layers, each all-reduce 2 (2-1)/2 times.
    assert traffic(tp=2).tp == pytest.approx(4 * 32 * 4096 * 4096 * 2)
    assert traffic(tp=2, num_microbatches=8).tp == pytest.approx(8 * traffic(tp=2).tp)


def test_data_parallelism_sends_each_gradient_about_twice() -> None:
    total = LLAMA.parameters.total * 2
    assert traffic(dp=8).dp == pytest.approx(2 * 7 / 8 * total)
    assert traffic(dp=8, zero_stage=3).dp == pytest.approx(3 * 7 / 8 * total)
    assert traffic(dp=2, pp=4, pipeline_schedule="1f1b").dp == pytest.approx(total / 4)


def test_a_pipeline_sends_an_activation_and_its_gradient() -> None:
    assert traffic(pp=4, pipeline_schedule="1f1b", num_microbatches=8).pp == pytest.approx(8 * 2 * 4096 * 4096 * 2)


def test_axes_of_one_rank_send_nothing() -> None:
    assert traffic() == AxisTraffic(tp=0, cp=0, dp=0, pp=0)
    assert traffic(cp=2).cp > 0


def test_rows_of_tokens_go_to_experts_along_the_axes_that_hold_them() -> None:
    mixtral = read_model("mixtral-8x7b")

    def of(**values: object) -> AxisTraffic:
        return axis_traffic(ParallelPlan.model_validate(values), TRAINING, mixtral)

    # Two experts a token: 2 rows there and back, forward and backward, in 32 layers; 3 of 4 leave the rank.
    rows = 4 * 2 * 32 * 3 / 4 * 4096 * 4096 * 2
    assert of(dp=8, ep=4).dp - of(dp=8).dp == pytest.approx(rows)
    around = {"dp": 2, "cp": 4}
    assert of(**around, ep=4).cp - of(**around).cp == pytest.approx(rows / 4)
    assert of(**around, ep=4).dp == of(**around).dp
    assert of(**around, ep=8).dp > of(**around).dp
