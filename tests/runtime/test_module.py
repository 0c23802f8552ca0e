"""Training and evaluation against closed forms in float64."""

import gc
import json
import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack_runtime import (
    CheckpointState,
    LinearLRScheduler,
    Module,
    OdtpackError,
    Optimizer,
    Package,
    default_session_options,
)
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.training.loop import evaluate, right_labels, train_step
from tests import zoo
from tests.model_text import parsed
from tests.packaging_tools import built_training
from tests.refused import refused
from tests.runtime import models


def open_module(files: models.Files, **options: object) -> tuple[Module, CheckpointState]:
    module = files.module(**options)
    return module, module.state


oracle = models.Regression.of


def batches(count: int, size: int = 5) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(3)
    return [models.feeds(rng, size) for _ in range(count)]


((X, T),) = batches(1)


def assert_gradient_of(state: CheckpointState, x: np.ndarray, t: np.ndarray) -> None:
    wanted = oracle(state).forward(x, t)[1]
    np.testing.assert_allclose(state.parameters["W"].grad, wanted, rtol=1e-5)


def test_loss_and_gradients(regression):
    module, state = open_module(regression)
    loss, dW, db = oracle(state).forward(X, T)
    result = module(X, T)
    assert (type(result), result.shape, result.dtype) == (np.ndarray, (), np.float32)
    np.testing.assert_allclose(result, loss, rtol=1e-6)
    np.testing.assert_allclose(state.parameters["W"].grad, dW, rtol=1e-5)
    np.testing.assert_allclose(state.parameters["b"].grad, db, rtol=1e-5)


def test_gradients_accumulate_until_reset(regression):
    module, state = open_module(regression)
    (x1, t1), (x2, t2), (x3, t3) = batches(3)
    reference = oracle(state)
    module(x1, t1)
    module(x2, t2)
    first, second, third = (reference.forward(*b)[1] for b in ((x1, t1), (x2, t2), (x3, t3)))
    gradient = state.parameters["W"].grad
    np.testing.assert_allclose(gradient, first + second, rtol=1e-5)
    module.lazy_reset_grad()
    np.testing.assert_allclose(gradient, first + second, rtol=1e-5)  # lazy: not yet
    module(x3, t3)
    np.testing.assert_allclose(gradient, third, rtol=1e-5)
    module(x1, t1)
    np.testing.assert_allclose(gradient, third + first, rtol=1e-5)


def test_a_reset_forgets_even_nan(regression):
    module, state = open_module(regression)
    module(X, T)
    state.parameters["W"].grad[:] = np.nan  # as an app may write
    module.lazy_reset_grad()
    module(X, T)
    assert_gradient_of(state, X, T)


def test_a_reset_is_kept_through_evaluation_and_refused_input(regression):
    module, state = open_module(regression)
    module(X, T)
    module.lazy_reset_grad()
    module.eval()(X, T)
    module.train()
    with pytest.raises(OdtpackError):
        module(X, T[:1])
    module(X, T)
    assert_gradient_of(state, X, T)


def labelled(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of the classifier."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((size, 4)).astype(np.float32), rng.integers(0, 3, size)


def test_results_belong_to_the_caller(classifier):
    module, _ = open_module(classifier)
    kept = []
    for seed, size in enumerate((4, 4, 7, 2, 4)):
        loss, probabilities = module(*labelled(seed, size))
        kept.append((loss, probabilities, loss.copy(), probabilities.copy()))
        assert probabilities.shape == (size, 3)
    for loss, probabilities, loss_then, probabilities_then in kept:
        assert loss == loss_then
        assert np.array_equal(probabilities, probabilities_then)
    assert len({float(loss) for loss, *_ in kept}) == 5


def test_cross_entropy_step(classifier):
    module, state = open_module(classifier)
    x, labels = labelled(1, 6)
    logits = x.astype(np.float64) @ state.parameters["W"].data
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss, probabilities = module(x, labels)
    np.testing.assert_allclose(loss, -np.log(p[np.arange(6), labels]).mean(), rtol=1e-5)
    np.testing.assert_allclose(probabilities, p, rtol=1e-5)
    p[np.arange(6), labels] -= 1
    np.testing.assert_allclose(state.parameters["W"].grad, x.T @ p / 6, rtol=1e-4, atol=1e-6)


def test_state_is_updated_in_training_only(regression):
    module, state = open_module(regression)
    mean = state.parameters["mean"].data
    expected = np.zeros(3)
    for x, t in batches(4):
        module(x, t)
        expected = 0.9 * expected + 0.1 * x.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7)
        module.eval()(x, t)
        module.train()
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-7)


def test_evaluation_sees_the_current_parameters(regression):
    module, state = open_module(regression)
    state.parameters["W"].data[...] = 0
    state.parameters["b"].data = np.float32([1, 2])
    module.eval()
    loss, prediction = module(X, T)
    assert np.array_equal(prediction, np.tile(np.float32([1, 2]), (5, 1)))
    np.testing.assert_allclose(loss, ((prediction - T).astype(np.float64) ** 2).mean(), rtol=1e-6)
    assert not state.parameters["W"].grad.any()


def test_modes_and_names(regression):
    module, _ = open_module(regression)
    assert module.input_names() == ["input", "target"]
    assert (module.training, module.output_names()) == (True, ["loss"])
    assert module.eval() is module
    assert (module.training, module.output_names()) == (False, ["loss", "prediction"])
    assert module.train() is module
    assert module.training
    assert module.train(False).training is False
    assert list(map(str, module.input_specs())) == ["float32[batch, 3]", "float32[batch, 2]"]


def test_ortvalues_in_ortvalues_out(classifier):
    module, state = open_module(classifier)
    as_value = onnxruntime.OrtValue.ortvalue_from_numpy
    x, labels = labelled(1, 6)
    expected = module(x, labels)
    gradient = state.parameters["W"].grad.copy()
    module.lazy_reset_grad()
    results = module(as_value(x), as_value(labels))
    assert isinstance(results, tuple)
    for result, array in zip(results, expected, strict=True):
        assert isinstance(result, onnxruntime.OrtValue)
        assert np.array_equal(result.numpy(), array)
    assert np.array_equal(state.parameters["W"].grad, gradient)
    with refused("label-out-of-range"):
        module(as_value(x), as_value(labels + 3))
    # One array among them makes it a call with arrays.
    assert np.array_equal(module(as_value(x), labels)[0], expected[0])


def test_lists_and_views_are_taken(regression):
    module, _ = open_module(regression)
    expected = module(X, T)
    assert module(X.tolist(), T.tolist()) == expected
    wide = np.zeros((5, 6), np.float32)
    wide[:, ::2] = X
    assert module(wide[:, ::2], np.asfortranarray(T)) == expected
    assert module([[1, 0, 0]], [[0, 0]]).shape == ()  # integers become floats


def test_an_array_that_changes_in_place_is_read_again(regression):
    module, state = open_module(regression)
    (x, t), (x2, t2) = batches(2)
    reference = oracle(state)
    module(x, t)
    x[...], t[...] = x2, t2
    np.testing.assert_allclose(module(x, t), reference.forward(x2, t2)[0], rtol=1e-6)


def test_two_modules_share_a_state(regression):
    module, state = open_module(regression)
    first = module(X, T)
    accumulated = state.parameters["W"].grad.copy()
    other = Module(regression.training, state)
    np.testing.assert_array_equal(state.parameters["W"].grad, accumulated)
    state.parameters["b"].data += 1
    assert other(X, T) == module(X, T) != first


def test_flat_copies(regression):
    module, state = open_module(regression)
    assert module.get_parameters_size() == 8
    assert module.get_parameters_size(trainable_only=False) == 14
    parts = [state.parameters[name].data.reshape(-1) for name in ("W", "scale", "b", "mean")]
    everything = module.get_contiguous_parameters()
    assert isinstance(everything, onnxruntime.OrtValue)
    assert np.array_equal(everything.numpy(), np.concatenate(parts))
    trained = module.get_contiguous_parameters(trainable_only=True).numpy()
    assert np.array_equal(trained, np.concatenate([parts[0], parts[2]]))
    before = everything.numpy().copy()
    state.parameters["W"].data[...] = 0
    assert np.array_equal(everything.numpy(), before)
    assert not np.array_equal(module.get_contiguous_parameters().numpy(), before)
    module.copy_buffer_to_parameters(everything, trainable_only=False)
    assert np.array_equal(module.get_contiguous_parameters().numpy(), everything.numpy())
    module.copy_buffer_to_parameters(np.arange(8, dtype=np.float32))
    assert state.parameters["W"].data.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert state.parameters["b"].data.tolist() == [6, 7]
    inner = everything._ortvalue  # what the reference's Python API returns
    module.copy_buffer_to_parameters(inner, trainable_only=False)
    assert np.array_equal(module.get_contiguous_parameters().numpy(), everything.numpy())


def test_a_view_of_the_contiguous_parameters_outlives_the_ortvalue(regression):
    """A view that borrowed memory would read what the next copies left there."""
    module = regression.alone()
    expected = module.get_contiguous_parameters().numpy().copy()
    views = [module.get_contiguous_parameters().numpy() for _ in range(50)]
    gc.collect()
    assert all(np.array_equal(view, expected) for view in views)


@pytest.mark.parametrize(("buffer", "code"), [
    (np.zeros(7, np.float32), "buffer-size"), (np.zeros(14, np.float32), "buffer-size"),
    (np.zeros(8), "buffer-type"), ([0.0] * 8, "buffer-type"),
])  # fmt: skip
def test_buffers_that_do_not_fit(regression, buffer, code):
    module, state = open_module(regression)
    before = state.parameters["W"].data.copy()
    with refused(code):
        module.copy_buffer_to_parameters(buffer)
    assert np.array_equal(state.parameters["W"].data, before)


def test_session_options_reach_the_sessions(regression, tmp_path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    module, _ = open_module(regression, session_options=options)
    assert (tmp_path / "optimized.onnx").exists()
    assert np.isfinite(module(X, T))


def test_a_model_without_trainable_parameters_computes_the_loss(regression):
    data = regression.state().snapshot(False)
    frozen = data.frozen | data.trainable
    frozen.pop("mean")
    state = CheckpointState(CheckpointData({}, frozen))
    module = Module(regression.evaluation, state)  # type: ignore[arg-type]
    loss, prediction = module(X, T)
    assert prediction.shape == (5, 2)
    np.testing.assert_allclose(loss, oracle(state).forward(X, T)[0], rtol=1e-6)
    assert module.get_parameters_size() == 0


TEXT = f"""{models.HEADER}
training (string[batch] words, float[batch] target, float[1] W, float[1] W_grad_buffer,
          bool[1] lazy_reset_grad)
      => (float loss, float[1] W_grad_out)
   <string[1] yes = {{"yes"}}>
{{
    hit_flag = Equal(words, yes) hit = Cast<to = 1>(hit_flag) prediction = Mul(hit, W)
    difference = Sub(prediction, target) square = Mul(difference, difference)
    loss = ReduceMean<keepdims = 0>(square) error = Mul(difference, hit)
    mean_error = ReduceMean<keepdims = 1>(error) W_grad = Add(mean_error, mean_error)
    W_sum = Add(W_grad_buffer, W_grad) W_grad_out = Where(lazy_reset_grad, W_grad, W_sum)
}}""".replace('"" : 17', '"" : 19')


def test_text_inputs(tmp_path):
    training = models.write(tmp_path, "training_model.onnx", TEXT)
    state = CheckpointState(CheckpointData({"W": np.float32([2])}, {}))
    module = Module(training, state)
    words, target = np.array(["yes", "no", "yes", "no"]), np.float32([1, 0, 0, 1])
    assert str(module.input_specs()[0]) == "text[batch]"
    for repeat in (1, 2):
        # loss = (1 + 0 + 4 + 1) / 4; gradient = 2 * (1 + 2) / 4
        assert module(words, target) == np.float32(1.5)
        assert state.parameters["W"].grad.tolist() == [1.5 * repeat]
    assert module(words.tolist(), target) == np.float32(1.5)
    with refused("input-type"):
        module(np.float32([1, 2, 3, 4]), target)


# The packager's advice on how to run a training model reaches the session.

_EXTENDED = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
_ALL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


def write(path: Path, **metadata: str) -> Path:
    model = parsed("(float[1] x) => (float[1] y) { y = Relu(x) }")
    model.producer_version = "v" * 300
    onnx.helper.set_model_props(model, metadata)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(("text", "level"), [("extended", _EXTENDED), ("all", _ALL), ("?", _ALL)])
def test_the_recorded_level_is_taken(tmp_path, text, level):
    metadata = {"other": "x" * 200, "odtpack.optimization_level": text}
    options = default_session_options(write(tmp_path / "m.onnx", **metadata), threads=3)
    assert options.graph_optimization_level == level
    assert options.intra_op_num_threads == 3
    assert not options.enable_mem_pattern


def test_threads_rest_between_runs(tmp_path):
    """Threads that spin take the cores from the training's other session."""
    key = "session.force_spinning_stop"
    assert default_session_options(write(tmp_path / "m.onnx")).get_session_config_entry(key) == "1"
    with pytest.raises(RuntimeError, match=key):
        onnxruntime.SessionOptions().get_session_config_entry(key)


def test_the_manifest_beside_the_model_says_it(tmp_path):
    path = write(tmp_path / "a_training_model.onnx", **{"odtpack.optimization_level": "all"})
    session = {
        "optimization_level": "disabled", "memory_pattern": True, "arena": False,
        "prepacking": False, "shared_allocator": True, "threads": 3,
        "config": {"session.force_spinning_stop": "1"},
    }  # fmt: skip
    content = {"files": {"training_model": {"path": path.name}}, "session": session}
    manifest = tmp_path / "a_manifest.json"
    manifest.write_text(json.dumps(content))
    options = default_session_options(path)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert options.enable_mem_pattern
    assert not options.enable_cpu_mem_arena
    assert options.intra_op_num_threads == 3
    for entry in ("disable_prepacking", "use_env_allocators", "force_spinning_stop"):
        assert options.get_session_config_entry(f"session.{entry}") == "1"
    assert default_session_options(path, threads=2).intra_op_num_threads == 2
    with refused("bad-argument", "at most 256 threads, not 257"):
        default_session_options(path, threads=257)
    y = onnxruntime.InferenceSession(str(path), options).run(None, {"x": np.float32([-1])})
    assert y[0] == 0
    manifest.rename(tmp_path / "manifest.json")  # another prefix than the model's
    assert default_session_options(path).intra_op_num_threads == 3
    (tmp_path / "manifest.json").unlink()
    for damaged in ("", "[]", '{"files": 3}'):
        manifest.write_text(damaged)
        assert default_session_options(path).graph_optimization_level == _ALL
    manifest.write_text(json.dumps(content).replace("disabled", "odd"))
    with refused("manifest-invalid"):
        default_session_options(path)
    content["files"]["training_model"]["path"] = "another.onnx"
    manifest.write_text(json.dumps(content))
    assert default_session_options(path).graph_optimization_level == _ALL


def test_damaged_files_give_the_defaults(tmp_path):
    path = write(tmp_path / "m.onnx", **{"odtpack.optimization_level": "extended"})
    whole = path.read_bytes()
    dice = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole[: dice.randrange(len(whole))])
        for _ in range(3):
            if damaged:
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        assert default_session_options(path).graph_optimization_level in (_EXTENDED, _ALL)
    assert default_session_options(tmp_path / "absent.onnx").graph_optimization_level == _ALL


# The training loop against formulas in numpy.


def chunks(*sizes: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(3)
    return [[rng.random((n, 3), np.float32), rng.random((n, 2), np.float32)] for n in sizes]


def values(state: CheckpointState) -> dict[str, np.ndarray]:
    return {name: item.data.astype(np.float64) for name, item in state.parameters}


def loss(batch: list[np.ndarray], at: dict[str, np.ndarray]) -> float:
    x, target = (array.astype(np.float64) for array in batch)
    return float(np.mean((x * at["scale"] @ at["W"] + at["b"] - target) ** 2))


def test_a_step_follows_the_sum_of_its_batches_gradients(regression):
    module, state = open_module(regression)
    optimizer = Optimizer(regression.sgd, module)
    before, fed, seen = values(state), chunks(4, 3), []
    scheduler = LinearLRScheduler(optimizer, 0, 2, 0.1)
    rate = optimizer.get_learning_rate()
    mean = train_step(module, optimizer, iter(fed), scheduler, on_loss=seen.append)
    wanted = [loss(batch, before) for batch in fed]
    np.testing.assert_allclose(seen, wanted, rtol=1e-5)
    np.testing.assert_allclose(mean, np.mean(wanted), rtol=1e-5)
    gradient = np.zeros_like(before["W"])
    for at in np.ndindex(gradient.shape):  # central differences
        for sign in (1, -1):
            moved = {**before, "W": before["W"].copy()}
            moved["W"][at] += sign * 1e-6
            gradient[at] += sum(sign * loss(batch, moved) for batch in fed) / 2e-6
    np.testing.assert_allclose(values(state)["W"], before["W"] - rate * gradient, rtol=1e-4)
    np.testing.assert_allclose(optimizer.get_learning_rate(), 0.05, rtol=1e-6)
    # Nothing of this step goes into the next one.
    after = values(state)
    np.testing.assert_allclose(train_step(module, optimizer, fed[:1]), loss(fed[0], after), 1e-5)


def test_an_evaluation_weights_batches_by_their_samples(regression):
    module, state = open_module(regression)
    fed = chunks(4, 1)
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


def test_right_labels_are_counted_without_the_ignored_ones():
    scores = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]])
    labels = np.array([1, 1, -1, 0])
    for ignored, total in ((-1, 3), (None, 4)):
        named, counted = right_labels(scores, labels, ignored)
        assert (named.tolist(), len(counted)) == ([1, 0], total)


def test_an_optimizer_whose_state_another_took_over_refuses(tmp_path):
    """A save would have the other's moments and step count."""
    state, module, optimizer = built_training(zoo.mlp((6, 5, 3)), tmp_path)
    batch = np.ones((2, 6), np.float32), np.array([0, 1])
    module(*batch)
    optimizer.step()
    package = Package.open(tmp_path)
    second = Module(package.training_model, state)
    other = Optimizer(package.optimizer_model, second)
    for use in (optimizer.step, lambda: optimizer.step_on(*batch)):
        with refused("optimizer-mismatch", "Another Optimizer", hint="a new Optimizer"):
            use()
    other.step()
    assert state.optimizer is not None
    assert state.optimizer.step == 2
    second.close()
    with refused("optimizer-mismatch", hint="a new Optimizer if its Module is closed"):
        optimizer.step()
    again = Optimizer(package.optimizer_model, module)
    again.step()
    assert again.step_count == 3


def test_one_batch_is_no_step_of_several(tmp_path):
    """It would move a fourth of the way, as each gradient is divided by the number of batches."""
    said: list[str] = []
    options = {"accumulation_steps": 4, "step_model": "always", "remark": said.append}
    state, _, optimizer = built_training(zoo.mlp((6, 5, 3)), tmp_path, optimizer="sgd", **options)
    assert said == ["the package gets no step model: an optimizer step needs several batches"]
    before = {name: parameter.data.copy() for name, parameter in state.parameters}
    with refused("step-of-several", "4 batches"):
        optimizer.step_on(np.ones((2, 6), np.float32), np.array([0, 1]))
    assert optimizer.step_count == 0
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(parameter.data, before[name])
