"""``odtpack ops``: the support table, and what stands in a model's way."""

from pathlib import Path

import numpy as np
import onnx

from odtpack.package.coverage import coverage
from tests import zoo
from tests.autodiff.test_rules import CASES
from tests.model_text import parsed


def write(folder: Path, body: str, *known: onnx.ValueInfoProto, **weights: tuple[int, ...]) -> Path:
    """A model with operators of the domain ``odd``, and what is known of its values."""
    ones = {name: np.ones(shape, np.float32) for name, shape in weights.items()}
    text = f'(float["b", 4] x) => (float["b", 4] y) {body}'
    model = parsed(text, domains=["odd"], **ones)
    model.graph.value_info.extend(known)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_coverage_names_opsets_inputs_and_way(run):
    shown = run("ops", "coverage", "Conv", "Floor", "Mish", "StringSplit", "--json", code=0)
    rows = {row["op_type"]: row for row in shown.json()["operators"]}
    assert rows["Conv"] == {
        "domain": "ai.onnx", "op_type": "Conv", "how": "rule", "since": [1], "opsets": [11, 22],
        "inputs": ["X", "W", "B"],
    }  # fmt: skip
    assert [rows[name]["how"] for name in ("Floor", "Mish")] == ["no gradient", "expansion"]
    assert rows["StringSplit"]["inputs"] == []
    for word in ("Conv", "11, 22", "X, W, B", "expansion"):
        assert word in shown.err


def test_coverage_by_way(run):
    rows = run("ops", "coverage", "--how", "rule", "--json", code=0).json()["operators"]
    assert {row["how"] for row in rows} == {"rule"}
    assert len(rows) == sum(row.how == "rule" for row in coverage())


def test_an_unknown_operator_suggests_the_near_one(run):
    assert "did you mean Conv" in run("ops", "coverage", "Konv", code=2).err


def test_the_trainable_inputs_are_those_of_the_gradient_sweep():
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


def test_a_model_without_obstacles(run, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(zoo.mlp(), path)
    assert "4 parameters: a gradient reaches each" in run("ops", "check", path, code=0).out


def test_every_obstacle_is_named_with_what_it_blocks(run, tmp_path):
    body = """{
        h = MatMul(x, w1)
        [first] i = odd.First(h)
        b = MatMul(i, w2)
        [second] r = odd.Second(b)
        y = MatMul(r, w3)
    }"""
    # Of i nothing is known, which is the fault of its operator and no obstacle of its own.
    known = onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["b", 4])
    path = write(tmp_path, body, known, w1=(4, 4), w2=(4, 4), w3=(4, 4))
    shown = run("ops", "check", path, "--json", code=1)
    found = [(o["node"], o["op_type"], o["parameters"]) for o in shown.json()["obstacles"]]
    assert found == [("first", "odd.First", ["w1"]), ("second", "odd.Second", ["w1", "w2"])]
    assert "2 nodes without a gradient" in shown.err
    run("ops", "check", path, "--train", "w3", code=0)
    run("build", path, "--out", tmp_path / "p", "--loss", "mse", code=2)


def test_check_names_the_model_and_the_output_that_do_not_exist(run, tmp_path):
    path = tmp_path / "model.onnx"
    run("ops", "check", path, code=2)
    onnx.save(zoo.mlp(), path)
    said = run("ops", "check", path, "--loss-input", "logits", code=2).err
    assert "its outputs are output" in said


def test_an_obstacle_inside_of_a_body_is_named(run, tmp_path):
    body = """{
        [steps] h = Scan <num_scan_inputs = 1, body = turn (float[4] part) => (float[4] r) {
            m = MatMul(part, w1) [inner] o = odd.First(m) r = Tanh(o)
        }> (x)
        y = MatMul(h, w2)
    }"""
    path = write(tmp_path, body, w1=(4, 4), w2=(4, 4))
    (found,) = run("ops", "check", path, "--json", code=1).json()["obstacles"]
    assert (found["node"], found["op_type"], found["parameters"]) == ("steps", "Scan", ["w1"])
    assert found["why"].startswith("inside of it operator First (domain odd")


def test_check_and_build_agree_on_what_the_loss_reaches(run, tmp_path):
    path = tmp_path / "model.onnx"
    text = """(float[n, 2] x) => (float[n, 2] y, float[n, 2] z)
        <float[2, 2] w = {1, 2, 3, 4}, float[2, 2] v = {1, 2, 3, 4}>
        { y = MatMul(x, w) z = MatMul(x, v) }"""
    onnx.save(parsed(text), path)
    for read, other in (("y", "v"), ("z", "w")):
        build = "build", "--loss", "mse", "--out", tmp_path / read
        for words in (("ops", "check"), build):
            shown = run(*words, path, "--loss-input", read, code=0)
            said = " ".join(f"{shown.out}{shown.err}".split())
            assert f"the loss does not depend on {other}: not trained" in said
