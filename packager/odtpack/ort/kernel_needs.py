"""Which kernels models need, and the oldest release that has them."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import onnx
import onnx_ir as ir

from odtpack import targets
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import nodes_of
from odtpack.graph.inference import inferred_proto

_TABLE: Final = Path(__file__).with_name("kernels.json")

Types = tuple[str | None, ...]
"""Types of a node's inputs or outputs, such as ``"float"``; None if missing or not known."""


@dataclass(frozen=True)
class Need:
    """A release, and what needs it."""

    version: tuple[int, ...]  # the release
    why: str  # what it is the first to load, such as ``"Split of opset 13 with bool"``
    others: tuple[Need, ...] = ()  # what needs no newer one, the newest first

    @property
    def name(self) -> str:
        """The release as users write it."""
        return ".".join(map(str, self.version))


def oldest_runtime(models: Iterable[ir.Model]) -> Need:
    """Return the oldest release of ONNX Runtime that loads all of some models."""
    return newest(need for model in models for need in _of_model(model))


def require(version: str, need: Need) -> None:
    """Check that a release of ONNX Runtime is no older than what is needed."""
    newer = [n for n in (need, *need.others) if targets.parsed(version) < targets.parsed(n.name)]
    if newer:
        whats = "; ".join(f"{each.why}, which {each.name} is the first to have" for each in newer)
        raise OdtpackError(
            "target-cannot-load",
            f"the target, ONNX Runtime {version}, does not load the package: it needs {whats}",
            hint=f"ship ONNX Runtime {need.name} and say so: --onnxruntime {need.name}",
        )


def newest(needs: Iterable[Need]) -> Need:
    """Return the first of those that need the newest release."""
    flat = dict.fromkeys(
        each for need in needs for each in (dataclasses.replace(need, others=()), *need.others)
    )
    first, *others = sorted(flat, key=lambda need: need.version, reverse=True)
    return dataclasses.replace(first, others=tuple(others))


def _of_model(model: ir.Model) -> Iterator[Need]:
    opsets = dict(model.graph.opset_imports)
    yield Need(targets.lowest_target(opsets[""]).version, f"opset {opsets['']}")
    for node in nodes_of(model.graph):
        if node.op_type.endswith("uantizeLinear") and node.attributes.get_int("block_size", 0) > 0:
            yield Need((1, 19), f"{node.op_type} with block_size")
    proto = inferred_proto(model, sizes=False) or ir.to_proto(model)
    for operator in dict.fromkeys(operators_of(proto.graph, opsets, {})):
        yield from of_operator(*operator)


def operators_of(
    graph: onnx.GraphProto, opsets: Mapping[str, int], outer: Mapping[str, str]
) -> Iterator[tuple[str, str, int, Types, Types]]:
    """The operators of a graph and its subgraphs: domain, name, version and types."""
    types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.HasField("tensor_type") and value.type.tensor_type.elem_type:
            types[value.name] = _type_name(value.type.tensor_type.elem_type)
    types |= {tensor.name: _type_name(tensor.data_type) for tensor in graph.initializer}
    for node in graph.node:
        domain, name = "" if node.domain == "ai.onnx" else node.domain, node.op_type
        if domain in opsets:
            inputs, outputs = map(types.get, node.input), map(types.get, node.output)
            yield domain, name, since(domain, name, opsets[domain]), tuple(inputs), tuple(outputs)
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                yield from operators_of(body, opsets, types)


@functools.lru_cache(10_000)
def of_operator(
    domain: str, name: str, version: int, inputs: Types, outputs: Types
) -> tuple[Need, ...]:
    """Return what the kernel of one operator needs; nothing if no kernel is needed."""
    kernel = kernels(_TABLE).get(domain or "ai.onnx", {}).get(f"{name};{version}")
    if kernel is None:
        return ()  # folded when it is loaded, or written in other operators
    (there,) = kernel[""]
    needs = [Need(_parsed(there), f"{name} of opset {version}")]
    for constraint, type_name in constrained(domain, name, version, inputs, outputs):
        releases = {
            each: _parsed(release)
            for release, names in kernel.get(constraint, {}).items()
            for each in names
        }
        # ONNX Runtime computes in float32 where there is no kernel for float16.
        ways = [type_name, "float"] if type_name == "float16" else [type_name]
        known = [releases[way] for way in ways if way in releases]
        if known:
            needs.append(Need(min(known), f"{name} of opset {version} with {type_name}"))
    return tuple(needs)


def constrained(
    domain: str, name: str, version: int, inputs: Types, outputs: Types
) -> Iterator[tuple[str, str]]:
    """Constraints of an operator, and the type that is bound to each."""
    if not onnx.defs.has(name, version, domain):
        return
    schema = onnx.defs.get_schema(name, version, domain)
    for types, formals in ((inputs, schema.inputs), (outputs, schema.outputs)):
        for index, type_name in enumerate(types):
            if type_name is not None and formals:
                formal = formals[min(index, len(formals) - 1)]  # the last may be variadic
                yield from ((key, type_name) for key in (formal.type_str, formal.name))


@functools.lru_cache(10_000)
def since(domain: str, name: str, opset: int) -> int:
    """The version of an operator in an opset; the opset itself where ONNX does not know it."""
    if not onnx.defs.has(name, opset, domain):
        return opset
    return int(onnx.defs.get_schema(name, opset, domain).since_version)


@functools.lru_cache(100)
def _type_name(number: int) -> str:
    return ir.DataType(number).name.lower()


def _parsed(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@functools.cache
def kernels(table: Path) -> Mapping[str, Any]:
    """Types by domain (of several), operator and version, constraint, and first release."""
    found: Mapping[str, Any] = json.loads(table.read_bytes())["kernels"]
    return found


_GRAPHS: Final = onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS
_FORMAT: Final = Need((1, 16), "ORT format of version 6")
"""The first release that reads what the present converter writes; `make runtimes` holds it."""


def oldest_of_files(paths: Iterable[Path]) -> Need:
    """Return the oldest release of ONNX Runtime that loads files in ORT format."""
    # Its package must come first: it makes the bindings of the format importable.
    from onnxruntime.tools.ort_format_model import OperatorTypeUsageManager, OrtFormatModelProcessor

    needs = [_FORMAT]

    class Collects(OperatorTypeUsageManager):  # type: ignore[misc] # it has no types
        def process_node(self, node: Any, known: dict[Any, Any]) -> None:
            domain, name = (node.Domain() or b"").decode(), node.OpType().decode()
            domain = "" if domain == "ai.onnx" else domain
            inputs, outputs = (
                tuple(_name_of_type(value(index), known) for index in range(count))
                for value, count in (
                    (node.Inputs, node.InputsLength()), (node.Outputs, node.OutputsLength()),
                )
            )  # fmt: skip
            needs.extend(of_operator(domain, name, node.SinceVersion(), inputs, outputs))

    for path in paths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it forgets to close the file
            OrtFormatModelProcessor(str(path), {}, Collects()).process()
    return newest(needs)


def _name_of_type(value: bytes, known: Mapping[Any, Any]) -> str | None:
    fbs = "ort_flatbuffers_py.fbs."
    info = known.get(value)
    tensors = import_module(f"{fbs}TypeInfoValue").TypeInfoValue.tensor_type
    if info is None or info.ValueType() != tensors:
        return None
    tensor = import_module(f"{fbs}TensorTypeAndShape").TensorTypeAndShape()
    tensor.Init(info.Value().Bytes, info.Value().Pos)
    return ir.DataType(tensor.ElemType()).name.lower()  # the numbers are those of ONNX
