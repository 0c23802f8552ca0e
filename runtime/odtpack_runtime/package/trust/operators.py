"""The operators of every model that a package holds, whatever its manifest says of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.checks.onnx_files import graphs_of, load_model
from odtpack_runtime.package.checks.ort_files import ort_operators
from odtpack_runtime.package.package import Package

_WRITTEN_BY_OPTIMIZERS = ("com.microsoft.nchwc", "com.ms.internal.nhwc")
"""Domains that ONNX Runtime's own optimizer uses in a model in ORT format."""


def check_operators(package: Package, domains: Collection[str]) -> None:
    """Check that no model has an operator of another domain.

    Args:
        package: The package.
        domains: The domains that are allowed.

    Raises:
        OdtpackError: ``package-limits``, naming the operator; as :func:`load_model` and
            :func:`ort_operators`.
    """
    files = package.manifest.files
    models = {key: file.path for key, file in files.named().items() if "checkpoint" not in key}
    of_role = ("ort_model", "inference_model", "segment_model")
    for path in (*models.values(), *(file.path for file in files.extra if file.role in of_role)):
        file = package.path / path
        in_ort_format = file.suffix == ".ort"
        allowed = {*domains, *(_WRITTEN_BY_OPTIMIZERS if in_ort_format else ())}
        found = ort_operators(file) if in_ort_format else _onnx_operators(file)
        for domain, operator in sorted(found):
            if domain not in allowed:
                raise OdtpackError(
                    "package-limits",
                    f"{path} has the operator {operator!r} of the domain {domain!r}, which is not "
                    "part of ONNX Runtime.",
                    where=str(package.path),
                )


def _onnx_operators(path: Path) -> set[tuple[str, str]]:
    graphs = graphs_of(load_model(path))
    return {(node.domain or "ai.onnx", node.op_type) for _, nodes in graphs for node in nodes}
