"""Communication overhead of torch.nn.DataParallel."""

from __future__ import annotations

import numpy as np

from paraplan.cost.communication.collectives import device_links
from paraplan.cost.plan_table import Floats, PlanTable
from paraplan.cost.workload import Workload

_LIKE_PARAMETERS = 4.0


def torch_data_parallel_s(workload: Workload, table: PlanTable, parameters: Floats) -> Floats:
    """Return the seconds of one step that nothing hides, 0 for plans of one GPU a process.

    In every forward pass the parameters go from the first GPU to all others, and the outputs of these come back; in
    every backward pass the gradients of the outputs go to them, and those of the parameters are summed on the first GPU
    (torch/nn/parallel: replicate, gather and their backward passes). The first GPU takes the loss of the whole
    micro-batch. Where a model takes its loss itself, as transformers does, its outputs are gathered all the same, and
    no gradients of them come back.
    """
    if not (table.devices > 1).any():
        return np.zeros(len(table))
    framework, training = workload.framework, workload.training
    links = device_links(workload, table)
    weights = parameters * (framework.storage.weight_bytes if workload.is_mixed_precision else _LIKE_PARAMETERS)
    gradients = parameters * (framework.storage.gradient_bytes if workload.is_mixed_precision else _LIKE_PARAMETERS)
    logits: Floats = np.asarray(table.device_batch_size * float(training.seq_length * workload.model.vocabulary))
    output = logits * (_LIKE_PARAMETERS if framework.loss.implementation.in_model else float(training.activation_bytes))
    others = table.devices - 1
    returned = others * links.send_s(output) * (1.0 if framework.loss.implementation.in_model else 2.0)
    bandwidth = workload.memory_bandwidth_bytes_per_s
    loss = (
        0.0
        if framework.loss.implementation.in_model
        else others * logits * framework.loss.implementation.traffic_per_logit / bandwidth
    )
    each = links.broadcast_s(weights) + links.broadcast_s(gradients) + returned + loss
    return np.asarray(table.num_microbatches * np.where(table.devices > 1, each, 0.0))
