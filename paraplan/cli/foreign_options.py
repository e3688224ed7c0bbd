"""The options of `paraplan estimate` that name another tool's configuration; apart, so that they cost no imports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FROM_PANEL = "What another tool is configured for"

FromDeepspeedOption = Annotated[
    Path | None,
    typer.Option("--from-deepspeed", metavar="FILE", help="DeepSpeed's JSON.", rich_help_panel=FROM_PANEL),
]
FromAccelerateOption = Annotated[
    Path | None,
    typer.Option("--from-accelerate", metavar="FILE", help="Accelerate's YAML or JSON.", rich_help_panel=FROM_PANEL),
]
FromMegatronOption = Annotated[
    str | None,
    typer.Option("--from-megatron", metavar="ARGS", help="Megatron-LM's arguments.", rich_help_panel=FROM_PANEL),
]
