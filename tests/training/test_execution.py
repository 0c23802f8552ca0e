"""How ONNX Runtime executes a package does not change what it learns.

Parameters, gradients, moments and running statistics are written into the memory they are read
from. ONNX Runtime does not check that this is safe, and each optimization level runs another
graph in another order; so each is held, bit for bit, against a run of the same models in which
every output has memory of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from odtpack import zoo
from odtpack_runtime import CheckpointState
from onnxruntime import GraphOptimizationLevel as Level

from tests.packaging_tools import OPTIMIZERS, batch, generate, open_training, statistic_names
from tests.training import settled

BUFFER, GRADIENT, UPDATE = "_grad.accumulation.buffer", "_grad.accumulation.out", ".update.out"
LEVELS = {
    "disable-all": Level.ORT_DISABLE_ALL,
    "basic": Level.ORT_ENABLE_BASIC,
    "extended": Level.ORT_ENABLE_EXTENDED,
    "all": Level.ORT_ENABLE_ALL,
}
SMALL_MOBILENET = {"size": 32, "width_mult": 0.35}


@functools.cache
def _model(name: str) -> onnx.ModelProto:
    if name.startswith("mobilenet"):
        x, _ = batch(zoo.mobilenet_v2(**SMALL_MOBILENET), 4)
        return settled.mobilenet(name.removeprefix("mobilenet-"), x, **SMALL_MOBILENET)
    if name == "transformer":
        return zoo.transformer_encoder(vocab=50, d=32, layers=2, T=16, ff=64, opset=14)
    return {
        # fc1 is large enough for an If around its accumulation, fc2 for none.
        "mlp": lambda: zoo.mlp((40, 30, 10)),
        "cnn": lambda: zoo.cnn(size=14, width=(8, 12), hidden=32),
    }[name]()


MODELS = ["mlp", "cnn", "mobilenet-fold", "mobilenet-train", "mobilenet-eval", "transformer"]


@dataclasses.dataclass
class Trace:
    """Loss of every micro-batch, and all values after the last step."""

    losses: list[float]
    values: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=MODELS)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with AdamW, and ``batch.npz``: two micro-batches of four."""
    model = _model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    frozen = statistic_names(model)
    generate(model, folder, OPTIMIZERS["adamw"], frozen_params=frozen)
    data = [batch(model, 4, seed) for seed in (0, 1)]
    np.savez(folder / "batch.npz", x=[x for x, _ in data], labels=[labels for _, labels in data])
    return folder


def _micro_batches(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray, bool]]:
    """Ten steps of two micro-batches: input, labels, and whether the step ends here."""
    with np.load(folder / "batch.npz") as archive:
        data = list(zip(archive["x"], archive["labels"], (False, True), strict=True))
    return itertools.chain.from_iterable(itertools.repeat(data, 10))


RATE = 1e-3


def _aliased(folder: Path, options: onnxruntime.SessionOptions) -> Trace:
    """Through the runtime: everything in place."""
    state, module, optimizer = open_training(folder, options)
    optimizer.set_learning_rate(RATE)
    losses = []
    for x, labels, ends in _micro_batches(folder):
        losses.append(float(module(x, labels)))
        if ends:
            optimizer.step()
            module.lazy_reset_grad()
    return Trace(losses, {name: p.data.copy() for name, p in state.parameters})


def _separate(folder: Path, options: onnxruntime.SessionOptions) -> Trace:
    """By hand: every output is a new array."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    values = {name: parameter.data.copy() for name, parameter in state.parameters}
    trained = [name for name, parameter in state.parameters if parameter.requires_grad]
    training, update = (
        onnxruntime.InferenceSession(
            folder / f"{name}_model.onnx", options, providers=["CPUExecutionProvider"]
        )
        for name in ("training", "optimizer")
    )
    names = [node.name for node in training.get_outputs()]
    gradients = {name: np.full_like(values[name], np.nan) for name in trained}
    moments: dict[str, dict[str, np.ndarray]] = {
        f"{order}_order_moments": {name: np.zeros_like(values[name]) for name in trained}
        for order in ("first", "second")
    }
    data, reset, step = training.get_inputs()[0].name, True, 0
    losses = []
    for x, labels, ends in _micro_batches(folder):
        feeds = {data: x, "labels": labels, "lazy_reset_grad": np.array([reset])} | values
        feeds |= {name + BUFFER: gradient for name, gradient in gradients.items()}
        results = dict(zip(names, training.run(None, feeds), strict=True))
        losses.append(float(results[names[0]]))
        gradients = {name: results[name + GRADIENT] for name in trained}
        values |= {
            name.removesuffix(UPDATE): array
            for name, array in results.items()
            if name.endswith(UPDATE)
        }
        reset = ends
        if not ends:
            continue
        step += 1
        for name in trained:
            shape = values[name].shape
            feeds = {"learning_rate": np.float32([RATE]), "step": np.int64([step])}
            feeds |= {"params": values[name].ravel(), "gradients": gradients[name].ravel()}
            feeds |= {order: of[name].ravel() for order, of in moments.items()}
            outputs = [f"{key}.out" for key in ("params", *moments)]
            results = dict(zip(outputs, update.run(outputs, feeds), strict=True))
            values[name] = results["params.out"].reshape(shape)
            for order, of in moments.items():
                of[name] = results[f"{order}.out"].reshape(shape)
    return Trace(losses, values)


def _options(level: Level = Level.ORT_ENABLE_ALL) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = level
    return options


@pytest.fixture(scope="module")
def expected(package: Path) -> Trace:
    """What comes out without optimizations and without aliases."""
    return _separate(package, _options(Level.ORT_DISABLE_ALL))


@pytest.mark.parametrize("level", LEVELS)
def test_levels(package: Path, expected: Trace, level: str) -> None:
    options = _options(LEVELS[level])
    aliased, separate = _aliased(package, options), _separate(package, options)
    assert aliased.losses == separate.losses
    for name, value in separate.values.items():
        np.testing.assert_array_equal(aliased.values[name], value, err_msg=name)
    # Fused and rearranged kernels round in another way, no more.
    assert expected.losses[-1] < expected.losses[0]
    assert aliased.losses == pytest.approx(expected.losses, rel=2e-4)
    for name, value in expected.values.items():
        error = np.linalg.norm(aliased.values[name] - value)
        assert error < 1e-4 * np.linalg.norm(value) + 1e-4, name


@pytest.mark.parametrize("pattern", [True, False], ids=["pattern", "no-pattern"])
@pytest.mark.parametrize("arena", [True, False], ids=["arena", "no-arena"])
def test_memory_options(package: Path, arena: bool, pattern: bool) -> None:
    options = _options()
    options.enable_cpu_mem_arena = arena
    options.enable_mem_pattern = pattern
    options.enable_mem_reuse = pattern
    aliased, separate = _aliased(package, options), _separate(package, _options())
    assert aliased.losses == separate.losses
    for name, value in separate.values.items():
        np.testing.assert_array_equal(aliased.values[name], value, err_msg=name)


def test_order_of_the_file(package: Path) -> None:
    """The other order of execution that ONNX Runtime knows."""
    options = _options()
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    aliased, separate = _aliased(package, options), _separate(package, _options())
    assert aliased.losses == separate.losses
    for name, value in separate.values.items():
        np.testing.assert_array_equal(aliased.values[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["mlp", "cnn", "mobilenet-fold", "mobilenet-eval", "transformer"])
def test_three_micro_batches_are_one_batch(name: str, tmp_path: Path) -> None:
    model = _model(name)
    folder = generate(model, tmp_path, frozen_params=statistic_names(model))
    x, labels = batch(model, 12)
    whole, whole_module, _ = open_training(folder)
    loss = float(whole_module(x, labels))
    parts, module, optimizer = open_training(folder)
    module(x[:4] * 2, labels[:4])  # what came before lazy_reset_grad does not count
    module.lazy_reset_grad()
    losses = [float(module(x[i : i + 4], labels[i : i + 4])) for i in (0, 4, 8)]
    assert np.mean(losses) == pytest.approx(loss, rel=1e-5)
    scale = max(np.abs(p.grad).max() for _, p in whole.parameters if p.requires_grad)
    for key, parameter in parts.parameters:
        if parameter.requires_grad:
            expected = whole.parameters[key].grad
            np.testing.assert_allclose(
                parameter.grad / 3, expected, rtol=1e-4, atol=1e-5 * scale, err_msg=key
            )
    optimizer.step()
    kept = {key: p.grad.copy() for key, p in parts.parameters if p.requires_grad}
    module(x[:4], labels[:4])  # without lazy_reset_grad the step is added to
    for key, before in kept.items():
        assert not np.array_equal(parts.parameters[key].grad, before) or not before.any()


def test_a_diverged_step_is_forgotten(tmp_path: Path) -> None:
    """Gradients of NaN do not survive lazy_reset_grad, whatever the way of accumulation."""
    model = _model("mlp")
    state, module, _ = open_training(generate(model, tmp_path))
    x, labels = batch(model, 4)
    module(x, labels)
    fresh = {name: p.grad.copy() for name, p in state.parameters}
    module(np.full_like(x, np.nan), labels)
    assert all(np.isnan(p.grad).any() for _, p in state.parameters)
    module.lazy_reset_grad()
    module(x, labels)
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.grad, fresh[name], err_msg=name)
