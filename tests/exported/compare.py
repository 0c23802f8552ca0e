"""Holds a package, built from an export, to PyTorch.

PyTorch runs in float64, so that what is measured is the error of the package alone.
"""

import copy

import numpy as np
import pytest

from odtpack import optimizers
from odtpack.build import build_package
from tests.exported import twins
from tests.packaging_tools import open_training

OPTIMIZERS: dict[str, optimizers.Optimizer] = {
    "sgd": optimizers.SGD(),
    "adamw": optimizers.AdamW(epsilon=twins.EPSILON),
}


def assert_follows(subject, module, data, target, model, folder):
    """Every loss, and every parameter after every step, agree with both optimizers.

    ``module`` is as it was when it was exported. Returns the manifest of a package in ``folder``.
    """
    for kind, method in OPTIMIZERS.items():
        package = folder / kind
        manifest = build_package(model, package, loss=subject.loss, optimizer=method)
        state, trainer, optimizer = open_training(package)
        initial = {name: parameter.data.copy() for name, parameter in state.parameters}
        pairs = twins.pair(module, initial)
        trained = {pairs[p.name] for p in manifest.parameters if p.role == "trainable"}
        assert twins.parameters_of(module, trained) == {n for n, _ in module.named_parameters()}
        theirs = twins.train(copy.deepcopy(module), data, target, subject, kind)
        # The forward error in float32 is about 1e-6: nowhere do the runs take different sides.
        assert theirs.margin > 3e-6
        feeds = [tensor.numpy() for tensor in (*data.values(), target) if tensor is not None]
        optimizer.set_learning_rate(subject.rate if kind == "sgd" else twins.ADAM_RATE)
        for loss, values in zip(theirs.losses, theirs.values, strict=True):
            # Float32 carries seven digits; sums over a batch leave six.
            assert float(trainer(*feeds)) == pytest.approx(loss, rel=1e-5)
            optimizer.step()
            trainer.lazy_reset_grad()
            for name, parameter in state.parameters:
                _assert_near(parameter.data, values[pairs[name]], initial[name], name)
        # Ten steps that change nothing would agree too.
        assert theirs.losses[-1] < 0.97 * theirs.losses[0]
    return manifest


def _assert_near(ours: np.ndarray, theirs: np.ndarray, initial: np.ndarray, name: str) -> None:
    """At most a ten-thousandth of the way a tensor went, beyond a few roundings of its values."""
    error, way = np.linalg.norm(ours - theirs), np.linalg.norm(theirs - initial)
    assert error < 1e-4 * way + 1e-6 * np.linalg.norm(theirs) + 1e-7, name
