"""Packages with If, Loop and Scan train as PyTorch does."""

from collections.abc import Callable

import numpy as np
import onnx.parser
import pytest
import torch
from torch.nn import functional as F

from odtpack import optimizers
from odtpack.build import build_package
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.memory_plan import plan_memory
from tests.model_text import add_initializers, parsed
from tests.packaging_tools import built_training, losses_of_steps, open_training
from tests.refused import refused
from tests.torch_twins import losses_of

Tensors = dict[str, torch.Tensor]
STEPS, RATE = 6, 0.2

_GENERATOR = np.random.default_rng(0)
WEIGHTS = {
    "w": _GENERATOR.normal(size=(4, 4)) * 0.4, "u": _GENERATOR.normal(size=(4, 4)) * 0.4,
    "b": _GENERATOR.normal(size=4) * 0.1, "head": _GENERATOR.normal(size=(4, 3)) * 0.5,
}  # fmt: skip
WEIGHTS = {name: value.astype(np.float32) for name, value in WEIGHTS.items()}
X = _GENERATOR.normal(size=(6, 5, 4)).astype(np.float32)
LABELS = _GENERATOR.integers(0, 3, 6)

SCAN = """
  xt = Transpose <perm = [1, 0, 2]> (x) first = Gather <axis = 1> (x, zero) h = Mul(first, nought)
  last = Scan <num_scan_inputs = 1, body = turn (float[batch, 4] s, float[batch, 4] part)
      => (float[batch, 4] t) {
    pw = MatMul(part, w) su = MatMul(s, u) sum = Add(pw, su) biased = Add(sum, b) t = Tanh(biased)
  }> (h, xt)
  logits = MatMul(last, head)
"""


def scan(x: torch.Tensor, p: Tensors, *, stop: bool = False) -> torch.Tensor:
    h = x[:, 0] * 0
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ p["w"] + (h.detach() if stop else h) @ p["u"] + p["b"])
    return h @ p["head"]


# As many turns as the input has rows, and the first layer within the body only.
LOOP = """
  shape = Shape(x) count = Gather(shape, one)
  h = Gather <axis = 1> (x, zero)
  last, ys = Loop <body = turn (int64 i, bool go, float[batch, 4] s)
      => (bool on, float[batch, 4] t, float[batch, 4] y) {
    on = Identity(go) row = Gather <axis = 1> (x, i) sw = MatMul(s, w) su = MatMul(row, u)
    sum = Add(sw, su) biased = Add(sum, b) t = Sigmoid(biased) y = Mul(t, s)
  }> (count, , h)
  mean = ReduceMean <axes = [0], keepdims = 0> (ys) joined = Add(last, mean)
  logits = MatMul(joined, head)
"""


def loop(x: torch.Tensor, p: Tensors, *, stop: bool = False) -> torch.Tensor:
    h, ys = x[:, 0], []
    for t in range(x.shape[1]):
        before, h = h, torch.sigmoid(h @ p["w"] + x[:, t] @ p["u"] + p["b"])
        ys.append((h.detach() if stop else h) * before)
    return (h + torch.stack(ys).mean(0)) @ p["head"]


# The sum of b grows, and the branch changes after two steps.
CHOICE = """
  h = Gather <axis = 1> (x, zero) hw = MatMul(h, w)
  norm = ReduceSum <keepdims = 0> (b) positive = Less(norm, limit)
  y = If (positive) <
    then_branch = yes () => (float[batch, 4] y1) { m = MatMul(hw, u) y1 = Tanh(m) },
    else_branch = no () => (float[batch, 4] y2) { y2 = Sin(hw) }>
  z = Add(y, b) logits = MatMul(z, head)
"""


def choice(x: torch.Tensor, p: Tensors, stop: str = "") -> torch.Tensor:
    h = x[:, 0] @ p["w"]
    inner = h.detach() if stop == "hw" else h
    y = torch.tanh(inner @ p["u"]) if p["b"].sum() < LIMIT else torch.sin(h)
    if stop == "y2" and p["b"].sum() >= LIMIT:
        y = y.detach()
    return (y + p["b"]) @ p["head"]


LIMIT = 0.103

CASES: dict[str, tuple[str, Callable[[torch.Tensor, Tensors], torch.Tensor]]] = {
    "Scan": (SCAN, scan), "Loop": (LOOP, loop), "If": (CHOICE, choice),
}  # fmt: skip


def build(body: str, opset: int) -> onnx.ModelProto:
    """A model whose weights are initializers."""
    return parsed(
        "(float[batch, 5, 4] x) => (float[batch, 3] logits) <int64 zero = {0}, int64 one = {1}, "
        f"float nought = {{0.0}}, float limit = {{{LIMIT}}}> {{ {body} }}", opset, ir_version=7,
        **{name: value for name, value in WEIGHTS.items() if f" {name})" in body},
    )  # fmt: skip


def pytorch(function, names):
    parameters = {n: torch.tensor(WEIGHTS[n]).double().requires_grad_() for n in names}
    x, labels = torch.tensor(X).double(), torch.tensor(LABELS)
    optimizer = torch.optim.SGD(list(parameters.values()), lr=RATE)

    def loss() -> torch.Tensor:
        return F.cross_entropy(function(x, parameters), labels)

    losses = losses_of(optimizer, loss, STEPS)
    return losses, {n: p.detach().numpy() for n, p in parameters.items()}, loss().item()


@pytest.mark.parametrize("opset", [12, 13, 17])
@pytest.mark.parametrize("name", CASES)
def test_steps_follow_pytorch(name, opset, tmp_path):
    follow(*CASES[name], opset, tmp_path / "package")


STOPPED: dict[str, tuple[str, Callable[[torch.Tensor, Tensors], torch.Tensor], list[str]]] = {
    "state": (SCAN, lambda x, p: scan(x, p, stop=True), ["s"]),
    "on one way": (LOOP, lambda x, p: loop(x, p, stop=True), ["t@y"]),
    "result of a branch": (CHOICE, lambda x, p: choice(x, p, stop="y2"), ["y2"]),
    "read in a branch": (CHOICE, lambda x, p: choice(x, p, stop="hw"), ["hw@m"]),
}


@pytest.mark.parametrize("name", STOPPED)
def test_gradients_stop_in_bodies(name, tmp_path):
    body, function, stops = STOPPED[name]
    follow(body, function, 17, tmp_path / "package", stop_gradient=stops)


def follow(body, function, opset, folder, **options):
    model = build(body, opset)
    names = [n for n in WEIGHTS if f" {n})" in body]
    build_package(
        model, folder, loss="cross_entropy", optimizer=optimizers.SGD(), train=names, **options
    )
    losses, values, final = pytorch(function, names)
    state, module, optimizer = open_training(folder)
    optimizer.set_learning_rate(RATE)
    found = losses_of_steps(module, optimizer, [(X, LABELS)] * STEPS)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    trained = {n: parameter for n, parameter in state.parameters if parameter.requires_grad}
    assert sorted(trained) == sorted(names)
    for n, parameter in trained.items():
        np.testing.assert_allclose(parameter.data, values[n], rtol=1e-4, atol=1e-6, err_msg=n)
    module.eval()
    assert float(module(X, LABELS)[0]) == pytest.approx(final, rel=1e-5)
    plan = plan_memory(Package.open(folder), {"x": X.shape, "labels": LABELS.shape})
    assert plan.peak.nbytes > 0


def test_both_branches_are_taken():
    """Otherwise the case above would not show that either is trained."""
    taken = set()

    def watched(x: torch.Tensor, p: Tensors) -> torch.Tensor:
        taken.add(bool(p["b"].sum() < LIMIT))
        return choice(x, p)

    pytorch(watched, ["w", "u", "b", "head"])
    assert taken == {True, False}


def names_nodes(model: onnx.ModelProto, op_type: str, name: str) -> None:
    """Name the only node of a type, wherever it lies."""

    def search(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == op_type:
                node.name = name
            for attribute in node.attribute:
                search(attribute.g)

    search(model.graph)


def test_a_weight_that_is_stored_in_a_body_is_trained(tmp_path):
    model = build(SCAN.replace("Add(sum, b)", "Add(sum, v)"), 17)
    (turn,) = (a.g for node in model.graph.node for a in node.attribute if a.name == "body")
    start = np.array([0.5, -0.5, 0.25, 0.0], np.float32)
    turn.initializer.append(onnx.numpy_helper.from_array(start, "v"))
    options = {"freeze": ["nought"], "optimizer": optimizers.SGD()}
    state, module, optimizer = built_training(model, tmp_path / "package", **options)
    assert sorted(name for name, _ in state.parameters) == ["head", "nought", "u", "v", "w"]
    optimizer.set_learning_rate(RATE)
    parameters = {n: torch.tensor(v).double() for n, v in WEIGHTS.items()}
    parameters["b"] = torch.tensor(start).double().requires_grad_()
    loss = F.cross_entropy(scan(torch.tensor(X).double(), parameters), torch.tensor(LABELS))
    loss.backward()
    gradient = parameters["b"].grad
    assert float(module(X, LABELS)) == pytest.approx(loss.item(), rel=1e-5)
    optimizer.step()
    moved = dict(state.parameters)["v"].data
    np.testing.assert_allclose(moved, start - RATE * gradient.numpy(), rtol=1e-5)


def test_dropout_in_a_body_is_off_in_evaluation(tmp_path):
    body = SCAN.replace("t = Tanh(biased)", "q = Tanh(biased) t = Dropout(q, half, training)")
    model = build(body, 17)
    add_initializers(model, {"half": np.float32(0.5), "training": True})
    _, module, _ = built_training(model, tmp_path / "p", optimizer=optimizers.SGD())
    parameters = {n: torch.tensor(v).double() for n, v in WEIGHTS.items()}
    expected = F.cross_entropy(scan(torch.tensor(X).double(), parameters), torch.tensor(LABELS))
    assert len({float(module(X, LABELS)) for _ in range(3)}) == 3
    module.eval()
    assert float(module(X, LABELS)[0]) == pytest.approx(expected.item(), rel=1e-5)


def test_batch_normalization_that_trains_in_a_body_is_refused(tmp_path):
    layer = "q, m, v = BatchNormalization <training_mode = 1> (biased, b, b, b, b) t = Tanh(q)"
    model = build(SCAN.replace("t = Tanh(biased)", layer), 17)
    names_nodes(model, "BatchNormalization", "norm")
    with refused("batch-norm-in-body", r"'norm' .* inside the body"):
        build_package(model, tmp_path / "package", loss="cross_entropy")


def test_an_operator_without_a_gradient_in_a_body_is_named(tmp_path):
    model = build(SCAN.replace("t = Tanh(biased)", "t = odd.Turn(biased)"), 17)
    model.opset_import.add(domain="odd", version=1)
    names_nodes(model, "Turn", "turning")
    names_nodes(model, "Scan", "steps")
    with refused("no-gradient", "Turn", "'turning'", "Scan 'steps'"):
        build_package(model, tmp_path / "package", loss="cross_entropy")


# torch.jit exports squeeze(d) of a dynamic axis as this; with both branches the rank is unknown.
SQUEEZE = """
  shape = Shape(x) size = Gather(shape, one) c = Equal(size, ones)
  s = If (c) <
    then_branch = yes () => (float[] s1) { s1 = Squeeze(x, one) },
    else_branch = no () => (float[] s2) { s2 = Identity(x) }>
  rank = Shape(shape) deep = Equal(rank, twos)
  y = If (deep) <
    then_branch = never () => (float[] y1) { y1 = MatMul(s, dead) },
    else_branch = always () => (float[] y2) { y2 = MatMul(s, w) }>
  logits = MatMul(y, head)
"""


@pytest.mark.parametrize("steps", ["steps", "1", "5"])
def test_a_squeeze_of_a_dynamic_axis_takes_its_branch(steps, tmp_path):
    model = parsed(
        f"(float[batch, {steps}, 4] x) => (float[batch, 3] logits) <int64[1] one = {{1}}, "
        f"int64[1] ones = {{1}}, int64[1] twos = {{2}}> {{ {SQUEEZE} }}",
        w=WEIGHTS["w"], head=WEIGHTS["head"], dead=WEIGHTS["u"],
    )  # fmt: skip
    said: list[str] = []
    x = X if steps == "5" else X[:, :1]
    if steps == "5":
        model.graph.output[0].type.tensor_type.shape.dim.insert(
            1, onnx.TensorShapeProto.Dimension(dim_value=5)
        )
    build_package(model, tmp_path / "p", loss="mse", remark=said.append)
    assert any("size 1" in each for each in said) == (steps == "steps")
    state, module, _ = open_training(tmp_path / "p")
    assert set(module.trained) == {"w", "head"}  # no gradient reaches what only a dead branch reads
    parameters = {n: torch.tensor(WEIGHTS[n]).double().requires_grad_() for n in module.trained}
    y = torch.tensor(x).double() @ parameters["w"] @ parameters["head"]
    y = y if steps == "5" else y.squeeze(1)
    target = np.random.default_rng(1).normal(size=y.shape).astype(np.float32)
    F.mse_loss(y, torch.tensor(target).double()).backward()
    module(x, target)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        np.testing.assert_allclose(
            state.parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-6
        )
    if steps == "steps":
        with pytest.raises(Exception, match=r"(?i)squeeze"):
            module(X, target)
