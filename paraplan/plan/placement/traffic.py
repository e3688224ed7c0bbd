"""How many bytes each axis of a plan sends in a step: the weights of a placement."""

from __future__ import annotations

from pydantic import Field

from paraplan.model.spec import ModelSpec
from paraplan.plan.parallel import Axis, ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.records import Record


class AxisTraffic(Record):
    """Bytes that a rank sends in one step on each axis; only their proportions matter to a placement."""

    tp: float = Field(ge=0)
    cp: float = Field(ge=0)
    dp: float = Field(ge=0)
    pp: float = Field(ge=0)

    def bytes_of(self, axis: Axis) -> float:
        """Return the bytes of an axis."""
        return float(getattr(self, axis))


def axis_traffic(plan: ParallelPlan, training: TrainingSpec, model: ModelSpec) -> AxisTraffic:
    """Return the bytes that a rank sends on each axis in one step of a transformer, by rings.

    tp: four all-reduces of an activation per layer and micro-batch (Shoeybi et al., Megatron-LM, section 3), each
    2 (t-1)/t of its size. cp: keys and values of each layer pass around the ring forward, and with their gradients
    backward. dp: gradients in 2(d-1)/d of their size, with ZeRO-3 parameters twice more. pp: an activation and its
    gradient for each boundary and micro-batch. Rows of tokens to experts and back are on the axes that `ep` lies on.
    """
    tokens = plan.micro_batch_size * training.seq_length / plan.cp
    activation = tokens * model.hidden_size * training.activation_bytes
    layers = model.num_blocks / plan.pp
    parameters = model.parameters.total / (plan.tp * plan.pp) * training.activation_bytes
    sharded = plan.dp * plan.cp
    passes = {3: 1.5}.get(plan.zero_stage, 1.0)
    rows = _expert_rows(plan, model) * activation / plan.tp * plan.num_microbatches
    inner: Axis = max(
        (axis for axis in ("dp", "cp") if getattr(plan, axis) > 1), key=plan.rank_order.index, default="dp"
    )
    is_beyond = plan.ep > getattr(plan, inner)
    return AxisTraffic(
        tp=4 * 2 * (plan.tp - 1) / plan.tp * activation * layers * plan.num_microbatches,
        cp=3 * 2 * (plan.cp - 1) * activation / plan.tp * layers * plan.num_microbatches
        + rows * (inner == "cp" or is_beyond),
        dp=2 * (sharded - 1) / sharded * parameters * passes + rows * (inner == "dp" or is_beyond),
        pp=(2 * activation * model.residual_streams * plan.virtual_pipeline_size * plan.num_microbatches)
        * (plan.pp > 1),
    )


def _expert_rows(plan: ParallelPlan, model: ModelSpec) -> float:
    """Return how many activations of a token leave a rank for experts elsewhere: two ways, forward and backward."""
    sent = 0.0
    for run in model.runs:
        rows = max((matmul.rows_per_token for matmul in run.block.matmuls if matmul.num_experts > 1), default=0.0)
        sent += 4 * rows * run.count / plan.pp
    return sent * (plan.ep - 1) / plan.ep
