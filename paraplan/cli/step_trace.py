"""`--trace` of `paraplan recommend` and `paraplan estimate`: the predicted step for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

import typer

from paraplan.api.estimates import Estimate
from paraplan.cli.inputs import write_beside_and_rename

TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write the predicted step as a trace for Perfetto and paraplan compare (.json, .json.gz).",
    ),
]


def write_trace(estimate: Estimate, path: Path) -> None:
    """Write the predicted step. Raises `UsageError` for a path that cannot be written."""
    text = json.dumps(estimate.to_trace()).encode() + b"\n"
    write_beside_and_rename(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    typer.echo(f"trace: {path}; open it in https://ui.perfetto.dev, or compare it with a run's", err=True)
