"""``odtpack diff``: what differs between two packages, and what it means for devices."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import OLD_PACKAGE


class Format(StrEnum):
    """How the difference is shown."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def diff(
    old: Annotated[Path, OLD_PACKAGE],
    new: Annotated[
        Path,
        typer.Argument(metavar="NEW", show_default=False, help="Package that they would get."),
    ],
    form: Annotated[
        Format,
        typer.Option("--format", help="How to print the difference."),
    ] = Format.TEXT,
) -> None:
    """Compare two packages, and say whether devices that trained the old one go on.

    Shows what differs in files, operators, settings, versions, inputs and parameters; what
    happens to trained checkpoints and to the optimizer's state; whether the app must change
    its calls; and whether a reduced build of ONNX Runtime must be made again.
    """
    from odtpack.update.diff import diff_packages
    from odtpack.update.diff_text import headline, markdown, sections

    found = diff_packages(old, new)
    if form is Format.JSON:
        _console.print_json(found.model_dump(mode="json"))
    elif form is Format.MARKDOWN:
        sys.stdout.buffer.write(f"{markdown(found)}\n".encode())
        sys.stdout.flush()
    else:
        _console.results()
        _console.say(headline(found.verdict), style="bold")
        for section in sections(found):
            _console.say(section.title.lower(), style="bold")
            if section.header:
                _console.table(section.rows, section.header, figures=section.figures)
            else:
                for row in section.rows:
                    _console.say(f"  {row[0]}")
