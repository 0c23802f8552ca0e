"""``odtpack sign``: a detached signature of a package, and keys to make it with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from odtpack.cli import _console


def sign(
    package: Annotated[
        Path | None,
        typer.Argument(metavar="[PKG]", show_default=False, help="Folder of the package."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY.pem", help="Private key: PEM, PKCS #8, Ed25519.", show_default=False
        ),
    ] = None,
    new_key: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY.pem",
            help="Make a private key here, and the public one beside it, as KEY.pub.",
            show_default=False,
        ),
    ] = None,
    release: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Number of this release, for apps that refuse to go back to an older one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Sign a package, or make a key pair to sign with; with both, sign with the new key.

    Writes manifest.sig: an Ed25519 signature of the manifest, which holds the hash of every
    other file. Needs the package cryptography: pip install 'odtpack[sign]'.
    """
    from odtpack.errors import OdtpackError
    from odtpack.update.signing import new_key as make_key
    from odtpack.update.signing import sign_package

    if package is None and new_key is None:
        raise OdtpackError(
            "nothing-to-sign", "there is neither a package to sign nor a key to make"
        )
    if (package is None or new_key is not None) and key is not None:
        raise OdtpackError(
            "option-not-used",
            "--key signs a package, and "
            + ("none is named" if package is None else "--new-key names another key for it"),
            hint=f"odtpack sign PKG --key {key}",
        )
    if package is None and release is not None:
        raise OdtpackError(
            "option-not-used",
            "--release gives a package its number, and none is named",
            hint=f"odtpack sign PKG --release {release} --key key.pem",
        )
    if new_key is not None:
        public = make_key(new_key)
        _console.say(f"wrote {new_key} (private: keep it to yourself) and {public}")
    if package is None:
        return
    secret = new_key or key
    if secret is None:
        raise OdtpackError(
            "no-key",
            "a package is signed with a key, and none is named",
            hint=f"odtpack sign {package} --key key.pem",
        )
    _console.say(f"wrote {sign_package(package, secret, release=release)}")
