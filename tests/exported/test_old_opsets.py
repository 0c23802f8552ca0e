"""Models of opsets from 7 to 11 are converted, keep their names and train as in PyTorch."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.model.loading import load_model
from tests.exported import twins
from tests.exported.compare import assert_follows
from tests.exported.export import export
from tests.exported.subjects import SUBJECTS
from tests.sweep import split

NAMES = ["keyword-gru", "lstm", "mobilenet-v3", "bert", "recommender", "siamese", "translator",
         "window-transformer"]  # fmt: skip


@pytest.mark.parametrize("name", split(NAMES, lambda name: name == "siamese"))
@pytest.mark.parametrize("opset", [9, 11])
def test_an_old_export_trains_as_in_pytorch(name: str, opset: int, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    module, data, target = twins.make(subject, 0)
    model = export(
        module.eval(), data, tmp_path / "model.onnx", "torchscript",
        opset=opset, dynamic=subject.dynamic,
    )  # fmt: skip
    assert onnx.load(model).opset_import[0].version == opset
    assert_follows(subject, twins.folded(module), data, target, model, tmp_path)


def test_opset_7_keeps_its_names_and_is_said(tmp_path: Path) -> None:
    """Upsample and the broadcasts of opset 7; weights are inputs, as IR version 3 asks for."""
    model = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["" : 7]>
        net (float[N, 1, 4, 4] x, float[2, 1, 3, 3] w, float[2] b) => (float[N, 2, 4, 4] y)
        {
            c = Conv(x, w, b)
            u = Upsample<scales = [1.0, 1.0, 2.0, 2.0]>(c)
            y = Softmax<axis = 3>(u)
        }""")
    model.graph.output.add().CopyFrom(
        onnx.helper.make_tensor_value_info("u", onnx.TensorProto.FLOAT, ["N", 2, 4, 4])
    )
    for name, shape in {"w": (2, 1, 3, 3), "b": (2,)}.items():
        count = 18 if name == "w" else 2
        values = [0.1 * number for number in range(count)]
        tensor = onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, shape, values)
        model.graph.initializer.append(tensor)
    graph = load_model(model).graph
    assert graph.opset_imports[""] == 17
    assert [value.name for value in graph.inputs] == ["x"]
    assert {"c", "u", "y"} <= {value.name for node in graph for value in node.outputs}
    said: list[str] = []
    manifest = build_package(model, tmp_path / "package", loss="mse", remark=said.append)
    assert [parameter.name for parameter in manifest.parameters] == ["w", "b"]
    assert said[0] == "the model has opset 7, and is converted to 17"


def test_what_the_converter_refuses() -> None:
    model = onnx.parser.parse_model("""<ir_version: 4, opset_import: ["" : 7]>
        net (float[N, 2, 4, 4] x, float[2] s) => (float[N, 2, 4, 4] y)
        { y = BatchNormalization<spatial = 0>(x, s, s, s, s) }""")
    with pytest.raises(
        OdtpackError, match="opset 7, and converting it to 17 fails: Attr"
    ) as caught:
        load_model(model)
    assert caught.value.code == "opset-too-old"
