"""``odtpack init``: a recipe for a model, to be edited."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import MODEL


def init(
    model: Annotated[Path, MODEL],
    out: Annotated[Path, typer.Option(metavar="recipe.toml", help="Recipe to write.")] = Path(
        "recipe.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace a recipe that is there.")] = False,
) -> None:
    """Write a recipe for a forward model, with everything optional commented out.

    It builds as it is: odtpack build --recipe recipe.toml. Beside it lies recipe.schema.json,
    from which editors complete and check the keys.
    """
    from odtpack.cli._files import check_writable
    from odtpack.errors import OdtpackError
    from odtpack.recipe.draft import SCHEMA_NAME, draft, schema_text
    from odtpack_runtime.files.atomic import atomic_write

    schema = out.with_name(SCHEMA_NAME)
    for path in (out, schema):
        check_writable(path, "--out")
    if out.exists() and not force:
        raise OdtpackError("recipe-exists", f"there is a file {str(out)!r} already")
    for path, text in ((schema, schema_text()), (out, draft(model, out.parent))):
        with atomic_write(path) as stream:
            stream.write(text.encode())
        _console.say(f"wrote {path}")
    _console.say(f"next: odtpack build --recipe {shlex.quote(str(out))}")
