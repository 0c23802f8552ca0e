"""``odtpack install``: a package into the resources of an app."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import AS_JSON, PACKAGE

if TYPE_CHECKING:
    from odtpack.update.install import Installed


def install(
    package: Annotated[Path, PACKAGE],
    android: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of its own in the app's assets."),
    ] = None,
    ios: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of its own in the app's resources or bundle."),
    ] = None,
    ort: Annotated[
        bool, typer.Option("--ort", help="The models in ORT format in place of the ONNX models.")
    ] = False,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Copy what a phone needs of a package into an app: models, checkpoint and manifest.

    Files that are there already are not written again, so that the app's build stays up to
    date.
    """
    from odtpack.errors import OdtpackError
    from odtpack.update.install import NO_COMPRESS
    from odtpack.update.install import install as copy

    folders = {"android": android, "ios": ios}
    wanted = {platform: folder for platform, folder in folders.items() if folder is not None}
    if not wanted:
        raise OdtpackError("usage", "--android or --ios is missing", hint="odtpack install --help")
    done: dict[str, Installed] = {}
    for platform, folder in wanted.items():
        done[platform] = copy(package, folder, ort=ort)
        verb = "installed into" if done[platform].changed else "unchanged"
        _console.say(f"{verb} {folder}", style="bold")
    if "android" in done and done["android"].changed:
        ends = ", ".join(f'"{end}"' for end in NO_COMPRESS)
        _console.say("  the app must not compress them, to map them from the APK; in its build:")
        _console.say(f"  android {{ androidResources {{ noCompress += listOf({ends}) }} }}")
    if as_json:
        _console.print_json(
            {
                platform: {
                    "path": str(installed.folder),
                    "files": list(installed.names),
                    "changed": installed.changed,
                    **({"no_compress": list(NO_COMPRESS)} if platform == "android" else {}),
                }
                for platform, installed in done.items()
            }
        )
