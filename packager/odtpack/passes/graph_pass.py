"""Passes of onnx-ir that are made of functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import onnx_ir as ir
from onnx_ir import passes

from odtpack.autodiff.registry import INTERNAL_DOMAIN
from odtpack.graph.ops import Ops

ALL: Final = "*"
"""Every internal operator."""


class GraphPass(passes.InPlacePass):
    """A pass over the main graph, in place.

    Args:
        rewrite: Changes the graph, which it takes after the writer if there is one. It
            returns whether it changed something; None counts as yes.
        op: Writer, which several passes may share: they share its constants then.
        lowers: Internal operator, or :data:`ALL`, of which no node is left afterwards.
    """

    def __init__(
        self, rewrite: Callable[..., object], op: Ops | None = None, *, lowers: str | None = None
    ) -> None:
        self._rewrite = rewrite if op is None else functools.partial(rewrite, op)
        self._op = op
        self._lowers = lowers
        self._name = f"{rewrite.__module__}.{rewrite.__qualname__}"

    def __str__(self) -> str:
        return self._name

    def requires(self, model: ir.Model) -> None:
        """The writer writes into the graph of this model."""
        if self._op is not None and self._op.graph is not model.graph:
            raise passes.PreconditionError(f"{self} has a writer for another graph")

    def call(self, model: ir.Model) -> passes.PassResult:
        """Rewrite the graph."""
        return passes.PassResult(model, self._rewrite(model.graph) is not False)

    def ensures(self, model: ir.Model) -> None:
        """No node is left of the operator that it lowers."""
        for node in model.graph if self._lowers else ():
            if node.domain == INTERNAL_DOMAIN and self._lowers in (node.op_type, ALL):
                raise passes.PostconditionError(f"{self} left a node {node.op_type}")


class ModelPass(passes.InPlacePass):
    """A pass over a whole model, in place, from a function that takes and returns it."""

    def __init__(self, rewrite: Callable[..., ir.Model], **options: Any) -> None:
        self._rewrite = functools.partial(rewrite, **options)

    def call(self, model: ir.Model) -> passes.PassResult:
        """Rewrite the model."""
        return passes.PassResult(self._rewrite(model), modified=True)


def run(model: ir.Model, *sequence: passes.PassBase) -> bool:
    """Run passes one after the other; return whether one changed the model.

    Unlike onnx-ir's ``Sequential`` it lets errors through as they are: they are for the user.
    """
    changed = False
    for each in sequence:
        changed |= each(model).modified
    return changed
