"""Which operators a model in ORT format has, read without ONNX Runtime.

The format is ``onnxruntime/core/flatbuffers/schema/ort.fbs``; the numbers below are those of its
fields. A model optimized at run time also names operators that may take the place of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from odtpack_runtime.checkpoint.flatbuffer import Source, Table
from odtpack_runtime.errors import OdtpackError

_IDENTIFIER = b"ORTM"
_SESSION_MODEL, _MODEL_GRAPH = 1, 7
_INITIALIZERS, _NODES, _OPTIMIZATIONS = 0, 2, 8
_DOMAIN, _OPERATOR, _ATTRIBUTES = 2, 5, 10
_TENSOR, _GRAPH, _TENSORS, _GRAPHS = 6, 7, 11, 12
_RECORDS, _OF_OPTIMIZER, _PRODUCED = 0, 1, 3
_TENSOR_NAME, _EXTERNAL = 0, 6


class _Model(Source):
    """A model in ORT format, whose errors are those of a model."""

    def fail(self, reason: str) -> NoReturn:
        raise OdtpackError(
            "model-not-readable",
            f"{Path(self.where).name} is not a model in ORT format: {reason}.",
            where=self.where,
        )


def ort_operators(path: Path) -> set[tuple[str, str]]:
    """Return domain and type of every operator, ``ai.onnx`` for ONNX's own.

    Raises:
        OdtpackError: ``model-not-readable``; ``model-external-data`` if a tensor lies elsewhere.
    """
    found: set[tuple[str, str]] = set()
    with path.open("rb") as stream:
        source = _Model(stream, "model", str(path))
        model = source.root(_IDENTIFIER).table(_SESSION_MODEL)
        graph = None if model is None else model.table(_MODEL_GRAPH)
        if graph is None:
            source.fail("it has no graph")
        waiting = [graph]
        while waiting:
            graph = waiting.pop()
            for tensor in graph.tables(_INITIALIZERS):
                _check_inside(tensor, path)
            for node in graph.tables(_NODES):
                found.add((node.string(_DOMAIN) or "ai.onnx", node.string(_OPERATOR)))
                for attribute in node.tables(_ATTRIBUTES):
                    inner = attribute.table(_GRAPH)
                    waiting += [*([] if inner is None else [inner]), *attribute.tables(_GRAPHS)]
                    single = attribute.table(_TENSOR)
                    for tensor in (*([] if single is None else [single]),
                                   *attribute.tables(_TENSORS)):  # fmt: skip
                        _check_inside(tensor, path)
            found |= set(_produced(graph.table(_OPTIMIZATIONS)))
    return found


def _produced(optimizations: Table | None) -> Iterator[tuple[str, str]]:
    """Operators that optimizations at run time may put in, each ``domain:type:version``."""
    for entry in () if optimizations is None else optimizations.tables(_RECORDS):
        for record in entry.tables(_OF_OPTIMIZER):
            for text in record.strings(_PRODUCED):
                domain, _, rest = text.partition(":")
                yield domain or "ai.onnx", rest.partition(":")[0]


def _check_inside(tensor: Table, path: Path) -> None:
    if tensor.integer(_EXTERNAL, "q", default=-1) != -1:
        raise OdtpackError(
            "model-external-data",
            f"{path.name} reads its tensor {tensor.string(_TENSOR_NAME)!r} from another file, and "
            "the models of a package hold what they need.",
            where=str(path),
        )
