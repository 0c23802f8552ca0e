"""Which nodes of a model draw random numbers that no seed from outside repeats."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final

import onnx

OWN_GENERATOR: Final = frozenset(
    {
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"),
        *("RandomUniform", "RandomUniformLike"),
    }
)
"""Operators whose kernel in ONNX Runtime keeps a generator of its own, seeded when it loads."""


def unrepeatable_operators(model: str | os.PathLike[str]) -> str | None:
    """Name a node that draws from a generator inside the session, None if there is none."""
    # Dropout without the attribute `seed` is none: it draws from the process's generator, which
    # `onnxruntime.set_seed` sets before every batch.
    proto = onnx.load(os.fspath(model), load_external_data=False)
    for node in _walk([proto.graph.node, *(function.node for function in proto.functions)]):
        if node.op_type in OWN_GENERATOR:
            return f"{node.op_type} '{node.name}'"
        if node.op_type == "Dropout" and any(a.name == "seed" for a in node.attribute):
            return f"Dropout '{node.name}' with the attribute seed"
    return None


def _walk(bodies: Iterable[Iterable[onnx.NodeProto]]) -> Iterator[onnx.NodeProto]:
    for body in bodies:
        for node in body:
            yield node
            for attribute in node.attribute:
                yield from _walk(graph.node for graph in (attribute.g, *attribute.graphs))
