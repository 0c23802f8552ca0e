"""Feed-forward layers by blocks of tokens give what whole layers give, and the same gradients."""

import numpy as np
import pytest
import torch

from odtpack.graph.graphs import Ops
from odtpack.passes import feed_forward
from tests.passes.test_attention import _with_gradients
from tests.passes.tools import op_types, parse, run

# A gated layer with adapters on its products, of which the last is taken apart, as in segments.
TEXT = """
    g (float[B, tokens, 8] x, float[8, 40] w, float[8, 40] v, float[40, 8] d, float[2, 8] a,
       float[40, 2] b, float[2, 40] e, float[8, 2] f, float[40] c)
    => (float[B, tokens, 8] z) <float s = {2.0}, int64[2] k = {24, 16}> {
        xx = Mul(x, s) p = MatMul(xx, w) at = Transpose <perm = [1, 0]> (a) q = MatMul(xx, at)
        bt = Transpose <perm = [1, 0]> (b) r = MatMul(q, bt) r2 = Mul(r, s) g1 = Add(p, r2)
        g2 = Add(g1, c) sg = Sigmoid(g2) act = Mul(g2, sg) u = MatMul(xx, v) h = Mul(act, u)
        h1, h2 = Split <axis = -1> (h, k) d1, d2 = Split <axis = 0> (d, k)
        y1 = MatMul(h1, d1) y2 = MatMul(h2, d2) y3 = Add(y1, y2)
        et = Transpose <perm = [1, 0]> (e) l = MatMul(h, et) ft = Transpose <perm = [1, 0]> (f)
        m = MatMul(l, ft) n = Mul(m, s) y = Add(y3, n) z = Add(x, y)
    }
"""
# The same with the first product in parts, the first of them wide by itself, as of codes.
PARTS = (
    TEXT.replace("k = {24, 16}", "k = {24, 16}, int64[2] n = {32, 8}")
    .replace(
        "p = MatMul(xx, w)",
        "w1, w2 = Split <axis = 1> (w, n) p1 = MatMul(xx, w1) p2 = MatMul(xx, w2) "
        "p = Concat <axis = -1> (p1, p2)",
    )
    .replace("n = Mul(m, s) y = Add(y3, n)", "o = Mul(m, s) y = Add(y3, o)")
)
SHAPES = {"w": (8, 40), "v": (8, 40), "d": (40, 8), "a": (2, 8), "b": (40, 2), "e": (2, 40),
          "f": (8, 2), "c": (40,)}  # fmt: skip


def _expected(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x = {name: torch.tensor(a, dtype=torch.float64, requires_grad=True)
         for name, a in feeds.items() if name != "seed"}  # fmt: skip
    twice = 2 * x["x"]
    gate = twice @ x["w"] + 2 * (twice @ x["a"].T @ x["b"].T) + x["c"]
    wide = torch.nn.functional.silu(gate) * (twice @ x["v"])
    z = x["x"] + wide @ x["d"] + 2 * (wide @ x["e"].T @ x["f"].T)
    z.backward(torch.tensor(feeds["seed"], dtype=torch.float64))
    return {"z": z.detach().numpy(), **{f"d{n}": t.grad.numpy() for n, t in x.items()}}


@pytest.mark.parametrize("text", [TEXT, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 255, 256, 257, 600])
def test_blocks_give_the_whole(batch, length, text, monkeypatch):
    monkeypatch.setattr(feed_forward, "BLOCK", 256 * 40)
    model = parse(text)
    feed_forward.by_blocks(Ops(model.graph, "blocks/"), model.graph)
    (scan,) = (node for node in model.graph if node.op_type == "Scan")
    assert len(scan.inputs) == len(scan.outputs) == 1  # what lies inside is read there alone
    assert "Sigmoid" not in op_types(model.graph)
    model = _with_gradients(model)
    (scan, _) = (node for node in model.graph if node.op_type == "Scan")
    assert len(scan.outputs) == 1  # the gradient computes wide values again
    random = np.random.default_rng(length)
    feeds = {name: random.standard_normal(shape, dtype=np.float32) * np.float32(0.3)
             for name, shape in SHAPES.items()}  # fmt: skip
    for name in ("x", "seed"):
        feeds[name] = random.standard_normal((batch, length, 8), dtype=np.float32)
    found, expected = run(model, feeds), _expected(feeds)
    for name, value in expected.items():
        error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert error < 1e-6, (name, error)


@pytest.mark.parametrize(("old", "new"), [
    ("float[B, tokens, 8] x", "float[2, 128, 8] x"),  # few tokens
    ("h = Mul(act, u)", "o = Softmax <axis = 1> (act) h = Mul(o, u)"),  # tokens are mixed
    ("h = Mul(act, u)", "h = Mul(act, u) kept = ReduceSum(h)"),  # it is read elsewhere
    ("sg = Sigmoid(g2)", "sg = Sqrt(g2)"),  # no gradient at the zeros that fill a block
])  # fmt: skip
def test_what_is_left_alone(old, new):
    assert old in TEXT
    model = parse(TEXT.replace(old, new).replace("float[B, tokens, 8] z", "float[P, Q, 8] z"))
    before = op_types(model.graph)
    feed_forward.by_blocks(Ops(model.graph, "blocks/"), model.graph)
    assert op_types(model.graph) == before
