"""Text models in, rewritten models out, and what ONNX Runtime makes of both."""

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from odtpack import targets
from odtpack.graph.graphs import Ops
from odtpack.graph.inference import infer_shapes
from tests import model_text
from tests.model_text import inferred

Rewrite = Callable[[Ops, ir.Graph], bool | None]


parse = inferred


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
    return model_text.run(model, feeds, "off")


def random_feeds(model: ir.Model, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """Standard normal values for every float input; ``sizes`` for symbols."""
    random = np.random.default_rng(seed)

    def dims(value: ir.Value) -> list[int]:
        return [dim if isinstance(dim, int) else sizes[dim.value] for dim in value.shape]

    inputs = model.graph.inputs
    return {each.name: random.standard_normal(dims(each), dtype=np.float32) for each in inputs}


def assert_same(one: ir.Model, other: ir.Model, feeds: dict[str, np.ndarray]) -> None:
    """Same outputs, up to rounding."""
    first, second = run(one, feeds), run(other, feeds)
    assert list(first) == list(second)
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
