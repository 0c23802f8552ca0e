"""LoRA on embeddings: the product of two thin matrices beside a frozen table.

    y = W[ids] + s (A^T)[ids] B^T

A is [rank, rows of the table] and zero, B is [width, rank] and drawn from a normal distribution,
as in PEFT, whose names they have. There is no dropout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import numpy as np
import onnx_ir as ir

from odtpack.adapters.layers import layer_name
from odtpack.adapters.low_rank import take_place
from odtpack.graph.graphs import LOOK_UP, dims_of, is_lifted_constant
from odtpack.graph.ops import Ops
from odtpack.model.exporters import module_names
from odtpack.spec import AdapterSpec

A, B = "lora_embedding_A", "lora_embedding_B"


@dataclasses.dataclass(frozen=True)
class Table:
    """An embedding; its uses share the table.

    Attributes:
        name: That of the table in the exported module, without ``.weight``.
        source: The initializer with the table, or with its codes.
        rows: How many there are.
        width: Numbers in a row.
        uses: What is looked up, and the rows that are found.
    """

    name: str
    source: ir.Value
    rows: int
    width: int
    uses: tuple[tuple[ir.Value, ir.Value], ...]

    def matches(self, patterns: Iterable[str]) -> bool:
        """Whether a pattern matches its name, or that of the stored table."""
        names = (self.name, str(self.source.name))
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def find_tables(graph: ir.Graph) -> list[Table]:
    """The embeddings of a graph, in the order in which they are read first."""
    modules = module_names(graph)
    found: dict[ir.Value, list[tuple[ir.Value, ir.Value]]] = {}
    for node in graph:
        gather = _gather(node)
        source = None if gather is None else gather.inputs[0]
        ids = None if gather is None else gather.inputs[1]
        if source is not None and ids is not None:
            found.setdefault(source, []).append((ids, node.outputs[0]))
    tables = []
    for source, uses in found.items():
        widths = {(dims_of(rows) or (None,))[-1] for _, rows in uses}
        width, count = widths.pop(), (dims_of(source) or (None,))[0]
        if not widths and isinstance(width, int) and isinstance(count, int):
            name = layer_name(str(source.name), modules)
            tables.append(Table(name, source, count, width, tuple(uses)))
    return tables


def _gather(node: ir.Node) -> ir.Node | None:
    """The look-up of rows of a stored matrix that ends in a node."""
    marked = LOOK_UP in node.metadata_props
    end: ir.Node | None = node
    while marked and end is not None and end.op_type != "Gather":
        end = None if end.inputs[0] is None else end.inputs[0].producer()
    if end is None or end.op_type != "Gather" or end.domain not in ("", "ai.onnx"):
        return None
    source = end.inputs[0]
    if source is None or not source.is_initializer() or len(dims_of(source) or ()) != 2:
        return None
    floats = source.dtype is not None and source.dtype.is_floating_point()
    plain = floats and not is_lifted_constant(source)
    return end if end.attributes.get_int("axis", 0) == 0 and (plain or marked) else None


def parameters(
    table: Table, spec: AdapterSpec, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """First values of the parameters on a table, by the end of their names, float64."""
    return {
        A: np.zeros((spec.rank, table.rows)),
        B: random.standard_normal((table.width, spec.rank)),
    }


def apply(op: Ops, table: Table, given: Mapping[str, ir.Value], spec: AdapterSpec) -> None:
    """Let the nodes that read rows of the table read the sum."""
    for ids, rows in table.uses:
        last = rows.producer()
        assert last is not None  # noqa: S101 - a look-up
        readers = [*rows.uses()]
        with op.after(last):
            through = op.Gather(op.transpose(given[A], 1, 0), ids, axis=0)
            added = op.MatMul(through, op.transpose(given[B], 1, 0))
            total = op.Add(rows, op.Mul(added, spec.scaling))
        take_place(rows, total, readers)
