"""CTC against PyTorch: values, gradients, ten steps; repeated labels, lengths, blanks."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as F

from odtpack import onnxblock
from odtpack.build import build_package
from tests.losses.cases import CTC_LABELS, CTC_LENGTHS, ctc_case, normal
from tests.losses.harness import Case, check, package, shifted
from tests.model_text import parsed
from tests.onnxblock.nets import Forward, Train, run
from tests.packaging_tools import open_training
from tests.refused import refused


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("opset", [12, 17, 21])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"blank": 4}, {"layout": "NTC"}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_ten_steps(options, opset, optimized, tmp_path):
    case = ctc_case(**options)
    check(tmp_path, case, opset=opset, optimized=optimized, rtol=1e-4, atol=1e-5)


def _one(folder: Path, x: np.ndarray, labels: list[int], length: int) -> tuple[float, np.ndarray]:
    """Loss and gradient of one sample x [T, 1, C], after ``length`` steps."""
    model = shifted([x.shape], values=[np.zeros(x.shape[1:])], batch="T")
    package(folder, model, "ctc", {"reduction": "sum"})
    state, module, _ = open_training(folder)
    given = np.array([labels]), np.array([length]), np.array([len(labels)])
    return float(module(x, *given)), state.parameters["s0"].grad.copy()


def test_two_steps_by_hand(tmp_path):
    """P(a) over two steps: aa, a-, -a."""
    p = np.array([[0.5, 0.3, 0.2], [0.25, 0.6, 0.15]])
    loss, _ = _one(tmp_path, np.log(p)[:, None].astype(np.float32), [1], 2)
    assert loss == pytest.approx(-np.log(0.3 * 0.6 + 0.3 * 0.25 + 0.5 * 0.6), rel=1e-6)


def test_labels_that_do_not_fit(tmp_path):
    """Equal labels need a blank between them: three steps for two. PyTorch: zero_infinity."""
    loss, gradient = _one(tmp_path / "a", normal(2, 1, 3), [1, 1], 2)
    assert loss == 0
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))
    loss, gradient = _one(tmp_path / "b", normal(3, 1, 3), [1, 1], 3)
    assert 0 < loss < 100
    assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
def test_large_logits(magnitude, tmp_path):
    case = ctc_case()
    large = dataclasses.replace(case, xs=[case.xs[0] * np.float32(magnitude)])
    check(tmp_path, large, steps=1, rtol=1e-4, atol=1e-5)


def test_long_sequences(tmp_path):
    """200 steps, 60 labels: probabilities of 1e-200."""
    labels = np.random.default_rng(0).integers(1, 30, (2, 60))
    lengths = np.array([200, 170]), np.array([60, 41])
    x = normal(200, 2, 30)

    def oracle(y: torch.Tensor, *targets: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(F.log_softmax(y, 2), *targets)

    case = Case("ctc", {"layout": "TNC"}, [x], [labels, *lengths], oracle)
    check(tmp_path, case, steps=1, rtol=3e-4, atol=1e-5)


def test_what_is_padded_does_not_matter(tmp_path):
    case = ctc_case()
    package(tmp_path, shifted([case.xs[0].shape], batch="T"), "ctc", {})
    state, module, _ = open_training(tmp_path)
    first = float(module(*case.xs, *case.targets))
    gradient = state.parameters["s0"].grad.copy()
    labels = CTC_LABELS.copy()
    for row, length in zip(labels, CTC_LENGTHS[1], strict=True):
        row[length:] = 2
    module.lazy_reset_grad()
    assert float(module(*case.xs, labels, *CTC_LENGTHS)) == first
    np.testing.assert_array_equal(state.parameters["s0"].grad, gradient)


def test_plain_operators_only(tmp_path):
    package(tmp_path, shifted([ctc_case().xs[0].shape], batch="T"), "ctc", {})
    for name in ("training", "eval"):
        model = onnx.load(tmp_path / f"{name}_model.onnx")
        onnx.checker.check_model(model, full_check=True)
        assert {node.domain for node in model.graph.node} == {""}
        assert [entry.domain for entry in model.opset_import] == [""]


def test_in_a_block():
    case, forward = ctc_case(), Forward(onnxblock.loss.Loss("ctc", reduction="none"))
    train = Train(onnxblock.loss.Loss("ctc", reduction="sum"))
    train.requires_grad("s0")
    model = shifted([case.xs[0].shape], values=[np.zeros(case.xs[0].shape[1:])], batch="T")
    for block in (forward, train):
        with onnxblock.base(model):
            block("y0")

    feeds = dict(zip(("labels", "input_lengths", "target_lengths"), case.targets, strict=True))
    feeds["x0"] = case.xs[0]
    (terms,) = run(forward.to_model_proto(), feeds).values()
    y = torch.from_numpy(case.xs[0]).double().requires_grad_()
    targets = [torch.from_numpy(target) for target in case.targets]
    expected = F.ctc_loss(F.log_softmax(y, 2), *targets, reduction="none")
    np.testing.assert_allclose(terms, expected.detach().numpy(), rtol=1e-5)
    expected.sum().backward()
    feeds["s0"] = np.zeros(case.xs[0].shape[1:], np.float32)
    gradient = run(train.to_model_proto()[0], feeds)["s0_grad.accumulation.out"]
    np.testing.assert_allclose(gradient, y.grad.sum(0).numpy(), rtol=1e-4, atol=1e-5)
    onnx.checker.check_model(forward.to_model_proto(), full_check=True)


def test_blanks_that_do_not_exist(tmp_path):
    for blank in (5, -1):
        with refused("bad-loss-option", "blank"):
            package(tmp_path, shifted([(7, 3, 5)]), "ctc", {"blank": blank})


@pytest.mark.parametrize(("batch", "layout"), [("batch", "NTC"), ("s24", "NTC"), ("frames", "TNC")])
def test_axes_by_their_names(batch, layout, tmp_path):
    """A network that gives [batch, time, classes], as most do, with no word about it."""
    case = ctc_case(layout=layout)
    package(tmp_path, shifted([case.xs[0].shape], values=[np.zeros(5)], batch=batch), "ctc", {})
    _state, module, _ = open_training(tmp_path)
    y = torch.from_numpy(case.xs[0]).double()
    expected = case.oracle(y, *(torch.from_numpy(target) for target in case.targets))
    assert float(module(case.xs[0], *case.targets)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("order", [1, -1])
def test_targets_of_another_loss_name_no_axis(order, tmp_path):
    model = parsed("""g (float[n, 4, s] x) => (float[s, n, 5] y) {
        t = Transpose <perm = [2, 0, 1]> (x)  y = MatMul(t, w)
    }""", w=np.ones((4, 5), np.float32))  # fmt: skip
    manifest = build_package(
        model, tmp_path / "p", losses=["a=ctc input=y", "b=mse input=y"][::order]
    )
    (labels,) = (each for each in manifest.inputs if each.dtype == "int64" and len(each.shape) == 2)
    assert labels.shape[0] == "n"
