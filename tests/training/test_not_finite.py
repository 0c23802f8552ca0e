"""A batch whose loss or gradients are not finite changes nothing: compared bit by bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx.parser
import pytest

from odtpack.build import build_package
from odtpack.optimizers import SGD, Adafactor, Adam, AdamW, Lion
from odtpack_runtime import CheckpointState, LinearLRScheduler, Module, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.loop import train_step
from odtpack_runtime.training.parameter_vector import all_finite
from tests import zoo
from tests.model_text import drawn, parsed
from tests.packaging_tools import batch, open_training
from tests.refused import refused

WHOLE = pytest.mark.parametrize("whole", [False, True], ids=["two models", "step model"])
OPTIMIZERS = {
    "sgd": SGD(), "momentum": SGD(momentum=0.9), "adam": Adam(), "adamw": AdamW(weight_decay=0.1),
    "adafactor": Adafactor(), "lion": Lion(),
}  # fmt: skip


def package_of(model, folder, formula=None, **options):
    build_package(
        model, folder / "package", **{"loss": "cross_entropy", **options},
        optimizer=formula or AdamW(), self_check=False,
    )  # fmt: skip
    return Package.open(folder / "package")


def opened(package: Package, *, whole: bool = False, **options: object) -> tuple[Module, Optimizer]:
    step = package.step_model if whole else None
    return open_training(package.path, step_model_uri=step, **options)[1:]


def contents(module: Module) -> dict[str, bytes]:
    """Everything that a step may change, as bytes: -0.0 is not 0.0."""
    state = module.state
    found = {name: parameter.data.tobytes() for name, parameter in state.parameters}
    for name, own in state.optimizer.moments.items():
        found |= {f"{name}.{i}": moment.tobytes() for i, moment in enumerate(own)}
    return found | {"step": str(state.optimizer.step).encode()}


def after(package: Package, *steps: list[list[np.ndarray]]) -> dict[str, bytes]:
    """What a training holds that makes these steps, each of some batches, and no other."""
    module, optimizer = opened(package)
    for batches in steps:
        train_step(module, optimizer, batches)
    return contents(module)


def spoilt(feeds: list[np.ndarray], value: float = np.nan, place: Any = -1) -> list[np.ndarray]:
    bad = [feeds[0].copy(), *feeds[1:]]
    bad[0][place] = value
    return bad


@contextmanager
def unchanged(module: Module) -> Iterator[None]:
    """Check that a block changes nothing that a module holds."""
    before = contents(module)
    yield
    assert contents(module) == before


MLP = zoo.mlp((20, 16, 10))
FEEDS = [*batch(MLP, 8)]


@WHOLE
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nan_in_a_batch(tmp_path, name, whole):
    if whole and name == "adafactor":
        pytest.skip("it has no step model")
    options = {"step_model": "always"} if whole else {}
    package = package_of(MLP, tmp_path, OPTIMIZERS[name], **options)
    found = []
    for bad in (True, False):  # what follows is what follows without that batch
        module, optimizer = opened(package, whole=whole)
        scheduler = LinearLRScheduler(optimizer, 0, 10, 0.01)
        train_step(module, optimizer, [FEEDS], scheduler)
        # A zero of either sign stays what it is.
        next(iter(module.state.arrays(trainable=True).values())).flat[:2] = (-0.0, 0.0)
        if bad:
            rate = optimizer.get_learning_rate()
            with unchanged(module):
                assert np.isnan(train_step(module, optimizer, [spoilt(FEEDS)], scheduler))
            assert optimizer.get_learning_rate() == rate
            assert module.skipped_steps == 1
            assert module.last_not_finite.code == "loss-not-finite"
            assert module.last_not_finite.step == 2
        for _ in range(3):
            assert np.isfinite(train_step(module, optimizer, [FEEDS], scheduler))
        found.append(contents(module))
    assert found[0] == found[1]


def test_clipping_by_the_norm(tmp_path):
    module, optimizer = opened(package_of(MLP, tmp_path, clip_norm=0.1))
    with unchanged(module):
        train_step(module, optimizer, [spoilt(FEEDS)])


@pytest.mark.parametrize(
    ("way", "place"), [*(("whole", i) for i in range(4)), *(("segments", i) for i in range(3))]
)
def test_one_of_the_accumulated_batches(tmp_path, way, place):
    if way == "whole":
        package = package_of(MLP, tmp_path, accumulation_steps=4)
        parts = [[array[i * 8 : i * 8 + 8] for array in batch(MLP, 32)] for i in range(4)]
    else:
        package = package_of(layers(), tmp_path, segments=True, loss="mse", accumulation_steps=3)
        parts = [rows(4, seed) for seed in range(3)]
    module, optimizer = opened(package)
    bad = [spoilt(part) if i == place else part for i, part in enumerate(parts)]
    train_step(module, optimizer, bad)
    others = [part for i, part in enumerate(parts) if i != place]
    assert contents(module) == after(package, others)
    assert module.skipped_steps == 1
    with unchanged(module):  # nothing is left of the step
        train_step(module, optimizer, [spoilt(part) for part in parts])
    assert module.skipped_steps == 1 + len(parts)


@WHOLE
def test_running_statistics(tmp_path, whole):
    model = zoo.mobilenet_v2(32, width_mult=0.2, batch_norm="train", stages=2)
    package = package_of(model, tmp_path, step_model="always" if whole else "never")
    assert any(p.role == "state" for p in package.manifest.parameters)
    module, optimizer = opened(package, whole=whole)
    feeds = batch(model, 4)
    train_step(module, optimizer, [feeds])
    with unchanged(module):
        train_step(module, optimizer, [spoilt(feeds)])


def rooted() -> onnx.ModelProto:
    """The gradient of Sqrt at 0 is infinite, and the loss is not: ``second`` is 0."""
    weights = drawn(np.random.default_rng(0), first=(4, 3), second=(4, 3), third=(4, 3))
    weights["second"][:] = 0
    return parsed("""(float[N, 4] input) => (float[N, 3] output) {
        a = MatMul(input, first) z = MatMul(input, second) r = Sqrt(z) b = Add(a, r)
        c = MatMul(input, third) output = Add(b, c)
    }""", **weights)  # fmt: skip


@WHOLE
def test_a_gradient_that_is_not_finite_with_a_loss_that_is(tmp_path, whole):
    package = package_of(rooted(), tmp_path, step_model="always" if whole else "never")
    module, optimizer = opened(package, whole=whole)
    random = np.random.default_rng(1)
    feeds = [random.standard_normal((8, 4), np.float32), random.integers(0, 3, 8)]
    before = contents(module)
    assert np.isfinite(train_step(module, optimizer, [feeds]))
    after = contents(module)
    assert module.last_not_finite.code == "gradient-not-finite"
    assert module.last_not_finite.parameters == ("second",)
    assert (module.skipped_steps, optimizer.step_count) == (1, int(whole))
    changed = {key.split(".")[0] for key in before if before[key] != after[key]}
    assert changed == ({"first", "third", "step"} if whole else set())


def test_a_schedule_follows_a_counted_step_that_is_an_error(tmp_path):
    package = package_of(rooted(), tmp_path, step_model="always")
    module, optimizer = opened(package, whole=True, on_not_finite="stop")
    scheduler = LinearLRScheduler(optimizer, warmup_step_count=0, total_step_count=4, initial_lr=1)
    feeds = [np.ones((8, 4), np.float32), np.zeros(8, np.int64)]
    with refused("gradient-not-finite"):
        train_step(module, optimizer, [feeds], scheduler=scheduler)
    assert (optimizer.step_count, optimizer.get_learning_rate()) == (1, 0.75)


def test_large_parameters_and_small_ones_of_a_step_model(tmp_path, monkeypatch):
    """Updates in parts, of single parameters and of joined ones; with Inf as with NaN."""
    from odtpack.step import chunks
    from odtpack.step import model as step_models

    for owner, name, value in ((step_models, "OWN", 64), (chunks, "LARGE", 256),
                               (chunks, "PART", 128), (chunks, "LEAST_PART", 1)):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    model = zoo.mlp((40, 30, 10))
    module, optimizer = opened(package_of(model, tmp_path, step_model="always"), whole=True)
    feeds = batch(model, 8)
    train_step(module, optimizer, [feeds])
    before = contents(module)
    for value in (np.nan, np.inf, -np.inf):
        train_step(module, optimizer, [spoilt(feeds, value, (0, 0))])
        assert contents(module) == before
    assert np.isfinite(train_step(module, optimizer, [feeds]))
    assert contents(module) != before


def both_ways(way: str, folder: Path) -> tuple[Package, list[np.ndarray]]:
    """A package of one model, or of segments, and a batch."""
    if way == "segments":
        return package_of(layers(), folder, segments=True, loss="mse"), rows(4)
    return package_of(MLP, folder), FEEDS


@pytest.mark.parametrize("way", ["whole", "segments"])
def test_a_reset_does_not_make_spoilt_gradients_good(tmp_path, way):
    package, feeds = both_ways(way, tmp_path)
    module, optimizer = opened(package)
    train_step(module, optimizer, [feeds])
    before = contents(module)
    for resets in (0, 1, 2):
        module(*spoilt(feeds))
        for _ in range(resets):
            module.lazy_reset_grad()
        optimizer.step()
        assert contents(module) == before
        assert module.accumulated_batches == 0
        assert all_finite(module.flat.gradients.view(np.float32))
    module(*feeds)
    optimizer.step()
    assert contents(module) == after(package, [feeds], [feeds])


@pytest.mark.parametrize("way", ["whole", "segments"])
def test_sessions_that_share_a_state_know_of_a_skipped_step(tmp_path, way):
    """Gradients are the state's, and so is whether they are of any use."""
    package, feeds = both_ways(way, tmp_path)
    module, optimizer = opened(package)
    first = Module(package.training_model, module.state)
    with unchanged(module):
        first(*spoilt(feeds))
        optimizer.step()
    # What one accumulated is gone with the first step of another, whether that is made or not;
    # the next step begins anew.
    with unchanged(module):
        module(*feeds)
        assert module.accumulated_batches == 1
        first(*spoilt(feeds))
        assert module.accumulated_batches == 0
        optimizer.step()
    module(*feeds)
    first.lazy_reset_grad()
    optimizer.step()
    assert contents(module) == after(package, [feeds])


@pytest.mark.parametrize("way", ["whole", "segments"])
def test_gradients_outlive_a_module_that_had_no_optimizer(tmp_path, way):
    package, feeds = both_ways(way, tmp_path)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    first = Module(package.training_model, state)
    first(*feeds)
    first.close()
    module = Module(package.training_model, state)
    Optimizer(package.optimizer_model, module).step()
    assert contents(module) == after(package, [feeds])


def test_a_bad_batch_between_good_ones_and_after_them(tmp_path):
    """The others of its accumulation count, also with a session beside it."""
    package, feeds = both_ways("whole", tmp_path)
    found = []
    for bad in (False, True):
        module, optimizer = opened(package)
        second = Module(package.training_model, module.state)
        second.lazy_reset_grad()
        for place in range(3):
            if bad and place:
                module(*spoilt(feeds))
            if place < 2:
                module(*feeds)
        assert module.accumulated_batches == 2
        optimizer.step()
        found.append(contents(module))
    assert found[0] == found[1]


def test_a_private_step_that_is_broken_off(tmp_path):
    """What it leaves is the gradient of a sample, or part of a sum: no step is made with it."""
    package = package_of(layers(), tmp_path, SGD(), privacy_clip=0.5, privacy_noise=1.0, loss="mse")
    module, optimizer = opened(package)
    broken = mock.Mock(side_effect=RuntimeError("no noise"))
    with unchanged(module):
        with pytest.raises(RuntimeError, match="no noise"):
            train_step(module, optimizer, [rows(3)], noise=broken)
        optimizer.step(privatized=True)
    found = []
    for each in (module, None):
        one, its = (module, optimizer) if each is module else opened(package)
        train_step(one, its, [rows(3)], noise=np.random.default_rng(5).standard_normal)
        found.append(contents(one))
    assert found[0] == found[1]


def test_a_private_batch_that_is_refused_leaves_the_gradients(tmp_path):
    package = package_of(layers(), tmp_path, SGD(), privacy_clip=0.5, privacy_noise=1.0, loss="mse")
    module, optimizer = opened(package)
    module(*rows(3))
    module(*rows(2))
    before = {name: each.grad.tobytes() for name, each in module.state.parameters}
    with refused("input-shape"):
        train_step(module, optimizer, [[each[:, :1] for each in rows(3)]])
    assert module.accumulated_batches == 2
    assert {name: each.grad.tobytes() for name, each in module.state.parameters} == before
    start = contents(module)
    optimizer.step(privatized=True)
    assert contents(module) != start


@WHOLE
def test_to_stop_is_a_policy(tmp_path, whole):
    package = package_of(MLP, tmp_path, step_model="always" if whole else "never")
    module, optimizer = opened(package, whole=whole, on_not_finite="stop")
    with unchanged(module), refused("loss-not-finite"):
        train_step(module, optimizer, [spoilt(FEEDS)])
    with refused("bad-policy"):
        opened(package, on_not_finite="ignore")


def test_step_on_without_a_step_model(tmp_path):
    """Training and optimizer model make it, as in the other kits."""
    package = package_of(MLP, tmp_path)
    module, optimizer = opened(package)
    loss = float(np.ravel(optimizer.step_on(*FEEDS))[0])
    other, its = opened(package)
    assert loss == train_step(other, its, [FEEDS])
    assert contents(module) == contents(other)
    assert module.accumulated_batches == 0


@pytest.mark.parametrize("rate", [-1e-9, np.nan, np.inf, -np.inf, 1e39])
def test_learning_rates(tmp_path, rate):
    _module, optimizer = opened(package_of(MLP, tmp_path))
    before = optimizer.get_learning_rate()
    for act in (optimizer.set_learning_rate, lambda r: LinearLRScheduler(optimizer, 5, 10, r)):
        with refused("bad-learning-rate"):
            act(rate)
        assert optimizer.get_learning_rate() == before
    optimizer.set_learning_rate(0)
    assert optimizer.get_learning_rate() == 0


@pytest.mark.parametrize("size", [0, 1, 7, 65536, 65537, 200_000])
def test_finite_is_exact(size):
    vector = np.full(size, 3e38, np.float32)  # its sum and its squares are infinite
    assert all_finite(vector)
    for value in (np.nan, np.inf, -np.inf):
        for place in {0, size // 2, size - 1} if size else ():
            assert not all_finite(spoilt([vector], value, place)[0])


def layers(*, rooted: bool = False) -> onnx.ModelProto:
    """Two matrices, between which a network is cut; with a gradient that is infinite at 0."""
    bent = "Relu (hidden)" if not rooted else "Sqrt (large)"
    first, second = (np.random.default_rng(i).standard_normal((40, 40), np.float32) for i in (0, 1))
    return parsed(f"""(float[batch, 40] input) => (float[batch, 40] output) {{
        hidden = MatMul (input, first) sign = Sign (hidden) large = Mul (hidden, sign)
        bent = {bent} output = MatMul (bent, second)
    }}""", first=first, second=second)  # fmt: skip


def rows(count: int, seed: int = 3) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((count, 40), np.float32) for _ in range(2)]


@pytest.mark.parametrize("harm", ["loss", "gradient"])
def test_in_segments(tmp_path, harm):
    """A step that is not finite changes nothing, and what follows is what follows without it."""
    package = package_of(layers(rooted=harm == "gradient"), tmp_path, segments=True, loss="mse")
    assert package.manifest.segments is not None
    feeds = rows(4)
    bad = spoilt(feeds, np.nan if harm == "loss" else 0)
    module, optimizer = opened(package)
    train_step(module, optimizer, [feeds])
    with unchanged(module):
        assert np.isfinite(train_step(module, optimizer, [bad])) == (harm == "gradient")
    assert module.last_not_finite.code == f"{harm}-not-finite"
    if harm == "gradient":
        assert module.last_not_finite.parameters == ("first",)
    train_step(module, optimizer, [feeds])
    assert contents(module) == after(package, [feeds], [feeds])


@pytest.mark.parametrize("harm", ["loss", "gradient"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_sample_of_private_training(tmp_path, name, harm):
    """With the same noise the step is, bit by bit, the one without the sample."""
    model = layers(rooted=harm == "gradient")
    package = package_of(
        model, tmp_path, OPTIMIZERS[name], privacy_clip=0.5, privacy_noise=1.0, loss="mse"
    )
    feeds = rows(5)
    bad = spoilt(feeds, np.nan if harm == "loss" else 0, 2)
    without = [np.delete(array, 2, axis=0) for array in feeds]
    found = []
    for batch_of_step in (bad, without):
        module, optimizer = opened(package)
        normal = np.random.default_rng(5).standard_normal
        for _ in range(2):
            train_step(module, optimizer, [batch_of_step], noise=normal, expected=5)
        found.append(contents(module))
        assert module.skipped_steps == (2 if batch_of_step is bad else 0)
    assert found[0] == found[1]


def test_a_private_batch_without_a_finite_sample(tmp_path):
    """What is left of its step is noise, and nothing where there is none."""
    package = package_of(layers(), tmp_path, SGD(), privacy_clip=0.5, privacy_noise=0.0, loss="mse")
    module, optimizer = opened(package)
    before = contents(module)
    train_step(module, optimizer, [spoilt(rows(3), np.nan, slice(None))])
    after = contents(module)
    assert {key for key in before if before[key] != after[key]} == {"step"}
    assert module.skipped_steps == 3
