"""Whether a package can be trusted: its signature, and limits for packages of strangers."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.checks import graphs_of, load_model, ort_operators
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.native import check_functions
from odtpack_runtime.package.package import Package, signature_path
from odtpack_runtime.session.model_file import is_in_ort_format
from odtpack_runtime.session.native import DOMAIN as NATIVE

SIGNATURE_BYTES = 64
_MOST_KEY_BYTES = 64 * 2**10


KeyFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A file with a public key, or several of them, any of which will do."""


def check_signature(data: bytes, signature: bytes, public_key: KeyFiles, where: str) -> Path:
    """Check a signature."""
    # `public_key`: File with the public key: PEM, SubjectPublicKeyInfo, Ed25519. Of several one
    # must be right: while keys are changed an app trusts the old and the new one.
    # Returns the file of the key that is right.
    several = public_key if isinstance(public_key, Sequence) else [public_key]
    paths = [Path(public_key)] if isinstance(public_key, str) else [Path(key) for key in several]
    for path in paths:
        if _is_signed_with(path, data, signature):
            return path
    names = " or ".join(map(str, paths))
    raise OdtpackError(
        "signature-wrong",
        f"The manifest was not signed with the key that belongs to {names}, or was changed since.",
        where=where,
    )


def _is_signed_with(path: Path, data: bytes, signature: bytes) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise cryptography_missing() from error
    try:
        key = load_pem_public_key(read_key_file(path))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise key_error(path, "public", str(error)) from error
    if not isinstance(key, Ed25519PublicKey):
        raise key_error(path, "public", "it uses another algorithm")
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def read_key_file(path: Path) -> bytes:
    """Read a small file that holds a key."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_MOST_KEY_BYTES + 1)
    except OSError as error:
        what = f"The key {path} cannot be read: {error.strerror or error}."
        raise OdtpackError("key-not-readable", what) from error
    if len(data) > _MOST_KEY_BYTES:
        raise key_error(path, "PEM", f"it has more than {_MOST_KEY_BYTES} bytes")
    return data


def key_error(path: Path, kind: str, reason: str) -> OdtpackError:
    """Return the error for a file that is not a key of the wanted kind."""
    first = reason.splitlines()[0].rstrip(".?") if reason else "it cannot be read"
    return OdtpackError("bad-key", f"{path} is not an Ed25519 {kind} key in a PEM file: {first}.")


def cryptography_missing() -> OdtpackError:
    """Return the error for a system without the library that signs and checks."""
    what = "Signatures need the package cryptography, which is not installed."
    return OdtpackError("cryptography-missing", what)


# What a package from somebody else may ask of a device before anything of it is loaded.

STANDARD_DOMAINS = ("ai.onnx", "ai.onnx.ml", "com.microsoft", NATIVE)
"""Operators of these domains are ONNX Runtime's own, or functions; others need a library beside it.
"""


@dataclass(frozen=True)
class Limits:
    """Bounds of what the manifest of a package declares.

    Whatever keeps within them runs operators of ONNX Runtime alone, and takes memory in
    proportion to what is written here.
    """

    domains: Collection[str] = STANDARD_DOMAINS  # operator domains that models may use
    disk_bytes: int = 4 * 2**30  # all files together
    state_bytes: int = 4 * 2**30  # parameters, gradients and the optimizer's vectors together
    input_elements: int = 2**26  # of one input whose shape is fixed
    tensors: int = 20_000  # parameters, inputs and outputs together

    def check(self, manifest: Manifest, where: str) -> None:
        """Check a manifest; the error ``package-limits`` names the first bound that it breaks."""
        tensors = (*manifest.parameters, *manifest.inputs, *manifest.all_outputs)
        fixed = ([dim for dim in each.shape if isinstance(dim, int)] for each in manifest.inputs)
        sizes = map(math.prod, fixed)
        for what, found, bound in (
            ("bytes of files", sum(file.size_bytes for file in manifest.files.all()),
             self.disk_bytes),
            ("bytes of parameters and what trains them", _state_bytes(manifest),
             self.state_bytes),
            ("elements in an input", max(sizes, default=0), self.input_elements),
            ("parameters, inputs and outputs", len(tensors), self.tensors),
        ):  # fmt: skip
            if found > bound:
                raise _beyond(f"It has {found} {what}, and at most {bound} are allowed.", where)
        used = {name for domains in manifest.operators.by_model().values() for name in domains}
        if foreign := sorted(used - set(self.domains)):
            raise _beyond(
                f"Its models use operators of the domain {foreign[0]!r}, which are not part of "
                "ONNX Runtime.",
                where,
            )


def _state_bytes(manifest: Manifest) -> int:
    """Parameters once, and each flat vector of the training: gradients and moments."""
    parameters = sum(
        # numpy has no types of more than eight bytes that a checkpoint could hold
        math.prod(item.shape) * 8 if item.size_bytes is None else item.size_bytes
        for item in manifest.parameters
    )
    if manifest.layout is None:
        return parameters * 4
    itemsize = 8 if manifest.layout.dtype == "float64" else 4
    return parameters + manifest.layout.elements * itemsize * (1 + len(manifest.layout.state))


def _beyond(problem: str, where: str) -> OdtpackError:
    return OdtpackError("package-limits", problem, where=where)


# The operators of every model that a package holds, whatever its manifest says.

_WRITTEN_BY_OPTIMIZERS = ("com.microsoft.nchwc", "com.ms.internal.nhwc")
"""Domains that ONNX Runtime's own optimizer uses in a model in ORT format."""


def check_operators(package: Package, domains: Collection[str]) -> None:
    """Check that no model has an operator of another domain."""
    files = package.manifest.files
    models = {key: file.path for key, file in files.named().items() if "checkpoint" not in key}
    of_role = ("ort_model", "inference_model", "segment_model", "decoder_model")
    decoders = {file.path for file in files.extra if file.role == "decoder_model"}
    for path in (*models.values(), *(file.path for file in files.extra if file.role in of_role)):
        file = package.path / path
        in_ort_format = is_in_ort_format(file)
        # A file in ORT format has no bodies that its native nodes could be held against.
        allowed = {*domains} - {NATIVE} | {*_WRITTEN_BY_OPTIMIZERS} if in_ort_format else {*domains}
        allowed |= {"com.microsoft"} if path in decoders else set()
        beside = package.decoder_weights if path in decoders else ()
        found = ort_operators(file) if in_ort_format else _onnx_operators(file, beside)
        for domain, operator in sorted(found):
            if domain not in allowed:
                raise OdtpackError(
                    "package-limits",
                    f"{path} has the operator {operator!r} of the domain {domain!r}, which is not "
                    "part of ONNX Runtime.",
                    where=str(package.path),
                )


def _onnx_operators(path: Path, beside: Collection[str]) -> set[tuple[str, str]]:
    model = load_model(path, beside)
    check_functions(model, str(path))
    graphs = graphs_of(model)
    return {(node.domain or "ai.onnx", node.op_type) for _, nodes in graphs for node in nodes}


# Where a package comes from: who signed it, and which release it is.


def check_release(manifest: Manifest, minimum: int, where: str) -> None:
    """Refuse a package that is older than it may be."""
    if manifest.release is None or manifest.release < minimum:
        found = "has no release number" if manifest.release is None else f"is {manifest.release}"
        what = f"The package's release must be {minimum} or later, and it {found}."
        raise OdtpackError("package-downgrade", what, where=where)


def check_signed(
    manifest: Path, data: bytes, public_key: KeyFiles | None, required: bool
) -> Path | None:
    """Check the signature that lies beside a manifest."""
    # `public_key`: as for check_signature; None checks only that it is one.
    # `required`: whether there must be one, also where no key is passed.
    # Returns the file of the key that it is valid for; None without a key.
    path = signature_path(manifest)
    if not os.path.lexists(path):
        if public_key is None and not required:
            return None
        what = f"The package has no signature: there is no {path.name}."
        hint = f"odtpack sign {quote(str(manifest.parent))} --key key.pem"
        raise OdtpackError("not-signed", what, where=str(manifest.parent), hint=hint)
    signature = b""
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as stream:
            signature = stream.read(SIGNATURE_BYTES + 1)
    if len(signature) != SIGNATURE_BYTES:
        what = f"{path.name} is not a signature: it must be a file of {SIGNATURE_BYTES} bytes."
        hint = f"odtpack sign {quote(str(manifest.parent))} --key key.pem"
        raise OdtpackError("signature-wrong", what, where=str(path), hint=hint)
    if public_key is None:
        return None
    return check_signature(data, signature, public_key, str(path))
