"""The models of a package's segments, read as the one model that they make up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from odtpack_runtime.package.checks.contradictions import contradiction, same
from odtpack_runtime.package.checks.onnx_files import Tensor, load_model, operators_of, values_of
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX, GRADIENT_SUFFIX
from odtpack_runtime.session.segments import segment_name

Operators = dict[str, dict[str, int]]


class SegmentModels:
    """The models of segments; none of them in a package with one model.

    Args:
        package: The package.

    Raises:
        OdtpackError: As :func:`load_model`; ``manifest-contradicts`` if the file of weights is not
            as long as the manifest says, or a model takes a weight as something else.
    """

    def __init__(self, package: Package) -> None:
        self._manifest = package.manifest
        info = self._manifest.segments
        self.models: dict[Path, Any] = {}
        self._parts: list[tuple[Path, Mapping[str, str], bool]] = []
        if info is None:
            return
        self._weights = {each.name: each for each in info.tensors}
        for name in info.files():
            path = package.path / name
            if name != info.weights:
                self.models[path] = load_model(path)
            elif info.tensors:
                end = info.tensors[-1].offset + info.tensors[-1].nbytes
                same(path, "its length", path.stat().st_size, end)
        for each in info.segments:
            self._parts.append((package.path / each.forward, each.names, False))
            if each.backward is not None:
                self._parts.append((package.path / each.backward, each.names, True))

    def operators(self, own: Operators, *, training: bool) -> Operators:
        """Operators of the whole that ends with a model that has ``own``."""
        found = {domain: dict(versions) for domain, versions in own.items()}
        for path in dict.fromkeys(path for path, _, _ in self._used(training)):
            model = self.models[path]
            opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
            for domain, versions in operators_of(model, opsets).items():
                found.setdefault(domain, {}).update(versions)
        return found

    def whole(
        self, model: Any, where: Path, *, training: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs of the whole that ends with a model.

        Returns:
            Without segments those of the model. Else the inputs that no segment makes and no file
            holds, the manifest's inputs and parameters first and in its order; the model's
            outputs, and the gradients of all.

        Raises:
            OdtpackError: ``manifest-contradicts`` if a weight is taken as something else.
        """
        ends = values_of(model.graph.input), values_of(model.graph.output)
        if not self._parts:
            return ends
        taken: dict[str, Tensor] = {}
        made: set[str] = set()
        gradients: list[Tensor] = []
        for path, names, backward in self._used(training):
            graph = self.models[path].graph
            self._take(values_of(graph.input), names, path, taken)
            outputs = _renamed(values_of(graph.output), names)
            made.update(name for name, _, _ in outputs if not backward)
            gradients += [each for each in outputs if each[0].endswith(GRADIENT_SUFFIX)]
        self._take(ends[0], {}, where, taken)
        first = [item.name for item in self._manifest.inputs]
        first += [item.name for item in self._manifest.parameters]
        order = [*(name for name in first if name in taken), *sorted(taken.keys() - set(first))]
        inputs = [
            taken[name]
            for name in order
            if name not in made and not name.endswith(COTANGENT_SUFFIX)
        ]
        outputs = [each for each in ends[1] if not each[0].endswith(COTANGENT_SUFFIX)]
        return inputs, [*outputs, *gradients]

    def _used(self, training: bool) -> Iterator[tuple[Path, Mapping[str, str], bool]]:
        return (part for part in self._parts if training or not part[2])

    def _take(
        self,
        inputs: list[Tensor],
        names: Mapping[str, str],
        where: Path,
        taken: dict[str, Tensor],
    ) -> None:
        """Note what a model reads besides weights, which are checked."""
        for name, dtype, dims in _renamed(inputs, names):
            weight = self._weights.get(name)
            if weight is None:
                taken.setdefault(name, (name, dtype, dims))
            elif (dtype, dims) != (weight.dtype, weight.shape):
                raise contradiction(
                    where, f"the weight {name!r}", (dtype, dims), (weight.dtype, weight.shape)
                )


def _renamed(values: list[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    return [(segment_name(names, name), dtype, dims) for name, dtype, dims in values]
