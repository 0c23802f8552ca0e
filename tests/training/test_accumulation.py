"""Gradients of several batches make the step of one large batch."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from odtpack import optimizers
from odtpack.build import build_package
from odtpack.cli import _fit
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_simulator.replay.job import step_count
from tests import zoo
from tests.model_text import run
from tests.packaging_tools import OPTIMIZERS, batch, generate, open_training
from tests.refused import refused
from tests.training.formulas import adamw

MODELS = {
    "mlp": lambda: zoo.mlp((12, 9, 5)),
    "cnn": lambda: zoo.cnn(size=8, width=(4, 8), classes=5),
    "transformer": lambda: zoo.transformer_encoder(vocab=20, d=16, layers=1, T=8, ff=32, classes=5),
}


RATE = 1e-3  # of a new optimizer


def build(model: onnx.ModelProto, folder: Path, k: int, **options: object) -> Path:
    build_package(model, folder, loss="cross_entropy", accumulation_steps=k, **options)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_small_batches_equal_the_large_one(name, k, tmp_path):
    model = MODELS[name]()
    update = {"clip_norm": 0.5}
    large = open_training(build(model, tmp_path / "large", 1, **update))
    small = open_training(build(model, tmp_path / "small", k, **update))
    assert large[1].accumulation_steps == 1
    assert small[1].accumulation_steps == k
    for step in range(10):
        x, labels = batch(model, 4 * k, seed=step, classes=5)
        loss = float(large[1](x, labels))
        losses = []
        for part in range(k):
            losses.append(float(small[1](x[part::k], labels[part::k])))
            assert small[1].accumulated_batches == part + 1
        assert np.mean(losses) == pytest.approx(loss, rel=2e-5)
        for parameter, theirs in zip(small[0].parameters, large[0].parameters, strict=True):
            ours, whole = parameter[1].grad, theirs[1].grad
            assert ours is not None
            assert whole is not None
            scale = max(float(np.abs(whole).max()), 1e-6)
            # Weights drift apart by the last digits of a step; the first step shows the rest.
            assert np.abs(ours - whole).max() <= (2e-6 if step == 0 else 1e-3) * scale + 1e-8
        for _, module, optimizer in (large, small):
            optimizer.step()
            module.lazy_reset_grad()
            assert module.accumulated_batches == 0
        for parameter, theirs in zip(small[0].parameters, large[0].parameters, strict=True):
            # Gradients of a bias of keys are rounding error, of which AdamW makes whole steps.
            walk = 2 * RATE * (step + 1) if parameter[0].endswith("key.bias") else 2e-5
            np.testing.assert_allclose(
                parameter[1].data, theirs[1].data, rtol=1e-4, atol=walk, err_msg=parameter[0]
            )


def test_the_package_says_so(tmp_path):
    model = MODELS["mlp"]()
    for k in (1, 4):
        folder = build(model, tmp_path / str(k), k)
        assert Package.open(folder).manifest.accumulation_steps == k
        text = json.loads((folder / "manifest.json").read_text())
        assert text.get("accumulation_steps", 1) == k
        metadata = {
            entry.key: entry.value
            for entry in onnx.load(folder / "training_model.onnx").metadata_props
        }
        assert metadata.get("odtpack.accumulation_steps", "1") == str(k)
    assert "accumulation_steps" not in (tmp_path / "1" / "manifest.json").read_text()


@pytest.mark.parametrize("k", [0, -2])
def test_less_than_one_batch(k, tmp_path):
    with refused("bad-accumulation"):
        build(MODELS["mlp"](), tmp_path, k)
    assert list(tmp_path.iterdir()) == []


def test_what_an_epoch_leaves_makes_a_smaller_step(tmp_path):
    """Five batches by twos are steps of 2, 2 and 1; nothing crosses the end of an epoch."""
    model = MODELS["mlp"]()
    build(model, tmp_path, 2, optimizer=optimizers.SGD())
    x, labels = batch(model, 20, classes=5)
    data = {"input": x, "labels": labels}
    package = Package.open(tmp_path)

    def opened() -> tuple[Module, Optimizer]:
        module = _fit.open_module(package, CheckpointState.load_checkpoint(package.checkpoint))
        optimizer = Optimizer(package.optimizer_model, module)
        optimizer.set_learning_rate(0.5)
        return module, optimizer

    module, optimizer = opened()
    calls: list[tuple[int, int]] = []
    epochs = list(
        _fit.fit(module, optimizer, data, np.arange(20), batch_size=4, epochs=2, seed=3,
                 whole=False, on_step=lambda done, total: calls.append((done, total))),
    )  # fmt: skip
    assert [epoch.steps for epoch in epochs] == [3, 3]
    assert optimizer.step_count == 6
    assert step_count(20, 4, 2, whole=False) == 3
    assert calls == [(done, 10) for done in range(1, 11)]

    by_hand, stepper = opened()
    for epoch in (1, 2):
        order = np.random.default_rng([3, epoch]).permutation(np.arange(20))
        for first, last in ((0, 8), (8, 16), (16, 20)):
            for start in range(first, last, 4):
                part = order[start : start + 4]
                by_hand(x[part], labels[part])
            stepper.step()
            by_hand.lazy_reset_grad()
    for (name, ours), (_, theirs) in zip(
        module.state.parameters, by_hand.state.parameters, strict=True
    ):
        assert ours.data.tobytes() == theirs.data.tobytes(), name


# AdamW follows the formula of the reference, computed in float64 from the same gradients.

SETTINGS = {
    "default": optimizers.AdamW(),
    "weight-decay": optimizers.AdamW(weight_decay=0.1),
    "other": optimizers.AdamW(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.01),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("build", "size"),
    [(lambda: zoo.mlp((30, 20, 10)), 16), (lambda: zoo.cnn(size=12, width=(4, 6)), 4),
     (lambda: zoo.transformer_encoder(vocab=20, d=16, layers=1, T=8, ff=32), 4)],
    ids=["mlp", "cnn", "transformer"],
)  # fmt: skip
def test_ten_steps(setting, build, size, tmp_path):
    method, model = SETTINGS[setting], build()
    generate(model, tmp_path, OPTIMIZERS["adamw"])
    if setting != "default":
        _replace_optimizer(tmp_path, method)
    state, module, optimizer = open_training(tmp_path)
    initial = {name: p.data.astype(np.float64) for name, p in state.parameters}
    exact, kept = dict(initial), {name: {} for name in initial}
    data, formula = batch(model, size), adamw(method)
    for step in range(1, 11):
        rate = 0.01 / step
        optimizer.set_learning_rate(rate)
        module(*data)
        for name, p in exact.items():
            g = state.parameters[name].grad.astype(np.float64)
            exact[name] = formula(p, g, kept[name], rate, step, method.weight_decay)
        optimizer.step()
        module.lazy_reset_grad()
    assert optimizer.step_count == 10
    for name, p in exact.items():
        after = state.parameters[name].data
        np.testing.assert_allclose(after, p, rtol=2e-6, atol=1e-6, err_msg=name)
        if not name.endswith("key.bias"):  # the softmax does not see it, its gradient is 0
            assert np.abs(p - initial[name]).max() > 0.001


def _replace_optimizer(folder: Path, method: optimizers.AdamW) -> None:
    opset = onnx.load(folder / "training_model.onnx").opset_import[0].version
    ir.save(optimizers.optimizer_model(method, opset), folder / "optimizer_model.onnx")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
def test_one_step_over_all_magnitudes(setting, step):
    method = SETTINGS[setting]
    random = np.random.default_rng(0)
    magnitude = np.logspace(-15, 8, 1001)
    g = (random.choice([-1, 1], 1001) * magnitude).astype(np.float32)
    g[::100] = 0
    p = random.standard_normal(1001, dtype=np.float32)
    m = (random.standard_normal(1001) * magnitude).astype(np.float32)
    v = (random.random(1001) * magnitude**2).astype(np.float32)
    wide, kept = p.astype(np.float64), {"m": m.astype(np.float64), "v": v.astype(np.float64)}
    exact = adamw(method)(wide, g.astype(np.float64), kept, 0.01, step, method.weight_decay)
    feeds = {"params": p, "gradients": g, "first_order_moments": m, "second_order_moments": v}
    feeds |= {"learning_rate": np.float32([0.01]), "step": np.int64([step])}
    after = run(optimizers.optimizer_model(method, 17), feeds)
    # The new moment may be the difference of two large numbers.
    scale = np.abs(m) + np.abs(g)
    assert (np.abs(after["first_order_moments.out"] - kept["m"]) <= 3e-7 * scale).all()
    found = after["second_order_moments.out"]
    np.testing.assert_allclose(found, kept["v"], rtol=3e-7, atol=1e-37)
    reach = 0.01 * scale / (np.sqrt(kept["v"]) + method.epsilon) + np.abs(exact - p)
    assert (np.abs(after["params.out"] - exact) <= 3e-7 * np.abs(p) + 1e-5 * reach).all()


def test_sgd_is_one_subtraction(tmp_path):
    model = zoo.mlp((6, 5, 4))
    generate(model, tmp_path)
    state, module, optimizer = open_training(tmp_path)
    optimizer.set_learning_rate(0.25)
    module(*batch(model, 3, classes=4))
    expected = {n: p.data - np.float32(0.25) * p.grad for n, p in state.parameters}
    optimizer.step()
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, expected[name])
