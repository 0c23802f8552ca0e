"""out = gradient if reset else buffer + gradient, in three ways."""

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import pytest

from odtpack.autodiff.backward import SUM_OF_COTANGENTS
from odtpack.graph.graphs import Ops, static_dims
from odtpack.passes import aliases, gradient_buffers
from odtpack.passes.gradient_buffers import accumulate
from tests.model_text import run_in_place, session
from tests.passes.tools import check, op_types, outline, parse, run

PRODUCT = "g (float[{m}, {k}] a, float[{k}, {n}] b) => ({outputs}) {{ {body} }}"
ELEMENTWISE = "g (float{shape} a) => (float{shape} y) {{ gradient = Neg(a) y = Abs(gradient) }}"


def _accumulated(model: ir.Model) -> ir.Model:
    """The model with the accumulation of the value ``gradient`` as output ``out``."""
    graph = model.graph
    gradient = next(y for node in graph for y in node.outputs if y.name == "gradient")
    dims = static_dims(gradient)
    buffer = ir.val("buffer", dtype=ir.DataType.FLOAT, shape=dims)
    reset = ir.val("reset", dtype=ir.DataType.BOOL, shape=[])
    graph.inputs.extend([buffer, reset])
    graph.outputs[:] = [value for value in graph.outputs if value is not gradient]
    out = accumulate(Ops(graph, "new/"), gradient, buffer, reset)
    out.name, out.shape = "out", ir.Shape(dims)
    graph.outputs.append(out)
    aliases.verify(graph, buffer, out)
    return check(model)


def _check(model: ir.Model) -> None:
    random = np.random.default_rng(0)
    feeds = {
        value.name: random.standard_normal(static_dims(value), dtype=np.float32)
        for value in model.graph.inputs[:-1]
    }
    gradient = -feeds["a"] if "b" not in feeds else feeds["a"] @ feeds["b"]
    added = run(model, feeds | {"reset": np.array(False)})["out"]
    np.testing.assert_allclose(added, feeds["buffer"] + gradient, rtol=1e-5, atol=1e-5)
    fresh = run(model, feeds | {"reset": np.array(True)})["out"]
    np.testing.assert_allclose(fresh, gradient, rtol=1e-5, atol=1e-5)
    # What a step that diverged has left is forgotten.
    feeds["buffer"] = np.full_like(feeds["buffer"], np.nan)
    np.testing.assert_array_equal(run(model, feeds | {"reset": np.array(True)})["out"], fresh)


SMALL = ("", "[1]", "[100]", "[5, 6]", "[1, 1, 1]", "[2, 0]")


@pytest.mark.parametrize("shape", [*SMALL, "[40000]", "[40, 30]", "[64, 3, 3, 3]"])
def test_elementwise(shape):
    model = _accumulated(parse(ELEMENTWISE.format(shape=shape)))
    end = ["Where", "Add"] if shape in SMALL else ["If"]
    assert op_types(model.graph) == ["Neg", "Abs", *end]
    _check(model)


def _product(m: int, k: int, n: int, body: str, outputs: str = "") -> ir.Model:
    outputs = outputs or f"float[{m}, {n}] gradient"
    return parse(PRODUCT.format(m=m, k=k, n=n, body=body, outputs=outputs))


def _branch(model: ir.Model, name: str) -> list[str]:
    """Operators of a branch of the last node."""
    return op_types(model.graph.node(-1).attributes[f"{name}_branch"].as_graph())


@pytest.mark.parametrize(
    "body", ["gradient = Gemm(a, b)", "t = Transpose(a) gradient = Gemm <transA = 1> (t, b)"]
)
def test_a_product_moves_into_the_branches(body):
    model = _accumulated(_product(40, 3, 30, body))
    assert "Gemm" not in op_types(model.graph)
    assert sorted(_branch(model, "else")) == ["Add", "Gemm"]
    assert _branch(model, "then") == ["Gemm"]
    _check(model)


@pytest.mark.parametrize(("body", "outputs"), [
    pytest.param("gradient = MatMul(a, b)", "", id="another operator"),
    pytest.param("gradient = Gemm(a, b) other = Neg(gradient)", "float[40, 30] other",
                 id="read elsewhere"),
    pytest.param("zero = Sub(c, c) gradient = Gemm(a, b, zero)", "", id="an addend"),
])  # fmt: skip
def test_a_product_that_stays(body, outputs):
    if "zero" in body:
        body = "c = Constant <value = float[1] {1}> ()" + body
    model = _accumulated(_product(40, 3, 30, body, outputs))
    assert {"Gemm", "MatMul"} & set(op_types(model.graph))
    _check(model)


def test_a_small_product_stays():
    model = _accumulated(_product(4, 3, 5, "gradient = Gemm(a, b)"))
    assert op_types(model.graph) == ["Gemm", "Where", "Add"]
    _check(model)


def test_names_in_the_branches_are_new():
    model = parse(
        'g (float[40, 3] a, float[3, 30] b) => (float[40, 30] gradient, float[1] "t")'
        "{ gradient = Gemm(a, b) t = Constant <value = float[1] {1}> () }"
    )
    next(y for node in model.graph for y in node.outputs if y.name == "t").name = "buffer.fresh"
    _check(_accumulated(model))


# Gradients of tables: into the buffer, afresh, and summed up without zeros.


ROWS = """
zeros = ConstantOfShape (dims) column = Reshape (i, shape) extent = Shape (u)
every = Expand (column, extent) gradient = ScatterElements <axis = {axis}, reduction = "add">
(zeros, every, u)
"""


def rows(dims: str, updates: str, axis: int = 0, *, half: bool = False) -> ir.Model:
    """A scatter of whole slices at the INT64 vector i; ``half`` rounds it to float16."""
    rank = dims.count(",") + 1
    shape = ", ".join("-1" if k == axis else "1" for k in range(rank))
    body = ROWS.format(axis=axis)
    if half:
        body = body.replace("gradient", "summed")
        body += "rounded = Cast <to = 10> (summed) gradient = Cast <to = 1> (rounded)"
    return parse(
        f"g (int64[n] i, float[{updates}] u) => (float[{dims}] gradient) "
        f"<int64[{rank}] dims = {{{dims}}}, int64[{rank}] shape = {{{shape}}}>"
        f"{{ {body} }}",
        opset=18,
    )


ELEMENTS = """g (int64[9, 7] i, float[9, 7] u) => (float[40, 30] gradient)
    <int64[2] dims = {40, 30}> {
    zeros = ConstantOfShape (dims)
    gradient = ScatterElements <axis = 1, reduction = "add"> (zeros, i, u)
}"""

FORMS = {
    "few rows": (lambda: rows("40, 30", "n, 30"), ["Not", "Cast", "Expand"]),
    "short rows": (lambda: rows("40000, 8", "n, 8"), ["Not", "Cast", "Expand"]),
    "long rows": (lambda: rows("9000, 32", "n, 32"), ["Not", "Cast", "Reshape"]),
    "of float16": (lambda: rows("9000, 32", "n, 32", half=True), ["Not", "Cast", "Reshape"]),
    "rows of planes": (lambda: rows("6000, 4, 12", "n, 4, 12"), ["Not", "Cast", "Reshape"]),
    "columns": (lambda: rows("32, 9000", "32, n", axis=1), ["Not", "Cast", "Expand"]),
    "elements": (lambda: parse(ELEMENTS, opset=18), ["Not", "Cast", "Expand"]),
}


def _accumulated_table(model: ir.Model) -> ir.Model:
    """The same of the only output, without what else computed it."""
    return check(common_passes.RemoveUnusedNodesPass()(_accumulated(model)).model)


def _feeds(model: ir.Model, count: int) -> dict[str, np.ndarray]:
    """Indices of which many are equal, counted from either end, and updates."""
    random = np.random.default_rng(count)
    shapes = {
        value.name: [d if isinstance(d, int) else count for d in value.shape]
        for value in model.graph.inputs
    }
    dims = shapes["buffer"]
    least = min(dims)
    return {
        "i": random.choice([0, 1, -1, least // 2, -least], shapes["i"]),
        "u": random.standard_normal(shapes["u"], dtype=np.float32),
        "buffer": random.standard_normal(dims, dtype=np.float32),
    }


def _expected(name: str, feeds: dict[str, np.ndarray], start: np.ndarray) -> np.ndarray:
    """Additions one by one, in the order of the indices."""
    result, i, u = start.copy(), feeds["i"], feeds["u"]
    if name == "elements":
        np.add.at(result, (np.arange(len(i))[:, None], i), u)
    elif name == "columns":
        np.add.at(result.T, i, u.T)
    else:
        np.add.at(result, i, u)
    return result


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", ["off", "all"])
@pytest.mark.parametrize("name", FORMS)
def test_sums(name, level, threads):
    """Bit for bit, in memory of its own and in that of the buffer, whatever that held."""
    model = _accumulated_table(FORMS[name][0]())
    opened = session(model, level, intra_op_num_threads=threads)
    for count in (0, 1, 500) if name != "elements" else (9,):
        feeds = _feeds(model, count)
        for reset, aliased in ((False, False), (False, True), (True, False), (True, True)):
            before = np.full_like(feeds["buffer"], np.nan) if reset else feeds["buffer"].copy()
            expected = _expected(name, feeds, np.zeros_like(before) if reset else before)
            buffer = before.copy()
            out = buffer if aliased else np.full_like(buffer, 7)
            inputs = feeds | {"buffer": buffer, "reset": np.array(reset)}
            run_in_place(opened, inputs, {"out": out})
            np.testing.assert_array_equal(out, expected, err_msg=f"{count} {reset} {aliased}")
            if not aliased:
                np.testing.assert_array_equal(buffer, before)


@pytest.mark.parametrize("name", FORMS)
def test_a_fresh_start(name):
    """Long rows of large tables are copied one by one; else the zeros are made as a whole."""
    make, beginning = FORMS[name]
    model = _accumulated_table(make())
    assert _branch(model, "then")[:3] == beginning
    assert _branch(model, "else")[-1] == "ScatterElements"
    assert not {"ScatterElements", "ConstantOfShape"} & set(op_types(model.graph))


@pytest.mark.parametrize(("old", "new"), [
    pytest.param("", "", id="read elsewhere"),
    pytest.param('reduction = "add"', 'reduction = "max"', id="the largest"),
    pytest.param("(dims)", "<value = float[1] {1}> (dims)", id="ones"),
])  # fmt: skip
def test_a_scatter_that_stays(old, new):
    text = ROWS.format(axis=0).replace(old, new) if old else ROWS.format(axis=0)
    other = ("other = Neg(gradient)", ", float[40, 30] other") if not old else ("", "")
    model = parse(
        f"g (int64[n] i, float[n, 30] u) => (float[40, 30] gradient{other[1]}) "
        "<int64[2] dims = {40, 30}, int64[2] shape = {-1, 1}>"
        f"{{ {text} {other[0]} }}",
        opset=18,
    )
    model = _accumulated(model)
    assert "ScatterElements" in op_types(model.graph)
    feeds = _feeds(model, 20)
    fresh, added = (run(model, feeds | {"reset": np.array(e)})["out"] for e in (True, False))
    np.testing.assert_allclose(added, feeds["buffer"] + fresh, rtol=1e-6)


def _sum(terms: str, *, marked: bool = True) -> ir.Model:
    """A gradient of [4000, 3] made of two scatters, ``first`` and ``second``, and of x and b."""
    body = """
        zeros = ConstantOfShape (dims) other_zeros = ConstantOfShape (dims)
        i_column = Reshape (i, shape) u_extent = Shape (u) i_every = Expand (i_column, u_extent)
        j_column = Reshape (j, shape) v_extent = Shape (v) j_every = Expand (j_column, v_extent)
        first = ScatterElements <axis = 0, reduction = "add"> (zeros, i_every, u)
        second = ScatterElements <axis = 0, reduction = "add"> (other_zeros, j_every, v)
    """
    model = parse(
        "g (int64[n] i, float[n, 3] u, int64[m] j, float[m, 3] v, float[4000, 3] x, float[3] b)"
        " => (float[4000, 3] gradient) <int64[2] dims = {4000, 3}, int64[2] shape = {-1, 1}>"
        f"{{ {body} {terms} }}",
        opset=18,
    )
    for node in model.graph:
        if node.op_type == "Add" and marked:
            node.meta[SUM_OF_COTANGENTS] = True
    return model


SUMS = {
    "two scatters": "gradient = Add (first, second)",
    "onto another gradient": "y = Tanh (x) gradient = Add (y, first)",
    "the other way round": "y = Tanh (x) gradient = Add (first, y)",
    "both onto another": "y = Tanh (x) s = Add (first, y) gradient = Add (second, s)",
    "in the middle": "y = Tanh (x) z = Neg (x) s = Add (y, first) gradient = Add (s, z)",
}


def _sum_feeds() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    return {
        "i": np.array([3, 3, -1, 0, 7]), "u": random.standard_normal((5, 3), dtype=np.float32),
        "j": np.array([3, -4000, 9]), "v": random.standard_normal((3, 3), dtype=np.float32),
        "x": random.standard_normal((4000, 3), dtype=np.float32),
        "b": random.standard_normal(3, dtype=np.float32),
    }  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_merge(name):
    model = _sum(SUMS[name])
    expected = run(model, _sum_feeds())["gradient"]
    merged = gradient_buffers.merge(Ops(model.graph, "new/"), model.graph.outputs.pop())
    model.graph.outputs.append(merged)
    used = set(_ancestors(merged))
    assert [n.op_type for n in used].count("ScatterElements") == 1
    assert len([n for n in used if n.op_type == "ConstantOfShape"]) == (name == "two scatters")
    actual = run(check(model), _sum_feeds())["gradient"]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def _ancestors(value: ir.Value) -> list[ir.Node]:
    node = value.producer()
    if node is None:
        return []
    return [node, *(n for v in node.inputs if v is not None for n in _ancestors(v))]


@pytest.mark.parametrize(("terms", "marked"), [
    pytest.param("gradient = Add (first, b)", False, id="no sum of cotangents: it broadcasts"),
    pytest.param("y = Tanh (x) gradient = Add (y, x)", True, id="no scatter"),
    pytest.param("gradient = Add (first, first)", True, id="one that is read twice"),
    pytest.param("gradient = Sub (first, second)", True, id="no sum"),
])  # fmt: skip
def test_what_is_not_merged(terms, marked):
    model = _sum(terms, marked=marked)
    before = outline(model)
    gradient = model.graph.outputs.pop()
    assert gradient_buffers.merge(Ops(model.graph, "new/"), gradient) is gradient
    model.graph.outputs.append(gradient)
    assert outline(model) == before


def _zeros_made(text: str) -> ir.Model:
    model = parse(text, opset=18)
    reset = ir.val("reset", dtype=ir.DataType.BOOL, shape=[1])
    model.graph.inputs.append(reset)
    gradient_buffers.zeros_at_run_time(Ops(model.graph, "new/"), model.graph, reset)
    return check(model)


ZEROS = """g (int64[n] i, {kind}[n] u) => ({kind}[{size}] y) <int64[1] dims = {{{size}}}> {{
    zeros = ConstantOfShape <value = {kind}[1] {{{fill}}}> (dims) {view}
    y = ScatterElements ({data}, i, u)
}}"""


@pytest.mark.parametrize("view", ["", "flat = Reshape (zeros, dims)"], ids=["", "view"])
@pytest.mark.parametrize("kind", ["float", "double", "int64"])
def test_zeros_at_run_time(kind, view):
    text = ZEROS.format(kind=kind, size=5000, fill=0, view=view, data="flat" if view else "zeros")
    model = _zeros_made(text)
    assert "ConstantOfShape" not in op_types(model.graph)
    u = np.array([3, 4]).astype({"float": np.float32, "double": np.float64}.get(kind, np.int64))
    for reset in (True, False):
        y = run(model, {"i": np.array([7, -1]), "u": u, "reset": np.array([reset])})["y"]
        assert y.dtype == u.dtype
        assert (y[7], y[-1], np.abs(y).sum()) == (3, 4, 7)


@pytest.mark.parametrize(("size", "fill"), [(100, 0), (5000, 1)], ids=["few", "no zeros"])
def test_constants_that_stay(size, fill):
    text = ZEROS.format(kind="float", size=size, fill=fill, view="", data="zeros")
    assert op_types(_zeros_made(text).graph) == ["ConstantOfShape", "ScatterElements"]
