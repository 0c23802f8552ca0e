"""What does not fit is refused with a sentence that says what, and nothing crashes."""

import gc
from collections.abc import Callable

import numpy as np
import pytest

from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_runtime.session.session import UserInputs
from tests.refused import refused
from tests.runtime import models

X, T = np.zeros((5, 3), np.float32), np.zeros((5, 2), np.float32)


@pytest.mark.parametrize(("inputs", "code", "says"), [
    ((), "input-count", "takes 2 inputs and 0"),
    ((X,), "input-count", "takes 2 inputs and 1"),
    ((X, T, T), "input-count", "takes 2 inputs and 3"),
    ((X.astype(np.float64), T), "input-type", "'input' must be float32"),
    ((X, T.astype(np.int64)), "input-type", "'target' must be float32"),
    ((X.astype(">f4"), T), "input-type", "'input'"),
    ((X[:, :2], T), "input-shape", r"float32\[batch, 3\], and its shape is \[5, 2\]"),
    ((X[0], T), "input-shape", r"shape is \[3\]"),
    ((X[None], T), "input-shape", "'input'"),
    ((X, T[:4]), "input-sizes-differ", "'batch' is 5 in input 'input' and 4 in input 'target'"),
    ((X[:0], T[:0]), "empty-batch", "'input' is empty"),
    (([], []), "input-shape", "'input'"),
    (([[1, 2, 3], [1]], T), "input-shape", "not a regular array"),
    (("text", T), "input-type", "'input'"),
    ((None, T), "input-type", "'input'"),
])  # fmt: skip
def test_inputs_that_do_not_fit(regression, inputs, code, says):
    module = regression.alone()
    for _ in range(2):
        with refused(code, says):
            module(*inputs)
        assert np.isfinite(module(X, T))  # a call that fits works, before and after


@pytest.mark.parametrize("labels", [[0, 3], [-1, 0], [2**40, 0], [0, -(2**63)]])
def test_labels_out_of_range(classifier, labels):
    module = classifier.alone()
    x = np.zeros((2, 4), np.float32)
    wrong = next(label for label in labels if not 0 <= label < 3)
    place = rf"label {wrong} at \[{labels.index(wrong)}\]"
    with refused("label-out-of-range", "numbered 0 to 2", place):
        module(x, np.array(labels))
    module(x, np.array([0, 2]))


@pytest.mark.parametrize("name", ["input_ids", "decoder_input_ids", "position_ids"])
def test_numbers_of_tokens_are_not_negative(name):
    """Gather would take them from the end of its table; of positions that may be meant."""
    inputs = UserInputs([TensorSpec(name, np.dtype(np.int64), (None, 3))], [], None)
    assert inputs.arrays([np.arange(6).reshape(2, 3)]) is not None
    wrong = np.array([[0, 1, -100]])
    if name == "position_ids":
        assert inputs.arrays([wrong]) is not None
        return
    with refused("bad-prompt", f"'{name}' holds -100"):
        inputs.arrays([wrong])


def test_one_label_may_be_ignored(tmp_path):
    metadata = {"odtpack.class_count": "3", "odtpack.ignore_index": "-100"}
    module = models.classifier(tmp_path, metadata).alone()
    x = np.zeros((2, 4), np.float32)
    module(x, np.array([-100, 2]))
    with pytest.raises(OdtpackError, match="label -1 "):
        module(x, np.array([-100, -1]))


def test_without_a_class_count_labels_are_taken_as_they_are(tmp_path):
    module = models.classifier(tmp_path, {}).alone()
    loss, _ = module(np.zeros((1, 4), np.float32), np.array([7]))
    assert loss == 0


def test_metadata_that_are_no_number(tmp_path):
    files = models.classifier(tmp_path, {"odtpack.class_count": "many"})
    with pytest.raises(OdtpackError, match=r"odtpack\.class_count = 'many'"):
        files.alone()


def test_evaluation_without_a_model(regression, tmp_path):
    module = regression.alone()
    module.eval()
    for use in (
        lambda: module(X, T),
        module.input_names,
        lambda: module.export_model_for_inferencing(tmp_path / "m.onnx", ["prediction"]),
    ):
        with refused("no-eval-model"):
            use()
    module.train()
    module(X, T)


def test_devices(regression):
    state = regression.state()
    with pytest.raises(OdtpackError, match="cuda"):
        Module(regression.training, state, device="cuda")
    Module(regression.training, state, device="cpu")


def test_files_that_are_no_models(regression, tmp_path):
    state = regression.state()
    (tmp_path / "text.onnx").write_text("this is not a model")
    for path, code in [
        (tmp_path / "absent.onnx", "model-not-found"),
        (tmp_path, "model-not-found"),
        (tmp_path / "text.onnx", "model-not-loadable"),
        (regression.checkpoint, "model-not-loadable"),
    ]:
        with refused(code):
            Module(path, state)
        with refused(code):
            Module(regression.training, state, path)


def _without(name: str) -> Callable[[CheckpointData], None]:
    def change(data: CheckpointData) -> None:
        data.trainable.pop(name, None)
        data.frozen.pop(name, None)

    return change


CHANGES: dict[str, tuple[Callable[[CheckpointData], object], str]] = {
    "no W": (_without("W"), "'scale'|'W'|W_grad"),
    "no scale": (_without("scale"), "'scale' belongs to no parameter"),
    "no b": (_without("b"), "'b' belongs to no parameter"),
    "no mean": (_without("mean"), "'mean' belongs to no parameter"),
    "reshaped": (lambda data: data.trainable.update(W=data.trainable["W"].T),
                 r"'W' is float32\[3, 2\] in the model, and float32\[2, 3\] in the checkpoint"),
    "retyped": (lambda data: data.frozen.update(scale=data.frozen["scale"].astype(np.float64)),
                r"'scale' is float32\[3\] in the model, and float64\[3\]"),
    "double": (lambda data: data.trainable.update(extra=np.zeros(2)), "no gradient for 'extra'"),
    "frozen weight": (lambda data: data.frozen.update(W=data.trainable.pop("W")),
                      "W_grad.accumulation.buffer"),
    "trained scale": (lambda data: data.trainable.update(scale=data.frozen.pop("scale")),
                      "no gradient for 'scale'"),
    "extra": (lambda data: data.frozen.update(extra=np.zeros(2, np.float32)), "no input 'extra'"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_models_and_checkpoints_that_do_not_go_together(regression, change):
    act, says = CHANGES[change]
    data = regression.state().snapshot(False)
    act(data)
    with refused("model-mismatch", says):
        regression.module(CheckpointState(data))


def test_a_training_model_is_no_evaluation_model(regression):
    state = regression.state()
    with pytest.raises(OdtpackError, match="computes no gradients"):
        Module(regression.training, state, regression.training)


def test_all_trainable_parameters_have_one_type(regression):
    text = models.REGRESSION_TRAINING
    for old, new in (
        ("float[2] b,", "double[2] b_double,"),
        ("float[2] b_grad_", "double[2] b_double_grad_"),
        ("    scaled = Mul", "    b = Cast<to = 1>(b_double) scaled = Mul"),
        ("b_sum = Add(b_grad_buffer, b_grad)", "b_double_grad = Cast<to = 11>(b_grad) "
         "b_sum = Add(b_double_grad_buffer, b_double_grad)"),
        ("b_grad_out = Where(lazy_reset_grad, b_grad, b_sum)",
         "b_double_grad_out = Where(lazy_reset_grad, b_double_grad, b_sum)"),
    ):  # fmt: skip
        text = text.replace(old, new)
    path = models.write(regression.folder, "double.onnx", text)
    data = regression.state().snapshot(False)
    data.trainable["b_double"] = data.trainable.pop("b").astype(np.float64)
    with refused("parameter-type", "all must be float32, or all float64"):
        Module(path, CheckpointState(data))


SWAPPED = (
    "float[3, 2] W, float[3] scale, float[2] b,", "float[2] b, float[3] scale, float[3, 2] W,"
)  # fmt: skip


def test_a_state_keeps_the_order_of_its_first_module(regression):
    state = regression.state()
    first = Module(regression.training, state)
    other = regression.changed(*SWAPPED)
    with pytest.raises(OdtpackError, match="another order"):
        Module(other, state)
    Module(other, regression.state())
    assert first.flat is not None


def test_what_cannot_be_trained_leaves_a_state_for_another_package(regression, tmp_path):
    """An Optimizer that cannot be made, also on a Module that is gone, has placed nothing."""
    state = regression.state()
    optimizer = Optimizer(regression.sgd, Module(regression.training, state))
    optimizer.step()
    CheckpointState.save_checkpoint(state, tmp_path / "sgd", include_optimizer_state=True)
    other = regression.changed(*SWAPPED)
    for closes in (False, True):
        state = CheckpointState.load_checkpoint(tmp_path / "sgd")
        before = {name: parameter.data.copy() for name, parameter in state.parameters}
        module = Module(regression.training, state)
        with refused("optimizer-mismatch"):
            Optimizer(regression.adamw, module)
        assert state.placed
        with refused("model-mismatch", "another order"):
            Module(other, state)
        if closes:
            module.close()
        else:
            del module
            gc.collect()  # what was raised holds it
        assert not state.placed
        assert state.parameters["W"].grad is None
        module = Module(other, state)
        optimizer = Optimizer(regression.sgd, module)
        assert optimizer.step_count == 1
        for name, parameter in state.parameters:
            np.testing.assert_array_equal(parameter.data, before[name])
        assert np.shares_memory(module.flat.parameters, state.parameters["W"].data)
        optimizer.step_on(X, T)
        straight = CheckpointState.load_checkpoint(tmp_path / "sgd")
        Optimizer(regression.sgd, Module(regression.training, straight)).step_on(X, T)
        for name, parameter in straight.parameters:
            np.testing.assert_allclose(state.parameters[name].data, parameter.data, rtol=1e-6)
        # What has been trained keeps its place.
        module.close()
        with refused("model-mismatch", "another order"):
            Module(regression.training, state)


def test_a_row_that_a_table_does_not_have_is_named(regression, capfd):
    more = "last = Constant<value_int = 3>() beyond = Gather(scale, last) more = Mul(scale, beyond)"
    path = regression.changed("scaled = Mul(input, scale)", f"{more} scaled = Mul(input, more)")
    module = Module(path, regression.state())
    with refused("run-failed", "row 3 is looked up in a table of 3 rows.*positions.*Gather"):
        module(X, T)
    capfd.readouterr()  # ONNX Runtime's own log


def test_a_run_that_fails_says_so(regression, capfd):
    # The model claims a free batch and then reshapes to five rows.
    reshape = "five = Constant<value_ints = [5, 3]>() fixed = Reshape(input, five)"
    path = regression.changed("scaled = Mul(input,", f"{reshape} scaled = Mul(fixed,")
    module = Module(path, regression.state())
    module(X, T)
    with refused("run-failed", "in the middle of a step"):
        module(X[:4], T[:4])
    module.lazy_reset_grad()
    assert module(X, T).shape == ()
    capfd.readouterr()  # ONNX Runtime's own log
