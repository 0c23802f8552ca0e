"""Finds where a forward graph can be cut: values that every path from its input to the loss takes.

    x ──► block ──► x1 ──► block ──► x2 ──► head ──► loss          cut at x, x1 and x2
          ▲                ▲
    masks, rotary tables ──┘                                       context, computed once

In a network with residual sums these are the sums. They are the post-dominators of what reads the
input, found as by Cooper, Harvey and Kennedy (2001, A simple, fast dominance algorithm): a graph
without cycles takes one pass.

What depends on the data and on no parameter, and is read by several pieces, is computed by a piece
of its own, the prelude; so is the value that the first block reads, for that block to be like the
others. What depends on constants alone belongs to each piece that reads it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from odtpack.autodiff.backward import FLOATS, ancestors, dependents, influences
from odtpack.autodiff.unpack_late import SMALLEST
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import reads


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of a graph.

    Attributes:
        start: The value that the piece before gives it, whose gradient it gives back; of the
            prelude, and where the first block cannot be told from it, None.
        end: Its result, whose gradient it takes; None of the prelude.
        inputs: What it reads: graph inputs and values of other pieces, ``start`` among them.
        outputs: What others read of it, ``end`` among them.
    """

    start: ir.Value | None
    end: ir.Value | None
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]


def cut(graph: ir.Graph, trained: Sequence[ir.Value]) -> list[Piece]:
    """Cut a graph into pieces, in the order in which they are computed.

    Args:
        graph: Ends in the loss; sorted, without unused nodes, its parameters being inputs.
        trained: The inputs to train.

    Returns:
        The pieces: the prelude, if anything is for it, those in between, and the one that
        computes the loss.

    Raises:
        OdtpackError: There is no place to cut (``segments-not-found``), or a parameter is read on
            both sides of one (``segments-unsupported``).
    """
    loss = graph.outputs[0]
    flow = dependents(graph, trained) & influences(graph, [loss])
    readers = _readers(graph)
    constant = _constants(graph)
    stream = _stream(graph, trained, readers, constant)
    before = [value for value in stream if value not in flow]
    start = before[-1] if before else None
    cuts = [value for value in stream if value in flow]
    cuts = _without_leaks(cuts, _owners(graph, [*cuts, loss]), flow, readers)
    cuts = _worthwhile(cuts, _owners(graph, [*cuts, loss]), trained)
    if not cuts:
        raise OdtpackError(
            "segments-not-found",
            "no value of the model lies on every path from its input to the loss, with something "
            "trained before it and a matrix on either side: there is no place to cut it",
            hint="leave --segments out",
        )
    owner = _owners(graph, [*cuts, loss])
    shared = _shared(graph, owner, flow, readers, constant)
    for node in ancestors([*shared, *(() if start is None else (start,))], graph):
        owner[node] = -1
    _check_shared(trained, owner, readers)
    ends: dict[int, ir.Value] = {**dict(enumerate(cuts)), len(cuts): loss}
    starts: dict[int, ir.Value | None] = {0: start, **{i + 1: v for i, v in enumerate(cuts)}}
    return [
        piece
        for index in sorted({-1, *ends})
        if (piece := _piece(graph, index, owner, constant, starts, ends)) is not None
    ]


def _readers(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    found: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        for value in dict.fromkeys(reads(node)):
            found.setdefault(value, []).append(node)
    return found


def _constants(graph: ir.Graph) -> set[ir.Node]:
    """Nodes that depend on no input."""
    fixed = {v for v in graph.initializers.values() if not v.is_graph_input()}
    found = set()
    for node in graph:
        if all(value in fixed for value in reads(node)):
            fixed.update(node.outputs)
            found.add(node)
    return found


def _post_dominators(
    nodes: Sequence[ir.Node],
    successors: Mapping[ir.Node, Collection[ir.Node]],
    position: Mapping[ir.Node, int],
) -> dict[ir.Node, ir.Node | None]:
    """The next node that all paths from a node take; None where there is none."""
    found: dict[ir.Node, ir.Node | None] = {}

    def meet(a: ir.Node | None, b: ir.Node | None) -> ir.Node | None:
        while a is not b:
            if a is None or b is None:
                return None
            if position[a] < position[b]:
                a = found.get(a)
            else:
                b = found.get(b)
        return a

    for node in reversed(nodes):
        following = [each for each in successors[node] if each in found]
        if not following:
            found[node] = None
            continue
        common: ir.Node | None = following[0]
        for each in following[1:]:
            common = meet(common, each)
        found[node] = common
    return found


def _stream(
    graph: ir.Graph,
    trained: Collection[ir.Value],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
    constant: Collection[ir.Node],
) -> list[ir.Value]:
    """Values that all data of an input pass through, for the input that has most of them.

    Others, as positions and masks, have few: each block reads what is made of them.
    """
    position = {node: place for place, node in enumerate(graph)}
    given = {value for value in graph.inputs if value not in trained}
    ends = influences(graph, graph.outputs[:1])
    longest: list[ir.Value] = []
    for source in graph:
        if source in constant or given.isdisjoint(reads(source)):
            continue
        reached = dependents(graph, source.outputs) & (ends | {*source.outputs})
        nodes = [node for node in graph if any(y in reached for y in node.outputs)]
        inside = set(nodes)
        successors = {
            node: [
                r for y in node.outputs if y in reached for r in readers.get(y, ()) if r in inside
            ]
            for node in nodes
        }
        following = _post_dominators(nodes, successors, position)
        node: ir.Node | None = source
        found = []
        while node is not None:
            made = [y for y in node.outputs if y in reached]
            if len(made) == 1 and made[0].dtype in FLOATS and made[0] not in graph.outputs:
                found.append(made[0])
            node = following.get(node)
        longest = max(longest, found, key=len)
    return longest


def _owners(graph: ir.Graph, ends: Sequence[ir.Value]) -> dict[ir.Node, int]:
    """The first of some ends that needs a node, for each node that one needs."""
    owner: dict[ir.Node, int] = {}
    for index, end in enumerate(ends):
        stack = [end.producer()]
        while stack:
            node = stack.pop()
            if node is None or node in owner or node.graph is not graph:
                continue
            owner[node] = index
            stack.extend(value.producer() for value in reads(node))
    return owner


def _without_leaks(
    cuts: Sequence[ir.Value],
    owner: Mapping[ir.Node, int],
    flow: Collection[ir.Value],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
) -> list[ir.Value]:
    """Cuts that no other value with a gradient crosses."""
    bad: set[int] = set()
    for node, index in owner.items():
        for value in node.outputs:
            if value not in flow:
                continue
            last = max((owner.get(reader, index) for reader in readers.get(value, ())), default=0)
            own = index < len(cuts) and cuts[index] is value
            bad.update(range(index + own, last))
    return [value for index, value in enumerate(cuts) if index not in bad]


def _worthwhile(
    cuts: Sequence[ir.Value], owner: Mapping[ir.Node, int], trained: Collection[ir.Value]
) -> list[ir.Value]:
    """Cuts with a matrix between each and the one before, and after the last."""
    heavy = {
        index
        for node, index in owner.items()
        if any(value in trained or _is_matrix(value) for value in reads(node))
    }
    found: list[ir.Value] = []
    last = max(heavy, default=0)
    pending = False
    for index, value in enumerate(cuts[:last]):
        pending |= index in heavy
        if pending:
            found.append(value)
            pending = False
    return found


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        value.is_initializer()
        and tensor is not None
        and len(tensor.shape) >= 2
        and math.prod(tensor.shape.numpy()) >= SMALLEST
    )


def _shared(
    graph: ir.Graph,
    owner: Mapping[ir.Node, int],
    flow: Collection[ir.Value],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
    constant: Collection[ir.Node],
) -> list[ir.Value]:
    """Values of the first piece that the data decide alone, and that others read too."""
    depends = _after_parameters(graph, flow)
    return [
        value
        for node, index in owner.items()
        if index == 0 and node not in constant and node not in depends
        for value in node.outputs
        if any(owner.get(reader, 0) > 0 for reader in readers.get(value, ()))
    ]


def _after_parameters(graph: ir.Graph, flow: Collection[ir.Value]) -> set[ir.Node]:
    """Nodes that read what depends on a trained parameter, whatever they make of it."""
    reached = set(flow)
    found = set()
    for node in graph:
        if any(value in reached for value in reads(node)):
            reached.update(node.outputs)
            found.add(node)
    return found


def _check_shared(
    trained: Iterable[ir.Value],
    owner: Mapping[ir.Node, int],
    readers: Mapping[ir.Value, Sequence[ir.Node]],
) -> None:
    for value in trained:
        if len({owner[reader] for reader in readers.get(value, ()) if reader in owner}) > 1:
            raise OdtpackError(
                "segments-unsupported",
                f"{value.name!r} is read by several segments, and each would give a gradient of "
                "its own",
                hint="leave --segments out, or --untie it",
            )


def _piece(
    graph: ir.Graph,
    index: int,
    owner: Mapping[ir.Node, int],
    constant: Collection[ir.Node],
    starts: Mapping[int, ir.Value | None],
    ends: Mapping[int, ir.Value],
) -> Piece | None:
    nodes = [node for node in graph if owner.get(node) == index and node not in constant]
    if not nodes:
        return None
    inputs: dict[ir.Value, None] = {}
    for node in nodes:
        for value in reads(node):
            maker = value.producer()
            outside = value.is_graph_input() if maker is None else owner.get(maker) != index
            if outside and maker not in constant:
                inputs[value] = None
    own = {value for node in nodes for value in node.outputs}
    others = (n for n in graph if owner.get(n, index) != index and n not in constant)
    read = {value for node in others for value in reads(node)}
    outputs = dict.fromkeys([ends[index]] if index in ends else [])
    outputs.update(dict.fromkeys(v for n in nodes for v in n.outputs if v in read and v in own))
    start = starts.get(index)
    return Piece(start if start in inputs else None, ends.get(index), (*inputs,), (*outputs,))
