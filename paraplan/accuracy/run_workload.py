"""The workload of a measured run: its model, training, machines, and the framework that ran it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from paraplan.accuracy.machines import DescribedMachines, described_cluster
from paraplan.accuracy.measured_runs import SHAPES, MeasuredRun
from paraplan.accuracy.prediction import framework_of_run, padded_vocabulary, training_of_run
from paraplan.cost.constants import CostConstants
from paraplan.cost.framework import FrameworkProfile
from paraplan.cost.framework_files import FrameworkCatalog
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.hardware.link_speed import LinkSpeedTable, load_link_speeds
from paraplan.hardware.profile_files import list_gpus
from paraplan.hardware.profiles import GpuProfile
from paraplan.model.config_file import ModelConfig
from paraplan.model.named import Fields, named_config
from paraplan.model.reader import read_fields
from paraplan.model.shapes import Activation, TransformerShapes, model_from_shapes
from paraplan.model.spec import BlockSpec, ModelSpec
from paraplan.units import KIB

DEFAULT_VOCABULARY = 50304
DETERMINISTIC_WORKSPACE_BYTES = 8 * 4096 * KIB
"""CUBLAS_WORKSPACE_CONFIG=:4096:8, which torch asks for where matmuls must repeat bit by bit."""


@dataclass(frozen=True)
class BundledData:
    """What descriptions of runs refer to by name."""

    gpus: list[GpuProfile] = field(default_factory=list_gpus)
    """Kinds of GPU."""
    links: LinkSpeedTable = field(default_factory=load_link_speeds)
    """Speeds of links."""
    frameworks: FrameworkCatalog = field(default_factory=FrameworkCatalog)
    """Framework profiles."""
    configs: Mapping[str, Fields] = field(default_factory=dict)
    """Configurations of models by name (`model.named.known_configs`)."""


def workload_of_run(run: MeasuredRun, data: BundledData) -> Workload:
    """Return what is priced for a run.

    Blank cells: what the model of that name in `data` has; else a GELU, a vocabulary of 50304, and what
    `described_cluster` assumes. Where the precision is blank, GPUs without bf16 train in fp16.
    Raises `ParaplanError` for a GPU that no profile describes and for shapes that do not divide.
    """
    machines = DescribedMachines(
        gpu=run.gpu,
        num_gpus=run.num_gpus,
        gpus_per_node=run.gpus_per_node,
        link=run.intra_node_link,
        network_bits_per_s_per_gpu=run.inter_node_gbps_per_gpu and run.inter_node_gbps_per_gpu * 1e9,
    )
    framework, constants = framework_of_run(run, data.frameworks), CostConstants()
    model = _named_model(run, framework, data.configs) or model_from_shapes(_shapes(run, framework, data.configs))
    if run.head == "classifier":
        # A classifier: the vocabulary stays in the embedding alone.
        model = model.replace(head=BlockSpec(kind="classifier"), vocab_size=1)
    cluster = described_cluster(machines, data.gpus)
    if re.search("fp[48]", run.precision):
        constants = constants.replace(block_matmul_speedup=cluster.gpu.shared.fp8_speedup)
    if run.deterministic:
        constants = constants.replace(cublas_workspace_bytes=DETERMINISTIC_WORKSPACE_BYTES)
    training = training_of_run(run, framework)
    if not run.precision and "bf16" not in cluster.gpu.peak_flops_per_s:
        training = training.replace(precision="fp16")
    return Workload(
        model=model,
        training=training,
        cluster=cluster,
        links=data.links,
        framework=framework,
        constants=constants,
    )


def _named_model(run: MeasuredRun, framework: FrameworkProfile, known: Mapping[str, Fields]) -> ModelSpec | None:
    """Return the known model that a run names, None for a run that gives its shapes."""
    blank = [name for name in SHAPES if getattr(run, name) is None]
    if not blank:
        return None
    fields = named_config(known, run.model_name, num_layers=run.layers)
    if fields is None:
        raise PlanError(f"{', '.join(blank)} not given", hint="a model_name that is bundled says them too")
    vocabulary = padded_vocabulary(run, framework, run.vocab or int(fields["vocab_size"]))
    config = ModelConfig(run.model_name, fields | {"vocab_size": vocabulary}, run.model_name, run.seq_len)
    return read_fields(config)


def _shapes(run: MeasuredRun, framework: FrameworkProfile, known: Mapping[str, Fields]) -> TransformerShapes:
    assert run.layers is not None
    assert run.hidden is not None
    assert run.heads is not None
    fields = named_config(known, run.model_name, num_layers=None) or {}
    if fields.get("hidden_size") != run.hidden or fields.get("num_attention_heads") != run.heads:
        fields = {}
    activation: Activation = "swiglu" if fields.get("hidden_act") == "silu" else "gelu"
    for name in get_args(Activation):
        if run.activation.lower() == name:
            activation = name
    tied = run.tied_embeddings
    return TransformerShapes(
        name=run.model_name or run.id,
        num_layers=run.layers,
        hidden_size=run.hidden,
        num_heads=run.heads,
        num_kv_heads=run.kv_heads or fields.get("num_key_value_heads"),
        ffn_hidden_size=run.ffn_hidden or fields.get("intermediate_size"),
        vocab_size=padded_vocabulary(run, framework, run.vocab or fields.get("vocab_size") or DEFAULT_VOCABULARY),
        max_seq_length=run.seq_len,
        activation=activation,
        tied_embeddings=bool(fields.get("tie_word_embeddings") if tied is None else tied),
        dropout=framework.kernels.dropout,
        writes_out_gelu=framework.kernels.writes_out_gelu,
    )
