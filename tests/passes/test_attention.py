"""Attention by blocks of queries gives what the whole attention gives, and the same gradients."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from odtpack.autodiff import differentiate
from odtpack.graph.graphs import Ops
from odtpack.passes import attention
from tests.passes.tools import check, op_types, parse, run

CASES = {  # the mask's shape, and how scores become the Softmax's input
    "[T, T]": "s = Mul(a, half) x = Add(s, m)",
    "[1, 1, 1, T]": "s = Div(a, two) x = Add(m, s)",
    "[B, 1, R, T]": "s = Mul(a, half) x = Add(s, m)",
    "[]": "x = Mul(a, m)",
    "[B, 1, T, 1]": "s = Div(a, m) x = Mul(s, half)",
    "bool [T, T]": "s = Mul(a, half) x = Where(m, s, none)",
}
TEXT = """
    g (float[B, 2, T, 4] q, float[B, 2, T, 4] k, float[B, 2, T, 3] v, {mask} m)
    => (float[B, 2, T, 3] y) <float half = {{0.5}}, float two = {{2.0}}, float none = {{-inf}},
        int64[1] o = {{0}}, int64[1] h = {{3}}, int64[1] i = {{3}}> {{
        t = Transpose <perm = [0, 1, 3, 2]> (k)
        a = MatMul(q, t) {scores}
        p = Softmax <axis = -1> (x) r = MatMul(p, v) y = Identity(r)
    }}
"""


def _with_gradients(model: ir.Model) -> ir.Model:
    graph = model.graph
    op = Ops(graph, "grad/")
    seed = ir.val("seed", dtype=ir.DataType.FLOAT, shape=graph.outputs[0].shape)
    inputs = [value for value in graph.inputs if value.dtype == ir.DataType.FLOAT]
    graph.inputs.append(seed)
    found = differentiate(graph, {graph.outputs[0]: seed}, inputs, op)
    for value in inputs:
        gradient = op.Identity(found[value])
        gradient.name, gradient.type, gradient.shape = f"d{value.name}", value.type, value.shape
        graph.outputs.append(gradient)
    return check(model)


def _expected(feeds: dict[str, np.ndarray], mask: str) -> dict[str, np.ndarray]:
    x = {name: torch.tensor(a, dtype=torch.float64, requires_grad=True)
         for name, a in feeds.items() if name != "seed" and a.dtype != bool}  # fmt: skip
    scores = x["q"] @ x["k"].transpose(-1, -2)
    if mask.startswith("bool"):
        scores = torch.where(torch.tensor(feeds["m"]), scores * 0.5, -torch.inf)
    elif mask == "[]":
        scores = scores * x["m"]
    else:
        scores = scores / x["m"] * 0.5 if mask.endswith("1]") else scores * 0.5 + x["m"]
    y = torch.softmax(scores, -1) @ x["v"]
    y.backward(torch.tensor(feeds["seed"], dtype=torch.float64))
    return {"y": y.detach().numpy(), **{f"d{n}": t.grad.numpy() for n, t in x.items()}}


def _text(mask: str) -> str:
    declared = mask.replace(" ", "", 1) if mask.startswith("bool") else f"float{mask}"
    return TEXT.format(mask=declared.removesuffix("[]"), scores=CASES[mask])


@pytest.mark.parametrize("mask", CASES)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_blocks_give_the_whole(mask, length):
    model = parse(_text(mask))
    attention.by_blocks(Ops(model.graph, "blocks/"), model.graph)
    assert op_types(model.graph).count("Scan") == 1
    assert "Softmax" not in op_types(model.graph)
    model = _with_gradients(model)
    random = np.random.default_rng(length)
    sizes = {"B": 2, "T": length, "R": 1 if length % 2 else length}
    shapes = {"q": "B24", "k": "B24", "v": "B23"}
    feeds = {name: random.standard_normal((2, 2, length, int(of[-1])), dtype=np.float32)
             for name, of in shapes.items()}  # fmt: skip
    dims = [sizes.get(each, each) for each in mask.strip("bol []").split(", ") if each]
    values = random.standard_normal([int(dim) for dim in dims], dtype=np.float32)
    if mask.startswith("bool"):  # causal
        feeds["m"] = np.tri(length, dtype=bool)
    else:
        feeds["m"] = np.abs(values) + np.float32(0.5) if mask.endswith("1]") else values
    feeds["seed"] = random.standard_normal((2, 2, length, 3), dtype=np.float32)
    found, expected = run(model, feeds), _expected(feeds, mask)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("old", "new"), [
    ("float[B, 2, T, 4] q", "float[B, 2, 200, 4] q"),  # few queries
    ("<axis = -1>", "<axis = -2>"),
    ("r = MatMul(p, v)", "r = MatMul(p, v) z = Identity(p)"),  # the scores are read elsewhere
    ("r = MatMul(p, v)", "w = MatMul(p, q) u = Slice(w, o, h, i) r = Add(u, v)"),  # q twice
])  # fmt: skip
def test_what_is_left_alone(old, new):
    text = _text("[1, 1, 1, T]")
    assert old in text
    model = parse(text.replace(old, new))
    before = op_types(model.graph)
    attention.by_blocks(Ops(model.graph, "blocks/"), model.graph)
    assert op_types(model.graph) == before
