"""Updates whose sums are products: the same values, in place, and never over what is multiplied."""

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.graph.graphs import Ops, static_dims
from odtpack.optimizers import SGD, Adam, AdamW, Lion, Optimizer
from odtpack.passes import aliases
from odtpack.step import chunks
from tests.model_text import run_in_place, session

STEP, RATE = 3, 0.01


def model_of(formula: Optimizer, dtype: ir.DataType) -> ir.Model:
    """One update of a parameter [1, 24] by the product of two factors, which is its gradient."""
    shape = (1, 24)
    names = ["params", *(vector.name for vector in formula.state)]
    kept = {name: ir.val(name, dtype=dtype, shape=shape) for name in names}
    left = ir.val("left", dtype, [5, shape[0]])
    right = ir.val("right", dtype, [5, shape[1]])
    rate, step = ir.val("rate", dtype, [1]), ir.val("step", ir.DataType.INT64, [1])
    graph = ir.Graph(
        [*kept.values(), left, right, rate, step], [], nodes=[], opset_imports={"": 17}, name="g"
    )
    op = Ops(graph)
    gradient = op.Gemm(left, right, transA=1)

    def update(op: Ops, values: chunks.Values) -> dict[str, ir.Value]:
        given = {**values, "learning_rate": rate, "step": step}
        return formula.write(op, given, formula.weight_decay)

    for name, value in chunks.write_axpy(op, kept, gradient, update).items():
        value.name, value.type, value.shape = f"{name}.out", kept[name].type, ir.Shape(shape)
        graph.outputs.append(value)
    return ir.Model(graph, ir_version=8)


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The new values, each written over the old one."""
    memory = {name: np.array(array) for name, array in feeds.items()}
    names = [str(value.name) for value in model.graph.outputs]
    outputs = {name: memory[name.removesuffix(".out")] for name in names}
    run_in_place(session(model), memory, outputs)
    return outputs


def feeds_of(model: ir.Model) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    feeds = {
        str(value.name): np.abs(random.standard_normal(static_dims(value))) + 0.1
        for value in model.graph.inputs
    }
    feeds["rate"], feeds["step"] = np.array([RATE]), np.array([STEP], np.int64)
    feeds["left"] -= 0.5
    return feeds


@pytest.mark.parametrize(("formula", "products"), [
    # Gemms, that of the gradient included
    (AdamW(), 4),
    (AdamW(weight_decay=0.1), 4),
    (AdamW(weight_decay=0.1, formula="pytorch"), 4),
    (Adam(weight_decay=0.1), 4),
    (Lion(weight_decay=0.1), 4),
    (SGD(), 2),
    (SGD(weight_decay=0.1), 2),
    (SGD(momentum=0.9, nesterov=True), 3),
], ids=lambda value: value.kind if isinstance(value, Optimizer) else None)  # fmt: skip
def test_values_are_those_of_the_formula(formula, products):
    """In float64 nothing is fused."""
    single = model_of(formula, ir.DataType.FLOAT)
    double = model_of(formula, ir.DataType.DOUBLE)
    counts = [Counter(node.op_type for node in model.graph) for model in (single, double)]
    assert counts[0]["Gemm"] == products
    assert counts[1]["Gemm"] == 1
    inputs = {str(value.name): value for value in single.graph.inputs}
    for output in single.graph.outputs:
        aliases.verify(single.graph, inputs[str(output.name).removesuffix(".out")], output)
    feeds = feeds_of(single)
    wanted = run(double, feeds)
    narrow = {n: a if n == "step" else a.astype(np.float32) for n, a in feeds.items()}
    for name, value in run(single, narrow).items():
        np.testing.assert_allclose(value, wanted[name], rtol=2e-6, atol=1e-7, err_msg=name)


def test_a_rate_of_zero_changes_nothing():
    for formula in (SGD(), AdamW()):
        model = model_of(formula, ir.DataType.FLOAT)
        feeds = {n: a if n == "step" else a.astype(np.float32) for n, a in feeds_of(model).items()}
        feeds["rate"] = np.zeros(1, np.float32)
        np.testing.assert_array_equal(run(model, feeds)["params.out"], feeds["params"])
