"""Ray: a program whose TorchTrainer starts the ranks; each runs the script, whose `runtime.init()` joins its group.

Classes and fields as in Ray Train's API: `TorchTrainer`, `ScalingConfig(num_workers, use_gpu, resources_per_worker)`.
"""

from __future__ import annotations

from paraplan.interop.exported import Exported, Subject, remarks, runtime_gap
from paraplan.interop.quoting import comment

_PROGRAM = '''\
import os
import runpy
import sys

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

SCRIPT, ARGUMENTS = {script!r}, {arguments!r}
PLAN = {plan!r}


def train():
    """Run the script in a rank that Ray has started, in the folder of the package on its node."""
    os.chdir(next(folder for folder in sys.path if os.path.exists(os.path.join(folder, SCRIPT))))
    sys.path.insert(0, os.path.dirname(os.path.abspath(SCRIPT)))
    if PLAN is not None:
        os.environ["PARAPLAN_PLAN"] = os.path.abspath(PLAN)
    sys.argv = [SCRIPT, *ARGUMENTS]
    runpy.run_path(SCRIPT, run_name="__main__")


if __name__ == "__main__":
    workers = ScalingConfig(num_workers={ranks}, use_gpu={use_gpu}, placement_strategy="PACK")
    TorchTrainer(train, scaling_config=workers, run_config=RunConfig(name={name!r})).fit()
'''


def to_ray(subject: Subject) -> Exported:
    """Return a program for `ray job submit`."""
    gaps = runtime_gap(subject)
    notes = ["paraplan and torch have to be on the nodes: in their image, or by --option runtime-env=FILE"]
    text = _PROGRAM.format(
        script=subject.script,
        arguments=list(subject.arguments),
        plan=subject.path if subject.is_planned else None,
        ranks=subject.plan.world_size,
        use_gpu=subject.needs_gpus,
        name=subject.name,
    )
    return Exported(
        target="ray", text=comment(remarks(subject, gaps, notes)) + text, gaps=tuple(gaps), notes=tuple(notes)
    )
