"""A Dropout in training mode drops, whatever ONNX Runtime takes it for."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack import optimizers
from odtpack.build import build_package
from odtpack.graph import graphs
from odtpack.passes.finishing import keep_dropout
from odtpack_runtime.package.package import Package
from tests.model_text import LEVELS, parsed, run
from tests.packaging_tools import open_training
from tests.passes.tools import assert_unchanged, changed, op_types, parse


def depth(mode: ir.Value | None) -> int:
    """How many nodes compute the mode of a Dropout, one after the other."""
    node = graphs.producer(mode, "Equal")
    return 0 if node is None else 1 + depth(node.inputs[0])


HEAD = """g (float[{rows}, 64] x, bool[1] lazy_reset_grad, bool mode) => ({outputs})
    <float half = {{0.5}}, bool yes = {{1}}, bool no = {{0}},
    float none = {{0}}, float one = {{1}}> {{ {body} }}"""


def graph(body: str, rows: str = "N", outputs: str = "float[N, 64] y", opset: int = 17) -> ir.Model:
    outputs = outputs.replace("N", rows)
    return parse(HEAD.format(rows=rows, outputs=outputs, body=body), opset)


def kept(model: ir.Model, level: str, mode: bool = True) -> list[np.ndarray]:
    """What of each output is not zero, for an input without zeros."""
    feeds = {
        "x": np.ones((8, 64), np.float32), "lazy_reset_grad": np.zeros(1, np.bool_),
        "mode": np.array(mode),
    }  # fmt: skip
    onnxruntime.set_seed(3)
    named = {str(each.name): feeds[str(each.name)] for each in model.graph.inputs}
    return [each != 0 for each in run(model, named, level).values()]


BODIES = {
    "of a node": "a = Abs(x) d = Dropout(a, half, yes) y = Neg(d)",
    "of an input": "d = Dropout(x, half, yes) y = Neg(d)",
    "of an input, once a node is removed": "a = Mul(x, one) d = Dropout(a, half, yes) y = Neg(d)",
    "without a ratio": "a = Abs(x) d = Dropout(a, , yes) y = Neg(d)",
    "of a mode that the app gives": "a = Abs(x) d = Dropout(a, half, mode) y = Neg(d)",
    "in a branch": """y = If (mode) <
        then_branch = t () => (float[N, 64] p) { a = Abs(x) d = Dropout(a, half, yes) p = Neg(d) },
        else_branch = e () => (float[N, 64] q) { q = Neg(x) }>""",
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", ["N", "8"])
@pytest.mark.parametrize("opset", [13, 17, 22])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_one_whose_mask_nothing_reads(body, opset, rows, level):
    model = changed(keep_dropout, graph(body.replace("[N,", f"[{rows},"), rows, opset=opset))
    (found,) = kept(model, level)
    assert 0.4 < found.mean() < 0.6


def test_a_mode_that_the_app_gives_may_be_off():
    model = changed(keep_dropout, graph(BODIES["of a mode that the app gives"]))
    assert all(each.all() for each in kept(model, "all", mode=False))


def test_settings_are_computed_once():
    body = "a = Abs(x) d = Dropout(a, half, yes) e = Exp(d) f = Dropout(e, half, yes) y = Neg(f)"
    model = changed(keep_dropout, graph(body))
    expected = ["Equal", "Squeeze", "Abs", "Equal", "Where", "Dropout", "Exp", "Dropout", "Neg"]
    assert op_types(model.graph) == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("again", ["half, yes", "half2, yes2", ", yes2"])
def test_two_of_one_value_have_masks_of_their_own(again, level):
    """Before 1.18 ONNX Runtime merges those that read the same values, once constants are one."""
    body = f"""a = Abs(x) half2 = Constant <value = float {{0.5}}> ()
        yes2 = Constant <value = bool {{1}}> () d, m = Dropout(a, half, yes)
        e, n = Dropout(a, {again}) f = Dropout(a, half, yes) y = Where(m, d, one)
        z = Where(n, e, none) w = Neg(f)"""
    outputs = "float[N, 64] y, float[N, 64] z, float[N, 64] w"
    model = changed(keep_dropout, graph(body, outputs=outputs))
    drops = [node for node in model.graph if node.op_type == "Dropout"]
    assert len({depth(node.inputs[2]) for node in drops}) == 3
    assert len({each.tobytes() for each in kept(model, level)}) == 3


@pytest.mark.parametrize("body", [
    "a = Abs(x) d, m = Dropout(a, half, yes) y = Where(m, d, one)",
    "a = Abs(x) d = Dropout(a, half) y = Neg(d)",
    "a = Abs(x) d = Dropout(a, half, no) y = Neg(d)",
    "a = Abs(x) d = Dropout(a, none, yes) y = Neg(d)",
    "y = Abs(x)",
])  # fmt: skip
def test_what_needs_nothing_stays(body):
    assert_unchanged(keep_dropout, graph(body))


def test_a_model_that_does_not_train_stays():
    body = "g (float[N] x) => (float[N] y) <float r = {0.5}, bool on = {1}> "
    assert_unchanged(keep_dropout, parse(body + "{ a = Abs(x) d = Dropout(a, r, on) y = Neg(d) }"))


@pytest.mark.parametrize("step_model", ["never", "always"])
def test_a_frozen_network_below_trains_with_dropout(step_model, tmp_path):
    """A head trains on what a Dropout leaves, as where all is trained; evaluation drops nothing."""
    text = """g (float[N, 8] x) => (float[N, 4] y) <float half = {0.5}, bool yes = {1}>
    { a = MatMul(x, body) b = Relu(a) d = Dropout(b, half, yes) y = MatMul(d, head) }"""
    random = np.random.default_rng(0)
    shapes = {"body": (8, 32), "head": (32, 4)}
    model = parsed(text, **{n: np.float32(random.normal(size=s)) for n, s in shapes.items()})
    batch = random.normal(size=(16, 8)).astype(np.float32), random.integers(0, 4, 16)
    losses: dict[str, list[float]] = {}
    for train in ("head", "*"):
        folder = tmp_path / f"package{len(losses)}"
        build_package(
            model, folder, loss="cross_entropy", optimizer=optimizers.SGD(), train=[train],
            step_model=step_model,
        )  # fmt: skip
        step = Package.open(folder).step_model
        _, module, optimizer = open_training(folder, step_model_uri=step)
        optimizer.set_learning_rate(0.0)
        losses[train] = []
        for seed in range(1, 6):
            onnxruntime.set_seed(seed)
            losses[train].append(float(optimizer.step_on(*batch)))
        whole = {float(module.eval()(*batch)[0]) for _ in range(3)}
        assert len(whole) == 1
        assert whole.isdisjoint(losses[train])
    assert losses["head"] == pytest.approx(losses["*"], rel=1e-6)
    assert len(set(losses["head"])) == 5
