"""Which nodes of a model stand between its parameters and a gradient, before it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from odtpack.autodiff.backward import REASON, dependents, differentiate, opset_of
from odtpack.autodiff.expand import expand
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import reads, subgraphs
from odtpack.graph.inference import infer_shapes
from odtpack.graph.ops import Ops
from odtpack.passes import float16_fallback

_AFTERWARDS = "train the float model, and quantize the model that was exported after training"
_OUTSIDE = "do this before the data reaches the model, in the app"
_SEQUENCE = "use Split and Concat in place of sequences, with sizes that are known"

# What to do about operators that have no derivative, or no kernel.
_ADVICE = {
    **dict.fromkeys(
        ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "DynamicQuantizeLinear"),
        _AFTERWARDS,
    ),
    **dict.fromkeys(
        ("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit",
         "TfIdfVectorizer", "LabelEncoder", "MelWeightMatrix"),
        _OUTSIDE,
    ),
    **dict.fromkeys(
        ("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
         "SequenceErase", "SequenceInsert", "SplitToSequence"),
        _SEQUENCE,
    ),
    "NonMaxSuppression": "let the loss read the boxes and scores before it (--loss-input NAME)",
    "Unique": "let the loss read a value before it (--loss-input NAME)",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """A node that a gradient would have to pass, and cannot.

    Attributes:
        node: Name of the node.
        op_type: Operator, with its domain where it is not the standard's.
        opset: Opset under which it is read.
        why: What is missing.
        parameters: Names of the parameters that cannot be trained because of it.
        advice: What to do.
    """

    node: str
    op_type: str
    opset: int
    why: str
    parameters: tuple[str, ...]
    advice: str


def find_obstacles(model: ir.Model, train: Sequence[str], outputs: Sequence[str]) -> list[Obstacle]:
    """Try to differentiate a model, and go on where that fails.

    Args:
        model: As :func:`odtpack.model.loading.load_model` returns it; not changed.
        train: Names of the initializers to train.
        outputs: Names of the outputs that the loss reads.

    Returns:
        What stands in the way, in the order of the graph; empty if nothing does.

    Raises:
        OdtpackError: The model's functions cannot be inlined.
    """
    model = model.clone()
    float16_fallback.widen(model.graph)  # as a build does
    model = expand(infer_shapes(model), train)
    graph = model.graph
    sources = [value for name, value in graph.initializers.items() if name in train]
    seeds = {value: value for value in graph.outputs if value.name in outputs}
    nodes = list(graph)
    refusals: dict[ir.Node, OdtpackError] = {}
    differentiate(graph, seeds, sources, Ops(graph, "try/"), refused=refusals.__setitem__)
    # After an unknown operator shapes are unknown too: that is its fault.
    unknown = [y for node in refusals for y in node.outputs if y.shape is None]
    hidden = dependents(graph, unknown) if unknown else set()
    reached_from = {source: dependents(graph, [source]) for source in sources} if refusals else {}
    return [
        _obstacle(node, refusals[node], graph, reached_from)
        for node in nodes
        if node in refusals
        and not (refusals[node].code == "unknown-rank" and hidden.intersection(reads(node)))
    ]


def _obstacle(
    node: ir.Node, error: OdtpackError, graph: ir.Graph, reached_from: dict[ir.Value, set[ir.Value]]
) -> Obstacle:
    why = error.what.partition(": ")[2] or error.what
    if error.code == "no-gradient":
        inner = f"inside of it {error.what.partition(';')[0]}"
        reason = node.metadata_props.get(REASON, "it has no gradient")
        why = inner if subgraphs(node) else reason
    return Obstacle(
        node.name or f"the one that computes {node.outputs[0].name}",
        node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}",
        opset_of(node, graph),
        why,
        tuple(
            str(source.name)
            for source, reached in reached_from.items()
            if any(value in reached for value in reads(node))
        ),
        _ADVICE.get(node.op_type) or error.hint or "",
    )
