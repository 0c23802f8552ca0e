"""Limits for untrusted packages."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.checks import ort_operators
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.manifest_signature import SIGNATURE_BYTES, KeyFiles, check_signature
from odtpack_runtime.package.native import check_functions
from odtpack_runtime.package.onnx_files import graphs_of, load_model
from odtpack_runtime.package.package import Package, signature_path
from odtpack_runtime.session.native import DOMAIN as NATIVE

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
        for what, found, bound in (
            ("bytes of files", sum(file.size_bytes for file in manifest.files.all()),
             self.disk_bytes),
            ("bytes of parameters and what trains them", _state_bytes(manifest),
             self.state_bytes),
            ("elements in an input", _input_elements(manifest), self.input_elements),
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


def _input_elements(manifest: Manifest) -> int:
    shapes = [item.shape for item in manifest.inputs]
    sizes = [math.prod(dim for dim in shape if isinstance(dim, int)) for shape in shapes]
    return max(sizes, default=0)


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
        in_ort_format = file.suffix == ".ort"
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
        raise OdtpackError(
            "package-downgrade",
            f"The package's release must be {minimum} or later, and it {found}.",
            where=where,
        )


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
        raise OdtpackError(
            "not-signed",
            f"The package has no signature: there is no {path.name}.",
            where=str(manifest.parent),
            hint=f"odtpack sign {manifest.parent} --key key.pem",
        )
    signature = b""
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as stream:
            signature = stream.read(SIGNATURE_BYTES + 1)
    if len(signature) != SIGNATURE_BYTES:
        raise OdtpackError(
            "signature-wrong",
            f"{path.name} is not a signature: it must be a file of {SIGNATURE_BYTES} bytes.",
            where=str(path),
            hint=f"odtpack sign {manifest.parent} --key key.pem",
        )
    if public_key is None:
        return None
    return check_signature(data, signature, public_key, str(path))
