"""Options about ORT format that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import typer

from odtpack.ort.choices import OrtFormat, Platform, Style


class StyleChoice(StrEnum):
    """:class:`odtpack.ort.choices.Style`, or both."""

    FIXED = "fixed"
    RUNTIME = "runtime"
    BOTH = "both"


ORT_STYLE = typer.Option(help="ORT format: how models are optimized.  [default: fixed]")
ORT_PLATFORM = typer.Option(
    help="ORT format: processors to optimize for; may be repeated. Default: a model that runs on "
    "all."
)


def read_formats(
    wanted: bool, style: StyleChoice | None, platforms: Sequence[Platform] | None
) -> OrtFormat | None:
    """Return which files in ORT format to write, None for none.

    Raises:
        OdtpackError: Style or platform are given, and ORT format is not asked for.
    """
    if not wanted:
        if style is None and not platforms:
            return None
        from odtpack.errors import OdtpackError

        raise OdtpackError(
            "option-not-used",
            "--ort-style and --ort-platform say how models in ORT format are made",
            hint="pass --ort-format too, or leave them out",
        )
    styles = tuple(Style) if style is StyleChoice.BOTH else (Style(style or StyleChoice.FIXED),)
    return OrtFormat(styles, tuple(dict.fromkeys(platforms or ())) or (None,))
