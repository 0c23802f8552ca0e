"""Where a naive formula overflows, divides by zero or reads what does not count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from torch.nn import functional as F

from tests.losses.cases import CASES, normal, probabilities
from tests.losses.harness import check, package, shifted
from tests.packaging_tools import open_training

FAR = {
    name: case
    for name, case in CASES.items()
    if name.endswith("vector")
    and case.name in ("cross_entropy", "bce_with_logits", "huber", "smooth_l1", "l1", "kl_div")
}


@pytest.mark.parametrize("magnitude", [1e2, 1e4])
@pytest.mark.parametrize("name", FAR)
def test_large_predictions(name: str, magnitude: float, tmp_path: Path) -> None:
    case = FAR[name]
    xs = [x * magnitude for x in case.xs]
    check(tmp_path, case.name, case.options, xs, case.targets, case.oracle, steps=2, rtol=3e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_limit_of_certain_scores(sign: int, tmp_path: Path) -> None:
    """Logits of +-1e4 for the right class: a loss of 0 or 1e4, a gradient of 0 or 1."""
    model = shifted([(2, 2)], values=[np.zeros(2)])
    package(tmp_path, model, "cross_entropy", {"reduction": "sum"})
    state, module, _ = open_training(tmp_path)
    x = np.array([[sign * 1e4, 0], [0, sign * 1e4]], np.float32)
    loss = module(x, np.array([0, 1]))
    assert float(loss) == (0 if sign > 0 else 2e4)
    np.testing.assert_array_equal(state.parameters["s0"].grad, [0, 0])


@pytest.mark.parametrize("magnitude", [1e4, 1e18])
def test_equal_embeddings_have_no_slope(magnitude: float, tmp_path: Path) -> None:
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


def test_embeddings_without_a_direction(tmp_path: Path) -> None:
    package(tmp_path, shifted([(2, 3)] * 2, values=[np.zeros(3)] * 2), "info_nce", {})
    state, module, _ = open_training(tmp_path)
    zero = np.zeros((2, 3), np.float32)
    assert float(module(zero, zero)) == pytest.approx(np.log(2), rel=1e-6)
    for _, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.grad, np.zeros(3))


@pytest.mark.parametrize("weight", [None, (1.0, 2.0, 3.0)])
def test_a_batch_in_which_nothing_counts(weight: tuple[float, ...] | None, tmp_path: Path) -> None:
    """Loss and gradient are 0: PyTorch's NaN would end the training on the device."""
    options = {"ignore_index": -100} | ({} if weight is None else {"weight": weight})
    package(tmp_path, shifted([(4, 3)]), "cross_entropy", options)
    state, module, _ = open_training(tmp_path)
    assert float(module(normal(4, 3), np.full(4, -100))) == 0
    np.testing.assert_array_equal(state.parameters["s0"].grad, np.zeros(3))


def test_ignored_samples_may_hold_anything(tmp_path: Path) -> None:
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


def test_a_teacher_that_is_certain(tmp_path: Path) -> None:
    """0 log 0 is 0, also in the gradient."""
    certain = np.eye(5, dtype=np.float32)[[0, 3, 3]]
    for temperature in (1.0, 20.0):

        def oracle(
            y: torch.Tensor, t: torch.Tensor, temperature: float = temperature
        ) -> torch.Tensor:
            log_p = F.log_softmax(y / temperature, 1)
            return F.kl_div(log_p, t, reduction="batchmean") * temperature**2

        options = {"temperature": temperature, "teacher": "probabilities"}
        folder = tmp_path / f"{temperature:g}"
        check(folder, "kl_div", options, [normal(3, 5) * 100], [certain], oracle, rtol=5e-5)


def _half_model(dtype: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> halves (float[N, 5] x) => '
        f"({dtype}[N, 5] y) {{ z = Add(x, s) y = Cast <to = {onnx.TensorProto.FLOAT16}> (z) }}"
    )
    shift = np.linspace(-1, 1, 5, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(shift, "s"))
    return model


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("cross_entropy", F.cross_entropy),
        ("mse", F.mse_loss),
        ("bce_with_logits", F.binary_cross_entropy_with_logits),
    ],
)
def test_half_precision_predictions(name: str, oracle: object, tmp_path: Path) -> None:
    """The loss is taken in float32: 4096 squared, or a sum over many terms, does not overflow."""
    manifest = package(tmp_path, _half_model("float16"), name, {"reduction": "sum"})
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


def test_probabilities_of_the_cases_hold_zeros() -> None:
    assert (probabilities(3, 5)[:, 0] == 0).all()
