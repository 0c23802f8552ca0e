"""What ``generate_artifacts`` takes, and what it writes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto

from odtpack import artifacts
from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.onnxblock.loss import CrossEntropyLoss
from odtpack_runtime import CheckpointState, Module
from tests import zoo
from tests.model_text import parsed
from tests.packaging_tools import (
    LOSSES,
    generate,
    open_module,
    open_training,
    statistic_names,
    trainable_names,
)
from tests.refused import refused
from tests.training.forward import contents, linear, make, names, renamed

FILES = {"training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"}
OWN = {"manifest.json", "inference_template.onnx"}


# What is written


def test_files_and_names(tmp_path):
    make(linear(), tmp_path)
    assert set(contents(tmp_path)) == FILES | OWN
    assert names(tmp_path / "training_model.onnx") == (
        [*("x", "target", "w", "b"), *("w_grad.accumulation.buffer", "b_grad.accumulation.buffer"),
         "lazy_reset_grad"],
        ["loss", "w_grad.accumulation.out", "b_grad.accumulation.out"],
    )  # fmt: skip
    assert names(tmp_path / "eval_model.onnx") == (["x", "target", "w", "b"], ["loss"])
    assert names(tmp_path / "optimizer_model.onnx") == (
        ["learning_rate", "step", "params", "gradients"],
        ["params.out"],
    )


def test_optimizer_names_of_adamw(tmp_path):
    make(linear(), tmp_path, optimizer=OptimType.AdamW)
    moments = ["first_order_moments", "second_order_moments"]
    assert names(tmp_path / "optimizer_model.onnx") == (
        ["learning_rate", "step", "params", "gradients", *moments],
        ["params.out", *(f"{name}.out" for name in moments)],
    )


def test_types_and_shapes(tmp_path):
    make(linear(), tmp_path, loss=LossType.CrossEntropyLoss)
    graph = onnx.load(tmp_path / "training_model.onnx").graph
    described = {}
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]
        described[value.name] = (tensor.elem_type, dims)
    assert described == {
        "x": (TensorProto.FLOAT, ["N", 3]), "labels": (TensorProto.INT64, ["N"]),
        "lazy_reset_grad": (TensorProto.BOOL, [1]), "loss": (TensorProto.FLOAT, []),
        **{
            f"{name}{part}": (TensorProto.FLOAT, dims)
            for name, dims in (("w", [3, 2]), ("b", [2]))
            for part in ("", "_grad.accumulation.buffer", "_grad.accumulation.out")
        },
    }  # fmt: skip


def test_metadata_for_the_runtime(tmp_path):
    make(linear(), tmp_path, loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW)

    def metadata(name: str) -> dict[str, str]:
        model = onnx.load(tmp_path / f"{name}_model.onnx")
        return {entry.key: entry.value for entry in model.metadata_props}

    training = {"odtpack.format": "1", "odtpack.loss": "cross_entropy", "odtpack.class_count": "2"}
    assert training.items() <= metadata("training").items()
    assert metadata("eval") == training
    optimizer = metadata("optimizer")
    assert json.loads(optimizer.pop("odtpack.state")) == [
        {"name": "first_order_moments"},
        {"name": "second_order_moments"},
    ]
    assert optimizer == {"odtpack.optimizer": "adamw", "odtpack.moments": "2"}


def test_prefix(tmp_path):
    make(linear(), tmp_path, prefix="digits_", nominal_checkpoint=True)
    wanted = {f"digits_{name}" for name in (*FILES, *OWN, "nominal_checkpoint")}
    assert set(contents(tmp_path)) == wanted
    manifest = json.loads((tmp_path / "digits_manifest.json").read_text())
    for entry in filter(None, manifest["files"].values()):
        data = (tmp_path / entry["path"]).read_bytes()
        assert len(data) == entry["size_bytes"]
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]


def test_the_current_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generate_artifacts(linear(), requires_grad=["w"], loss=LossType.L1Loss)
    assert set(contents(tmp_path)) == FILES - {"optimizer_model.onnx"}


def test_a_folder_is_made(tmp_path):
    make(linear(), tmp_path / "a" / "b")
    assert set(contents(tmp_path / "a" / "b")) >= FILES


def test_earlier_files_are_replaced(tmp_path):
    make(zoo.mlp((3, 4, 2)), tmp_path, requires_grad=["fc1.weight"])
    make(linear(), tmp_path)
    assert contents(tmp_path) == contents(make(linear(), tmp_path.parent / "fresh"))


def test_every_form_of_a_model(tmp_path):
    model = linear()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    forms = {
        "proto": model, "path": path, "str": str(path), "ir": ir.from_proto(model),
        "ir-file": ir.load(path),
    }  # fmt: skip
    written = [contents(make(form, tmp_path / name)) for name, form in forms.items()]
    assert all(files == written[0] for files in written)


def test_external_data(tmp_path):
    model = linear()
    inline = contents(make(model, tmp_path / "inline"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="model.data")
    for name, form in (("path", path), ("str", str(path)), ("ir", ir.load(path))):
        assert contents(make(form, tmp_path / name)) == inline
    lazily = ir.load(path)
    make(lazily, tmp_path / "again")
    assert isinstance(lazily.graph.initializers["w"].const_value, ir.ExternalTensor)


def test_the_model_is_not_changed(tmp_path):
    model = zoo.mobilenet_v2(32, width_mult=0.2, batch_norm="train", stages=2)
    before = model.SerializeToString(deterministic=True)
    graph = ir.from_proto(model)
    listed = ir.to_proto(graph).SerializeToString(deterministic=True)
    generate(model, tmp_path / "proto")
    make(graph, tmp_path / "ir", requires_grad=trainable_names(model))
    assert model.SerializeToString(deterministic=True) == before
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == listed


def test_initializers_that_are_inputs_too(tmp_path):
    """As models of IR 3 list them; the reference stops at that."""
    model = linear()
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", TensorProto.FLOAT, [3, 2]))
    assert contents(make(model, tmp_path / "a")) == contents(make(linear(), tmp_path / "b"))


def test_local_functions(tmp_path):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "my" : 1]>'
        "g (float[N, 3] x) => (float[N, 2] y) { h = my.f(x, w) y = Add(h, b) }"
        '<domain: "my", opset_import: ["" : 17]> f (a, b) => (c) { c = MatMul(a, b) }'
    )
    model.graph.initializer.extend(linear().graph.initializer)
    _, expected, _ = open_training(make(linear(), tmp_path / "plain"))
    _, module, _ = open_training(make(model, tmp_path / "function"))
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    assert float(module(x, target)) == float(expected(x, target))


# Arguments


def test_parameters_in_the_order_of_the_initializers(tmp_path):
    model = linear(more="z = Mul(y, s)", outputs="float[N, 2] z", s=np.float32(2))
    make(model, tmp_path, requires_grad=["s", "w"], frozen_params=["b"])
    order = [tensor.name for tensor in model.graph.initializer]
    inputs, outputs = names(tmp_path / "training_model.onnx")
    trained = [name for name in order if name != "b"]
    assert inputs == [
        *("x", "target"), *order, *(f"{name}_grad.accumulation.buffer" for name in trained),
        "lazy_reset_grad",
    ]  # fmt: skip
    assert outputs == ["loss", *(f"{name}_grad.accumulation.out" for name in trained)]
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert {name: p.requires_grad for name, p in state.parameters} == {
        "w": True, "b": False, "s": True,
    }  # fmt: skip


def test_what_is_neither_trained_nor_frozen_stays_inside(tmp_path):
    make(linear(), tmp_path, requires_grad=["w"])
    for name in ("training", "eval"):
        path = tmp_path / f"{name}_model.onnx"
        assert "b" in {tensor.name for tensor in onnx.load(path).graph.initializer}
        assert "b" not in names(path)[0]
    assert "b" not in CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters


def test_nothing_to_train(tmp_path):
    """The forward model with its loss, as the reference has it; initializers stay inside."""
    generate_artifacts(linear(), loss=LossType.MSELoss, artifact_directory=tmp_path / "a")
    assert names(tmp_path / "a" / "training_model.onnx") == (["x", "target"], ["loss"])
    generate_artifacts(
        linear(), frozen_params=["w"], loss=LossType.MSELoss, artifact_directory=tmp_path / "b"
    )
    assert names(tmp_path / "b" / "training_model.onnx") == (["x", "target", "w"], ["loss"])
    x, target = np.ones((2, 3), np.float32), np.zeros((2, 2), np.float32)
    assert float(open_module(tmp_path / "b")(x, target)) > 0


ENDS_IN_LOSS = {
    "inputs": ", float[N, 2] t",
    "more": "d = Sub(y, t) s = Mul(d, d) cost = ReduceMean <keepdims = 0> (s)",
    "outputs": "float cost, float[N, 2] y",
}


def test_a_model_that_ends_in_its_loss(tmp_path):
    make(linear(**ENDS_IN_LOSS), tmp_path / "own", loss=None)
    make(linear(), tmp_path / "mse")
    inputs, outputs = names(tmp_path / "own" / "training_model.onnx")
    assert inputs[:4] == ["x", "t", "w", "b"]
    assert outputs[:2] == ["cost", "y"]  # as in the reference
    x, target = np.ones((4, 3), np.float32), np.full((4, 2), 0.5, np.float32)
    states = []
    for name in ("own", "mse"):
        state, module, _ = open_training(tmp_path / name)
        module(x, target)
        states.append(state)
    for key in "wb":
        own, mse = (state.parameters[key].grad for state in states)
        np.testing.assert_allclose(own, mse, rtol=1e-6)


@pytest.mark.parametrize("chosen", [["cost"], ["cost", "d"], ["cost", "y", "d"]])
def test_without_a_loss_its_inputs_are_what_is_returned(chosen, tmp_path):
    """As in the reference: no other output of the model."""
    make(linear(**ENDS_IN_LOSS), tmp_path, loss=None, loss_input_names=chosen)
    assert names(tmp_path / "eval_model.onnx")[1] == chosen


def test_an_output_that_is_returned_anyway_is_told(tmp_path):
    """The reference returns it twice, which moves the outputs after it."""
    with pytest.warns(UserWarning, match="names 'y', which is returned anyway: it is returned on"):
        make(linear(**ENDS_IN_LOSS), tmp_path, loss=None, additional_output_names=["y", "d"])
    assert names(tmp_path / "eval_model.onnx")[1] == ["cost", "y", "d"]


def test_additional_outputs(tmp_path):
    make(linear(), tmp_path, additional_output_names=["y", "h"])
    for name in ("training", "eval"):
        assert names(tmp_path / f"{name}_model.onnx")[1][:3] == ["loss", "y", "h"]
    state, module, _ = open_training(tmp_path)
    x, target = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    assert module.output_names() == ["loss", "y", "h"]
    w, b = (state.parameters[name].data for name in "wb")
    for mode in (True, False):
        loss, y, h = module.train(mode)(x, target)
        np.testing.assert_allclose(h, x @ w, rtol=1e-6)
        np.testing.assert_allclose(y, x @ w + b, rtol=1e-6)
        assert float(loss) == pytest.approx(np.mean((x @ w + b) ** 2), rel=1e-6)


TWO_HEADS = {
    "inputs": ", float[N, 2] wanted",
    "more": "other = Neg(y)",
    "outputs": "float[N, 2] y, float[N, 2] other",
}


def test_loss_inputs(tmp_path):
    x, target = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    losses = {}
    for chosen in ([], ["y"], ["other"], ["h"], ["other", "wanted"], ["y", "other"]):
        folder = make(
            linear(**TWO_HEADS), tmp_path / "-".join(["reads", *chosen]), requires_grad=["w"],
            frozen_params=["b"], loss_input_names=chosen,
        )  # fmt: skip
        state, module, _ = open_training(folder)
        adds = len(chosen) < 2
        assert module.input_names() == ["x", "wanted", "target"][: 2 + adds]
        losses[tuple(chosen)] = float(module(*(x, target, target)[: 2 + adds]))
    w, b = (state.parameters[name].data.astype(float) for name in "wb")
    h = x @ w
    y = h + b
    assert losses[()] == losses[("y",)] == pytest.approx(np.mean((y - 1) ** 2), rel=1e-5)
    assert losses[("other",)] == pytest.approx(np.mean((-y - 1) ** 2), rel=1e-5)
    assert losses[("h",)] == pytest.approx(np.mean((h - 1) ** 2), rel=1e-5)
    assert losses["other", "wanted"] == losses[("other",)]
    assert losses["y", "other"] == pytest.approx(np.mean((2 * y) ** 2), rel=1e-5)


def test_an_input_of_the_model_is_the_target(tmp_path):
    """As in the reference, and as blocks do; its sizes are then those of the prediction."""
    make(linear(inputs=", float[M, 2] target"), tmp_path, requires_grad=["w"], frozen_params=["b"])
    assert names(tmp_path / "training_model.onnx")[0][:3] == ["x", "target", "w"]
    state, module, _ = open_training(tmp_path)
    x, target = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    w, b = (state.parameters[name].data.astype(float) for name in "wb")
    assert float(module(x, target)) == pytest.approx(np.mean((x @ w + b - 1) ** 2), rel=1e-5)
    with refused("input-sizes-differ", "'target'"):
        module(x, target[:1])


def test_labels_drop_the_class_axis(tmp_path):
    """[N, C, h, w] has one label per pixel; the reference drops the last axis."""
    model = zoo.cnn(size=8)
    model.graph.output[0].CopyFrom(
        onnx.helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 64, 2, 2])
    )
    last = next(node for node in model.graph.node if node.op_type == "Flatten")
    renamed(model, last.input[0], "pixels")
    make(model, tmp_path, requires_grad=["conv1.weight"], loss=LossType.CrossEntropyLoss)
    (labels,) = (
        i for i in onnx.load(tmp_path / "training_model.onnx").graph.input if i.name == "labels"
    )
    dims = [d.dim_value or d.dim_param for d in labels.type.tensor_type.shape.dim]
    assert dims == ["batch", 2, 2]


def test_classes_on_another_axis_than_in_the_reference_are_told(tmp_path):
    """Where the last size is the only one that is known."""
    w = np.float32([[1, 2], [3, 4], [5, 6]])
    model = parsed("(float[N, A, 3] x) => (float[N, A, 2] y) { y = MatMul(x, w) }", w=w)
    x, labels = np.eye(3, dtype=np.float32)[None, :2], np.array([[1, 0]])
    losses = []
    for loss in (LossType.CrossEntropyLoss, CrossEntropyLoss()):
        with pytest.warns(UserWarning, match="takes the last axis .*-training takes axis 1"):
            generate_artifacts(model, ["w"], [], loss, None, tmp_path, "last_")
        losses.append(_loss(tmp_path / "last_", x, labels))
    generate_artifacts(model, ["w"], [], CrossEntropyLoss(layout="NC"), None, tmp_path, "first_")
    scores = torch.tensor(x @ w)
    last = torch.nn.functional.cross_entropy(scores.mT, torch.tensor(labels))
    first = torch.nn.functional.cross_entropy(scores, torch.tensor(labels))
    assert losses == pytest.approx([float(last)] * 2)
    assert _loss(tmp_path / "first_", x, labels) == pytest.approx(float(first))


def _loss(start: Path, *batch: np.ndarray) -> float:
    """The loss of artifacts whose files begin like that."""
    state = CheckpointState.load_checkpoint(f"{start}checkpoint")
    return float(Module(f"{start}training_model.onnx", state)(*batch))


def test_nominal_checkpoint(tmp_path):
    model = zoo.mlp((50, 40, 10))
    generate(model, tmp_path, nominal_checkpoint=True)
    files = contents(tmp_path)
    assert len(files["nominal_checkpoint"]) < len(files["checkpoint"]) / 10
    nominal = CheckpointState.load_checkpoint(tmp_path / "nominal_checkpoint")
    assert nominal.is_nominal
    assert all(name in nominal.parameters for name in trainable_names(model))


def test_statistics_are_state(tmp_path):
    """Whether they are frozen or not; the step writes them, nobody trains them."""
    model = zoo.mobilenet_v2(32, 4, 0.2, "train", stages=2)
    statistics = statistic_names(model)
    plain = generate(model, tmp_path / "a")
    frozen = generate(model, tmp_path / "b", frozen_params=statistics)
    assert contents(plain) == contents(frozen)
    outputs = names(plain / "training_model.onnx")[1]
    assert {f"{name}.update.out" for name in statistics} <= set(outputs)
    with refused("statistic-trained", "running statistic"):
        make(model, tmp_path / "c", requires_grad=[statistics[0]])


def test_the_enumerations_are_the_references():
    assert {kind.name: kind.value for kind in artifacts.LossType} == {
        "MSELoss": 1, "CrossEntropyLoss": 2, "BCEWithLogitsLoss": 3, "L1Loss": 4,
    }  # fmt: skip
    assert {kind.name: kind.value for kind in artifacts.OptimType} == {"AdamW": 1, "SGD": 2}
    assert set(LOSSES.values()) == set(artifacts.LossType)
