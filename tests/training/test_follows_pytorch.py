"""Ten steps of SGD on packages follow PyTorch: every loss, every parameter, every statistic.

PyTorch runs in float64, so that what is measured is the error of the package alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import zoo
from tests.packaging_tools import batch, generate, statistic_names
from tests.sweep import split, split_rows
from tests.training import runs, settled

SMALL_TRANSFORMER = {"vocab": 50, "d": 32, "layers": 2, "heads": 4, "T": 16, "ff": 64}

CASES = {
    "mlp": (zoo.mlp, 64, 0.1),
    "mlp-opset12": (lambda: zoo.mlp((20, 30, 15, 10), opset=12), 16, 0.1),
    "cnn": (zoo.cnn, 8, 0.05),
    "cnn-hidden-opset13": (lambda: zoo.cnn(size=14, width=(8, 12), hidden=16, opset=13), 8, 0.1),
    **{
        f"transformer-opset{opset}": (
            lambda opset=opset: zoo.transformer_encoder(**SMALL_TRANSFORMER, opset=opset),
            4,
            0.05,
        )
        for opset in (12, 13, 17, 21)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_small_models(case: str, tmp_path: Path) -> None:
    build, size, learning_rate = CASES[case]
    model = build()
    data = batch(model, size)
    _compare(model, data, learning_rate, tmp_path)


@pytest.mark.parametrize(
    ("batch_norm", "size", "seed", "learning_rate"),
    # Batches for which no activation comes near a kink in ten steps, see tests.training.settled.
    split_rows(
        [("fold", 2, 3, 0.002), ("eval", 2, 3, 0.002), ("train", 3, 10, 0.02)],
        lambda batch_norm, *_: batch_norm == "train",
    ),
)
def test_mobilenet(
    batch_norm: str, size: int, seed: int, learning_rate: float, tmp_path: Path
) -> None:
    data = batch(zoo.mobilenet_v2(), size, seed)
    model = settled.mobilenet(batch_norm, data[0])
    theirs = _compare(model, data, learning_rate, tmp_path)
    # The forward error in float32 is about 1e-6: nowhere do the runs take different sides.
    assert theirs.kink_margin > 3e-6
    moved = [
        name
        for name, value in runs.initial(model).items()
        if not np.array_equal(value, theirs.values[name])
    ]
    assert any(name.endswith("running_var") for name in moved) == (batch_norm == "train")


@pytest.mark.parametrize("stages", split([3, 7], lambda stages: stages == 3))
def test_mobilenet_as_it_starts(stages: int, tmp_path: Path) -> None:
    """One step from the zoo's own values, where a fair part of the activations is clipped."""
    model = zoo.mobilenet_v2(batch_norm="train", stages=stages)
    x, labels = batch(model, 8)
    generate(model, tmp_path)
    before = runs.initial(model)
    ours = runs.ours(tmp_path, x, labels, 0.01, steps=1)
    theirs = runs.pytorch(model, x, labels, 0.01, steps=1)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    # A few of eight million activations lie within rounding of a kink, and each moves elements of
    # the gradient. One percent of the step's length is ten times what was seen, and a gradient
    # that is wrong in any layer departs by more.
    step = np.concatenate([(theirs.values[n] - v).ravel() for n, v in before.items()])
    error = np.concatenate([(theirs.values[n] - ours.values[n]).ravel() for n in before])
    assert np.linalg.norm(error) < 0.01 * np.linalg.norm(step)


def _compare(
    model: onnx.ModelProto,
    data: tuple[np.ndarray, np.ndarray],
    learning_rate: float,
    folder: Path,
) -> runs.Run:
    """Both runs agree; return PyTorch's."""
    frozen = statistic_names(model)
    generate(model, folder, frozen_params=frozen)
    ours = runs.ours(folder, *data, learning_rate)
    theirs = runs.pytorch(model, *data, learning_rate)
    # Ten steps that change nothing would agree too.
    assert theirs.losses[-1] < 0.9 * theirs.losses[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert ours.eval_loss == pytest.approx(theirs.eval_loss, rel=1e-5)
    assert set(ours.values) == set(theirs.values)
    initial = runs.initial(model)
    for name, value in theirs.values.items():
        # Of the way a tensor went at most a ten-thousandth, beyond ten roundings of its values.
        # (The bias of an attention's keys goes nowhere: the softmax does not see it.)
        error = np.linalg.norm(ours.values[name] - value)
        way = np.linalg.norm(value - initial[name])
        assert error < 1e-4 * way + 1e-6 * np.linalg.norm(value) + 1e-8, name
        np.testing.assert_allclose(ours.values[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    return theirs
