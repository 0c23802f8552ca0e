"""What is wrong with the user's model, where what was made of it cannot be derived or run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.inference import contradiction
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
_SOFT_LABELS: Final = (
    "labels are class numbers, as ArgMax gives them; for probabilities leave the loss out of the "
    "model: --loss kl_div --loss-option teacher=probabilities has the gradients of PyTorch's "
    "cross_entropy"
)


@contextmanager
def named_cause(model: ModelLike) -> Iterator[None]:
    """Say what contradicts itself in a model, in place of what followed from it."""
    # Only then: what the onnx library refuses may still run.
    try:
        yield
    except OdtpackError as error:
        if error.code not in _DOUBTFUL:
            raise
        source = open_model(model)
        given = ir.from_proto(source.proto)
        source.restore(given.graph)
        name_nodes(given.graph)
        found = _SAID.search(contradiction(given) or "")
        if found is None:
            raise
        operator, name, said = found.groups()
        raise OdtpackError(
            "invalid-model",
            f"the node {name!r} ({operator}) cannot be computed: {said}",
            hint=_SOFT_LABELS
            if operator in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
            else "correct the types and shapes of what it reads, and export the model again",
        ) from error
