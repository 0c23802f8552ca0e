"""Parameters are found by the names that they had before PyTorch's exporters renamed them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from odtpack.cli import main
from odtpack.errors import OdtpackError
from odtpack.model.exporters import KIND, made_up, module_names
from odtpack.model.loading import load_model
from odtpack.package.parameters import candidates, resolve

RANDOM = np.random.default_rng(0)
LINEAR = '["/head/MatMul"] h = MatMul(x, "val_1") y = Add("head.bias", h)'
SCOPES = "pkg.torch.onnx.name_scopes"


def _model(body: str, scopes: str | None = None, **values: tuple[int, ...]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> '
        f"g (float[4, 3] x) => (float[A, B] y) {{ {body} }}"
    )
    for name, shape in values.items():
        array = RANDOM.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    if scopes is not None:
        model.graph.node[0].metadata_props.add(key=SCOPES, value=scopes)
    return model


def _names(*arguments: Any, **values: tuple[int, ...]) -> dict[str, str]:
    return module_names(load_model(_model(*arguments, **values)).graph)


@pytest.mark.parametrize(
    ("bias", "weight"),
    [("head.bias", "head.weight"), ("mha.in_proj_bias", "mha.in_proj_weight")],
)
def test_beside_a_bias(bias: str, weight: str) -> None:
    body = LINEAR.replace("head.bias", bias)
    assert _names(body, **{"val_1": (3, 2), bias: (2,)}) == {"val_1": weight}


@pytest.mark.parametrize(
    ("node", "path"),
    [
        ("/head/MatMul", "head"),
        ("/layers.0/query/MatMul", "layers.0.query"),
        ("/blocks/blocks.0/mlp/mlp.2/MatMul_1", "blocks.0.mlp.2"),
    ],
)
def test_within_a_module(node: str, path: str) -> None:
    assert _names(f'["{node}"] y = MatMul(x, "onnx::MatMul_5")', **{"onnx::MatMul_5": (3, 2)}) == {
        "onnx::MatMul_5": f"{path}.weight"
    }


def _noted(model: onnx.ModelProto, **kinds: str) -> onnx.ModelProto:
    """The model with torch.export's notes of what initializers were."""
    for name, kind in kinds.items():
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        info.metadata_props.add(key=KIND, value=kind)
        model.graph.value_info.append(info)
    return model


def test_made_up_names() -> None:
    body = 'a = Add(x, val_1) b = Add(a, "onnx::Add_2") c = Add(b, scale) d = Add(c, zeros_like) '
    names = ("val_1", "onnx::Add_2", "scale", "zeros_like", "norm.bias")
    model = _model(body + 'y = Add(d, "norm.bias")', **dict.fromkeys(names, (3,)))
    assert made_up(load_model(model).graph) == {"val_1", "onnx::Add_2"}
    noted = load_model(_noted(model, scale="PARAMETER"))
    # What torch.export has no note of was computed; a dot is of a name in the module.
    assert made_up(noted.graph) == {"val_1", "onnx::Add_2", "zeros_like"}


def test_fills_that_the_exporter_computed() -> None:
    model = _model("a = Mul(x, scale) y = Add(a, zeros_like)", scale=(3,))
    zeros = numpy_helper.from_array(np.zeros((4, 3), np.float32), "zeros_like")
    model.graph.initializer.append(zeros)
    assert candidates(load_model(model)) == ["scale", "zeros_like"]
    assert candidates(load_model(_noted(model, scale="PARAMETER"))) == ["scale"]


def test_a_transpose_that_was_folded_under_the_name_of_its_operation() -> None:
    model = _model("h = MatMul(x, table) y = MatMul(h, permute)", table=(3, 5))
    table = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer.append(numpy_helper.from_array(table.T.copy(), "permute"))
    assert candidates(load_model(model)) == ["table", "permute"]
    assert candidates(load_model(_noted(model, table="PARAMETER"))) == ["table"]


def test_what_torch_export_notes() -> None:
    scopes = "['', 'blocks.0.attention', 'linear']"
    assert _names("y = MatMul(x, val_5)", scopes, val_5=(3, 2)) == {
        "val_5": "blocks.0.attention.weight"
    }


@pytest.mark.parametrize(
    "scopes", ["", "[", "['a'", "{'a': 1}", "['', 3, 'x']", "['x']", "[]", "a()", "[" * 5000]
)
def test_notes_that_make_no_sense(scopes: str) -> None:
    assert _names("y = MatMul(x, val_5)", scopes, val_5=(3, 2)) == {}


@pytest.mark.parametrize(
    "body",
    [
        "y = MatMul(x, val_1)",  # nothing says where it comes from
        '["/MatMul"] y = MatMul(x, val_1)',  # the root is not a module
        '["/head/Add"] y = Add(x, val_1)',  # no layer
        '["/a/MatMul"] h = MatMul(x, val_1) ["/b/MatMul"] y = MatMul(h, val_1)',  # two modules
        '["/a/MatMul"] h = MatMul(x, val_1) ["/a/MatMul_1"] y = MatMul(h, val_2)',  # one name
    ],
)
def test_what_stays_without_a_name(body: str) -> None:
    shapes = {"val_1": (3, 3)} | ({"val_2": (3, 3)} if "val_2" in body else {})
    assert _names(body, **shapes) == {}


def test_a_name_that_the_model_has_already() -> None:
    body = '["/a/MatMul"] h = MatMul(x, val_1) y = MatMul(h, "a.weight")'
    assert _names(body, **{"val_1": (3, 3), "a.weight": (3, 3)}) == {}


def test_patterns_find_both_names() -> None:
    model = load_model(
        _model(
            LINEAR + ' ["/body/MatMul"] k = MatMul(x, val_2) z = Relu(k)',
            **{"val_1": (3, 2), "head.bias": (2,), "val_2": (3, 3)},
        )
    )
    assert resolve(model, ["head.*"], [])[0] == ("val_1", "head.bias")
    assert resolve(model, ["val_1"], [])[0] == ("val_1",)
    assert resolve(model, [], ["head.weight"]) == (("head.bias",), ("val_1",))
    with pytest.raises(OdtpackError, match="matches no parameter") as raised:
        resolve(model, ["tail.*"], [])
    assert "'head.weight'" in str(raised.value.hint)


def test_inspect_shows_both_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(_model(LINEAR, **{"val_1": (3, 2), "head.bias": (2,)}), path)
    assert main(["inspect", str(path), "--json"]) == 0
    printed = capfd.readouterr()
    shown = {p["name"]: p["module_name"] for p in json.loads(printed.out)["parameters"]}
    assert shown == {"val_1": "head.weight", "head.bias": "head.bias"}
    assert "val_1 (head.weight)" in printed.err
