"""The model that blocks write into, and the types of its values.

The model is an ``onnx.ModelProto``, so that a block may also append nodes of its own to
``self.base.graph``. Types are inferred once for the model that comes in, and then for what
is new only: a model of many blocks takes time in proportion to its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.errors import OdtpackError, UnknownNameError
from odtpack.graph.graphs import Names, Ops
from odtpack.graph.inference import infer_shapes
from odtpack.losses import TargetRole

Equation = Callable[[Ops, list[ir.Value]], Sequence[ir.Value]]

_SMALL = 64  # elements of an initializer whose values may matter to shapes


class _FragmentOps(Ops):
    """Writes a fragment of a model, with names that are free in the whole model."""

    def __init__(self, graph: ir.Graph, stem: str, fresh: Callable[[str], str]) -> None:
        super().__init__(graph, f"{stem}/")
        self._fresh = fresh

    def fresh_name(self, stem: str) -> str:
        """Return a name that nothing in the model has."""
        return self._fresh(stem)


class ModelAccessor:
    """What ``with onnxblock.base(model) as accessor`` gives.

    Attributes:
        targets: Role of each graph input that a loss block added.
        labels: What the runtime must know of labels, for each input with labels.
        created: Names of initializers that blocks created to be trained.
        finish: Called with the model when a forward block has written it; None for nothing.
    """

    def __init__(self, model: onnx.ModelProto, path: str | None = None) -> None:
        self._model = model
        self._path = path
        self.targets: dict[str, TargetRole] = {}
        self.created: list[str] = []
        self.labels: dict[str, dict[str, int]] = {}
        self.finish: Callable[[ir.Model], None] | None = None
        self._names = Names()
        self._declared: dict[str, onnx.ValueInfoProto] = {}
        self.renew()

    @property
    def model(self) -> onnx.ModelProto:
        """The model as it stands."""
        return self._model

    @property
    def path(self) -> str:
        """Path that was given with the model.

        Raises:
            OdtpackError: None was.
        """
        if self._path is None:
            raise OdtpackError("no-model-path", "the base model has no path")
        return self._path

    @property
    def has_path(self) -> bool:
        """Whether a path was given with the model."""
        return self._path is not None

    def replace(self, model: onnx.ModelProto) -> None:
        """Take another model in place of this one."""
        self._model.CopyFrom(model)
        self._seen = [0, 0, len(model.graph.node) + 1]  # more than there are: all is new

    def renew(self) -> None:
        """Forget all types; infer them from the model as it stands."""
        self._values: dict[str, onnx.ValueInfoProto] = {}
        self._names.clear()
        self._seen = [0, 0, 0]
        graph = self._model.graph
        if graph.node:
            inferred = infer_shapes(ir.from_proto(self._model))
            for node in inferred.graph.all_nodes():
                self._names.update(filter(None, (node.name, *(y.name for y in node.outputs))))
            named = (y for node in inferred.graph for y in node.outputs if y.name)
            self._values.update({str(y.name): ir.serde.serialize_value(y) for y in named})
        self._take_new(len(graph.node))

    def knows(self, name: str) -> bool:
        """Whether the model has a value of this name."""
        self.learn("a block")
        return name in self._values

    def value(self, name: str, who: str = "a block") -> ir.Value:
        """A value of the model, with type and shape as far as they are known.

        Raises:
            OdtpackError: There is none, or the model is invalid.
        """
        return ir.serde.deserialize_value_info_proto(self.info(name, who), None)

    def info(self, name: str, who: str = "a block") -> onnx.ValueInfoProto:
        """The same as ONNX describes it."""
        self.learn(who)
        if name not in self._values:
            raise self._unknown(name, who)
        return self._values[name]

    def fresh_name(self, stem: str) -> str:
        """A name that nothing in the model has; the same blocks give the same names."""
        return self._names.fresh(stem)

    def write(self, stem: str, names: Sequence[str], equation: Equation) -> tuple[str, ...]:
        """Write nodes.

        Args:
            stem: Start of the names of new values.
            names: Values of the model that the equation reads.
            equation: Writes the nodes; returns the results.

        Returns:
            Names of the results.
        """
        values = {name: self.value(name, stem) for name in names}
        imports = {entry.domain: entry.version for entry in self._model.opset_import}
        imports[""] = self.opset
        fragment = ir.Graph([*values.values()], [], nodes=[], opset_imports=imports, name=stem)
        op = _FragmentOps(fragment, stem, self.fresh_name)
        results = equation(op, [values[name] for name in names])
        graph = self._model.graph
        for domain, version in fragment.opset_imports.items():
            self.import_domain(domain, version)
        # ONNX infers no types after operators that it does not know.
        internal = (y for n in fragment if n.domain == INTERNAL_DOMAIN for y in n.outputs)
        declared = [ir.serde.serialize_value(value) for value in internal]
        self._declared.update({info.name: info for info in declared})
        graph.value_info.extend(declared)
        graph.node.extend(ir.serde.serialize_node(node) for node in fragment)
        graph.initializer.extend(
            ir.serde.serialize_tensor(value.const_value)
            for value in fragment.initializers.values()
            if value.const_value is not None
        )
        return tuple(value.name or "" for value in results)

    def add_input(self, value: ir.Value) -> str:
        """Add a graph input.

        Raises:
            OdtpackError: Its name is taken.
        """
        name = value.name or ""
        if self.knows(name):
            raise OdtpackError(
                "reserved-name", f"the model already has {name!r}, the name of an input to add"
            )
        self._model.graph.input.append(ir.serde.serialize_value(value))
        return name

    def import_domain(self, domain: str, version: int) -> None:
        """Import operators of a domain, unless the model does so already."""
        if all(entry.domain != domain for entry in self._model.opset_import):
            self._model.opset_import.append(onnx.helper.make_opsetid(domain, version))

    def rename(self, old: str, new: str) -> None:
        """Give the result of a node another name."""
        self.learn("a block")
        for node in self._model.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
        info = self._values.pop(old)
        info.name = new
        self._values[new] = info
        self._names.add(new)

    @property
    def opset(self) -> int:
        """Opset of the standard operators."""
        imports = self._model.opset_import
        return int(next(e.version for e in imports if e.domain in ("", "ai.onnx")))

    def learn(self, who: str) -> None:
        """Check what was appended since the last time and infer its types.

        Raises:
            OdtpackError: A node reads what does not exist, or ONNX refuses it.
        """
        graph = self._model.graph
        if len(graph.node) < self._seen[2]:
            self.renew()
        start = self._seen[2]
        self._take_new(start)
        fresh = graph.node[start:]
        if not fresh:
            return
        part = self._part(fresh, who)
        try:
            onnx.checker.check_model(part)
            inferred = onnx.shape_inference.infer_shapes(part, True, True, True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise OdtpackError(
                "invalid-block",
                f"ONNX refuses what {who} wrote: {str(error).strip().splitlines()[0]}",
            ) from None
        known = {info.name: info for info in inferred.graph.value_info}
        for node in fresh:
            for name in filter(None, node.output):
                self._values[name] = known.get(name) or onnx.ValueInfoProto(name=name)
        self._seen[2] = len(graph.node)

    def _part(self, nodes: Sequence[onnx.NodeProto], who: str) -> onnx.ModelProto:
        """New nodes as a model of their own, whose inputs are the values that they read."""
        part = onnx.ModelProto(ir_version=self._model.ir_version)
        part.opset_import.extend(self._model.opset_import)
        part.functions.extend(self._model.functions)
        part.graph.name = "part"
        part.graph.node.extend(nodes)
        made = {name for node in nodes for name in node.output}
        part.graph.value_info.extend(self._declared[n] for n in made & self._declared.keys())
        made = set()
        read: dict[str, None] = {}
        for node in nodes:
            read.update(dict.fromkeys(n for n in _reads(node) if n not in made))
            made.update(node.output)
            self._names.update({node.name, *node.output})
        small = {t.name: t for t in self._model.graph.initializer if t.name in read}
        for name in read:
            if name not in self._values:
                raise self._unknown(name, who)
            tensor = small.get(name)
            if tensor is not None and math.prod(tensor.dims) <= _SMALL:
                part.graph.initializer.append(tensor)
            else:
                part.graph.input.append(self._values[name])
        return part

    def _take_new(self, nodes: int) -> None:
        """Record inputs and initializers that are new, and that this many nodes are known."""
        graph = self._model.graph
        new = {info.name: info for info in graph.input[self._seen[0] :]}
        for tensor in graph.initializer[self._seen[1] :]:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            new[tensor.name] = info
        self._values |= new
        self._names.update(new)
        self._seen = [len(graph.input), len(graph.initializer), nodes]

    def _unknown(self, name: str, who: str) -> OdtpackError:
        outputs = ", ".join(repr(output.name) for output in self._model.graph.output)
        return UnknownNameError(
            "unknown-value",
            f"{who} reads {name!r}, which the model does not have",
            hint=f"its outputs are {outputs}" if outputs else None,
        )


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, its subgraphs included."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            own = {v.name for v in (*graph.input, *graph.initializer)}
            own |= {name for inner in graph.node for name in inner.output}
            for inner in graph.node:
                yield from (name for name in _reads(inner) if name not in own)
            yield from (output.name for output in graph.output if output.name not in own)
