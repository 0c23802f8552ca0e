"""Optimizer steps against float64, and runs that are saved and resumed."""

import contextlib
import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.checkpoint.format import OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.training import optimizer as optimizer_module
from odtpack_runtime.training.optimizer_contract import StateVector, matrix, read_contract
from tests.refused import refused
from tests.runtime import models


class Run:
    """A state, its module and its optimizer."""

    def __init__(self, files, checkpoint=None, kind="adamw"):
        self.state = CheckpointState.load_checkpoint(checkpoint or files.checkpoint)
        self.module = files.module(self.state)
        self.optimizer = Optimizer(getattr(files, kind), self.module)

    def steps(self, first: int, last: int) -> list[bytes]:
        """Steps `first` to `last - 1` on their own data; the losses, bit by bit."""
        losses = []
        for index in range(first, last):
            losses.append(self.module(*models.feeds(index)).tobytes())
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return losses

    def bits(self) -> dict[str, bytes]:
        return {name: parameter.data.tobytes() for name, parameter in self.state.parameters}

    def save(self, path: Path) -> Path:
        CheckpointState.save_checkpoint(self.state, path, include_optimizer_state=True)
        return path


def test_adamw_follows_its_formula(regression):
    run = Run(regression)
    run.optimizer.set_learning_rate(0.05)
    reference, formula = models.Regression.of(run.state), models.AdamW()
    for index in range(60):
        _, dW, db = reference.forward(*models.feeds(index))
        formula.step([reference.W, reference.b], [dW, db], float(np.float32(0.05)))
        run.steps(index, index + 1)
        np.testing.assert_allclose(run.state.parameters["W"].data, reference.W, atol=2e-5)
        np.testing.assert_allclose(run.state.parameters["b"].data, reference.b, atol=2e-5)
    assert run.optimizer.step_count == 60
    assert run.state.optimizer is not None
    for name, m, v in zip("Wb", formula.m, formula.v, strict=True):
        moments = run.state.optimizer.moments[name]
        np.testing.assert_allclose(moments[0], m, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(moments[1], v, rtol=1e-3, atol=1e-6)


def test_sgd_follows_its_formula(regression):
    run = Run(regression, kind="sgd")
    run.optimizer.set_learning_rate(0.25)
    W = run.state.parameters["W"].data.copy()
    run.steps(0, 1)
    gradient = run.state.parameters["W"].grad  # step() leaves it alone
    assert gradient.any()
    expected = W - np.float32(0.25) * gradient
    np.testing.assert_allclose(run.state.parameters["W"].data, expected, rtol=1e-6)
    assert run.state.optimizer == OptimizerState(1, 0.25, {}, kind="sgd")


def test_frozen_parameters_do_not_move(regression):
    run = Run(regression)
    before = run.state.parameters["scale"].data.copy()
    run.steps(0, 3)
    assert np.array_equal(run.state.parameters["scale"].data, before)


def test_gaps_between_parameters_stay_zero(regression):
    run = Run(regression)
    run.steps(0, 20)
    flat = run.module.flat
    for memory in (flat.parameters, flat.gradients):
        used = np.zeros(memory.size, bool)
        for slot in flat.trainable.slots:
            used[slot.offset : slot.offset + slot.nbytes] = True
        assert 0 < used.sum() < used.size
        assert not memory[~used].any()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_chunks_change_nothing(regression, kind, monkeypatch):
    whole = Run(regression, kind=kind)
    whole.steps(0, 5)
    monkeypatch.setattr(optimizer_module, "CHUNK_ELEMENTS", 7)
    parts = Run(regression, kind=kind)
    assert len(parts.optimizer._bindings) == 5  # 32 elements: 16 and 16, with gaps
    parts.steps(0, 5)
    assert parts.bits() == whole.bits()


def test_a_model_that_is_not_elementwise_is_run_over_the_whole_vector(regression, monkeypatch):
    monkeypatch.setattr(optimizer_module, "CHUNK_ELEMENTS", 7)
    text = models.SGD.replace(
        "change = Mul(gradients, learning_rate)",
        "norm = ReduceL2<keepdims = 1>(gradients)\n    unit = Div(gradients, norm)\n"
        "    change = Mul(unit, learning_rate)",
    )
    run = Run(regression)
    before = {name: run.state.parameters[name].data.copy() for name in "Wb"}
    run.optimizer = Optimizer(regression.optimizer(text, elementwise="false"), run.module)
    assert len(run.optimizer._bindings) == 1
    run.steps(0, 1)
    grads = [run.state.parameters[name].grad.astype(np.float64) for name in "Wb"]
    norm = np.sqrt(sum((g**2).sum() for g in grads))
    for name, g in zip("Wb", grads, strict=True):
        np.testing.assert_allclose(
            run.state.parameters[name].data, before[name] - 0.001 * g / norm, rtol=1e-6
        )


def test_learning_rate(regression):
    optimizer = Run(regression).optimizer
    assert optimizer.get_learning_rate() == float(np.float32(0.001))
    optimizer.set_learning_rate(0.1)
    assert optimizer.get_learning_rate() == float(np.float32(0.1))
    for value in (float("nan"), float("inf"), 1e300, 10**400, "fast", None):
        with refused("bad-learning-rate") as error:
            optimizer.set_learning_rate(value)  # type: ignore[arg-type]
        assert isinstance(error.value, TypeError) == (value in ("fast", None))
    assert optimizer.get_learning_rate() == float(np.float32(0.1))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_resumed_run_is_the_same_bit_by_bit(regression, tmp_path, kind):
    straight = Run(regression, kind=kind)
    straight.optimizer.set_learning_rate(0.03)
    losses = straight.steps(0, 30)

    first = Run(regression, kind=kind)
    first.optimizer.set_learning_rate(0.03)
    head = first.steps(0, 11)
    saved = first.save(tmp_path / "c")
    first.steps(11, 13)  # what is lost when the process dies

    second = Run(regression, saved, kind=kind)
    assert second.optimizer.step_count == 11
    assert second.optimizer.get_learning_rate() == float(np.float32(0.03))
    assert head + second.steps(11, 30) == losses
    assert second.bits() == straight.bits()
    moments = [
        {name: [m.tobytes() for m in each] for name, each in run.state.optimizer.moments.items()}
        for run in (second, straight)
    ]
    assert moments[0] == moments[1]


def test_without_optimizer_state_a_run_starts_afresh(regression, tmp_path):
    run = Run(regression)
    run.optimizer.set_learning_rate(0.03)
    run.steps(0, 3)
    CheckpointState.save_checkpoint(run.state, tmp_path / "c")
    again = Run(regression, tmp_path / "c")
    assert again.optimizer.step_count == 0
    assert again.optimizer.get_learning_rate() == float(np.float32(0.001))
    assert again.bits() == run.bits()


def test_optimizer_state_is_kept_by_a_state_that_is_only_passed_on(regression, tmp_path):
    run = Run(regression)
    run.steps(0, 3)
    state = CheckpointState.load_checkpoint(run.save(tmp_path / "a"))
    state.properties["seen"] = 1
    CheckpointState.save_checkpoint(state, tmp_path / "b", include_optimizer_state=True)
    Module(regression.training, state)
    CheckpointState.save_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()
    ours, theirs = (read_checkpoint(tmp_path / name).optimizer for name in "ac")
    assert ours.step == theirs.step == 3
    assert ours.moments["W"][1].tobytes() == theirs.moments["W"][1].tobytes()


def test_padding_is_not_stored(regression, tmp_path):
    data = read_checkpoint(Run(regression).save(tmp_path / "c"))
    assert {name: a.shape for name, a in data.trainable.items()} == {"W": (3, 2), "b": (2,)}
    assert [m.shape for m in data.optimizer.moments["W"]] == [(3, 2), (3, 2)]


def test_a_second_optimizer_goes_on_where_the_first_stood(regression):
    straight, broken = Run(regression), Run(regression)
    straight.steps(0, 6)
    broken.steps(0, 3)
    broken.optimizer = Optimizer(regression.adamw, broken.module)
    assert broken.optimizer.step_count == 3
    broken.steps(3, 6)
    assert broken.bits() == straight.bits()


def test_the_state_of_another_optimizer_is_refused(regression, tmp_path):
    for kind, other, says in [
        ("adamw", "sgd", "2 moments per parameter, and this one keeps 0"),
        ("sgd", "adamw", "0 moments per parameter, and this one keeps 2"),
    ]:
        run = Run(regression, kind=kind)
        run.steps(0, 1)
        saved = run.save(tmp_path / kind)
        with refused("optimizer-mismatch", says):
            Run(regression, saved, kind=other)
        Run(regression, saved, kind=kind)


def failing(regression: models.Files) -> Path:
    """A training model that claims a free batch, and fails with other than four rows."""
    reshape = "rows = Constant<value_ints = [4, 3]>() fixed = Reshape(input, rows)"
    return regression.changed("scaled = Mul(input,", f"{reshape} scaled = Mul(fixed,")


X, T = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)


@pytest.mark.parametrize("shared", [False, True])
def test_no_step_is_made_after_a_training_step_that_failed(regression, shared, capfd):
    run = Run(dataclasses.replace(regression, training=failing(regression)))
    module = Module(failing(regression), run.state) if shared else run.module
    run.steps(0, 2)
    before = run.bits(), run.optimizer.step_count
    for resets in (False, True):
        with refused("run-failed"):
            module(X[:3], T[:3])
        if resets:
            module.lazy_reset_grad()
        run.optimizer.step()
        assert (run.bits(), run.optimizer.step_count) == before
        assert not run.module.flat.gradients.any()
    # Of an accumulation the others count.
    run.module(X, T)
    gradients = run.module.flat.gradients.copy()
    with refused("run-failed"):
        run.module(X[:3], T[:3])
    assert (run.module.flat.gradients == gradients).all()
    run.optimizer.step()
    assert run.optimizer.step_count == 3
    straight = Run(regression)
    straight.steps(0, 2)
    straight.module(X, T)
    straight.optimizer.step()
    for name, value in straight.state.parameters:
        if name != "mean":
            np.testing.assert_array_equal(run.state.parameters[name].data, value.data)
    capfd.readouterr()  # ONNX Runtime's own log


def test_a_batch_that_is_refused_leaves_the_gradients_alone(regression):
    run, other = Run(regression), Run(regression)
    second = Module(regression.training, run.state)
    for module in (run.module, other.module):
        module(X, T)
    with refused("input-type"):
        second(X.astype(np.float64), T)
    for each in (run, other):
        each.optimizer.step()
    assert run.bits() == other.bits()


def test_moments_of_the_same_shape_of_another_kind_are_refused(regression, tmp_path):
    adam = regression.optimizer(models.ADAMW, optimizer="adam")
    run = Run(regression)
    run.save(tmp_path / "new")
    run.steps(0, 1)
    run.save(tmp_path / "c")
    CheckpointState.save_checkpoint(run.state, tmp_path / "without")

    def optimizer(checkpoint: str) -> Optimizer:
        state = CheckpointState.load_checkpoint(tmp_path / checkpoint)
        # The kind is the optimizer's affair, not one of the user's values.
        assert "odtpack.optimizer" not in state.properties
        return Optimizer(adam, Module(regression.training, state))

    with refused("optimizer-mismatch", "'adamw', and this one is 'adam'"):
        optimizer("c")
    assert optimizer("without").step_count == 0
    assert optimizer("new").step_count == 0  # nothing was kept before the first step
    data = read_checkpoint(tmp_path / "c")
    assert data.optimizer.kind == "adamw"
    data.optimizer.kind = None
    write_checkpoint(tmp_path / "unnamed", data)
    assert optimizer("unnamed").step_count == 1  # as one of the reference


def test_the_moment_that_the_reference_saves_with_sgd_is_dropped(regression, tmp_path):
    run = Run(regression, kind="sgd")
    run.steps(0, 2)
    data = run.state.snapshot(True)
    assert data.optimizer is not None
    for value in (0, 1):
        moments = {name: [np.full_like(a, value)] for name, a in data.trainable.items()}
        data.optimizer = OptimizerState(2, 0.5, moments)
        write_checkpoint(tmp_path / str(value), data)
    again = Run(regression, tmp_path / "0", kind="sgd")
    assert again.optimizer.step_count == 2
    assert again.optimizer.get_learning_rate() == 0.5
    with pytest.raises(OdtpackError, match="1 moments"):
        Run(regression, tmp_path / "1", kind="sgd")


@pytest.mark.parametrize(("old", "new", "culprit"), [
    ("gradients", "gradient", "'gradient'"),
    ("int64[1] step", "int32[1] step", "'step'"),
    ("float[1] learning_rate", "float[n] learning_rate", None),
    ("float[n] params,", "float[8] params,", "'params'"),
    ("params_out", "result", "'params.out'"),
    (", float[n] gradients", ", float[n] gradients, float[n] extra", "'extra'"),
    (", float[n] gradients", ", float[n] gradients, float[n] second_order_moments",
     "'second_order_moments.out'"),
])  # fmt: skip
def test_models_that_are_no_optimizers(regression, old, new, culprit):
    path = regression.optimizer(models.SGD.replace(old, new))
    # A size that is left open fits.
    with refused("not-an-optimizer", culprit) if culprit else contextlib.nullcontext():
        Optimizer(path, regression.alone())


def test_what_is_no_optimizer_at_all(regression):
    module = regression.alone()
    with refused("not-an-optimizer"):
        Optimizer(regression.training, module)
    with refused("model-not-found"):
        Optimizer(regression.folder / "absent.onnx", module)
    with pytest.raises(TypeError):
        Optimizer(regression.adamw, module.state)  # type: ignore[arg-type]


def test_an_optimizer_that_made_no_step_may_be_replaced(regression):
    run = Run(regression)
    run.optimizer = Optimizer(regression.sgd, run.module)
    run.steps(0, 1)
    assert run.state.optimizer == OptimizerState(1, float(np.float32(0.001)), {}, kind="sgd")


def test_nothing_to_optimize(regression):
    data = regression.state().snapshot(False)
    data.frozen = {**data.trainable, "scale": data.frozen["scale"]}
    data.trainable = {}
    with refused("nothing-trainable"):
        Optimizer(regression.adamw, Module(regression.evaluation, CheckpointState(data)))


def test_memory_outlives_the_names(regression):
    """What is bound by address stays alive as long as it is bound."""
    run = Run(regression)
    optimizer, module = run.optimizer, run.module
    expected = Run(regression)
    del run
    gc.collect()
    for _ in range(3):
        filler = [np.full(100, 7, np.float32) for _ in range(100)]
        assert module(X, T) == expected.module(X, T)
        optimizer.step()
        expected.optimizer.step()
        del filler
        gc.collect()


def test_ort_format(regression, tmp_path):
    """Models converted to ONNX Runtime's own format train the same."""
    paths = {
        name: models.to_ort(getattr(regression, name), tmp_path / f"{name}.ort")
        for name in ("training", "adamw")
    }
    run, ort = Run(regression), Run(dataclasses.replace(regression, **paths, evaluation=None))
    assert ort.steps(0, 5) == run.steps(0, 5)
    assert ort.bits() == run.bits()


# Metadata of optimizer models: what they mean, and what is refused.

INPUTS = ("learning_rate", "step", "params", "gradients")


def group(*names: str, scale: Any = 1.0, decay: Any = 0.0) -> dict[str, Any]:
    return {"learning_rate_scale": scale, "weight_decay": decay, "parameters": list(names)}


@pytest.mark.parametrize(("shape", "seen", "rows", "columns"), [
    ((), (1, 1), (), ()),
    ((7,), (1, 7), (1,), (7,)),
    ((5, 7), (5, 7), (5, 1), (1, 7)),
    ((1, 7), (1, 7), (1, 1), (1, 7)),
    ((64, 32, 3, 3), (64, 288), (64, 1, 1, 1), (1, 32, 3, 3)),
    ((320, 64, 1, 1), (320, 64), (320, 1, 1, 1), (1, 64, 1, 1)),
    ((96, 1, 3, 3), (96, 9), (96, 1, 1, 1), (1, 1, 3, 3)),
    ((8, 64, 64), (512, 64), (8, 64, 1), (1, 1, 64)),
    ((1, 4, 4), (4, 4), (1, 4, 1), (1, 1, 4)),
    ((0, 3), (0, 3), (0, 1), (1, 3)),
])  # fmt: skip
def test_shapes_of_what_is_kept(shape, seen, rows, columns):
    assert matrix(shape) == seen
    for axis, stored in ((0, rows), (1, columns)):
        vector = StateVector("v", (axis,))
        assert vector.stored_shape(shape) == stored
        bound = vector.bound_shape(shape)
        assert bound == tuple(s if i == axis else 1 for i, s in enumerate(seen))
        assert np.prod(bound) == np.prod(stored)
    assert StateVector("v").stored_shape(shape) == shape


def test_without_metadata_the_moments_are_those_among_the_inputs():
    contract = read_contract({}, (*INPUTS, "first_order_moments"), "m")
    assert [vector.name for vector in contract.state] == ["first_order_moments"]
    flags = contract.by_parameter, contract.whole, contract.clips_norm, contract.takes_decay
    assert not any(flags)
    assert contract.groups == ()
    assert read_contract({"odtpack.elementwise": "false"}, INPUTS, "m").whole
    assert read_contract({}, (*INPUTS, "gradient_norm"), "m").clips_norm


def test_metadata_are_read():
    metadata = {
        "odtpack.state": json.dumps([{"name": "r", "axes": [0]}, {"name": "c", "axes": [1]}]),
        "odtpack.groups": json.dumps([group("a", scale=2, decay=0.5), group("b", "c")]),
    }
    contract = read_contract(metadata, (*INPUTS, "weight_decay"), "m")
    assert contract.by_parameter
    assert contract.takes_decay
    assert contract.state == (StateVector("r", (0,)), StateVector("c", (1,)))
    assert [g.parameters for g in contract.groups] == [("a",), ("b", "c")]
    assert (contract.groups[0].learning_rate_scale, contract.groups[0].weight_decay) == (2, 0.5)
    contract.check_groups(["c", "a", "b"], "m")
    for names in (["a", "b"], ["a", "b", "c", "d"]):
        with refused("model-mismatch"):
            contract.check_groups(names, "m")


BAD_STATE: list[Any] = [
    {}, "x", ["x"], [{}], [{"name": ""}], [{"name": 3}], [{"name": "params"}],
    [{"name": "weight_decay"}], [{"name": "m"}, {"name": "m"}], [{"name": "m", "axes": 1}],
    [{"name": "m", "axes": [2]}], [{"name": "m", "axes": [-1]}], [{"name": "m", "axes": [True]}],
    [{"name": "m", "axes": [1, 0]}], [{"name": "m", "axes": [0, 0]}],
    [{"name": "m", "axes": [0]}, {"name": "v"}], [{"name": f"m{i}"} for i in range(9)],
]  # fmt: skip
BAD_GROUPS: list[Any] = [
    {}, [1], [{"parameters": ["a"]}], [group()], [group("a"), group("a")], [group("a", "a")],
    [group("a", scale=-1)], [group("a", scale="1")], [group("a", scale=True)],
    [group("a", decay=1e999)], [group("a", decay=None)], [group(1)],
    [{**group(), "parameters": "a"}],
]  # fmt: skip


@pytest.mark.parametrize(("key", "text"), [
    *(("odtpack.state", json.dumps(value)) for value in BAD_STATE),
    *(("odtpack.groups", json.dumps(value)) for value in BAD_GROUPS),
    ("odtpack.groups", json.dumps([group("a", scale=float("nan"))])),
    ("odtpack.state", "["),
    ("odtpack.state", "[" * 100_000),
    ("odtpack.groups", ""),
])  # fmt: skip
def test_wrong_metadata_are_refused(key, text):
    with refused("bad-metadata", r"some\.onnx"):
        read_contract({key: text}, INPUTS, "some.onnx")


@pytest.mark.parametrize(("metadata", "inputs"), [
    ({}, (*INPUTS, "weight_decay")),
    ({"odtpack.groups": json.dumps([group("a"), group("b")]), "odtpack.elementwise": "false"},
     INPUTS),
])  # fmt: skip
def test_contradictions_are_refused(metadata, inputs):
    with refused("bad-metadata"):
        read_contract(metadata, inputs, "m")


@pytest.mark.parametrize(("key", "value", "code"), [
    ("groups", [group("W")], "model-mismatch"),
    ("groups", [group("W", "b", "scale")], "model-mismatch"),
    ("state", [{"name": "first_order_moments"}], "not-an-optimizer"),
    ("state", [{"name": "m", "axes": [0]}], "not-an-optimizer"),
])  # fmt: skip
def test_models_that_do_not_keep_their_word(regression, key, value, code):
    with refused(code):
        Optimizer(regression.optimizer(**{key: value}), regression.alone())


def test_an_optimizer_that_cannot_be_made_leaves_the_one_before(regression):
    run, other = Run(regression), Run(regression)
    for each in (run, other):
        each.steps(0, 3)
        each.optimizer.set_learning_rate(1e30)
    scaled = regression.optimizer(models.ADAMW, groups=[group("b", "W", scale=1e10)])
    with refused("bad-learning-rate"):
        Optimizer(scaled, run.module)
    for each in (run, other):
        each.optimizer.set_learning_rate(0.01)
        each.steps(3, 5)
    assert run.bits() == other.bits()


def test_a_group_scales_the_learning_rate(regression):
    module = regression.alone()
    path = regression.optimizer(groups=[group("b", scale=0.5), group("W", scale=0)])
    optimizer = Optimizer(path, module)
    optimizer.set_learning_rate(0.25)
    assert optimizer.get_learning_rate() == 0.25
    with refused("bad-learning-rate"):
        optimizer.set_learning_rate(1e39)
    before = {name: p.data.copy() for name, p in module.state.parameters}
    module(X, T)
    optimizer.step()
    b, W = module.state.parameters["b"], module.state.parameters["W"]
    assert b.grad is not None
    np.testing.assert_array_equal(b.data, before["b"] - np.float32(0.125) * b.grad)
    np.testing.assert_array_equal(W.data, before["W"])


@pytest.mark.parametrize(("key", "text"), [
    *(("parameter_order", text) for text in ("", "{}", '["W"]', '["W", "W"]', '["W", "b", "scale"]',
                                             '["W", 1]', "[" * 100_000)),
    *(("accumulation_steps", text) for text in ("0", "-1", "two", "")),
])  # fmt: skip
def test_orders_and_accumulations_that_are_none(regression, key, text):
    with refused("bad-metadata"):
        Module(regression.changed(**{key: text}), regression.state())


def test_a_scale_that_is_too_much(regression):
    path = regression.optimizer(groups=[group("b", scale=1e38), group("W")])
    optimizer = Optimizer(path, regression.alone())
    with refused("bad-learning-rate"):
        optimizer.set_learning_rate(100.0)
    assert optimizer.get_learning_rate() == float(np.float32(0.001))


def test_an_order_in_memory(regression):
    module = Module(regression.changed(parameter_order='["b", "W"]'), regression.state())
    assert [slot.name for slot in module.flat.trainable.slots] == ["b", "W"]
    flat = module.get_contiguous_parameters(trainable_only=True).numpy()
    np.testing.assert_array_equal(flat[:6], module.state.parameters["W"].data.reshape(-1))


def test_moments_of_other_shapes_are_refused(regression):
    """What a checkpoint may hold and this optimizer does not keep."""
    module = regression.alone()
    Optimizer(regression.adamw, module).step()
    data = module.state.snapshot(True)
    data.optimizer.moments["W"] = [np.ones((3, 1), np.float32), np.ones((1, 2), np.float32)]
    with refused("optimizer-mismatch", "'W' of other shapes"):
        Optimizer(regression.adamw, Module(regression.training, CheckpointState(data)))
