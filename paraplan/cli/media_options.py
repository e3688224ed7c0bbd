"""Options for what a sequence holds beside text: pictures, video and sound, by the tokens that towers make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from paraplan.cli.options import TRAINING_PANEL, length


@dataclass(frozen=True, kw_only=True)
class MediaChoices:
    """Tokens of a sequence that are no text."""

    image_tokens: Annotated[
        int | None,
        typer.Option(
            "--image-tokens",
            metavar="N",
            parser=length,
            help="Tokens of a sequence that are pictures or frames of video, also as 2k, which the tower makes.",
            rich_help_panel=TRAINING_PANEL,
        ),
    ] = None
    audio_tokens: Annotated[
        int | None,
        typer.Option(
            "--audio-tokens",
            metavar="N",
            parser=length,
            help="Tokens of a sequence that are sound.",
            rich_help_panel=TRAINING_PANEL,
        ),
    ] = None

    @property
    def media_fields(self) -> dict[str, int]:
        """The fields of a `TrainingSpec` that they give."""
        return {"image_tokens": self.image_tokens or 0, "audio_tokens": self.audio_tokens or 0}
