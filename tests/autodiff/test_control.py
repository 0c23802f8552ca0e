"""If, Loop and Scan in ONNX text, against finite differences of the ONNX reference, and PyTorch."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from odtpack.errors import OdtpackError
from tests.autodiff.cases.control import CASES
from tests.autodiff.oracle import Case, add_gradients, check, forward_model, session, spread
from tests.model_text import inferred
from tests.refused import refused
from tests.sweep import split

FIRST = {case.op: case.id for case in reversed(CASES)}.values()


@pytest.mark.parametrize(
    "case", split(CASES, lambda case: case.id in FIRST, name=lambda case: case.id)
)
def test_gradient_is_that_of_both_oracles(case):
    check(case)


def model_of(text: str) -> ir.Model:
    return forward_model(Case("", {}, torch.relu, text=text))


DRAW = (
    "half = Constant <value = float {0.5}> () yes = Constant <value_int = 1> () "
    "on = Cast <to = 9> (yes) "
)
RANDOM = {
    "Scan": DRAW
    + """
  ys = Scan <num_scan_inputs = 1, body = turn (float[40] part) => (float[40] y) {
    p = Mul(part, w) y = Dropout(p, half, on) }> (x)""",
    "Loop": DRAW
    + """five = Constant <value = int64 {5}> ()
  ys = Loop <body = turn (int64 i, bool go) => (bool goes, float[40] y) {
    goes = Identity(go) part = Gather(x, i) q = Mul(part, w) y = Dropout(q, half, on)
  }> (five, "")""",
    "If": DRAW
    + """
  ys = If (on) <then_branch = a () => (float[5, 40] y) {
      q = Mul(x, w) y = Dropout(q, half, on) },
    else_branch = b () => (float[5, 40] z) { z = Mul(x, w) }>""",
    "If in Scan": DRAW
    + """
  ys = Scan <num_scan_inputs = 1, body = turn (float[40] part) => (float[40] y) {
    y = If (on) <then_branch = a () => (float[40] y1) {
        q = Mul(part, w) y1 = Dropout(q, half, on) },
      else_branch = b () => (float[40] z) { z = Mul(part, w) }> }> (x)""",
    "noise": """
  ys = Scan <num_scan_inputs = 1, body = turn (float[40] part) => (float[40] y) {
    noise = RandomNormalLike(part) n = Mul(noise, part) y = Mul(n, w) }> (x)""",
}


@pytest.mark.parametrize("level", ["off", "all"])
@pytest.mark.parametrize("name", RANDOM)
def test_what_is_drawn_at_random_is_not_drawn_again(name, level):
    """y = mask w x, so that w dL/dw is the sum of y dL/dy over the turns, for its mask alone."""
    text = f"net (float[5, 40] x, float[40] w) => (float[5, 40] ys) {{ {RANDOM[name]} }}"
    model, names = add_gradients(model_of(text), ["w"])
    x, w = spread(5, 40), spread(40, seed=1)
    seed = spread(5, 40, seed=2)
    running, feeds = session(model, level), {"x": x, "w": w, "seed_ys": seed}
    first, again = (running.run(["ys", names["w"]], feeds) for _ in range(2))
    assert not np.array_equal(first[0], again[0])
    for y, gradient in (first, again):
        np.testing.assert_allclose(gradient * w, (y * seed).sum(0), rtol=1e-4, atol=1e-4)


def test_random_draws_whose_number_is_unknown_are_refused():
    text = """net (float[5, 40] x, float w, bool[40] keep) => (float[5, 40] ys) {
      ys = Scan <num_scan_inputs = 1, body = turn (float[40] part) => (float[40] y) {
        some = Compress(part, keep) noise = RandomNormalLike(some) n = Mul(noise, w)
        k = ReduceSum <keepdims = 0> (n) y = Mul(part, k) }> (x) }"""
    model = model_of(text)
    with refused("unsupported-node", "must not run twice"):
        add_gradients(model, ["w"])


GROWING = """
net (float[n, 3] h, float[3] w) => (float[m, 3] rows) {{
  two = Constant <value = int64 {{2}}> () zero = Constant <value = int64[1] {{0}}> ()
  one = Constant <value = int64[1] {{1}}> () many = Constant <value = int64[1] {{100}}> ()
  nought = Constant <value = float {{0}}> ()
  rows = Loop <body = turn (int64 i, bool go, {declared} s) => (bool on, {declared} t) {{
    on = Identity(go) sw = Mul(s, w) {body} }}> (two, , h) }}"""
# What a turn makes of sw [n, 3], whose number of rows is known only when the model runs.
OTHER_ROWS = {
    "twice as many": "t = Concat <axis = 0> (sw, s)",
    "as many again as at first": "t = Concat <axis = 0> (sw, h)",
    "one less": "t = Slice(sw, one, many, zero)",
    "as many as the data has it": ("k = ReduceSum <keepdims = 0> (sw, one) b = Greater(k, nought) "
                                   "t = Compress <axis = 0> (sw, b)"),
}  # fmt: skip


@pytest.mark.parametrize("declared", ["float[]", "float[a, b]"])
@pytest.mark.parametrize("rows", OTHER_ROWS)
def test_a_carried_value_whose_number_of_rows_changes_is_refused(rows, declared):
    text = GROWING.format(declared=declared, body=OTHER_ROWS[rows])
    model = model_of(text)
    with refused("unsupported-node", r"carries and whose shape (may )?change"):
        add_gradients(model, ["w"])


REFUSED = {
    "which it carries and whose shape changes": """
net (int64 m, float[1, 3] h, float[3] w) => (float[n, 3] rows) {
  rows = Loop <body = turn (int64 i, bool go, float[] s) => (bool on, float[] t) {
    on = Identity(go) sw = Mul(s, w) t = Concat <axis = 0> (sw, s) }> (m, , h) }""",
    "it carries 's', which is not a tensor": """
net (int64 m, float[3] h, float[3] w) => (float[3] last) {
  hw = Mul(h, w) start = SequenceConstruct(hw, hw)
  last, unread = Loop <body = turn (int64 i, bool go, float[3] a, seq(float[3]) s)
      => (bool on, float[3] b, seq(float[3]) t) {
    on = Identity(go) part = SequenceAt(s, i) b = Add(a, part) t = Identity(s) }> (m, , h, start)
}""",
    "(?s)operator ConcatFromSequence.*with torch's scan": """
net (int64 m, float[3] h, float[3] w) => (float[n] last) {
  empty = SequenceEmpty()
  unread, all = Loop <body = turn (int64 i, bool go, float[3] a, seq(float[3]) s)
      => (bool on, float[3] b, seq(float[3]) t) {
    on = Identity(go) b = Mul(a, w) t = SequenceInsert(s, b) }> (m, , h, empty)
  last = ConcatFromSequence <axis = 0> (all)
}""",
    "another number of inputs or outputs": """
net (int64 m, float[3] h, float[3] w) => (float[3] last) {
  last = Loop <body = turn (int64 i, bool go, float[3] a, float[3] z)
      => (bool on, float[3] b, float[3] y) {
    on = Identity(go) b = Mul(a, w) y = Identity(z) }> (m, , h)
}""",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_loop_does_not_cover_is_refused(why):
    with pytest.raises(OdtpackError, match=why):
        add_gradients(inferred(REFUSED[why]), ["w"])


def test_a_weight_is_not_summed_up_turn_by_turn():
    """Its products are one product behind the loop, which carries only what is left."""
    case = next(case for case in CASES if case.id == "Scan-opset16")
    model, _ = add_gradients(forward_model(case), ["w", "b"])
    backward = [node for node in model.graph if node.op_type == "Scan"][-1]
    body = backward.attributes["body"].as_graph()
    carried = [str(value.name) for value in body.inputs if str(value.name).endswith("cotangent")]
    assert sorted(carried) == ["b.cotangent", "t.cotangent"]
    assert [node.op_type for node in body].count("Gemm") == 1
    assert [node.op_type for node in model.graph].count("Gemm") == 2
