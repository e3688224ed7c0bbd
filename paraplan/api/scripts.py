"""Training scripts: the example that comes with paraplan, and whether one trains on ranks what one process trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paraplan.resources import bundled

if TYPE_CHECKING:
    from paraplan.script_check.records import ScriptReport


def example_script(name: str) -> Path:
    """Return a training script that comes with paraplan. Raises `ParaplanError` in a damaged installation."""
    return bundled(f"examples/{name}", f"scripts/{name}")


def check_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    num_ranks: int = 4,
    num_steps: int = 2,
    is_module: bool = False,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> ScriptReport:
    """Return whether `script`, run on CPU ranks as it is, trains what one process trains on all of their batches.

    The script may use anything that trains with torch's optimizers on gloo: DDP, FSDP, DTensors, accelerate, a Trainer,
    collectives of its own. Every gradient is compared after its last reduction and before it is clipped, the norm that
    clipping is told, and every parameter after each of `num_steps` optimizer steps. The report names the first that
    parts, on which ranks, by which factor, and what that usually means.

    `arguments` are the script's, `is_module` runs it as `python -m` does, `say` is told what is run. Raises
    `UsageError` for a script that is not there, and `CheckRunError` where it fails, or never steps an optimizer.
    """
    from paraplan.launch.checking import launch_on_cpu
    from paraplan.script_check.checking import check_script
    from paraplan.script_check.records import ScriptRequest

    request = ScriptRequest(script=script, is_module=is_module, arguments=tuple(arguments), num_steps=num_steps)
    return check_script(request, num_ranks=num_ranks, launch=partial(launch_on_cpu, timeout_s=timeout_s), say=say)
