"""Reads exports that start jobs: scripts of torchrun and Slurm, Kubernetes' documents, SkyPilot's tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from export_tools import Says, module, shellcheck, words_for


def read_torchrun(path: Path) -> Says:
    """By ShellCheck and torchrun's parser."""
    shellcheck(path)
    with words_for(path, "torchrun") as (words, _):
        arguments = module("torch.distributed.run").parse_args(words)
    nodes, per_node = int(arguments.nnodes.rpartition(":")[2]), int(arguments.nproc_per_node)
    return {"num_nodes": nodes, "gpus_per_node": per_node, "world_size": nodes * per_node}


def read_slurm(path: Path) -> Says:
    """By ShellCheck; the options of sbatch are read here, which Slurm's own parser would want a controller for."""
    shellcheck(path)
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in path.read_text().splitlines()
        if line[:7] == "#SBATCH"
    )
    nodes, per_node = int(options["nodes"]), int(options["gpus-per-node"])
    return {"num_nodes": nodes, "gpus_per_node": per_node, "world_size": nodes * per_node}


def read_trainjob(path: Path) -> Says:
    """By the classes of Kubeflow Trainer."""
    job = _checked(module("kubeflow_trainer_api.models").TrainerV1alpha1TrainJob, yaml(path))
    trainer = job["spec"]["trainer"]
    nodes, per_node = trainer["numNodes"], trainer["numProcPerNode"]
    return {"num_nodes": nodes, "gpus_per_node": per_node, "world_size": nodes * per_node, "plan": _plan_in(trainer)}


def read_jobset(path: Path) -> Says:
    """By the classes of JobSet that Kubeflow Trainer brings along."""
    jobset = _checked(module("kubeflow_trainer_api.models").JobsetV1alpha2JobSet, yaml(path))
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (per_node,) = container["resources"]["limits"].values()
    nodes = job["completions"]
    assert job["parallelism"] == nodes
    return {"num_nodes": nodes, "gpus_per_node": per_node, "world_size": nodes * per_node, "plan": _plan_in(container)}


def read_pytorchjob(path: Path) -> Says:
    """By the operator's own classes, and each pod by the classes made from the schemas of Kubernetes."""
    job = yaml(path)
    models = module("kubeflow.training.models")
    deserialised = module("kubeflow.training.api_client").ApiClient()
    made = deserialised.deserialize(_Response(job), "KubeflowOrgV1PyTorchJob")
    assert isinstance(made, models.KubeflowOrgV1PyTorchJob)
    kept = deserialised.sanitize_for_serialization(made)
    if kept != _with_quantities_as_text(job):
        raise ValueError(f"PyTorchJob reads it as something else: {_difference(job, kept)}")
    pod = module("kubeflow_trainer_api.models").IoK8sApiCoreV1PodTemplateSpec
    replicas = job["spec"]["pytorchReplicaSpecs"]
    for replica in replicas.values():
        _checked(pod, replica["template"])
    nodes, per_node = sum(part["replicas"] for part in replicas.values()), int(job["spec"]["nprocPerNode"])
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    return {"num_nodes": nodes, "gpus_per_node": per_node, "world_size": nodes * per_node, "plan": _plan_in(container)}


def yaml(path: Path) -> Any:
    """Return what a YAML file holds."""
    return module("yaml").safe_load(path.read_text())


def _with_quantities_as_text(value: Any) -> Any:
    """Return a document as the client of Kubernetes holds it: amounts of resources are text there."""
    if isinstance(value, list):
        return [_with_quantities_as_text(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: {name: str(count) for name, count in inner.items()} if key == "limits" else _with_quantities_as_text(inner)
        for key, inner in value.items()
    }


class _Response:
    """What the client of the operator takes for an answer of its server."""

    def __init__(self, value: object) -> None:
        self.data = json.dumps(value)


def _checked(model: Any, value: Any) -> Any:
    """Return `value` where a pydantic model takes it and keeps every key of it; the models pass over unknown ones."""
    kept = model.from_dict(value).to_dict()
    if kept != value:
        raise ValueError(f"{model.__name__} reads it as something else: {_difference(value, kept)}")
    return value


def _difference(given: Any, kept: Any, path: str = "") -> str:
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key in {**given, **kept}:
            if given.get(key) != kept.get(key):
                return _difference(given.get(key), kept.get(key), f"{path}.{key}")
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for place, (item, left) in enumerate(zip(given, kept, strict=True)):
            if item != left:
                return _difference(item, left, f"{path}[{place}]")
    return f"{path}: {given!r} becomes {kept!r}"


def _plan_in(container: Mapping[str, Any]) -> object:
    (value,) = [item["value"] for item in container["env"] if item["name"] == "PARAPLAN_PLAN_JSON"]
    return json.loads(value.replace("$$", "$"))["plan"]


def read_skypilot(path: Path) -> Says:
    """By SkyPilot's schema of tasks."""
    task = module("sky").Task.from_yaml(str(path))
    says: Says = {"num_nodes": task.num_nodes}
    for resources in task.resources:
        for count in (resources.accelerators or {}).values():
            says |= {"gpus_per_node": count, "world_size": count * task.num_nodes}
    return says
