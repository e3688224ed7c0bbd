"""Kubernetes: PyTorchJob (Kubeflow Training Operator 1), TrainJob (Kubeflow Trainer 2) and JobSet.

Fields as in their custom resource definitions: kubeflow.org_pytorchjobs.yaml at v1.9.0, trainer.kubeflow.org_trainjobs
(v1alpha1) of August 2026, jobset.x-k8s.io_jobsets (v1alpha2). The operators set PET_ variables for nodes, their ranks
and the rendezvous, which `paraplan launch` reads as torchrun does; for a JobSet they are set here. The plan travels in
an environment variable, so that the image need not hold it.
"""

from __future__ import annotations

from paraplan.errors import UsageError
from paraplan.interop.exported import Exported, Subject, launch_words, remarks, runtime_gap
from paraplan.interop.quoting import comment, to_yaml

_PLAN_IN_POD = "/tmp/plan.json"  # noqa: S108 (a path of the pod's own)
_PORT = 29500
_COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def to_pytorchjob(subject: Subject) -> Exported:
    """Return a PyTorchJob of one master and, with several nodes, workers. Raises `UsageError` without an image."""
    replicas: dict[str, object] = {"Master": _replicas(subject, 1)}
    if subject.layout.num_nodes > 1:
        replicas["Worker"] = _replicas(subject, subject.layout.num_nodes - 1)
    job: dict[str, object] = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": subject.name},
        "spec": {
            "nprocPerNode": str(subject.layout.gpus_per_node),
            "runPolicy": {"cleanPodPolicy": "None"},  # the default; the operator's Python classes want one said
            "pytorchReplicaSpecs": replicas,
        },
    }
    return _exported(subject, "pytorchjob", job, left=[])


def to_trainjob(subject: Subject) -> Exported:
    """Return a TrainJob of the runtime torch-distributed. Raises `UsageError` without an image."""
    trainer = {
        "image": _image(subject),
        "numNodes": subject.layout.num_nodes,
        "numProcPerNode": subject.layout.gpus_per_node,
        "command": _command(subject),
        "env": _plan_variables(subject),
        "resourcesPerNode": _resources(subject),
    }
    job: dict[str, object] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": subject.name},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }
    shared_memory = "an emptyDir of medium Memory at /dev/shm in the runtime torch-distributed: a pod has 64 MB of it"
    return _exported(subject, "trainjob", job, left=[f"{shared_memory}, too few for NCCL and data loaders"])


def to_jobset(subject: Subject) -> Exported:
    """Return a JobSet of one indexed job whose pods are the nodes. Raises `UsageError` without an image."""
    num_nodes, name = subject.layout.num_nodes, subject.name
    rendezvous: list[dict[str, object]] = [
        {"name": "PET_NNODES", "value": str(num_nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(subject.layout.gpus_per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _COMPLETION_INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    pod = {"restartPolicy": "Never", **_pod(subject, "trainer", rendezvous)}
    job = {"parallelism": num_nodes, "completions": num_nodes, "backoffLimit": 0, "template": {"spec": pod}}
    jobset: dict[str, object] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]},
    }
    return _exported(subject, "jobset", jobset, left=[])


_NETWORK = (
    "the RDMA resource of your cluster's device plugin (rdma/..., vpc.amazonaws.com/efa) in resources.limits, or "
    "hostNetwork: true: NCCL takes TCP between nodes without",
    "NCCL_SOCKET_IFNAME in env, where pods have several network interfaces",
)
"""Settings of a pod's network between nodes that the plan does not know."""


def _exported(subject: Subject, target: str, job: dict[str, object], *, left: list[str]) -> Exported:
    gaps = runtime_gap(subject)
    notes = [f"the image has to hold paraplan, torch and {subject.script}", *left]
    notes += _NETWORK if subject.layout.num_nodes > 1 else ()
    if subject.gpu is None and subject.needs_gpus:
        notes.append("nvidia.com/gpu is asked for; the plan file does not say what GPUs it was made for")
    text = comment(remarks(subject, gaps, notes)) + to_yaml(job)
    return Exported(target=target, text=text, gaps=tuple(gaps), notes=tuple(notes))


def _image(subject: Subject) -> str:
    if subject.image is None:
        raise UsageError(
            "a pod needs a container image",
            hint=f"name one that holds paraplan, torch and {subject.script}: --image registry/name:tag",
        )
    return subject.image


def _replicas(subject: Subject, count: int) -> dict[str, object]:
    # The operator looks for a container of this name.
    return {
        "replicas": count,
        "restartPolicy": "Never",
        "template": {"spec": _pod(subject, "pytorch", [])},
    }


def _pod(subject: Subject, name: str, variables: list[dict[str, object]]) -> dict[str, object]:
    """Return a pod of one container, whose /dev/shm is memory of the node: 64 MB are too few for NCCL and loaders."""
    shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    return {"containers": [_container(subject, name, variables)], "volumes": [shared_memory]}


def _container(subject: Subject, name: str, variables: list[dict[str, object]]) -> dict[str, object]:
    return {
        "name": name,
        "image": _image(subject),
        "command": _command(subject),
        "env": [*_plan_variables(subject), *variables],
        "resources": _resources(subject),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],  # noqa: S108 (a path of the pod)
    }


def _command(subject: Subject) -> list[str]:
    words = launch_words(subject, plan_path=_PLAN_IN_POD).replace("$", "$$")  # Kubernetes turns $$ into $
    launch = f"exec paraplan launch {words}"
    if not subject.is_planned:
        return ["sh", "-c", launch]
    return ["sh", "-c", f'printf %s "$PARAPLAN_PLAN_JSON" > {_PLAN_IN_POD} && {launch}']


def _plan_variables(subject: Subject) -> list[dict[str, object]]:
    if not subject.is_planned:
        return []
    return [{"name": "PARAPLAN_PLAN_JSON", "value": subject.file.to_json(indent=None).replace("$", "$$")}]


def _resources(subject: Subject) -> dict[str, object]:
    if not subject.needs_gpus:
        return {}
    is_amd = subject.gpu is not None and subject.gpu.vendor == "amd"
    resource = "amd.com/gpu" if is_amd else "nvidia.com/gpu"
    # Extended resources are whole numbers, and their requests default to their limits.
    return {"limits": {resource: subject.layout.gpus_per_node}}
