"""Models from ONNX's text form, and what ONNX Runtime computes of them."""

import copy
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
from onnx import numpy_helper

from odtpack.graph.inference import infer_shapes

Level = onnxruntime.GraphOptimizationLevel
LEVELS = {
    "off": Level.ORT_DISABLE_ALL, "basic": Level.ORT_ENABLE_BASIC,
    "extended": Level.ORT_ENABLE_EXTENDED, "all": Level.ORT_ENABLE_ALL,
}  # fmt: skip


def parsed(
    text: str, opset: int = 17, *, ir_version: int = 8,
    domains: Collection[str] | Mapping[str, int] = (), **values: Any,
) -> onnx.ModelProto:  # fmt: skip
    """The model of a graph's text, with arrays as initializers.

    The graph's name may be left out. Further domains are of version 1 if it is not said.
    """
    versions = domains if isinstance(domains, Mapping) else dict.fromkeys(domains, 1)
    imports = ", ".join(f'"{domain}" : {n}' for domain, n in {"": opset, **versions}.items())
    graph = text if text.lstrip()[0] != "(" else f"g {text}"
    model = onnx.parser.parse_model(
        f"<ir_version: {ir_version}, opset_import: [{imports}]> {graph}"
    )
    add_initializers(model, values)
    return model


def nodes(text: str, opset: int = 17) -> list[onnx.NodeProto]:
    """Nodes alone, of their text."""
    return [*parsed(f"() => () {{ {text} }}", opset).graph.node]


def inferred(text: str, opset: int = 17, **options: Any) -> ir.Model:
    """The same as a graph with shapes."""
    return infer_shapes(ir.from_proto(parsed(text, opset, **options)))


def add_initializers(model: onnx.ModelProto, values: Mapping[str, Any]) -> None:
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in values.items()
    )


def with_arrays(
    model: onnx.ModelProto,
    change: Callable[[str, np.ndarray], np.ndarray] | Mapping[str, np.ndarray],
) -> onnx.ModelProto:
    """A copy whose initializers are changed: each by its name and its array, or those of names."""
    result = copy.deepcopy(model)
    change = change if callable(change) else change.get
    for tensor in result.graph.initializer:
        array = change(tensor.name, numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return result


# Constants of the zoo that float32 rounds, as the models mean them.
MEANT = (math.sqrt(2), math.sqrt(8))


def retyped(model: onnx.ModelProto, dtype: type, before: type = np.float32) -> onnx.ModelProto:
    """A model with another type in place of `before`, as an exporter would write it."""
    kinds = (onnx.helper.np_dtype_to_tensor_dtype(np.dtype(each)) for each in (before, dtype))
    (single, code), result = kinds, copy.deepcopy(model)
    graph = result.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == single:
            value.type.tensor_type.elem_type = code
    tensors = [*graph.initializer]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                tensors.append(attribute.t)
            if (node.op_type, attribute.name, attribute.i) == ("Cast", "to", single):
                attribute.i = code
    for tensor in tensors:
        if tensor.data_type == single:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            if array.size == 1:
                near = [c for c in MEANT if math.isclose(array.item(), c, rel_tol=1e-6)]
                array = np.full(array.shape, near[0]) if near else array
            tensor.CopyFrom(numpy_helper.from_array(array.astype(dtype), tensor.name))
    return result


def session(
    model: ir.Model | onnx.ModelProto, level: str = "all", **settings: Any
) -> onnxruntime.InferenceSession:
    """On one thread of the CPU, in silence; ``settings`` are those of the session options."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    for name, value in ({"intra_op_num_threads": 1, "log_severity_level": 4} | settings).items():
        setattr(options, name, value)
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def kernels(opened: onnxruntime.InferenceSession) -> list[dict[str, Any]]:
    """The profile's events of kernels that ran, each with the name of its node."""
    events, suffix = json.loads(Path(opened.end_profiling()).read_text()), "_kernel_time"
    found = [each for each in events if each["name"].endswith(suffix)]
    return [each | {"name": each["name"].removesuffix(suffix)} for each in found]


def drawn(
    random: np.random.Generator, scale: float = 1.0, /, **shapes: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Normal float32 values for :func:`parsed`."""
    return {name: random.normal(0, scale, s).astype(np.float32) for name, s in shapes.items()}


def run(
    model: ir.Model | onnx.ModelProto, feeds: Mapping[str, Any], level: str = "all"
) -> dict[str, np.ndarray]:
    """All outputs by name."""
    opened = session(model, level)
    names = [node.name for node in opened.get_outputs()]
    return dict(zip(names, opened.run(names, dict(feeds)), strict=True))


def computed(model: Path | onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    """All outputs in order, of a file too."""
    return [*run(onnx.load(model) if isinstance(model, Path) else model, feeds).values()]


def run_in_place(
    opened: onnxruntime.InferenceSession,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> None:
    """Run on these arrays, of which an output may be an input."""
    binding = opened.io_binding()
    for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, array in arrays.items():
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    opened.run_with_iobinding(binding)
