"""What a package from somebody else may ask of a device before anything of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest import Manifest

STANDARD_DOMAINS = ("ai.onnx", "ai.onnx.ml", "com.microsoft")
"""Operators of these domains are ONNX Runtime's own; others need a library beside it."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what the manifest of a package declares.

    Whatever keeps within them runs operators of ONNX Runtime alone, and takes memory in
    proportion to what is written here.

    Attributes:
        domains: Operator domains that models may use.
        disk_bytes: All files together.
        state_bytes: Parameters, gradients and the optimizer's vectors together.
        input_elements: Elements of one input whose shape is fixed.
        tensors: Parameters, inputs and outputs together.
    """

    domains: Collection[str] = STANDARD_DOMAINS
    disk_bytes: int = 4 * 2**30
    state_bytes: int = 4 * 2**30
    input_elements: int = 2**26
    tensors: int = 20_000

    def check(self, manifest: Manifest, where: str) -> None:
        """Check a manifest.

        Args:
            manifest: The manifest.
            where: The package, for messages.

        Raises:
            OdtpackError: ``package-limits``, naming the first bound that it breaks.
        """
        for what, found, bound in (
            ("bytes of files", sum(file.size_bytes for file in manifest.files.all()),
             self.disk_bytes),
            ("bytes of parameters and what trains them", _state_bytes(manifest),
             self.state_bytes),
            ("elements in an input", _input_elements(manifest), self.input_elements),
            ("parameters, inputs and outputs", _tensors(manifest), self.tensors),
        ):  # fmt: skip
            if found > bound:
                raise _beyond(f"It has {found} {what}, and at most {bound} are allowed.", where)
        foreign = sorted(_domains(manifest) - set(self.domains))
        if foreign:
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


def _tensors(manifest: Manifest) -> int:
    return len(manifest.parameters) + len(manifest.inputs) + len(manifest.all_outputs)


def _domains(manifest: Manifest) -> set[str]:
    return {domain for domains in manifest.operators.by_model().values() for domain in domains}


def _beyond(problem: str, where: str) -> OdtpackError:
    return OdtpackError("package-limits", problem, where=where)
