"""``odtpack ops``: the support table, and what stands in a model's way."""

import json
from pathlib import Path

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

from odtpack.cli import main
from odtpack.package.coverage import coverage
from tests import zoo
from tests.autodiff.test_rules import CASES


def write(tmp_path: Path, body: str, **weights: tuple[int, ...]) -> Path:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float["b", 4] x) => (float["b", 4] y) {body}'
    )
    for name, shape in weights.items():
        array = np.ones(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    return path


def test_coverage_names_opsets_inputs_and_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "coverage", "Conv", "Floor", "Mish", "StringSplit", "--json"]) == 0
    shown = capsys.readouterr()
    rows = {row["op_type"]: row for row in json.loads(shown.out)["operators"]}
    assert rows["Conv"] == {
        "domain": "ai.onnx", "op_type": "Conv", "how": "rule", "since": [1], "opsets": [11, 22],
        "inputs": ["X", "W", "B"],
    }  # fmt: skip
    assert [rows[name]["how"] for name in ("Floor", "Mish", "StringSplit")] == [
        "no gradient", "expansion", rows["StringSplit"]["how"],
    ]  # fmt: skip
    assert rows["StringSplit"]["inputs"] == []
    for word in ("Conv", "11, 22", "X, W, B", "expansion"):
        assert word in shown.err


def test_coverage_by_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "coverage", "--how", "rule", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["operators"]
    assert {row["how"] for row in rows} == {"rule"}
    assert len(rows) == sum(row.how == "rule" for row in coverage())


def test_an_unknown_operator_suggests_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "coverage", "Konv"]) == 2
    assert "did you mean Conv" in capsys.readouterr().err


def test_the_trainable_inputs_are_those_of_the_gradient_sweep() -> None:
    """What the table promises is what is held to PyTorch and finite differences."""
    swept: dict[str, set[str]] = {}
    for case in CASES:
        if not case.domain:
            schema = onnx.defs.get_schema(case.op, case.opset, "")
            last = len(schema.inputs) - 1
            places = [list(case.inputs).index(name) for name in case.differentiated]
            names = {schema.inputs[min(place, last)].name for place in places}
            swept.setdefault(case.op, set()).update(names)
    promised = {row.op_type: row for row in coverage() if row.domain == "ai.onnx"}
    newest = {name: row.opsets[-1] for name, row in promised.items() if row.opsets}
    latest = {
        name: {parameter.name for parameter in onnx.defs.get_schema(name, opset, "").inputs}
        for name, opset in newest.items()
    }
    different = {
        name: (sorted(found), promised[name].inputs)
        for name, found in swept.items()
        if name in latest and found & latest[name] != set(promised[name].inputs)
    }
    assert not different


def test_a_model_without_obstacles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(zoo.mlp(), path)
    assert main(["ops", "check", str(path)]) == 0
    assert "4 parameters: a gradient reaches each" in capsys.readouterr().out


def test_every_obstacle_is_named_with_what_it_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """{
        h = MatMul(x, w1)
        [first] i = odd.First(h)
        b = MatMul(i, w2)
        [second] r = odd.Second(b)
        y = MatMul(r, w3)
    }"""
    path = write(tmp_path, body, w1=(4, 4), w2=(4, 4), w3=(4, 4))
    model = onnx.load(path)
    model.opset_import.add(domain="odd", version=1)
    # Of i nothing is known, which is the fault of its operator and no obstacle of its own.
    shape = onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["b", 4])
    model.graph.value_info.append(shape)
    onnx.save(model, path)
    assert main(["ops", "check", str(path), "--json"]) == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)["obstacles"]
    assert [(item["node"], item["parameters"]) for item in found] == [
        ("first", ["w1"]),
        ("second", ["w1", "w2"]),
    ]
    assert [item["op_type"] for item in found] == ["odd.First", "odd.Second"]
    assert "2 nodes without a gradient" in shown.err
    assert main(["ops", "check", str(path), "--train", "w3"]) == 0
    assert main(["build", str(path), "--out", str(tmp_path / "p"), "--loss", "mse"]) == 2


def test_check_names_the_model_and_the_output_that_do_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    assert main(["ops", "check", str(path)]) == 2
    onnx.save(zoo.mlp(), path)
    assert main(["ops", "check", str(path), "--loss-input", "logits"]) == 2
    assert "its outputs are output" in capsys.readouterr().err


def test_an_obstacle_inside_of_a_body_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """{
        [steps] h = Scan <num_scan_inputs = 1, body = turn (float[4] part) => (float[4] r) {
            m = MatMul(part, w1) [inner] o = odd.First(m) r = Tanh(o)
        }> (x)
        y = MatMul(h, w2)
    }"""
    path = write(tmp_path, body, w1=(4, 4), w2=(4, 4))
    model = onnx.load(path)
    model.opset_import.add(domain="odd", version=1)
    onnx.save(model, path)
    assert main(["ops", "check", str(path), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["obstacles"]
    assert (found["node"], found["op_type"], found["parameters"]) == ("steps", "Scan", ["w1"])
    assert found["why"].startswith("inside of it operator First (domain odd")


def test_check_and_build_agree_on_what_the_loss_reaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[n, 2] x) => (float[n, 2] y, float[n, 2] z)
        <float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 2, 3, 4}>
        { y = MatMul(x, w) z = MatMul(x, v) }"""
    )
    onnx.save(model, path)
    for read, other in (("y", "v"), ("z", "w")):
        build = ["build", "--loss", "mse", "--out", str(tmp_path / read)]
        for words in (["ops", "check"], build):
            assert main([*words, str(path), "--loss-input", read]) == 0
            said = " ".join("".join(capsys.readouterr()).split())
            assert f"the loss does not depend on {other}: not trained" in said
