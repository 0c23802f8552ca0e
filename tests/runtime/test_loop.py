"""The training loop against formulas in numpy."""

from __future__ import annotations

import numpy as np

from odtpack_runtime import CheckpointState, LinearLRScheduler, Module, Optimizer
from odtpack_runtime.training.loop import evaluate, right_labels, train_step
from tests.runtime import models


def opened(files: models.Files) -> tuple[CheckpointState, Module, Optimizer]:
    state = CheckpointState.load_checkpoint(files.checkpoint)
    module = Module(files.training, state, files.evaluation)
    return state, module, Optimizer(files.sgd, module)


def batches(*sizes: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(3)
    return [[rng.random((n, 3), np.float32), rng.random((n, 2), np.float32)] for n in sizes]


def values(state: CheckpointState) -> dict[str, np.ndarray]:
    return {name: item.data.astype(np.float64) for name, item in state.parameters}


def loss(batch: list[np.ndarray], at: dict[str, np.ndarray]) -> float:
    x, target = (array.astype(np.float64) for array in batch)
    return float(np.mean((x * at["scale"] @ at["W"] + at["b"] - target) ** 2))


def test_a_step_follows_the_sum_of_its_batches_gradients(regression: models.Files) -> None:
    state, module, optimizer = opened(regression)
    before, fed, seen = values(state), batches(4, 3), []
    scheduler = LinearLRScheduler(optimizer, 0, 2, 0.1)
    rate = optimizer.get_learning_rate()
    mean = train_step(module, optimizer, iter(fed), scheduler, on_loss=seen.append)
    wanted = [loss(batch, before) for batch in fed]
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)
    np.testing.assert_allclose(mean, np.mean(wanted), rtol=1e-5)
    gradient = np.zeros_like(before["W"])
    for batch in fed:  # central differences
        for at in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = {**before, "W": before["W"].copy()}
                moved["W"][at] += sign * 1e-6
                ends.append(loss(batch, moved))
            gradient[at] += (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(values(state)["W"], before["W"] - rate * gradient, rtol=1e-4)
    np.testing.assert_allclose(optimizer.get_learning_rate(), 0.05, rtol=1e-6)
    # Nothing of this step goes into the next one.
    after = values(state)
    np.testing.assert_allclose(train_step(module, optimizer, fed[:1]), loss(fed[0], after), 1e-5)


def test_an_evaluation_weights_batches_by_their_samples(regression: models.Files) -> None:
    state, module, _ = opened(regression)
    fed = batches(4, 1)
    found = evaluate(module, fed)
    everything = [np.concatenate(column) for column in zip(*fed, strict=True)]
    assert found.loss is not None
    np.testing.assert_allclose(found.loss, loss(everything, values(state)), rtol=1e-5)
    assert found.sizes == (4, 1)
    assert (found.accuracy, found.total) == (None, 0)
    assert module.training
    module.eval()
    assert evaluate(module, []).loss is None
    assert not module.training


def test_right_labels_are_counted_without_the_ignored_ones() -> None:
    scores = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    labels = np.array([1, 1, -1, 0])
    for ignored, total in ((-1, 3), (None, 4)):
        named, counted = right_labels(scores, labels, ignored)
        assert (named.tolist(), len(counted)) == ([1, 0], total)
