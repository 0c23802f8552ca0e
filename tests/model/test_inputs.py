"""Inputs that are not samples: constants, states that start at zero, samples on another axis."""

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from odtpack.build import build_package
from odtpack.cli import main
from odtpack.cli._fit import open_module
from odtpack.optimizers import SGD
from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package, write_inference_model
from odtpack_runtime.training.loop import train_step
from tests.model_text import parsed, run
from tests.packaging_tools import built_package, built_training, open_training
from tests.refused import refused

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((4, 3)).astype(np.float32)


def speech() -> onnx.ModelProto:
    """(x rate + state[0] + state[1]) w."""
    text = """
    speech (float[batch, 4] x, float[2, batch, 4] state, int64 rate) => (float[batch, 3] y)
    <int64[1] axis = {0}> {
        last = ReduceSum <keepdims = 0> (state, axis) scale = Cast <to = 1> (rate)
        seen = Mul(x, scale) h = Add(seen, last) y = MatMul(h, w)
    }"""
    return parsed(text, w=WEIGHT)


X, STATE, TARGET = (
    RANDOM.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (5, 2, 4), (5, 3))
)


@pytest.mark.parametrize("state", ["zeros", "axis:1"])
def test_a_step_is_that_of_the_settled_model(state, tmp_path):
    notes: list[str] = []
    package = built_package(
        speech(), tmp_path / "p", loss="mse", optimizer=SGD(), remark=notes.append,
        inputs=("rate=3", f"state={state}"),
    )  # fmt: skip
    given = [X, TARGET] if state == "zeros" else [X, STATE, TARGET]
    assert [len(each.shape) for each in package.manifest.inputs] == [each.ndim for each in given]
    parameters, module, optimizer = open_training(package.path)
    optimizer.set_learning_rate(0.1)
    loss = train_step(module, optimizer, [given])

    weight = torch.tensor(WEIGHT, dtype=torch.float64, requires_grad=True)
    before = 0 if state == "zeros" else torch.from_numpy(STATE).double().sum(1)
    expected = torch.nn.functional.mse_loss(
        (torch.from_numpy(X).double() * 3 + before) @ weight, torch.from_numpy(TARGET).double()
    )
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    stepped = (weight - 0.1 * weight.grad).detach().numpy()
    np.testing.assert_allclose(parameters.parameters["w"].data, stepped, rtol=1e-4, atol=1e-5)
    verify_package(tmp_path / "p")
    assert not notes

    # The inference template is the model as it came.
    write_inference_model(package, parameters.arrays(trainable=True), tmp_path / "model.onnx")
    feeds = {"x": X, "state": STATE.transpose(1, 0, 2), "rate": np.array(3)}
    found = run(onnx.load(tmp_path / "model.onnx"), feeds)["y"]
    np.testing.assert_allclose(found, (X * 3 + STATE.sum(1)) @ stepped, rtol=1e-4, atol=1e-4)


def test_samples_on_another_axis_are_told_and_not_fed(tmp_path):
    """``state`` has two layers first: batches of its rows would be nonsense."""
    notes: list[str] = []
    build_package(speech(), tmp_path / "p", loss="mse", inputs=("rate=3",), remark=notes.append)
    assert ["--input state=axis:K" in note for note in notes] == [True]
    np.savez(tmp_path / "data.npz", x=X, state=np.zeros((5, 5, 4), np.float32), target=TARGET)
    with refused("data-shape", r"'state' has 'batch'.*on axis 1"):
        Package.open(tmp_path / "p").load_data(tmp_path / "data.npz")


def test_a_recipe_says_the_same(tmp_path):
    onnx.save(speech(), tmp_path / "speech.onnx")
    (tmp_path / "recipe.toml").write_text(
        'model = "speech.onnx"\npackage = "p"\n[inputs]\nrate = 3\nstate = "zeros"\n'
        '[loss]\nkind = "mse"\n'
    )
    build_package(speech(), tmp_path / "q", loss="mse", inputs=("rate=3", "state=zeros"))
    assert main(["build", "--recipe", str(tmp_path / "recipe.toml")]) == 0
    table: Any = {"rate": 3, "state": "zeros"}
    build_package(speech(), tmp_path / "r", loss="mse", inputs=table)
    first, *others = (Package.open(tmp_path / name).manifest for name in "pqr")
    assert {each.recipe_digest for each in others} == {first.recipe_digest}
    with refused("bad-argument", "sizes cannot be {'batch': 4}"):
        build_package(speech(), tmp_path / "r", loss="mse", sizes={"batch": 4})
    np.savez(tmp_path / "data.npz", x=X, target=TARGET)
    data = ["--data", str(tmp_path / "data.npz"), "--out", str(tmp_path / "c"), "--epochs", "1"]
    assert main(["train", str(tmp_path / "p"), *data]) == 0


@pytest.mark.parametrize(("kind", "cast"), [("float", 1), ("float16", 10), ("int32", 6)])
@pytest.mark.parametrize("shape", ["", "[1]", "[4]"])
def test_a_number_has_the_type_of_its_input(kind, cast, shape, tmp_path):
    text = f"""scaled (float[batch, 4] x, {kind}{shape} rate) => (float[batch, 3] y)
        {{ scale = Cast <to = 1> (rate) seen = Mul(x, scale) y = MatMul(seen, w) }}"""
    model = parsed(text, w=WEIGHT)
    assert cast == model.graph.input[1].type.tensor_type.elem_type
    _, module, _ = built_training(model, tmp_path / "p", loss="mse", inputs=("rate=3",))
    assert module(X, TARGET) == pytest.approx(((X * 3 @ WEIGHT - TARGET) ** 2).mean(), rel=1e-3)


@pytest.mark.parametrize(
    ("setting", "code"),
    [("sate=zeros", "unknown-value"), ("state=axis:3", "bad-input-setting"), ("rate=2.5",
     "bad-input-setting"), ("state=1,2", "bad-input-setting"), ("rate", "unknown-value")],
)  # fmt: skip
def test_settings_that_cannot_be(setting, code, tmp_path):
    with refused(code, setting.split("=", maxsplit=1)[0]):
        build_package(speech(), tmp_path / "p", loss="mse", inputs=(setting,))


def test_a_state_that_is_computed_from_the_loss_is_told_from_statistics(tmp_path):
    """The inference template takes it, though nothing in it needs it."""
    text = """baseline (float[N, 4] x, float[1] level) => (float loss, float[1] next) {
        y = MatMul(x, w) square = Mul(y, y) loss = ReduceMean <keepdims = 0> (square)
        share = Constant <value = float[1] {0.9}> () old = Mul(level, share) next = Add(old, loss)
    }"""
    model = parsed(text, w=WEIGHT)
    inputs = ("level=carry:next",)
    manifest = build_package(model, tmp_path / "p", inputs=inputs, outputs=("y",))
    assert manifest.inference is not None
    assert manifest.inference.inputs == ("x", "level")
    assert main(["export", str(tmp_path / "p"), "--out", str(tmp_path / "m.onnx")]) == 0
    with refused("bad-input-setting", "'level' is carried over"):
        build_package(model, tmp_path / "q", inputs=inputs)


def stream() -> onnx.ModelProto:
    """state <- tanh(x w + state u), which the backward pass reads before and after."""
    text = """stream (float[N, 4] x, float[N, 3] state) => (float[N, 3] y, float[N, 3] new) {
        seen = MatMul(x, w) kept = MatMul(state, u) sum = Add(seen, kept)
        new = Tanh(sum) y = Mul(new, state)
    }"""
    return parsed(text, w=WEIGHT, u=WEIGHT[:3])


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("step_model", ["never", "always"])
def test_a_state_is_carried_from_step_to_step(step_model, batches, tmp_path):
    package = built_package(
        stream(), tmp_path / "p", loss="mse", optimizer=SGD(), step_model=step_model,
        inputs=("state=carry:new",), sizes=("N=5",),
    )  # fmt: skip
    assert [each.name for each in package.manifest.inputs] == ["x", "target"]
    values = CheckpointState.load_checkpoint(package.checkpoint)
    module = open_module(package, values)
    optimizer = Optimizer(package.optimizer_model, module)
    optimizer.set_learning_rate(0.5)
    weights = [torch.tensor(a).double().requires_grad_() for a in (WEIGHT, WEIGHT[:3])]
    theirs = torch.optim.SGD(weights, lr=0.5)
    state = torch.zeros(5, 3, dtype=torch.float64)
    for step in range(4):
        given = [[np.roll(X, step * batches + i), TARGET] for i in range(batches)]
        loss, losses = train_step(module, optimizer, given), []
        theirs.zero_grad()
        for x, target in given:
            new = torch.tanh(torch.from_numpy(x).double() @ weights[0] + state @ weights[1])
            y = new * state
            losses.append(torch.nn.functional.mse_loss(y, torch.from_numpy(target).double()))
            losses[-1].backward()
            state = new.detach()
        theirs.step()
        assert loss == pytest.approx(sum(losses).item() / batches, rel=1e-5)
    for name, wanted in (("w", weights[0]), ("u", weights[1]), ("state", state)):
        found = values.parameters[name].data
        np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-4, atol=1e-6)
    verify_package(tmp_path / "p")
    values.save_checkpoint(values, tmp_path / "c")
    given = ["--checkpoint", str(tmp_path / "c"), "--out", str(tmp_path / "m.onnx")]
    assert main(["export", str(tmp_path / "p"), *given]) == 0
    assert [each.name for each in onnx.load(tmp_path / "m.onnx").graph.input] == ["x", "state"]
    template = onnx.load(tmp_path / "p" / "inference_template.onnx")
    assert {"x", "state"} <= {each.name for each in template.graph.input}


@pytest.mark.parametrize(("setting", "options", "said"), [
    ("state=carry:new", {}, "--size batch=4"),
    ("state=carry:news", {"sizes": ("N=5",)}, "did you mean new"),
    ("x=carry:new", {"sizes": ("N=5",)}, "fixed sizes"),
    ("state=carry:new", {"sizes": ("N=5",), "runtime": "ort-training"}, "carry no state"),
    ("state=carry:new", {"sizes": ("N=5",), "train": ("state",)}, "carried states"),
])  # fmt: skip
def test_states_that_cannot_be_carried(setting, options, said, tmp_path):
    with pytest.raises(OdtpackError) as caught:
        build_package(stream(), tmp_path / "p", loss="mse", inputs=(setting,), **options)
    assert said in f"{caught.value.what} {caught.value.hint}"


TWO = """
two (float[{0}, 4] x, float rate) => (float[{0}, 3] near, float[{0}, 3] far, float[{0}, 4] more)
{{ near = MatMul(x, w) far = Mul(near, rate) more = Neg(x) }}"""


@pytest.mark.parametrize("format_", ["onnx", "ort"])
@pytest.mark.parametrize(("shape", "settings", "known"), [
    ("T, N", ("x=axis:1", "rate=3"), []),
    ("?, ?", ("x=axis:1", "rate=3"), []),
    ("T, N", ("rate=3",), ["more"]),
    ("?, ?", ("rate=3",), ["more"]),
])  # fmt: skip
def test_what_the_loss_does_not_read_is_exported_of_the_same_inputs(
    shape, settings, known, format_, tmp_path
):
    """The model for inference has inputs as they came, the evaluation model as they are fed."""
    model = parsed(TWO.format(shape), w=WEIGHT)
    package = built_package(
        model, tmp_path / "p", loss="mse", loss_inputs=("near",), inputs=settings
    )
    path = package.eval_model
    if format_ == "ort":
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(path := tmp_path / "eval.ort")
        options.add_session_config_entry("session.save_model_format", "ORT")
        onnxruntime.InferenceSession(package.eval_model, options)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    with Module(package.training_model, state, path) as module:
        for name in ("far", "more"):
            if name in known:
                module.export_model_for_inferencing(tmp_path / "m.onnx", [name])
                assert [each.name for each in onnx.load(tmp_path / "m.onnx").graph.input] == ["x"]
            else:
                with refused("unknown-output", f"'{name}'"):
                    module.export_model_for_inferencing(tmp_path / "m.onnx", [name])


OPEN = "any (float[batch, tokens] x) => (float[batch, tokens] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [(["tokens=4"], ("batch", 4)), (["x=5,4"], (5, 4)), (["batch=5", "x=5,4"], (5, 4))],
)
def test_sizes_are_fixed_everywhere(sizes, shape, tmp_path):
    """The output that has the axis's name, the target, and the model for inference too."""
    weight = RANDOM.standard_normal((4, 4)).astype(np.float32)
    manifest = build_package(parsed(OPEN, w=weight), tmp_path / "p", loss="mse", sizes=sizes)
    assert [each.shape for each in manifest.inputs] == [shape, shape]
    (y,) = onnx.load(tmp_path / "p" / "inference_template.onnx").graph.output
    assert [d.dim_param or d.dim_value for d in y.type.tensor_type.shape.dim] == list(shape)
    _, module, _ = open_training(tmp_path / "p")
    loss = float(module(X, np.zeros_like(X)))
    assert loss == pytest.approx(np.mean((X @ weight) ** 2), rel=1e-5)


def test_verify_finds_the_sizes_that_the_build_found(tmp_path):
    """Without recorded losses nothing says that x has as many columns as the weight has rows."""
    model = parsed(OPEN, w=np.zeros((37, 3), np.float32))
    model.graph.output[0].type.tensor_type.shape.ClearField("dim")
    options = {"sizes": ["batch=4"], "self_check": False}
    build_package(model, tmp_path / "p", loss="mse", **options)
    assert verify_package(tmp_path / "p").steps.shapes == {"x": [4, 37], "target": [4, 3]}


@pytest.mark.parametrize(
    "sizes",
    [["nothing=3"], ["x=5"], ["x=5,4,1"], ["batch=0"], ["batch=5,4"], ["batch=4", "x=5,4"], ["x"]],
)
def test_sizes_that_do_not_fit_are_refused(sizes, tmp_path):
    model = parsed(OPEN, w=np.eye(4, dtype=np.float32))
    with refused("bad-input-setting", r"the inputs are x \[batch, tokens\]"):
        build_package(model, tmp_path / "p", loss="mse", sizes=sizes)
