"""Text models in, rewritten models out, and what ONNX Runtime makes of both."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime

from odtpack import targets
from odtpack.graph.graphs import Ops
from odtpack.graph.inference import infer_shapes

Rewrite = Callable[[Ops, ir.Graph], bool | None]


def parse(text: str, opset: int = 17, domains: str = "") -> ir.Model:
    """A graph in ONNX's text form, with shapes inferred; ``domains`` as in ', "my" : 1'."""
    head = f'<ir_version: 8, opset_import: ["" : {opset}{domains}]> '
    return infer_shapes(ir.from_proto(onnx.parser.parse_model(head + text)))


def op_types(graph: ir.Graph) -> list[str]:
    """Operators in the order of the graph."""
    return [node.op_type for node in graph]


def changed(rewrite: Rewrite, model: ir.Model) -> ir.Model:
    """The rewritten model, which must differ."""
    result = model.clone()
    assert rewrite(Ops(result.graph, "new/"), result.graph) in (True, None)
    assert outline(result) != outline(model)
    return check(infer_shapes(result))


def outline(model: ir.Model) -> str:
    """Nodes, attributes and names, without types and shapes."""
    graph = ir.to_proto(model).graph
    graph.ClearField("value_info")
    for value in (*graph.input, *graph.output):
        value.ClearField("type")
    for node in graph.node:
        for attribute in node.attribute:
            attribute.t.ClearField("name")  # a constant that was looked at is given one
    return str(graph)


def assert_unchanged(rewrite: Rewrite, model: ir.Model) -> None:
    """The rewrite leaves the model as it is, and says so."""
    before = outline(model)
    assert not rewrite(Ops(model.graph, "new/"), model.graph)
    assert outline(model) == before


def check(model: ir.Model) -> ir.Model:
    """The model itself, once ONNX's full check has passed."""
    targets.stamp(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs by name, computed as the graph is written."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def random_feeds(model: ir.Model, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """Standard normal values for every float input; ``sizes`` for symbols."""
    random = np.random.default_rng(seed)
    return {
        value.name: random.standard_normal(
            [dim if isinstance(dim, int) else sizes[dim.value] for dim in value.shape],
            dtype=np.float32,
        )
        for value in model.graph.inputs
    }


def assert_same(one: ir.Model, other: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    """Same outputs, up to rounding."""
    first, second = run(one, feeds), run(other, feeds)
    assert list(first) == list(second)
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
