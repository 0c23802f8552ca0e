"""``odtpack diff``, ``carry-over``, ``install``, ``sign``, ``verify``: a package on its way out."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Literal

from odtpack.cli import _console
from odtpack.cli._options import Count, Json

if TYPE_CHECKING:
    from odtpack.update.release import Installed


def diff(
    old: Path,
    new: Path,
    *,
    form: Literal["text", "json", "markdown"] = "text",
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Compare two packages. Say whether devices that trained the old one can continue.

    Shows differences in files, operators, settings, versions, inputs and parameters; what
    happens to trained checkpoints and to the optimizer's state; whether the app must change
    its calls; and whether a reduced build of ONNX Runtime must be rebuilt.

    Parameters:
        old OLD: Package on the devices now.
        new NEW: New package.
        form: How to print the difference.
        out FILE: File for the difference, instead of standard output.

    Examples:
        odtpack diff package new-package
        odtpack diff package new-package --format markdown > comment.md
    """
    from odtpack.cli._files import check_writable, write_text
    from odtpack.update.diff import diff_packages, headline, markdown, plain, sections

    if out is not None:
        check_writable(out, "--out", [old, new])
    found = diff_packages(old, new)
    if as_json or form == "json":
        write_text(_console.json_text(found.model_dump(mode="json")), out)
    elif form == "markdown" or out is not None:
        write_text(f"{markdown(found)}\n" if form == "markdown" else plain(found), out)
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


def carry_over(old: Path, new: Path, checkpoint: Path, *, out: Path) -> Json:
    """Carry a trained checkpoint over to a new package.

    Takes what odtpack diff says: trained parameters, running statistics, and the optimizer's state
    where the verdict is "compatible". The rest is that of the new package's checkpoint.

    Parameters:
        old OLD: Package that the checkpoint was trained with.
        new NEW: New package.
        checkpoint CK: Trained checkpoint.
        out CK: Checkpoint of the new package to write.
        json: Print what was carried over as JSON on stdout.

    Examples:
        odtpack carry-over package new-package trained.ckpt --out carried.ckpt
        odtpack train new-package --data digits.npz --resume carried.ckpt
    """
    from odtpack.cli._files import check_writable
    from odtpack.errors import some
    from odtpack.update.diff import diff_packages
    from odtpack_runtime import CheckpointState, Package
    from odtpack_runtime.checkpoint import state

    package = Package.open(new)
    check_writable(out, "--out", [checkpoint], outside=package)
    verdict = diff_packages(old, new).verdict
    fresh = CheckpointState.load_checkpoint(package.checkpoint)
    state.carry_over(
        CheckpointState.load_checkpoint(checkpoint),
        fresh,
        verdict.carry_over,
        optimizer_state=verdict.level == "compatible",
    )
    CheckpointState.save_checkpoint(fresh, out, include_optimizer_state=True)
    _console.wrote(out)
    if lost := [f"{each.parameter!r}: {each.why}" for each in verdict.problems]:
        _console.warn(f"trained parameters without a place in the new package: {some(lost)}")
    for reason in verdict.reset_reasons:
        _console.say(f"the state of the optimizer is reset: {reason}")
    return {"path": str(out), "level": verdict.level, "carried_over": [*verdict.carry_over]}


def install(
    package: Path, *, android: Path | None = None, ios: Path | None = None, ort: bool = False
) -> Json:
    """Copy what an app needs of a package into the app.

    These are its models, checkpoint and manifest. Unchanged files are not written again, so that
    the app's build stays up to date.

    Parameters:
        android DIR: Folder in the app's assets, for this package alone.
        ios DIR: Folder in the app's resources or bundle, for this package alone.
        ort: Copy the models in ORT format instead of the ONNX models.

    Examples:
        odtpack install package --android app/src/main/assets/odtpack
        odtpack install package --ios Resources/odtpack
    """
    from odtpack.errors import OdtpackError
    from odtpack.update.release import NO_COMPRESS
    from odtpack.update.release import install as copy

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
        _console.say(
            "  do not compress them in the APK, so that they can be mapped; in the app's build:"
        )
        _console.say(f"  android {{ androidResources {{ noCompress += listOf({ends}) }} }}")
    return {
        platform: {
            "path": str(installed.folder),
            "files": list(installed.names),
            "changed": installed.changed,
            **({"no_compress": list(NO_COMPRESS)} if platform == "android" else {}),
        }
        for platform, installed in done.items()
    }


def sign(
    package: Path | None = None,
    *,
    key: Path | None = None,
    new_key: Path | None = None,
    release: Count | None = None,
) -> Json:
    """Sign a package, or make a key pair. With both, sign with the new key.

    Writes manifest.sig: an Ed25519 signature of the manifest, which holds the hash of every
    other file. Needs the package cryptography: pip install cryptography.

    Parameters:
        key KEY.pem: Private key: PEM, PKCS #8, Ed25519.
        new_key KEY.pem: Write a new private key here, and its public key beside it, as KEY.pub.
        release: Release number, for apps that refuse older releases.

    Examples:
        odtpack sign --new-key key.pem
        odtpack sign package --key key.pem
    """
    from odtpack.cli._files import check_writable
    from odtpack.errors import OdtpackError
    from odtpack.update.release import new_key as make_key
    from odtpack.update.release import sign_package

    if package is None and new_key is None:
        what = "there is nothing to do: name a package, or a new key with --new-key"
        raise OdtpackError("nothing-to-sign", what)
    if (package is None or new_key is not None) and key is not None:
        raise OdtpackError(
            "option-not-used",
            "--key signs a package, and "
            + ("no package is named" if package is None else "--new-key names another key for it"),
            hint=f"odtpack sign PKG --key {quote(str(key))}",
        )
    if package is None and release is not None:
        what = "--release numbers a package, and no package is named"
        hint = f"odtpack sign PKG --release {release} --key key.pem"
        raise OdtpackError("option-not-used", what, hint=hint)
    public = signature = None
    if new_key is not None:
        check_writable(new_key, "--new-key", [])  # outside of packages, which are given away
        public = make_key(new_key)
        _console.wrote(f"{new_key} (private: keep it to yourself) and {public}")
    secret = new_key or key
    if secret is None:
        hint = f"odtpack sign {quote(str(package))} --key key.pem"
        raise OdtpackError("no-key", "signing needs a key, and no key is named", hint=hint)
    if package is not None:
        signature = sign_package(package, secret, release=release)
        _console.wrote(signature)
    paths = {"signature": signature, "private_key": new_key, "public_key": public}
    found = {name: None if path is None else str(path) for name, path in paths.items()}
    return found


_SIGNATURES = {
    "valid": "valid",
    "unchecked": "present, not checked: pass --public-key to check it",
    "none": "none",
}


def verify(
    package: Path,
    *,
    public_key: list[Path] | None = None,
    require_signature: bool = False,
    minimum_release: int | None = None,
    stranger: bool = False,
) -> Json:
    """Verify a package.

    Checks the signature, the manifest, the hash of every file, that there are no other files,
    that models and checkpoint match the manifest, and that the first training steps on
    generated data give the recorded losses. Exit code 2 reports the first problem.

    Parameters:
        public_key KEY.pub: Public key (PEM, Ed25519) that must verify the signature. May be
            repeated; one must match.
        require_signature: Refuse a package without a signature. Only --public-key checks who signed
            it.
        minimum_release N: Refuse an older release (odtpack sign --release).
        stranger: Check limits for untrusted packages: disk, memory, sizes, operator domains.

    Examples:
        odtpack verify package
        odtpack verify package --public-key key.pub
    """
    import dataclasses

    from odtpack_runtime.package.trust import Limits
    from odtpack_runtime.package.verify import verify_package
    from odtpack_simulator.values.units import format_bytes

    found = verify_package(
        package,
        public_key=public_key or None,
        require_signature=require_signature,
        minimum_release=minimum_release,
        limits=Limits() if stranger else None,
    )
    _console.results()
    steps = found.steps
    _console.say(f"verified {found.path}", style="bold")
    size = format_bytes(found.size_bytes)
    _console.say(f"  files       {found.files} listed and the manifest, {size}, no others")
    _console.say("  models      they and the checkpoint match the manifest")
    if steps is not None:
        shapes = ", ".join(f"{name} {shape}" for name, shape in steps.shapes.items())
        _console.say(f"  steps       run on ONNX Runtime {steps.onnxruntime} with {shapes}")
    _console.say(f"  signature   {_SIGNATURES[found.signature]}")
    if require_signature and found.signature == "unchecked":
        _console.warn(
            "the signature was not checked, and anyone can write one: --require-signature asks "
            "only whether there is one. Pass --public-key."
        )
    if found.release is not None:
        _console.say(f"  release     {found.release}")
    _console.say(f"  manifest    sha256 {found.manifest_sha256}")
    for index, what in enumerate(found.checked):
        _console.say(f"  {'checked' if index == 0 else '':<11} {what}")
    return dataclasses.asdict(found)
