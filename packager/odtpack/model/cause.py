"""What is wrong with the user's model, where what was made of it cannot be derived or run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.graphs import nodes_of
from odtpack.graph.inference import contradiction
from odtpack.model.exporters import module_names
from odtpack.model.loading import name_nodes
from odtpack.model.source import ModelLike, open_model

_DOUBTFUL: Final = {
    "unknown-rank", "unknown-shape", "unknown-type", "ambiguous-shape", "models-do-not-run",
    "ort-conversion-failed",
}  # fmt: skip
"""Codes of errors that a model may cause which contradicts itself."""
_SAID: Final = re.compile(
    r"\(op_type:([^,]*), node name: (.*?)\): (?:\[\w+\] )?([^\n]*)", re.DOTALL
)
_QUOTED: Final = re.compile(r"'([^']+)'")
_SOFT_LABELS: Final = (
    "labels are class numbers, as ArgMax gives them; for probabilities leave the loss out of the "
    "model: --loss cross_entropy --loss-option labels=probabilities is PyTorch's"
)


@contextmanager
def named_cause(model: ModelLike) -> Iterator[None]:
    """Let errors name what is in the user's model, and what contradicts itself there."""
    # Only then: what the onnx library refuses may still run.
    try:
        yield
    except OdtpackError as error:
        given = None
        with suppress(OdtpackError, ir.serde.SerdeError):  # it cannot be read: that is the error
            source = open_model(model)
            given = ir.from_proto(source.proto)
            source.restore(given.graph)
            name_nodes(given.graph)
        if given is None:
            raise
        found = _SAID.search(contradiction(given) or "") if error.code in _DOUBTFUL else None
        if found is None:
            _speak_of(given.graph, error)
            raise
        operator, name, said = found.groups()
        raise OdtpackError(
            "invalid-model",
            f"the node {name!r} ({operator}) cannot be computed: {said}",
            where=error.where,
            hint=_SOFT_LABELS
            if operator in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
            else "correct the types and shapes of what it reads, and export the model again",
        ) from error


def _speak_of(graph: ir.Graph, error: OdtpackError) -> None:
    """Put the node of a graph in the place of one that was made of it, and names of modules."""
    nodes = {node.name for node in nodes_of(graph)}
    known = nodes | set(graph.initializers) | {v.name for n in nodes_of(graph) for v in n.outputs}

    def own(found: re.Match[str]) -> str:
        name = found[1]
        parts = [] if name in known else name.split("/")
        starts = ("/".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        return f"'{next((start for start in starts if start in nodes), name)}'"

    error.what = _QUOTED.sub(own, error.what)
    error.where = error.where and _QUOTED.sub(own, error.where)
    modules = module_names(graph) if error.hint else {}
    error.hint = error.hint and _QUOTED.sub(
        lambda found: f"'{modules.get(found[1], found[1])}'", error.hint
    )
