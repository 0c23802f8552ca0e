"""Every optimizer, with clipping and groups, against PyTorch and against float64."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.build import build_package
from odtpack.choices import OrtFormat
from odtpack.optimizers import OPTIMIZERS, AdamW, Clip, Group, optimizer_model
from odtpack.option import options_of
from odtpack_runtime import CheckpointState, Module
from odtpack_runtime import Optimizer as RuntimeOptimizer
from odtpack_runtime.training import optimizer as runtime_optimizer
from odtpack_runtime.training.parameter_vector import gradient_norm
from tests import model_text, zoo
from tests.packaging_tools import batch, losses_of_steps, open_training
from tests.training.formulas import CASES, FORMULAS
from tests.training.optimizer_runs import (
    GROUPS,
    Run,
    check_against_float64,
    check_against_torch,
    in_torch,
)

KINDS = {kind: CASES[kind] for kind in ("sgd-nesterov", "lion-decay", "adam-decay", "adamw",
                                        "adamw-pytorch", "adafactor-other")}  # fmt: skip


def test_every_optimizer_has_a_case_and_every_hyperparameter_another_value_than_its_default():
    assert set(FORMULAS) == set(OPTIMIZERS) == {optimizer.kind for optimizer in CASES.values()}
    changed = {
        (optimizer.kind, name)
        for optimizer in CASES.values()
        for name, value in optimizer.settings().items()
        if value != getattr(type(optimizer), name)
    }
    assert changed == {(k, each.name) for k, o in OPTIMIZERS.items() for each in options_of(o)}


UPDATES = {
    "clip-norm": {"clip_norm": 0.1},
    "clip-norm-unreached": {"clip_norm": 1e3},
    "clip-value": {"clip_value": 0.01},
    "groups": {"groups": GROUPS},
    "no-vector-decay": {"decay_vectors": False},
    "groups-and-clip": {"clip_norm": 0.1, "groups": GROUPS, "decay_vectors": False},
}


@pytest.mark.parametrize("case", CASES)
def test_follows_its_formula_in_float64(case, tmp_path):
    check_against_float64(Run(CASES[case], {}, tmp_path))


@pytest.mark.parametrize("case", [name for name, o in CASES.items() if in_torch(o)])
def test_follows_pytorch(case, tmp_path):
    check_against_torch(Run(CASES[case], {}, tmp_path))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", KINDS)
def test_clipping_and_groups(kind, update, tmp_path):
    run = Run(KINDS[kind], UPDATES[update], tmp_path)
    check_against_float64(run)
    if in_torch(KINDS[kind]):
        run.open()
        check_against_torch(run)


@pytest.mark.parametrize("update", ["groups-and-clip", "clip-value"])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_threads_change_nothing(kind, update, tmp_path, monkeypatch):
    run = Run(KINDS[kind], UPDATES[update], tmp_path)
    whole = run.trained(1, 6)
    monkeypatch.setattr(runtime_optimizer, "CHUNK_ELEMENTS", 48)
    run.open()
    count = len(run.stepper._bindings)
    assert run.trained(1, 6) == whole
    assert count > 8 or kind.startswith("adafactor")


@pytest.mark.parametrize("update", ["groups-and-clip", "clip-value"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_bit_by_bit(kind, update, tmp_path):
    run = Run(KINDS[kind], UPDATES[update], tmp_path / "p")
    straight = run.trained(1, 13)
    run.open()
    run.trained(1, 6)
    path = tmp_path / "c"
    CheckpointState.save_checkpoint(run.state, path, include_optimizer_state=True)
    run.open(path)
    assert run.stepper.step_count == 5
    assert run.trained(6, 13) == straight
    # A state that is only passed on stays as it is, groups included.
    again = tmp_path / "d"
    loaded = CheckpointState.load_checkpoint(path)
    CheckpointState.save_checkpoint(loaded, again, include_optimizer_state=True)
    assert again.read_bytes() == path.read_bytes()


def _feeds(model: ir.Model, random: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = {"n": 1000, "rows": 15, "columns": 8}
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.name is not None
        assert value.shape is not None
        shape = [sizes[str(d.value)] if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
        feeds[value.name] = random.random(shape).astype(value.dtype.numpy())
    feeds["step"] = np.array([3])
    if "factored" in feeds:
        feeds["factored"] = np.array([True])
    return feeds


@pytest.mark.parametrize("level", ["off", "extended", "all"])
@pytest.mark.parametrize("opset", [12, 17, 26])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE])
@pytest.mark.parametrize("kind", KINDS)
def test_in_place_is_the_same(kind, dtype, opset, level):
    """Outputs that overwrite their inputs hold what separate outputs hold."""
    groups = (Group(1.0, 0.0, ("a",)), Group(1.0, 0.1, ("b",)))
    for clip in (Clip(), Clip(norm=1.0), Clip(value=0.5)):
        model = optimizer_model(KINDS[kind], opset, clip=clip, groups=groups, dtype=dtype)
        feeds = _feeds(model, np.random.default_rng(0))
        expected = model_text.run(model, feeds, level)
        results = {name: feeds[name.removesuffix(".out")] for name in expected}
        model_text.run_in_place(model_text.session(model, level), feeds, results)
        for name, value in expected.items():
            assert results[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_doubles_follow_the_formula_to_the_last_digits(kind):
    optimizer = KINDS[kind]
    session = model_text.session(optimizer_model(optimizer, 17, dtype=ir.DataType.DOUBLE))
    random = np.random.default_rng(1)
    shaped = kind.startswith("adafactor")
    shape = (15, 8) if shaped else (120,)
    p = random.standard_normal(shape)
    feeds: dict[str, np.ndarray] = {"params": p, "learning_rate": np.float32([0.01])}
    for vector in optimizer.state:
        kept = shape
        if vector.axes is not None:
            kept = tuple(size if i in vector.axes else 1 for i, size in enumerate(shape))
        feeds[vector.name] = np.zeros(kept)
    if shaped:
        feeds["factored"] = np.array([True])
    formula: Callable[..., np.ndarray] = FORMULAS[optimizer.kind](optimizer)  # type: ignore[operator]
    memory: dict[str, np.ndarray] = {}
    for t in range(1, 21):
        g = random.standard_normal(shape)
        feeds |= {"gradients": g, "step": np.array([t])}
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(names, feeds), strict=True))
        feeds |= {name.removesuffix(".out"): value for name, value in results.items()}
        p = formula(p, g, memory, float(np.float32(0.01)), t, optimizer.weight_decay)
        np.testing.assert_allclose(feeds["params"], p, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.DOUBLE])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_only_the_decay_counts(kind, dtype):
    """Rows of an embedding that no batch read, units that are never active."""
    optimizer = KINDS[kind]
    model = optimizer_model(optimizer, 17, dtype=dtype)
    feeds = _feeds(model, np.random.default_rng(0))
    for name in ("gradients", *(vector.name for vector in optimizer.state)):
        feeds[name] = np.zeros_like(feeds[name])
    feeds |= {"learning_rate": np.float32([0.01]), "step": np.array([1])}
    p = model_text.run(model, feeds)["params.out"]
    formula: Callable[..., np.ndarray] = FORMULAS[optimizer.kind](optimizer)  # type: ignore[operator]
    expected = formula(
        feeds["params"].astype(np.float64), np.zeros(p.shape), {}, 0.01, 1, optimizer.weight_decay
    )
    np.testing.assert_allclose(p, expected, rtol=1e-6, atol=1e-9)


def test_groups_lie_together(tmp_path):
    """Groups that alternate in the model are stretches of memory; the model's order remains."""
    plain = Run(AdamW(weight_decay=0.1), {}, tmp_path / "a")
    split = Run(AdamW(weight_decay=0.1), {"decay_vectors": False}, tmp_path / "b")
    order = [slot.name for slot in split.module.flat.trainable.slots]
    assert order == sorted(order, key=lambda name: name.endswith("bias"))
    assert order != [slot.name for slot in plain.module.flat.trainable.slots]
    assert len(plain.stepper._bindings) == 1
    assert len(split.stepper._bindings) == 2
    np.testing.assert_array_equal(
        plain.module.get_contiguous_parameters().numpy(),
        split.module.get_contiguous_parameters().numpy(),
    )
    saved = {name: list(p.data.shape) for name, p in split.state.parameters}
    assert saved == {name: list(p.data.shape) for name, p in plain.state.parameters}


def test_norm_of_all_magnitudes():
    random = np.random.default_rng(0)
    for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-14)):
        for scale in (1e-30, 1e-3, 1.0, 1e15, 1e30):
            vector = (random.standard_normal(100_003) * scale).astype(dtype)
            exact = np.sqrt((vector.astype(np.longdouble) ** 2).sum())
            got = gradient_norm(vector)
            # Squares below 1e-38 are lost in float32: that of torch is 0 there too.
            if dtype == np.float32 and scale < 1e-20:
                assert got <= exact
            else:
                assert abs(got - exact) <= tolerance * exact
    assert np.isnan(gradient_norm(np.float32([1, np.nan])))
    assert np.isinf(gradient_norm(np.float32([1, np.inf])))
    assert gradient_norm(np.zeros(0, np.float32)) == 0


def test_a_second_module_on_the_same_state(tmp_path):
    run = Run(AdamW(), {"groups": GROUPS}, tmp_path)
    second = Module(tmp_path / "training_model.onnx", run.state)
    other = RuntimeOptimizer(tmp_path / "optimizer_model.onnx", second)
    before = run.values()
    second(*run.data[0])
    other.step()
    for name, value in run.values().items():
        assert not np.array_equal(value, before[name])


@pytest.mark.parametrize("kind", ["adamw", "lion-decay", "adafactor-other"])
def test_ort_format(kind, tmp_path):
    """The format of ONNX Runtime keeps the metadata that say how a model is run."""
    model = zoo.cnn(size=8, width=(4, 8), classes=3)
    update = UPDATES["groups-and-clip"]
    build_package(
        model, tmp_path, loss="cross_entropy", optimizer=KINDS[kind], **update,
        ort_format=OrtFormat(),
    )  # fmt: skip
    data, results = batch(model, 6, classes=3), []
    for form in ("onnx", "ort"):
        state, module, stepper = open_training(tmp_path, form=form)
        losses_of_steps(module, stepper, [data] * 3)
        order = [slot.name for slot in module.flat.trainable.slots]
        results.append((order, {name: p.data.copy() for name, p in state.parameters}))
    (onnx_order, ours), (ort_order, theirs) = results
    assert onnx_order == ort_order
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-5, atol=1e-6)
