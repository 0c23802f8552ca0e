"""Builds and writes the models of a package that trains segment by segment."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from odtpack.autodiff import differentiate
from odtpack.contrib.quantized import packed_four_bits
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Ops, draws, nodes_of, replace
from odtpack.graph.inference import infer_shapes
from odtpack.package import training
from odtpack.package.parameters import Parameter
from odtpack.package.segments.cut import (
    Outline,
    can_be_lifted,
    cut,
    differing,
    frozen_products,
    outline,
    part_of,
    split_rows,
    tensor_of,
    unpack,
)
from odtpack.package.task import Graphs, Segments, Task
from odtpack.package.training import optimization_level
from odtpack.passes import batch_norm, pipeline
from odtpack.passes.compact import compact
from odtpack.passes.finishing import SMALLEST, find_chains
from odtpack_runtime.checkpoint.parameters import ALIGNMENT
from odtpack_runtime.files.atomic import atomic_write, write_whole
from odtpack_runtime.package.manifest import ExtraFile, SegmentInfo, SegmentsInfo, WeightInfo
from odtpack_runtime.session.graph_signature import COTANGENT_SUFFIX


def stage_segments(
    segments: Segments, folder: Path, prefix: str
) -> tuple[SegmentsInfo, list[ExtraFile]]:
    """Write the models and the weights into a folder; return their manifest entry and files."""
    paths = []
    for name, model in segments.models.items():
        paths.append(folder / f"{prefix}{name}.onnx")
        write_whole(paths[-1], ir.to_proto(model).SerializeToString(deterministic=True))
    files = [ExtraFile.describe(path, role="segment_model") for path in paths]
    tensors, places = [], dict[bytes, int]()  # where the file has the bytes of a digest
    if segments.tensors:
        weights = folder / f"{prefix}segments.weights"
        whole, of, begin = hashlib.sha256(), "", 0
        with atomic_write(weights) as stream:
            for name, tensor in segments.tensors.items():
                gap = -stream.tell() % ALIGNMENT
                stream.write(bytes(gap))
                if (source := part_of(name)) != of or gap:
                    whole, of, begin = hashlib.sha256(), source, stream.tell()
                dtype, shape = tensor.dtype.numpy().name, list(tensor.shape.numpy())
                entry = {"name": name, "dtype": dtype, "shape": shape, "offset": stream.tell()}
                tensors.append(WeightInfo.read(entry))
                content = tensor.tobytes()
                whole.update(content)
                places.setdefault(whole.digest(), begin)
                stream.write(content)
        files.append(ExtraFile.describe(weights, role="segment_weights"))
    plan = [
        dataclasses.replace(
            each,
            forward=f"{prefix}{each.forward}.onnx",
            backward=None if each.backward is None else f"{prefix}{each.backward}.onnx",
        )
        for each in segments.plan
    ]
    info = SegmentsInfo(
        weights=weights.name if tensors else None, tensors=tuple(tensors), segments=tuple(plan)
    )
    if segments.decoder is not None:
        files += _stage_decoder(segments.decoder, info.weights, places, folder, prefix)
    return info, files


_STORED_APART = 1 << 10
"""Bytes of a tensor from which on it lies outside of the decoder's file."""


def _stage_decoder(
    decoder: ir.Model, weights: str | None, places: Mapping[bytes, int], folder: Path, prefix: str
) -> Iterator[ExtraFile]:
    """Write the inference model; what training has of its weights is not written again."""
    # `places`: where the file of training's weights holds what has some digest; of a matrix in
    # parts the whole.
    large = [v for v in decoder.graph.initializers.values() if tensor_of(v).nbytes >= _STORED_APART]
    # An adapter's inputs are zero where a run names none: all of them are read from the same zeros.
    zeros = [value for value in large if value.is_graph_input()]
    left = []
    for value in large:
        if value.is_graph_input():
            continue
        place = places.get(hashlib.sha256(tensor_of(value).tobytes()).digest())
        if place is None or weights is None:
            left.append(value)
        else:
            _lies_in(value, weights, place)
    if left or zeros:
        own = folder / f"{prefix}decoder.weights"
        with atomic_write(own) as stream:
            stream.write(bytes(max((tensor_of(value).nbytes for value in zeros), default=0)))
            for value in zeros:
                _lies_in(value, own.name, 0)
            for value in left:
                stream.write(bytes(-stream.tell() % ALIGNMENT))
                place = stream.tell()
                stream.write(tensor_of(value).tobytes())
                _lies_in(value, own.name, place)
        yield ExtraFile.describe(own, role="decoder_weights")
    _split_wide(decoder.graph)
    path = folder / f"{prefix}decoder.onnx"
    write_whole(path, ir.to_proto(decoder).SerializeToString(deterministic=True))
    yield ExtraFile.describe(path, role="decoder_model")


_WIDEST = 1 << 24
"""Elements of a matrix of few bits that one node of the decoder reads: 64 MiB where the kernel
unpacks it whole, as it does without prepacking."""


def _split_wide(graph: ir.Graph) -> None:
    """Let several nodes read the rows of the largest matrices, such as a vocabulary's."""
    op = Ops(graph, "rows/")
    for node in [node for node in graph if node.op_type == "MatMulNBits"]:
        rows, columns = (node.attributes.get_int(key, 0) for key in "NK")
        x, *stored = node.inputs
        given = [value for value in stored if value is not None]
        if rows * columns <= _WIDEST or not all(
            isinstance(value.const_value, ir.ExternalTensor)
            and value.const_value.nbytes % rows == 0
            for value in given
        ):
            continue
        attributes = {key: each.value for key, each in node.attributes.items()}
        step, parts = max(_WIDEST // columns, 1), list[ir.Value]()
        with op.before(node):
            for start in range(0, rows, step):
                count = min(step, rows - start)
                inputs = [v and _some_rows(graph, v, start, count, rows) for v in stored]
                parts += op.emit(
                    "MatMulNBits", [x, *inputs], domain=node.domain, **attributes | {"N": count}
                )
            result = op.Concat(*parts, axis=-1)
        replace(node.outputs[0], result, [node])
        for value in given:
            if not value.uses():
                graph.initializers.pop(str(value.name))


def _some_rows(graph: ir.Graph, of: ir.Value, start: int, count: int, rows: int) -> ir.Value:
    """An initializer that is some rows of another one, in the same file."""
    whole = of.const_value
    assert isinstance(whole, ir.ExternalTensor)  # noqa: S101 - as was asked before
    name, row = f"{whole.name}.rows_{start}", whole.nbytes // rows
    first, *rest = whole.shape.numpy()
    shape = ir.Shape([first // rows * count, *rest])
    value = ir.val(name, const_value=ir.ExternalTensor(
        whole.location, (whole.offset or 0) + start * row, count * row, whole.dtype, shape=shape,
        name=name,
    ))  # fmt: skip
    graph.register_initializer(value)
    return value


def _lies_in(value: ir.Value, file: str, place: int) -> None:
    """Let an initializer be read from a file beside the model."""
    tensor = tensor_of(value)
    value.const_value = ir.ExternalTensor(
        file, place, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()),
        name=str(value.name),
    )  # fmt: skip


def build_segments(task: Task) -> Graphs:
    """Differentiate a loaded model piece by piece."""
    # What is frozen lies in the file of weights, and not in the checkpoint.
    task = dataclasses.replace(task, frozen=())
    ready, _ = training.prepare(task)
    forward, parameters = ready.training, ready.parameters
    batch_norm.check(forward.graph)
    _check(forward.graph, parameters)
    products = frozen_products(forward.graph) if task.spec.keep_products else frozenset()
    for whole in (forward, ready.evaluation):
        split_rows(whole.graph)
    pipeline.drop_unused(forward)
    graph = infer_shapes(forward, new_only=True).graph
    names = set(task.train)
    trained = [value for value in graph.inputs if value.name in names]
    *body, last = cut(graph, trained)
    # What a caller feeds and nothing reads is an input all the same.
    unread = [v for v in graph.inputs if not v.uses() and v.name not in names]
    maker = _Maker(forward, task, {value.name for value in unread})
    models: dict[str, ir.Model] = {}
    plan: dict[int, SegmentInfo] = {}
    stored: dict[int, list[str]] = {}
    graphs = [_extract(graph, piece.inputs, piece.outputs) for piece in body]
    outlines = [outline(each, piece, task.train) for each, piece in zip(graphs, body, strict=True)]
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, each in enumerate(outlines):  # the values of the last pieces are kept least long
        keeps = index >= len(body) - task.spec.keep_products
        groups.setdefault((each.key, keeps), []).append(index)
    tensors = {name: tensor_of(v) for name, v in graph.initializers.items()}
    first_with_end = next((i for i, piece in enumerate(body) if piece.end is not None), -1)
    for number, ((_, keeps), members) in enumerate(groups.items()):
        first = members[0]
        outside = differing([outlines[index] for index in members], tensors)
        apart = _chosen(outlines[first], outside)
        key = f"segment_{number}"
        piece, back = body[first], None
        kept: Sequence[str] = ()
        if piece.end is not None:
            start = piece.start if members != [first_with_end] else None
            wanted = products if keeps else frozenset()
            back, kept = maker.backward(graphs[first], apart, piece.end, start, wanted)
        models[f"{key}_forward"] = maker.forward(graphs[first], apart, kept=kept)
        if back is not None:
            models[f"{key}_backward"] = back
        for index in members:
            own = _renamed(outlines[first], outlines[index], outside)
            if index != first:
                own |= {name: f"{name}/{index}" for name in kept}
            plan[index] = SegmentInfo(
                forward=f"{key}_forward",
                backward=None if back is None else f"{key}_backward",
                names=own,
            )
            stored[index] = _chosen(outlines[index], outside)
    head = _extract(graph, [*last.inputs, *unread], [graph.outputs[0]])
    apart = [
        name
        for name, v in head.initializers.items()
        if tensor_of(v).size >= SMALLEST and can_be_lifted(v)
    ]
    properties = training.properties_of(ready.loss)
    level = optimization_level(graph, parameters)
    result = ready.evaluation.graph
    given = [str(value.name) for value in (*last.inputs, *unread)]
    ending = _extract(result, given, [*result.outputs])
    order = [name for index in sorted(stored) for name in stored[index]]
    named = dict.fromkeys([*order, *apart])
    places = {source: place for place, source in reversed([*enumerate(map(part_of, named))])}
    properties_of_training = properties | training.of_training(task, level)
    return dataclasses.replace(
        ready,
        training=maker.last(head, apart, last.start, properties_of_training),
        evaluation=maker.forward(ending, apart, "evaluation", properties),
        segments=Segments(
            models,
            tuple(plan[index] for index in sorted(plan)),
            # The parts of a matrix follow each other.
            {
                name: packed_four_bits(tensors[name])
                for name in sorted(named, key=lambda name: places[part_of(name)])
            },
            tuple(v for v in graph.inputs if v.name not in {p.name for p in parameters}),
            task.decoder,
        ),
    )


def check_options(task: Task) -> None:
    """Refuse what is not built together with segments, or without."""
    spec, problem, hint = task.spec, "", ""
    if not spec.segments:
        if spec.keep_products:
            raise OdtpackError(
                "segments-missing",
                "products can only be kept between segments, and the model has no segments",
                hint="add --segments, or leave --keep-products out",
            )
    elif not task.backend.is_stock:
        problem, hint = "onnxruntime-training runs one training model", "leave --target out"
    elif spec.memory_budget is not None:
        problem = "a memory budget is kept by one training model"
        hint = "leave --memory-budget out"
    elif spec.ort_format is not None:
        problem, hint = "segments are not written in ORT format", "leave --ort-format out"
    elif spec.outputs:
        problem, hint = "segments return no further outputs", "leave --output out"
    elif spec.frozen_storage is not None:
        problem, hint = "segments map frozen weights as they are", "leave --frozen-dtype out"
    elif task.input_gradients:
        problem, hint = "segments give no gradients of inputs", "name parameters alone"
    if problem:
        raise OdtpackError(
            "segments-unsupported", problem, hint=f"{hint}, or build without --segments"
        )


def _check(graph: ir.Graph, parameters: Sequence[Parameter]) -> None:
    """Refuse what does not give the same when a piece is computed a second time."""
    problem = hint = ""
    if any(parameter.role == "state" for parameter in parameters):
        problem = "a state or the statistics of a batch normalization would be updated twice"
        hint = "export the model in evaluation mode, and carry no state over"
    for node in nodes_of(graph):
        if draws(node):
            problem = f"{node.op_type} {node.name!r} draws other numbers when it runs again"
            hint = "set the model's dropout to 0, and leave --adapter-dropout out"
    if problem:
        hint += ", or build without --segments"
        raise OdtpackError("segments-unsupported", problem, hint=hint)


def _extract(
    graph: ir.Graph, inputs: Sequence[ir.Value | str], outputs: Sequence[ir.Value]
) -> ir.Graph:
    found = ir.convenience.extract(graph, inputs, outputs)
    order = {name: place for place, name in enumerate(graph.initializers)}  # it has none
    kept = sorted(found.initializers.values(), key=lambda value: order[str(value.name)])
    found.initializers.clear()
    for value in kept:
        found.register_initializer(value)
    return found


def _chosen(outline: Outline, outside: Sequence[bool]) -> list[str]:
    return [name for name, out in zip(outline.weights, outside, strict=True) if out]


def _renamed(first: Outline, other: Outline, outside: Sequence[bool]) -> dict[str, str]:
    """What a piece calls the inputs and outputs of its group's models, where that differs."""
    pairs = (
        *zip(first.inputs, other.inputs, strict=True),
        *zip(_chosen(first, outside), _chosen(other, outside), strict=True),
        *zip(first.outputs, other.outputs, strict=True),
    )
    return {ours: theirs for ours, theirs in pairs if ours != theirs}


@dataclasses.dataclass(frozen=True)
class _Maker:
    source: ir.Model
    task: Task
    unread: Collection[str | None]

    def forward(
        self,
        graph: ir.Graph,
        apart: Sequence[str],
        name: str = "segment",
        properties: Mapping[str, str] | None = None,
        kept: Sequence[str] = (),
    ) -> ir.Model:
        """The model that computes a piece, and returns what is kept for the way back."""
        model = self._model(graph, whole=bool(kept))
        made = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.extend(made[each] for each in kept)
        self._lift(model.graph, apart, find_chains(model.graph))
        pipeline.for_evaluation(model)
        return self._finished(model, apart, name, properties or {})

    def backward(
        self,
        graph: ir.Graph,
        apart: Sequence[str],
        end: ir.Value,
        start: ir.Value | None,
        products: Collection[str],
    ) -> tuple[ir.Model, Sequence[str]]:
        """The model that computes the gradients of a piece, and the products that it takes."""
        model = self._model(graph, whole=bool(products))
        result = next(value for value in model.graph.outputs if value.name == end.name)
        seed = ir.val(f"{end.name}{COTANGENT_SUFFIX}", dtype=result.dtype, shape=result.shape)
        model.graph.inputs.append(seed)
        model.graph.outputs[:] = [result]
        self._lift(model.graph, apart, find_chains(model.graph))
        pipeline.before_gradient(model)
        self._differentiate(model, seed, start)
        model.graph.outputs.remove(result)
        kept = _taken(model, products)
        return self._finished(model, apart, "segment", {}), kept

    def last(
        self,
        graph: ir.Graph,
        apart: Sequence[str],
        start: ir.Value | None,
        properties: Mapping[str, str],
    ) -> ir.Model:
        """The model of the loss and of the gradients of what it follows from."""
        model = self._model(graph)
        self._lift(model.graph, apart, find_chains(model.graph))
        pipeline.before_gradient(model)
        dtype = (model.graph.outputs[0].dtype or ir.DataType.FLOAT).numpy()
        share = np.full((), 1 / self.task.spec.accumulation_steps, dtype)
        self._differentiate(model, Ops(model.graph, "seed/").constant(share), start)
        return self._finished(model, apart, "training", properties)

    def _model(self, graph: ir.Graph, *, whole: bool = False) -> ir.Model:
        # `whole`: with feed-forward layers as they are, whose wide values are kept.
        model = ir.Model(graph.clone(), ir_version=self.source.ir_version)
        if not self.task.backend.on_gpu:
            pipeline.in_segments(model, whole=whole)
        return model

    def _lift(
        self, graph: ir.Graph, names: Sequence[str], late: Collection[ir.Value] = frozenset()
    ) -> None:
        """Make inputs of weights, so that one model serves pieces with different ones."""
        # `late`: what is computed of weights that stay for now.
        values = [graph.initializers[name] for name in names if name in graph.initializers]
        values = [v for v in values if not any(y in late for n, _ in v.uses() for y in n.outputs)]
        unpack(graph, values, bits=not self.task.backend.on_gpu)
        for value in values:
            graph.initializers.pop(str(value.name))
            value.const_value = None
            graph.inputs.append(value)

    def _differentiate(self, model: ir.Model, seed: ir.Value, start: ir.Value | None) -> None:
        """Add the gradients of the trained parameters and of the start to the outputs."""
        graph = model.graph
        wanted = {*self.task.train, *(() if start is None else (start.name,))}
        sources = [value for value in graph.inputs if value.name in wanted]
        op = Ops(graph, "grad/")
        gradients = differentiate(graph, {graph.outputs[0]: seed}, sources, op)
        training.require_reached(sources, gradients)
        trained = [value for value in sources if start is None or value.name != start.name]
        outward = [op.Identity(gradients[value]) for value in sources if value not in trained]
        for value in outward:
            assert start is not None  # noqa: S101 - its gradient
            value.name = f"{start.name}{COTANGENT_SUFFIX}"
            value.type, value.shape = start.type, start.shape
        pipeline.after_gradient(op, model, self.task.backend.passes)
        if trained:
            training.accumulate_gradients(graph, op, trained, gradients, self.task)
        graph.outputs.extend(outward)

    def _finished(
        self, model: ir.Model, apart: Sequence[str], name: str, properties: Mapping[str, str]
    ) -> ir.Model:
        training.finish({name: (model, properties)})
        graph = model.graph
        self._lift(graph, apart)
        graph.inputs[:] = [v for v in graph.inputs if v.uses() or v.name in self.unread]
        return compact(self.task.backend.lower(model), keep_names=False)


def _taken(model: ir.Model, products: Collection[str]) -> list[str]:
    """Let a backward model take products as inputs, in place of computing them again."""
    pipeline.drop_unused(model)  # of those that it does not read nothing is left
    graph = model.graph
    found = [v for node in graph for v in node.outputs if v.name in products]
    taken = []
    for value in found:
        kept = ir.val(str(value.name), type=value.type, shape=value.shape)
        value.name = None
        value.replace_all_uses_with(kept)
        graph.inputs.append(kept)
        taken.append(kept)
    pipeline.drop_unused(model)
    for value in [each for each in taken if not each.uses()]:
        graph.inputs.remove(value)
        taken.remove(value)
    return [str(value.name) for value in taken]
