"""Every loss with its options follows PyTorch through ten training steps."""

import dataclasses
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional as F

from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.losses import LOSSES
from odtpack_runtime.training.loop import evaluate
from tests.losses.cases import CASES, SHAPES, normal, probabilities
from tests.losses.harness import Case, check, package, shifted
from tests.model_text import parsed
from tests.packaging_tools import open_training
from tests.refused import refused
from tests.sweep import split_rows


@pytest.mark.parametrize("name", [name for name in CASES if name != "ctc"])  # test_ctc.py
def test_ten_steps(name, tmp_path):
    check(tmp_path, CASES[name])


# At every opset the first case of each loss, and at one of them all others.
FIRST = {case.name: name for name, case in reversed(CASES.items())}.values()
AT_OPSETS = [
    (name, opset)
    for name in CASES
    if not name.endswith("sequence") and name != "ctc"
    for opset in (12, 13, 18, 21)
]


@pytest.mark.parametrize(
    ("name", "opset"), split_rows(AT_OPSETS, lambda name, opset: name in FIRST or opset == 13)
)
def test_every_opset_without_optimizations(name, opset, tmp_path):
    check(tmp_path, CASES[name], opset=opset, optimized=False, steps=1)


# The losses of the reference, in one step, to the last digits.
PLAIN = {
    "mse": "mse-mean", "l1": "l1-mean", "cross_entropy": "cross_entropy-plain",
    "bce_with_logits": "bce_with_logits-plain",
}  # fmt: skip
EXACT: dict[str, Any] = {"steps": 1, "rtol": 1e-5, "atol": 1e-8, "loss_rtol": 1e-6}


@pytest.mark.parametrize("opset", [12, 13, 17, 21])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PLAIN)
def test_one_step_agrees(name, shape, opset, tmp_path):
    case = dataclasses.replace(CASES[f"{PLAIN[name]}-{shape}"], options={})
    check(tmp_path, case, opset=opset, **EXACT)


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["cross_entropy", "bce_with_logits"])
def test_one_step_of_large_logits(name, shape, magnitude, tmp_path):
    case = CASES[f"{PLAIN[name]}-{shape}"]
    xs = [(x.astype(np.float64) * magnitude).astype(np.float32) for x in case.xs]
    check(tmp_path, dataclasses.replace(case, options={}, xs=xs), **EXACT)


def test_equal_large_logits(tmp_path):
    x, target = np.full((4, 3), 3e38, np.float32), np.array([0, 1, 2, 0])
    check(tmp_path, Case("cross_entropy", {}, [x], [target], F.cross_entropy), **EXACT)


def test_l1_has_no_slope_at_zero(tmp_path):
    x = normal(4, 3)
    target = x + onnx.numpy_helper.to_array(shifted([x.shape]).graph.initializer[0])
    target[2:] += 1
    check(tmp_path, Case("l1", {}, [x], [target], F.l1_loss), **EXACT)


def test_every_loss_has_a_case_and_every_option_another_value():
    assert {case.name for case in CASES.values()} == set(LOSSES)
    defaults = {name: loss.defaults() for name, loss in LOSSES.items()}
    changed = {
        (case.name, option)
        for case in CASES.values()
        for option, value in case.options.items()
        if not np.array_equal(value, defaults[case.name][option])
    }
    missing = {(name, o) for name, options in defaults.items() for o in options} - changed
    # test_ctc has all of its options, and tests/adapters/test_codes.py the words.
    assert {(name, o) for name, o in missing if name != "ctc"} <= {("next_token", "words")}


# Where a naive formula overflows, divides by zero or reads what does not count.

FAR = {
    name: case
    for name, case in CASES.items()
    if name.endswith("vector")
    and case.name in ("cross_entropy", "bce_with_logits", "huber", "smooth_l1", "l1", "kl_div")
}


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
@pytest.mark.parametrize("name", FAR)
def test_large_predictions(name, magnitude, tmp_path):
    case = FAR[name]
    large = dataclasses.replace(case, xs=[x * magnitude for x in case.xs])
    check(tmp_path, large, steps=2, rtol=3e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_limit_of_certain_scores(sign, tmp_path):
    """Logits of +-1e4 for the right class: a loss of 0 or 1e4, a gradient of 0 or 1."""
    model = shifted([(2, 2)], values=[np.zeros(2)])
    package(tmp_path, model, "cross_entropy", {"reduction": "sum"})
    state, module, _ = open_training(tmp_path)
    loss = module(np.array([[sign * 1e4, 0], [0, sign * 1e4]], np.float32), np.array([0, 1]))
    assert float(loss) == (0 if sign > 0 else 2e4)
    np.testing.assert_array_equal(state.parameters["s0"].grad, [0, 0])


@pytest.mark.parametrize("magnitude", [1e4, 1e18])
def test_equal_embeddings_have_no_slope(magnitude, tmp_path):
    """The distance of equal vectors has a kink; the slope there must not be NaN."""
    for name, options in (("triplet_margin", {}), ("contrastive", {}), ("info_nce", {})):
        shapes = [(2, 3)] * (3 if name == "triplet_margin" else 2)
        folder = tmp_path / name
        package(folder, shifted(shapes, values=[np.zeros(3)] * 3), name, options)
        state, module, _ = open_training(folder)
        same = [np.full((2, 3), magnitude / 3, np.float32)] * len(shapes)
        targets = [np.zeros(2, np.float32)] if name == "contrastive" else []
        assert np.isfinite(module(*same, *targets))
        for _, parameter in state.parameters:
            assert np.isfinite(parameter.grad).all()


def test_embeddings_without_a_direction(tmp_path):
    package(tmp_path, shifted([(2, 3)] * 2, values=[np.zeros(3)] * 2), "info_nce", {})
    state, module, _ = open_training(tmp_path)
    zero = np.zeros((2, 3), np.float32)
    assert float(module(zero, zero)) == pytest.approx(np.log(2), rel=1e-6)
    for _, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.grad, np.zeros(3))


@pytest.mark.parametrize("weight", [None, (1.0, 2.0, 3.0)])
def test_a_batch_in_which_nothing_counts(weight, tmp_path):
    """Loss and gradient are 0: PyTorch's NaN would end the training on the device."""
    options = {"ignore_index": -100} | ({} if weight is None else {"weight": weight})
    package(tmp_path, shifted([(4, 3)]), "cross_entropy", options)
    state, module, _ = open_training(tmp_path)
    assert float(module(normal(4, 3), np.full(4, -100))) == 0
    np.testing.assert_array_equal(state.parameters["s0"].grad, np.zeros(3))


def test_ignored_samples_may_hold_anything(tmp_path):
    package(tmp_path, shifted([(4, 3)]), "nll", {"ignore_index": -1})
    state, module, _ = open_training(tmp_path)
    x = normal(4, 3)
    x[1] = -np.inf
    loss = module(x, np.array([0, -1, 2, 1]))
    s = state.parameters["s0"].data
    assert float(loss) == pytest.approx(
        -np.mean([(x + s)[i, c] for i, c in ((0, 0), (2, 2), (3, 1))])
    )
    np.testing.assert_allclose(state.parameters["s0"].grad, np.full(3, -1 / 3), rtol=1e-6)


def test_a_teacher_that_is_certain(tmp_path):
    """0 log 0 is 0, also in the gradient."""
    certain = np.eye(5, dtype=np.float32)[[0, 3, 3]]
    for temperature in (1.0, 20.0):

        def oracle(y, t, temperature=temperature):
            log_p = F.log_softmax(y / temperature, 1)
            return F.kl_div(log_p, t, reduction="batchmean") * temperature**2

        options = {"temperature": temperature, "teacher": "probabilities"}
        case = Case("kl_div", options, [normal(3, 5) * 100], [certain], oracle)
        check(tmp_path / f"{temperature:g}", case, rtol=5e-5)


@pytest.mark.parametrize(("name", "oracle"), [
    ("cross_entropy", F.cross_entropy),
    ("mse", F.mse_loss),
    ("bce_with_logits", F.binary_cross_entropy_with_logits),
])  # fmt: skip
def test_half_precision_predictions(name, oracle, tmp_path):
    """The loss is taken in float32: 4096 squared, or a sum over many terms, does not overflow."""
    text = "halves (float[N, 5] x) => (float16[N, 5] y) { z = Add(x, s) y = Cast <to = 10> (z) }"
    model = parsed(text, s=np.linspace(-1, 1, 5, dtype=np.float32))
    manifest = package(tmp_path, model, name, {"reduction": "sum"})
    labels = name == "cross_entropy"
    assert [item.dtype for item in manifest.inputs] == ["float32", "int64" if labels else "float32"]
    assert manifest.outputs[0].dtype == "float32"
    state, module, _ = open_training(tmp_path)
    x = normal(6, 5) * (1 if labels else 4096)
    target = np.arange(6) % 5 if labels else np.abs(normal(6, 5, seed=4)) % 1
    y = torch.from_numpy((x + state.parameters["s"].data).astype(np.float16)).double()
    y.requires_grad_()
    wanted = torch.from_numpy(target)
    reference = oracle(y, wanted if labels else wanted.double(), reduction="sum")  # type: ignore[operator]
    reference.backward()
    loss = module(x, target)
    assert loss.dtype == np.float32
    assert float(loss) == pytest.approx(reference.item(), rel=1e-5)
    rounded = y.grad.numpy().astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(state.parameters["s"].grad, rounded.sum(0), rtol=2e-3, atol=1e-3)


def test_probabilities_of_the_cases_hold_zeros():
    assert (probabilities(3, 5)[:, 0] == 0).all()


# Several losses are their weighted sum, in value, parts and gradient, as in PyTorch.

MODEL = """
two (float[n, 6] x) => (float[n, 5, 4] kinds, float[n, 1] size) <int64[3] shape = {-1, 5, 4}> {
    h = MatMul(x, body) t = Tanh(h) size = MatMul(t, size_weight)
    flat = MatMul(t, kinds_weight) kinds = Reshape(flat, shape)
}"""
SIZES = {"body": (6, 8), "size_weight": (8, 1), "kinds_weight": (8, 20)}
PARTS = [
    "kind=cross_entropy input=kinds layout=NLC ignore_index=3 weight=0.3",
    "size=mse input=size weight=2",
]


def _model() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    random = np.random.default_rng(3)
    weights = {n: random.normal(size=s).astype(np.float32) for n, s in SIZES.items()}
    return parsed(MODEL, **weights), weights


def test_value_parts_and_gradient_are_those_of_pytorch(tmp_path):
    model, weights = _model()
    manifest = build_package(model, tmp_path / "p", losses=PARTS)
    assert manifest.inference.outputs == ("kinds", "size")
    assert manifest.inference.inputs == ("x",)
    names = [each.name for each in manifest.outputs]
    assert names == ["loss", "loss.kind", "accuracy.kind", "loss.size"]

    random = np.random.default_rng(4)
    x = random.normal(size=(7, 6)).astype(np.float32)
    labels = random.integers(0, 4, (7, 5))
    target = random.normal(size=(7, 1)).astype(np.float32)
    given = {n: torch.tensor(w, dtype=torch.float64).requires_grad_() for n, w in weights.items()}
    hidden = torch.tanh(torch.tensor(x, dtype=torch.float64) @ given["body"])
    scores = (hidden @ given["kinds_weight"]).reshape(-1, 4)
    wanted = torch.tensor(labels.ravel())
    kind = F.cross_entropy(scores, wanted, ignore_index=3)
    size = F.mse_loss(hidden @ given["size_weight"], torch.tensor(target).double())
    (0.3 * kind + 2 * size).backward()
    counted = wanted != 3
    accuracy = (scores.argmax(1) == wanted)[counted].double().mean()

    state, module, _ = open_training(tmp_path / "p")
    feeds = {"x": x, "labels.kind": labels, "target.size": target}
    batch = [feeds[name] for name in module.input_names()]
    expected = [each.item() for each in (0.3 * kind + 2 * size, kind, accuracy, size)]
    np.testing.assert_allclose([float(r) for r in module(*batch)], expected, rtol=1e-5)
    for name, parameter in state.parameters:
        exact = given[name].grad
        np.testing.assert_allclose(parameter.grad, exact.numpy(), rtol=1e-4, atol=1e-6)
    found = evaluate(module, [batch], numbers={n: i for i, n in enumerate(names) if i})
    assert found.means == pytest.approx(dict(zip(names[1:], expected[1:], strict=True)), rel=1e-5)


@pytest.mark.parametrize(("parts", "code"), [
    (["a=mse input=size", "a=l1 input=size"], "named-twice"),
    (["a=mse input=nothing"], "unknown-value"),
    (["a=nothing"], "unknown-loss"),
    (["mse"], "bad-loss-option"),
    (["a=mse weight=-1"], "bad-loss-option"),
])  # fmt: skip
def test_what_does_not_fit_is_said(parts, code, tmp_path):
    with refused(code):
        build_package(_model()[0], tmp_path / "p", losses=parts)


def test_class_weights_on_the_command_line_name_the_recipe(tmp_path):
    with refused("bad-loss-option", hint="options = { weight = [1,2,3] }"):
        build_package(_model()[0], tmp_path / "p", losses=["a=cross_entropy weight=1,2,3"])


def test_one_loss_besides_is_refused(tmp_path):
    with pytest.raises(OdtpackError, match="several besides"):
        build_package(_model()[0], tmp_path / "p", loss="mse", losses=PARTS)
