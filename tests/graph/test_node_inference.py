"""What was found of one node is taken for another only if nothing tells them apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.graph import inference
from odtpack.graph.inference import Found, NodeInference

Make = Callable[[], tuple[int, ir.Node]]


def value(*dims: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.val("x", dtype, dims)


def constant(*numbers: int) -> ir.Value:
    tensor = ir.tensor(np.array(numbers, np.int64))
    found = ir.val("c", const_value=tensor)
    ir.Graph([], [], nodes=[], initializers=[found])
    return found


def node(
    op_type: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = "", opset: int = 17,
    **attributes: int | float | Sequence[int],
) -> tuple[int, ir.Node]:  # fmt: skip
    return opset, ir.node(op_type, inputs, attributes, domain=domain, num_outputs=outputs)


# Each row: nodes that differ in one respect, and infer differently.
DIFFERENT: dict[str, list[Make]] = {
    "sizes": [lambda: node("Relu", value(2, 3)), lambda: node("Relu", value(3, 2))],
    "names of sizes": [lambda: node("Relu", value("a")), lambda: node("Relu", value("b"))],
    "type": [
        lambda: node("Relu", value(2)),
        lambda: node("Relu", value(2, dtype=ir.DataType.DOUBLE)),
    ],
    "operator": [lambda: node("Shape", value(2, 3)), lambda: node("Size", value(2, 3))],
    "domain": [lambda: node("Relu", value(2)), lambda: node("Relu", value(2), domain="my")],
    "opset": [
        lambda: node("ReduceMean", value(2, 3), constant(1), opset=18),
        lambda: node("ReduceMean", value(2, 3), constant(1), opset=17),
    ],
    "attribute": [
        lambda: node("Concat", value(2, 3), value(2, 3), axis=0),
        lambda: node("Concat", value(2, 3), value(2, 3), axis=1),
    ],
    "type of an attribute": [
        lambda: node("Concat", value(2, 3), value(2, 3), axis=1),
        lambda: node("Concat", value(2, 3), value(2, 3), axis=1.0),
    ],
    "constant": [
        lambda: node("Reshape", value(2, 3), constant(3, 2)),
        lambda: node("Reshape", value(2, 3), constant(6, 1)),
    ],
    "constant or not": [
        lambda: node("Reshape", value(2, 3), constant(3, 2)),
        lambda: node("Reshape", value(2, 3), value(2, dtype=ir.DataType.INT64)),
    ],
    "number of outputs": [
        lambda: node("Split", value(6), outputs=2),
        lambda: node("Split", value(6), outputs=3),
    ],
    "place of an input": [
        lambda: node("Slice", value(4), constant(0), constant(4), constant(0), constant(2)),
        lambda: node("Slice", value(4), constant(0), constant(4), None, constant(2)),
        lambda: node("Slice", value(4), constant(0), constant(3), constant(0)),
    ],
}


def infer(make: Make) -> list[Found | None]:
    opset, given = make()
    return NodeInference({"": opset, "my": 1}).outputs(given)


@pytest.mark.parametrize("respect", DIFFERENT)
def test_nodes_that_differ_do_not_share_what_was_found(
    respect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = []
    for make in DIFFERENT[respect]:
        monkeypatch.setattr(inference, "_KNOWN", {})
        alone.append(infer(make))
    if respect != "place of an input":
        assert alone[0] != alone[1]
    for order in itertools.permutations(range(len(alone))):
        monkeypatch.setattr(inference, "_KNOWN", {})
        for index in order:
            assert infer(DIFFERENT[respect][index]) == alone[index]


def test_the_same_node_is_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[object, object] = {}
    monkeypatch.setattr(inference, "_KNOWN", known)
    for _ in range(3):
        assert infer(DIFFERENT["sizes"][0]) == [(ir.DataType.FLOAT, (2, 3))]
    assert len(known) == 1
