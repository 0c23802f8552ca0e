"""Which operators can be differentiated, and what blocks the gradient in a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import onnx.defs
import onnx_ir as ir

from odtpack import contrib
from odtpack.autodiff import stop_gradient
from odtpack.autodiff.backward import REASON, dependents, differentiate, opset_of
from odtpack.autodiff.context import INTERNAL_DOMAIN, REGISTRY
from odtpack.autodiff.expand import expand
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Ops, reads, subgraphs
from odtpack.graph.inference import infer_shapes
from odtpack.ort import webgpu
from odtpack.passes import precision
from odtpack.targets import MAX_OPSET, MIN_OPSET

How = Literal["rule", "expansion", "rewritten", "no gradient", "none"]

# Replaced before differentiation, where autodiff.sequences and passes.fake_quant can.
REWRITTEN = frozenset({
    "ConcatFromSequence", "ConvInteger", "MatMulInteger", "QuantizeLinear", "SequenceAt",
    "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SplitToSequence",
})  # fmt: skip

# Inputs that have a derivative, whatever the standard's own mark says.
_ALSO_TRAINABLE = {
    "AffineGrid": ("theta",),
    "Clip": ("min", "max"),
    "DFT": ("input",),
    "GRU": ("initial_h",),
    "GridSample": ("grid",),
    "LSTM": ("initial_h", "initial_c"),
    "Mod": ("B",),
    "OneHot": ("values",),
    "Pad": ("constant_value",),
    "RNN": ("initial_h",),
    "STFT": ("signal", "window"),
    "Unique": ("X",),
}
# Inputs that the standard does not mark, through which no gradient passes: see the rules.
_NOT_TRAINABLE = {"DequantizeLinear": ("x", "x_zero_point"), "RoiAlign": ("rois",)}


@dataclasses.dataclass(frozen=True)
class Coverage:
    """One operator of the standard or a contributed one."""

    domain: str  # domain, `"ai.onnx"` for the standard operators
    op_type: str  # operator
    # by a rule of its own; by expansion of its function body; rewritten before, in the patterns
    # that the documentation names; declared to have no gradient; or none, which is an error where a
    # gradient would have to pass
    how: How
    since: tuple[int, ...] = ()  # opsets in which a rule starts to hold; empty without a rule
    # opsets from MIN_OPSET on in which the operator's definition changed, the one in force there
    # first; empty where the standard does not define it; for an expansion, those of its body
    opsets: tuple[int, ...] = ()
    # names of the inputs through which a gradient passes; empty where none does, or where the
    # standard does not name them
    inputs: tuple[str, ...] = ()


def coverage() -> list[Coverage]:
    """Return every registered operator and every operator of the newest opset, sorted."""
    rules: dict[tuple[str, str], list[int]] = {}
    stops: set[tuple[str, str]] = set()
    for domain, op_type, rule in REGISTRY.entries():
        if domain == INTERNAL_DOMAIN:
            continue
        key = (domain or "ai.onnx", op_type)
        if rule.differentiable:
            rules.setdefault(key, []).append(rule.since)
        else:
            stops.add(key)
    history = _history()
    found = []
    for domain, op_type in sorted(rules.keys() | stops | {("ai.onnx", name) for name in history}):
        key = (domain, op_type)
        schemas = history.get(op_type, []) if domain == "ai.onnx" else []
        how: How = "rule" if key in rules else "no gradient" if key in stops else "none"
        if key not in rules and domain == "ai.onnx" and op_type in REWRITTEN:
            how = "rewritten"
        if how == "none" and any(
            schema.has_function or schema.has_context_dependent_function for schema in schemas
        ):
            how = "expansion"
        found.append(
            Coverage(
                domain,
                op_type,
                how,
                tuple(rules.get(key, ())),
                tuple(
                    _begins(schema) if how == "expansion" else schema.since_version
                    for schema in schemas
                ),
                trainable_inputs(schemas[-1]) if schemas and how in ("rule", "expansion") else (),
            )
        )
    found += [Coverage(contrib.DOMAIN, name, "rewritten") for name in contrib.covered()]
    return found


def _begins(schema: Any) -> int:
    """Opset from which on a body stands for the operator: a later one for Shrink."""
    bodies: list[int] = [
        *schema.function_opset_versions,
        *schema.context_dependent_function_opset_versions,
    ]
    return max(int(schema.since_version), min(bodies, default=0))


def trainable_inputs(schema: Any) -> tuple[str, ...]:
    """Names of an operator's inputs that take floating-point values and have a derivative."""
    without = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    return tuple(
        parameter.name
        for parameter in schema.inputs
        if any("float" in str(kind) or "double" in str(kind) for kind in parameter.types)
        and parameter.name not in _NOT_TRAINABLE.get(schema.name, ())
        and (
            parameter.differentiation_category != without
            or parameter.name in _ALSO_TRAINABLE.get(schema.name, ())
        )
    )


def _history() -> dict[str, list[Any]]:
    """The standard's schemas that a model of a supported opset may mean, oldest first."""
    versions: dict[str, list[Any]] = {}
    schemas: Sequence[Any] = onnx.defs.get_all_schemas_with_history()  # its stubs lack functions
    for schema in schemas:
        if not schema.domain and schema.since_version <= MAX_OPSET:
            versions.setdefault(schema.name, []).append(schema)
    return {
        name: kept
        for name, found in versions.items()
        if (kept := _in_force(sorted(found, key=lambda schema: int(schema.since_version))))
    }


def _in_force(schemas: Iterable[Any]) -> list[Any]:
    """Drop the versions that a later one replaced by the lowest opset, and removed operators."""
    kept: list[Any] = []
    for schema in schemas:
        if schema.since_version <= MIN_OPSET:
            kept.clear()
        kept.append(schema)
    return [] if kept and kept[-1].deprecated else kept


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
    """A node that a gradient would have to pass, and cannot."""

    node: str  # name of the node
    op_type: str  # operator, with its domain where it is not the standard's
    opset: int  # opset under which it is read
    why: str  # what is missing
    parameters: tuple[str, ...]  # names of the parameters that cannot be trained because of it
    advice: str  # what to do


def find_obstacles(model: ir.Model, train: Sequence[str], outputs: Sequence[str]) -> list[Obstacle]:
    """Try to differentiate a model, and go on where that fails."""
    model = model.clone()
    precision.widen(model.graph)  # as a build does
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


def find_fallbacks(
    model: ir.Model, train: Sequence[str], outputs: Sequence[str]
) -> list[webgpu.Lack]:
    """Nodes of a model and its gradient that ``--target webgpu`` leaves to the processor."""
    model = expand(infer_shapes(model.clone()), train)
    graph = model.graph
    sources = [value for name, value in graph.initializers.items() if name in train]
    seeds = {value: value for value in graph.outputs if value.name in outputs}
    found = differentiate(graph, seeds, sources, Ops(graph, "try/"), refused=lambda *_: None)
    graph.outputs.extend(dict.fromkeys(found.values()))
    stop_gradient.lower(graph)
    return webgpu.lacks(webgpu.lower(model))


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
