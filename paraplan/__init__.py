"""paraplan: choose how to train a model on several GPUs, see what it costs, and run it.

    import paraplan

    job = paraplan.load_workload("llama-3-8b", "dgx-h100", num_nodes=2, seq_length=8192, global_batch_size=64)
    print(paraplan.recommend(job))

Each name is imported when it is first used, so that `import paraplan` and `from paraplan import runtime` stay fast.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paraplan.api.calibrations import load_calibration as load_calibration
    from paraplan.api.checking import check_script as check_script
    from paraplan.api.estimates import Estimate as Estimate
    from paraplan.api.estimates import estimate as estimate
    from paraplan.api.exporting import export as export
    from paraplan.api.history import load_history as load_history
    from paraplan.api.imported import ImportedPlan as ImportedPlan
    from paraplan.api.imported import import_plan as import_plan
    from paraplan.api.machines import load_cluster as load_cluster
    from paraplan.api.machines import probe_topology as probe_topology
    from paraplan.api.machines import read_topology as read_topology
    from paraplan.api.models import load_model as load_model
    from paraplan.api.plans import load_plan as load_plan
    from paraplan.api.recommendations import Recommendation as Recommendation
    from paraplan.api.recommendations import check as check
    from paraplan.api.recommendations import recommend as recommend
    from paraplan.api.recommendations import sweep as sweep
    from paraplan.api.workloads import load_workload as load_workload
    from paraplan.cost.workload import Workload as Workload
    from paraplan.errors import NoPlanFitsError as NoPlanFitsError
    from paraplan.errors import ParaplanError as ParaplanError
    from paraplan.errors import PlanError as PlanError
    from paraplan.hardware.cluster import Cluster as Cluster
    from paraplan.hardware.topology import NodeTopology as NodeTopology
    from paraplan.interop.exported import Exported as Exported
    from paraplan.model.spec import ModelSpec as ModelSpec
    from paraplan.plan.files import PlanFile as PlanFile
    from paraplan.plan.parallel import ParallelPlan as ParallelPlan
    from paraplan.plan.stack import StackSettings as StackSettings
    from paraplan.plan.training import TrainingSpec as TrainingSpec
    from paraplan.search.constraints import Constraints as Constraints
    from paraplan.search.verification import PlanCheck as PlanCheck

__version__ = "0.1.0"

_HOMES = {
    "api.calibrations": ("load_calibration",),
    "api.estimates": ("Estimate", "estimate"),
    "api.exporting": ("export",),
    "api.history": ("load_history",),
    "api.imported": ("ImportedPlan", "import_plan"),
    "api.machines": ("load_cluster", "probe_topology", "read_topology"),
    "api.models": ("load_model",),
    "api.plans": ("load_plan",),
    "api.recommendations": ("Recommendation", "check", "recommend", "sweep"),
    "api.checking": ("check_script",),
    "api.workloads": ("load_workload",),
    "cost.workload": ("Workload",),
    "errors": ("NoPlanFitsError", "ParaplanError", "PlanError"),
    "hardware.cluster": ("Cluster",),
    "hardware.topology": ("NodeTopology",),
    "interop.exported": ("Exported",),
    "model.spec": ("ModelSpec",),
    "plan.files": ("PlanFile",),
    "plan.parallel": ("ParallelPlan",),
    "plan.stack": ("StackSettings",),
    "plan.training": ("TrainingSpec",),
    "search.verification": ("PlanCheck",),
    "search.constraints": ("Constraints",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cluster",
    "Constraints",
    "Estimate",
    "Exported",
    "ImportedPlan",
    "ModelSpec",
    "NoPlanFitsError",
    "NodeTopology",
    "ParallelPlan",
    "ParaplanError",
    "PlanCheck",
    "PlanError",
    "PlanFile",
    "Recommendation",
    "StackSettings",
    "TrainingSpec",
    "Workload",
    "__version__",
    "check",
    "check_script",
    "estimate",
    "export",
    "import_plan",
    "load_calibration",
    "load_cluster",
    "load_history",
    "load_model",
    "load_plan",
    "load_workload",
    "probe_topology",
    "read_topology",
    "recommend",
    "sweep",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'paraplan' has no attribute {name!r}")
    value = getattr(import_module(f"paraplan.{home}"), name)
    if isinstance(value, type) and hasattr(value, "model_fields"):
        import_module("paraplan.records").describe_fields(value)
    elif isinstance(value, FunctionType):
        value = import_module("paraplan.arguments").checked(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
