"""Bad input to ``generate_artifacts`` gets one clear error, and nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto, numpy_helper

from odtpack.artifacts import LossType
from odtpack.errors import OdtpackError, UnknownNameError
from tests.model_text import parsed
from tests.refused import refused
from tests.training.forward import contents, linear, make, renamed


def _damaged(**fields: Any) -> onnx.ModelProto:
    model = linear()
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(TensorProto(**({"name": "w", "dims": [3, 2], "data_type": 1} | fields)))
    return model


def _with_constant(**fields: Any) -> onnx.ModelProto:
    model = linear(
        more="c = Constant <value = float[2] {1, 2}> () z = Mul(y, c)", outputs="float[N, 2] z"
    )
    model.graph.node[2].attribute[0].t.CopyFrom(
        TensorProto(**({"dims": [2], "data_type": 1} | fields))
    )
    return model


def _sparse() -> onnx.ModelProto:
    model = linear()
    del model.graph.initializer[0]
    model.graph.sparse_initializer.add().CopyFrom(
        onnx.helper.make_sparse_tensor(numpy_helper.from_array(np.ones(1, np.float32), "w"),
                                       numpy_helper.from_array(np.zeros(1, np.int64), "w_indices"),
                                       [3, 2]),
    )  # fmt: skip
    return model


def _custom() -> onnx.ModelProto:
    model = linear(more="z = Neg(y)", outputs="float[N, 2] z")
    model.graph.node[2].domain = "my"
    model.opset_import.add(domain="my", version=1)
    return model


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], str, str]] = {
    "model is a number": (lambda: 3, {}, "bad-model-type", "int"),
    "no such file": (lambda: "nowhere.onnx", {}, "model-not-found", "nowhere.onnx"),
    "unknown trained": (linear, {"requires_grad": ["w", "zz"]}, "unknown-parameter", "'zz'"),
    "unknown frozen": (linear, {"frozen_params": ["zz"]}, "unknown-parameter", "'zz'"),
    "trained and frozen": (linear, {"frozen_params": ["w"]}, "trained-and-frozen", "'w'"),
    "trained twice": (linear, {"requires_grad": ["w", "w"]}, "named-twice", "'w'"),
    "one name": (linear, {"requires_grad": "w"}, "bad-requires-grad", "requires_grad"),
    "no names": (linear, {"frozen_params": [1]}, "bad-frozen-params", "frozen_params"),
    "an unused parameter": (lambda: linear(unused=np.ones(2, np.float32)),
     {"requires_grad": ["w", "unused"]}, "not-reached", "'unused'"),
    "several that are not reached": (
        lambda: linear(unused=np.ones(2, np.float32), spare=np.ones(2, np.float32)),
        {"requires_grad": ["unused", "w", "spare"]}, "not-reached", "'unused', 'spare'"),
    "several unknown": (linear, {"requires_grad": ["zz", "w"], "frozen_params": ["yy"]},
     "unknown-parameter", "'zz', 'yy'"),
    "a whole number": (
        lambda: linear(more="c = Cast <to = 1> (k) z = Mul(y, c)", outputs="float[N, 2] z",
                       k=np.int64([2])),
        {"requires_grad": ["k"]}, "dtype-not-trainable", "'k'"),
    "loss is a name": (linear, {"loss": "mse"}, "bad-loss", "'mse'"),
    "loss is a number": (linear, {"loss": 1}, "bad-loss", "MSELoss"),
    "optimizer is a loss": (linear, {"optimizer": LossType.MSELoss}, "bad-optimizer", "AdamW"),
    "nothing to optimize": (linear, {"requires_grad": None}, "nothing-to-train", "requires_grad"),
    "loss is not a scalar": (linear, {"loss": None}, "loss-not-scalar", "'y'"),
    "loss of unknown name": (linear, {"loss_input_names": ["zz"]}, "unknown-value", "'zz'"),
    "loss reads three": (linear, {"loss_input_names": ["y", "h", "x"]}, "too-many-loss-inputs",
     "3 values"),
    "loss elsewhere": (linear, {"loss_input_names": ["x"]}, "not-reached", "'w'"),
    "classes without axis": (
        lambda: linear(more="z = ReduceSum <keepdims = 0> (y)", outputs="float z"),
        {"loss": LossType.CrossEntropyLoss}, "prediction-rank", "'z'"),
    "unknown output": (linear, {"additional_output_names": ["zz"]}, "unknown-value", "'zz'"),
    "one output": (linear, {"additional_output_names": "y"}, "bad-additional-output-names",
     "additional_output_names"),
    "output twice": (linear, {"additional_output_names": ["y", "y"]}, "named-twice", "'y'"),
    "loss as output": (lambda: linear(more="l = ReduceMean <keepdims = 0> (y)", outputs="float l"),
     {"loss": None, "additional_output_names": ["l"]}, "named-twice", "'l'"),
    "prefix is a path": (linear, {"prefix": "a/b"}, "bad-prefix", "'a/b'"),
    "no library": (linear, {"custom_op_library": "ops.so"}, "library-not-found", "'ops.so'"),
    "old opset": (lambda: linear(opset=6), {}, "opset-too-old", "opset 6"),
    "new opset": (lambda: linear(opset=29), {}, "opset-too-new", "opset 29"),
    "target is an input of a size": (lambda: linear(inputs=", float[1, 2] target"), {},
     "reserved-name", "'target'"),
    "target is an input of a type": (lambda: linear(inputs=", double[N, 2] target"), {},
     "reserved-name", "'target'"),
    "target is read": (lambda: linear(inputs=", float[N, 2] target", outputs="float[N, 2] z",
     more="z = Mul(y, target)"), {}, "reserved-name", "'target'"),
    "target is a parameter": (lambda: renamed(linear(), "b", "target"), {"requires_grad": ["w"]},
     "reserved-name", "'target'"),
    "target is a value": (lambda: renamed(linear(), "h", "target"), {}, "reserved-name",
     "'target'"),
    "labels is the output": (lambda: renamed(linear(), "y", "labels"),
     {"loss": LossType.CrossEntropyLoss}, "reserved-name", "'labels'"),
    "a training model": (lambda: renamed(linear(), "h", "lazy_reset_grad"), {}, "reserved-name",
     "lazy_reset_grad"),
    "a buffer": (lambda: renamed(linear(), "h", "w_grad.accumulation.buffer"), {}, "reserved-name",
     "w_grad.accumulation.buffer"),
    "no gradient": (_custom, {}, "no-gradient", "operator Neg (domain my"),
    "bytes are missing": (lambda: _damaged(raw_data=b"1" * 23), {}, "invalid-model", "23 bytes"),
    "bytes to spare": (lambda: _damaged(raw_data=b"1" * 25), {}, "initializer-size", "'w'"),
    "values are missing": (lambda: _damaged(float_data=[1] * 5), {}, "invalid-model", "w"),
    "values to spare": (lambda: _damaged(float_data=[1] * 7), {}, "initializer-size", "'w'"),
    "no values": (_damaged, {}, "invalid-model", "w"),
    "negative size": (lambda: _damaged(dims=[-3, 2], raw_data=b"1" * 24), {}, "invalid-model",
     "Negative"),
    "enormous": (lambda: _damaged(dims=[1 << 40], raw_data=b"1" * 24), {}, "invalid-model", "w"),
    "unknown type": (lambda: _damaged(data_type=99, raw_data=b"1" * 24), {},
     "unknown-element-type", "99"),
    "constant too short": (lambda: _with_constant(raw_data=b"123"), {}, "invalid-model", "3 bytes"),
    "constant too long": (lambda: _with_constant(raw_data=b"1" * 9), {}, "initializer-size", "9"),
    "sparse": (_sparse, {}, "sparse-initializer", "'w'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path, monkeypatch):
    build, arguments, code, culprit = BAD[case]
    monkeypatch.chdir(tmp_path)
    with refused(code) as caught:
        make(build(), tmp_path, **arguments)
    assert culprit in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    if code.startswith("unknown-") and code != "unknown-element-type":
        assert isinstance(caught.value, UnknownNameError)
        assert isinstance(caught.value, LookupError)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x00" * 100, b"\xff" * 100, linear().SerializeToString()[:-40]]
)
def test_not_a_model(data, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(OdtpackError, match=r"model\.onnx") as caught:
        make(path, tmp_path / "out")
    assert caught.value.code in ("not-onnx", "invalid-model")
    assert not (tmp_path / "out").exists()


def _external(location: str, **entries: object) -> onnx.ModelProto:
    model = linear()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return model


def _external_constant(location: str, **entries: object) -> onnx.ModelProto:
    model = _with_constant()
    tensor = model.graph.node[2].attribute[0].t
    tensor.CopyFrom(_external(location, **entries).graph.initializer[0])
    tensor.dims[:] = [6]
    return model


ESCAPES = ["../secret", "{base}/secret", "link", "folder-link/secret", "sub/../../secret"]
ESCAPES += ["", "a\0b"]


@pytest.mark.parametrize("build", [_external, _external_constant])
@pytest.mark.parametrize("location", ESCAPES)
def test_external_data_stays_in_the_folder(location, build, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(24))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folder-link").symlink_to(tmp_path)
    path = folder / "model.onnx"
    path.write_bytes(build(location.format(base=tmp_path)).SerializeToString())
    with refused("external-data-escapes", "outside the model's folder"):
        make(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("location", "entries", "code"), [
    ("missing", {}, "external-data-missing"),
    (".", {}, "external-data-missing"),
    ("data", {"offset": 4, "length": 24}, "external-data-short"),
    ("data", {"offset": -4, "length": 24}, "external-data-short"),
    ("data", {"length": 1 << 62}, "external-data-short"),
    ("data", {"offset": "x"}, "external-data-short"),
    ("data", {"length": 20}, "initializer-size"),
])  # fmt: skip
def test_external_data_is_there(location, entries, code, tmp_path):
    (tmp_path / "data").write_bytes(bytes(24))
    path = tmp_path / "model.onnx"
    path.write_bytes(_external(location, **entries).SerializeToString())
    with refused(code, r"model\.onnx"):
        make(path, tmp_path / "out")


def test_external_data_of_a_model_in_memory(tmp_path, monkeypatch):
    """It must not be read from wherever the process happens to stand."""
    monkeypatch.chdir(tmp_path)
    Path("data").write_bytes(bytes(24))
    model = _external("data")
    for form in (model, ir.from_proto(model)):
        with refused("external-data-without-folder", "in memory"):
            make(form, tmp_path / "out")


def test_external_data_of_a_lazy_model_is_checked(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(24))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(_external("../secret").SerializeToString())
    with pytest.raises(OdtpackError, match="in memory"):
        make(ir.load(folder / "model.onnx"), tmp_path / "out")


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("here")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused("package-not-written", "cannot be written"):
            make(linear(), folder)
    assert (tmp_path / "file").read_text() == "here"


@pytest.mark.parametrize(
    ("inputs", "first", "mean"),
    [("", "copy = Identity(mean)", "copy"), (", float[3] given", "", "given")],
)
def test_statistics_must_be_stored(inputs, first, mean, tmp_path):
    layer = f"BatchNormalization <training_mode = 1> (x, scale, bias, {mean}, var)"
    model = parsed(
        f"(float[N, 3] x{inputs}) => (float[N, 3] y) {{ {first} y, m2, v2 = {layer} }}",
        **dict.fromkeys(("scale", "bias", "mean", "var"), np.ones(3, np.float32)),
    )
    with refused("statistic-not-stored", f"'{mean}'"):
        make(model, tmp_path, requires_grad=["scale", "bias"])
