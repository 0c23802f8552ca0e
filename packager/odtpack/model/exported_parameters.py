"""Which parameter of the module a node reads, by what an exporter noted.

Exporters store equal tensors once, so that the name of an initializer does not say which
parameters it stands for. torch.export lists the parameters of the module in the metadata of
the graph, each tied one once, and beside each node the call that it was exported from, with
the parameters that the call takes. Where that is missing, the module around the node and the
place among its inputs tell, see :func:`odtpack.model.exporters.origin`.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from odtpack.model.exporters import (
    RECURRENT,
    SCOPES,
    beside,
    fixed_role,
    is_generated,
    made_up,
    origin,
    role,
)

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_TENSOR = re.compile(r"^(\w+): (?:PARAMETER|BUFFER) target='([^']+)'", re.MULTILINE)
_CALL = "pkg.torch.onnx.fx_node"
_ARGUMENT = re.compile(r"%(\w+)")


class ExportedParameters:
    """What the exporter of a graph noted of the module's parameters.

    Args:
        graph: Forward graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._targets = dict(_TENSOR.findall(graph.metadata_props.get(_SIGNATURE, "")))
        self._names = set(self._targets.values())
        self._owners = {name.rpartition(".")[0] for name in self._names}
        self._made_up = made_up(graph)

    def named(self, name: str) -> bool:
        """Whether the exporter listed a parameter or buffer of this name."""
        return name in self._names

    def read(self, node: ir.Node, index: int) -> str | None:
        """The parameter that a node reads at a place among its inputs; None if unknown.

        The same for two places only if they read one parameter of the module.
        """
        value = node.inputs[index]
        if value is None:
            return None
        # An Identity or a Transpose may hand on what an exporter made up.
        made_up = value.name in self._made_up or is_generated(str(value.name))
        if made_up and fixed_role(node, index) is None:
            return None  # a factor, or another constant of the exporter
        called = self._called(node, index, made_up)
        if called is not None:
            return called
        if made_up and (owner := beside(node)) is not None:
            return owner
        label = origin(node, index)
        if label is None or (self._names and label.rpartition(".")[0] not in self._owners):
            return None  # another name of a module that is listed once
        return label

    def _called(self, node: ir.Node, index: int, made_up: bool) -> str | None:
        """Which of the parameters of the call that a node was exported from."""
        taken = self._taken(node)
        kind = role(node, index)
        if made_up or len(taken) > 1:
            owners = {name.rpartition(".")[0] for name in taken}
            if node.op_type in RECURRENT and len(owners) == 1:
                return f"{owners.pop()}.{kind}"  # computed from several parameters of it
            taken = {each for each in taken if kind is not None and each.endswith(kind)}
        return taken.pop() if len(taken) == 1 else None

    def bias(self, node: ir.Node) -> str | None:
        """The one bias that the call takes that a node was exported from."""
        taken = [name for name in self._taken(node) if name.endswith("bias")]
        return taken[0] if len(taken) == 1 else None

    def _taken(self, node: ir.Node) -> set[str]:
        """Parameters that the call takes that a node was exported from."""
        call = node.metadata_props.get(_CALL, "").partition("](")[2]
        return {self._targets[a] for a in _ARGUMENT.findall(call) if a in self._targets}


def noted(node: ir.Node) -> bool:
    """Whether torch.export noted the modules around a node."""
    return SCOPES in node.metadata_props
