"""``odtpack delta`` and ``odtpack apply``: bring packages up to date with what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import OLD_PACKAGE


def delta(
    old: Annotated[Path, OLD_PACKAGE],
    new: Annotated[
        Path, typer.Argument(metavar="NEW", show_default=False, help="Package to make of it.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The update.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the update holds as JSON on stdout.")
    ] = False,
) -> None:
    """Write one file that makes the new package of the old one.

    It is a zip file of the files that changed. The same packages give the same bytes.
    """
    from odtpack.cli._files import check_writable
    from odtpack.update.update_archive import write_update
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.values.units import format_bytes

    for package in (old, new):
        check_writable(out, "--out", outside=Package.open(package))
    made = write_update(old, new, out)
    share = made.size_bytes / made.package_bytes
    _console.say(
        f"wrote {out}: {format_bytes(made.size_bytes)}, {share:.1%} of the package", style="bold"
    )
    stored = made.stored_bytes
    for file in made.index.files:
        word = "whole" if file.path in stored else "unchanged"
        size = format_bytes(stored.get(file.path, 0))
        _console.say(f"  {file.path:<24} {word:<13}{size:>10}")
    if as_json:
        files = [
            {
                "path": file.path,
                "kind": "whole" if file.path in stored else "copy",
                "size_bytes": file.size_bytes,
                "stored_bytes": stored.get(file.path, 0),
            }
            for file in made.index.files
        ]
        _console.print_json(
            {
                "path": str(out),
                "size_bytes": made.size_bytes,
                "package_bytes": made.package_bytes,
                "files": files,
            }
        )


def apply(
    package: Annotated[
        Path,
        typer.Argument(
            metavar="PKG", show_default=False, help="Package that the update starts from."
        ),
    ],
    update: Annotated[
        Path,
        typer.Argument(metavar="DELTA", show_default=False, help="File of odtpack delta."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="NEWPKG",
            help="New folder for the new package. Default: it takes the place of PKG.",
        ),
    ] = None,
    public_key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="KEY.pub",
            help="Public key that the new package must be signed with; of several, one.",
            show_default=False,
        ),
    ] = None,
    refuse_downgrade: Annotated[
        bool,
        typer.Option("--refuse-downgrade", help="Refuse an older release than PKG's."),
    ] = False,
) -> None:
    """Make the new package of an update, whole or not at all.

    The package must be exactly the one that the update starts from; the result is exactly the
    one that it was made for.
    """
    from odtpack_runtime.package.apply_update import apply_update

    made = apply_update(
        package, update, out, public_key=public_key or None, refuse_downgrade=refuse_downgrade
    )
    _console.say(f"{made} is the new package", style="bold")
