"""torchrun: the command that starts the ranks; `paraplan.runtime` in the script applies the plan."""

from __future__ import annotations

import shlex

from paraplan.interop.commands import torchrun_command
from paraplan.interop.exported import Exported, Subject, remarks, runtime_gap
from paraplan.interop.quoting import comment


def to_torchrun(subject: Subject) -> Exported:
    """Return a shell script with torchrun's command, to be run on every node."""
    gaps = runtime_gap(subject)
    notes = ["the script reads the plan through paraplan.runtime; one that does not use it has to apply it itself"]
    if subject.layout.num_nodes > 1:
        notes.append("run it on every node, with FIRST_NODE replaced by the address of one of them")
    command = torchrun_command(subject.layout, script=subject.script, training=subject.training)
    order = f"{subject.gpu_variables} " if subject.gpu_variables is not None else ""
    lines = f"{order}PARAPLAN_PLAN={shlex.quote(subject.path)} {command}\n"
    text = "#!/bin/sh\n" + comment(remarks(subject, gaps, notes)) + lines
    return Exported(target="torchrun", text=text, gaps=tuple(gaps), notes=tuple(notes))
