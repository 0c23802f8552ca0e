"""The shipped schema of checkpoints is that of the files: ``flatc`` reads and writes them by it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime.tools.ort_format_model  # noqa: F401 - makes the bindings importable
import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint

SCHEMA = Path(__file__).parents[2] / "docs" / "formats" / "checkpoint.fbs"


@pytest.fixture(scope="module")
def flatc() -> str:
    found = shutil.which("flatc")
    if found is None:
        reason = "flatc is not installed (Debian's package flatbuffers-compiler)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def data() -> CheckpointData:
    random = np.random.default_rng(0)
    weight = random.random((2, 3), np.float32)
    moments = {"fc.weight": (weight * 2, weight * 3)}
    return CheckpointData(
        trainable={"fc.weight": weight},
        frozen={"mean": np.arange(4, dtype=np.int8), "count": np.array(7, np.int64)},
        properties={"epoch": 3, "rate": 0.5, "note": "grüß"},
        optimizer=OptimizerState(step=9, learning_rate=0.25, moments=moments, kind="adamw"),
    )


def to_json(flatc: str, path: Path) -> dict[str, Any]:
    command = [flatc, "--json", "--strict-json", "--raw-binary", "-o", path.parent, SCHEMA, "--"]
    subprocess.run([*command, path], check=True, capture_output=True)
    content: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return content


def test_flatc_finds_the_fields_that_were_written(flatc: str, tmp_path: Path) -> None:
    written = data()
    write_checkpoint(tmp_path / "checkpoint", written)
    found = to_json(flatc, tmp_path / "checkpoint")
    assert found["version"] == 2
    module = found["module_state"]
    (weight,) = module["requires_grad_params"]
    assert (weight["name"], weight["dims"], weight["data_type"]) == ("fc.weight", [2, 3], "FLOAT")
    assert bytes(weight["raw_data"]) == written.trainable["fc.weight"].tobytes()
    assert "external_data_offset" not in weight
    frozen = {tensor["name"]: tensor for tensor in module["frozen_params"]}
    assert frozen["mean"]["data_type"] == "INT8"
    assert frozen["count"].get("dims", []) == []
    assert bytes(frozen["mean"]["raw_data"]) == bytes([0, 1, 2, 3])
    (group,) = found["optimizer_groups"]
    assert (group["group_name"], group["step"]) == ("group0", 9)
    assert group["initial_learning_rate"] == 0.25
    (state,) = group["optimizer_states"]
    assert [tensor["name"] for tensor in state["momentums"]] == ["momentum0", "momentum1"]
    bag = found["property_bag"]
    assert bag["ints"] == [{"name": "epoch", "value": 3}]
    assert bag["floats"] == [{"name": "rate", "value": 0.5}]
    assert {"name": "note", "value": "grüß"} in bag["strings"]


def test_what_flatc_builds_is_read(flatc: str, tmp_path: Path) -> None:
    written = data()
    write_checkpoint(tmp_path / "checkpoint", written)
    to_json(flatc, tmp_path / "checkpoint")
    found = read_checkpoint(build(flatc, tmp_path / "checkpoint.json"))
    assert found.checked
    assert found.properties == written.properties
    for name, array in {**written.trainable, **written.frozen}.items():
        np.testing.assert_array_equal({**found.trainable, **found.frozen}[name], array, strict=True)
    assert found.optimizer is not None
    assert written.optimizer is not None
    assert (found.optimizer.step, found.optimizer.learning_rate) == (9, 0.25)
    for one, other in zip(
        found.optimizer.moments["fc.weight"], written.optimizer.moments["fc.weight"], strict=True
    ):
        np.testing.assert_array_equal(one, other, strict=True)


def test_a_file_without_a_version_is_refused(flatc: str, tmp_path: Path) -> None:
    """The schema's default of the version is 0, so a writer must write it."""
    (tmp_path / "none.json").write_text('{"module_state": {}}')
    with pytest.raises(OdtpackError, match="version"):
        read_checkpoint(build(flatc, tmp_path / "none.json"))


def build(flatc: str, source: Path) -> Path:
    command = [flatc, "-b", "-o", source.parent / "built", SCHEMA, source]
    subprocess.run(command, check=True, capture_output=True)
    return source.parent / "built" / f"{source.stem}.bin"


_SLOT = re.compile(r"\.Prepend(\w+?)Slot\((\d+), .*, (\S+)\)")


@pytest.mark.parametrize(
    "table",
    [
        "Checkpoint", "ModuleState", "OptimizerGroup", "ParameterOptimizerState", "PropertyBag",
        "IntProperty", "FloatProperty", "StringProperty", "Tensor",
    ],
)  # fmt: skip
def test_fields_are_those_of_the_bindings_of_onnx_runtime(table: str) -> None:
    """Number, kind and default of each field, as the bindings in ONNX Runtime's wheel have them."""
    module = importlib.import_module(f"ort_flatbuffers_py.fbs.{table}")
    text = Path(str(module.__file__)).read_text()
    bound = [(int(number), kind, float(default)) for kind, number, default in _SLOT.findall(text)]
    match = re.search(rf"^table {table} \{{\n(.*?)^\}}", SCHEMA.read_text(), re.M | re.S)
    assert match is not None
    fields = re.findall(r"^  (\w+):(\S+?)(?: = (\S+))?;", match[1], re.M)
    if table == "Checkpoint":
        assert fields.pop() == ("digest", "string", "")  # after those of ONNX Runtime
    kinds = {"int32": "Int32", "TensorDataType": "Int32", "int64": "Int64", "float": "Float32",
             "bool": "Bool"}  # fmt: skip
    ours = [
        (number, kinds.get(kind, "UOffsetTRelative"), float(default or 0))
        for number, (_, kind, default) in enumerate(fields)
    ]
    assert ours == bound
    adders = re.findall(rf"^def {table}Add(\w+)\(", text, re.M)
    camel = ["".join(part.capitalize() for part in name.split("_")) for name, _, _ in fields]
    assert camel == adders
