"""``odtpack verify``: that a package is whole, unaltered, true to its manifest, and trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console
from odtpack.cli._options import AS_JSON, PACKAGE

_SIGNATURES = {
    "valid": "valid",
    "unchecked": "there, not checked: pass --public-key to check it",
    "none": "none",
}


def verify(
    package: Annotated[Path, PACKAGE],
    public_key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="KEY.pub",
            help="Public key (PEM, Ed25519) that the package must be signed with; of several, "
            "one must be right.",
            show_default=False,
        ),
    ] = None,
    require_signature: Annotated[
        bool,
        typer.Option(
            "--require-signature",
            help="Refuse a package without a signature, also where no key is passed.",
        ),
    ] = False,
    minimum_release: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Refuse an older release (odtpack sign --release).",
            show_default=False,
        ),
    ] = None,
    stranger: Annotated[
        bool,
        typer.Option(
            "--stranger",
            help="Hold the package to limits of disk, memory, sizes and operator domains.",
        ),
    ] = False,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Verify a package.

    Checks the signature, the manifest, the hash of every file, that there are no others,
    that models and checkpoint are what the manifest says, and that the first training steps on
    made-up data give the losses that they gave when the package was built. Exit code 2 says
    what is wrong first.
    """
    import dataclasses

    from odtpack_runtime.package.trust.limits import Limits
    from odtpack_runtime.package.verify import verify_package
    from odtpack_simulator.values.units import format_bytes

    found = verify_package(
        package,
        public_key=public_key or None,
        require_signature=require_signature,
        minimum_release=minimum_release,
        limits=Limits() if stranger else None,
    )
    _console.results(as_json=as_json)
    steps = found.steps
    shapes = ", ".join(f"{name} {shape}" for name, shape in steps.shapes.items())
    _console.say(f"verified {found.path}", style="bold")
    _console.say(f"  files       {found.files} listed, {format_bytes(found.size_bytes)}, no others")
    _console.say("  models      as the manifest says, and so is the checkpoint")
    _console.say(f"  steps       run on ONNX Runtime {steps.onnxruntime} with {shapes}")
    _console.say(f"  signature   {_SIGNATURES[found.signature]}")
    if found.release is not None:
        _console.say(f"  release     {found.release}")
    _console.say(f"  manifest    sha256 {found.manifest_sha256}")
    for index, what in enumerate(found.checked):
        _console.say(f"  {'checked' if index == 0 else '':<11} {what}")
    if as_json:
        _console.print_json(dataclasses.asdict(found))
