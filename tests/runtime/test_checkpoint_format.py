"""Round trips of the checkpoint file, and its bytes as other readers see them."""

import errno
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime.tools.ort_format_model  # noqa: F401 - makes the bindings importable
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import (
    DTYPES,
    CheckpointData,
    OptimizerState,
    parse_checkpoint,
    read_checkpoint,
)
from odtpack_runtime.checkpoint.parameters import ALIGNMENT, Layout, address, allocate, view
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.programs import ran
from tests.refused import refused
from tests.runtime.checkpoint_samples import Foreign, assert_same, sample


def test_everything_comes_back(tmp_path):
    data = sample()
    write_checkpoint(tmp_path / "c", data)
    assert_same(data, read_checkpoint(tmp_path / "c"))
    assert_same(data, parse_checkpoint((tmp_path / "c").read_bytes()))


@pytest.mark.parametrize("external", [False, True])
def test_the_disk_is_asked_for_all_elements_once(external, tmp_path, monkeypatch):
    data = CheckpointData({f"p{i}": np.full(1000 * i, i, np.float32) for i in range(6)}, {})
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 64 if external else 2**30)
    write_checkpoint(tmp_path / "plain", data)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, advice: asked.append((at, size)))
    monkeypatch.setattr(writer, "_AT_ONCE", 3000)
    write_checkpoint(tmp_path / "pieces", data)
    assert len(asked) > 10
    assert all(a + size == b for (a, size), (b, _) in pairwise(asked))
    assert sum(size for _, size in asked) >= sum(array.nbytes for array in data.trainable.values())
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "plain").read_bytes()
    assert_same(data, read_checkpoint(tmp_path / "pieces"))


def test_a_disk_that_takes_no_hints(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fadvise", mock.Mock(side_effect=OSError(errno.EINVAL, "no")))
    write_checkpoint(tmp_path / "c", sample())
    assert_same(sample(), read_checkpoint(tmp_path / "c"))
    monkeypatch.delattr(os, "posix_fadvise")  # as on macOS and Windows
    write_checkpoint(tmp_path / "d", sample())
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()


def test_equal_data_give_equal_bytes(tmp_path):
    for name in "ab":
        write_checkpoint(tmp_path / name, sample())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


names = st.text(min_size=1, max_size=12).filter(lambda text: text.isprintable())
arrays = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
float_arrays = hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
properties = st.dictionaries(
    names,
    st.integers(-(2**63), 2**63 - 1) | st.floats(width=32, allow_nan=False) | st.text(max_size=20),
    max_size=4,
)


@given(
    st.dictionaries(names, float_arrays, max_size=4), st.dictionaries(names, arrays, max_size=4),
    properties, st.integers(0, 2**63 - 1) | st.none(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_round_trip(tmp_path_factory, trainable, frozen, properties, step):
    frozen = {name: array for name, array in frozen.items() if name not in trainable}
    moments = {name: [array.copy(), array.copy()] for name, array in trainable.items()}
    optimizer = None if step is None else OptimizerState(step, 0.5, moments)
    data = CheckpointData(trainable, frozen, False, optimizer, properties)
    path = tmp_path_factory.mktemp("c") / "checkpoint"
    write_checkpoint(path, data)
    back = read_checkpoint(path)
    data.properties = dict(properties)
    back.properties = {name: back.properties[name] for name in properties}
    assert_same(data, back)


def test_arrays_need_not_be_contiguous(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    write_checkpoint(tmp_path / "c", CheckpointData({"w": array}, {}))
    assert np.array_equal(read_checkpoint(tmp_path / "c").trainable["w"], array)


def test_nominal_state_keeps_names_and_types_only(tmp_path):
    data = CheckpointData(
        {"w": np.ones((2, 2), np.float32)}, {"t": np.ones(3, np.int64)}, True, None, {"round": 7}
    )
    write_checkpoint(tmp_path / "c", data)
    back = read_checkpoint(tmp_path / "c")
    assert (back.nominal, back.properties) == (True, {"round": 7})
    assert (back.trainable["w"].shape, back.trainable["w"].dtype) == ((0,), np.float32)
    assert back.frozen["t"].dtype == np.int64


def test_tensor_data_are_aligned_to_16_bytes(tmp_path):
    data = sample()
    write_checkpoint(tmp_path / "c", data)
    content = (tmp_path / "c").read_bytes()
    for array in (data.trainable["layer.W"], data.frozen["table"]):
        assert content.index(array.tobytes()) % 16 == 0


@pytest.mark.parametrize("dtype", [np.complex64, ">f4", "U3"])
def test_types_that_the_format_lacks_are_refused(tmp_path, dtype):
    with refused("checkpoint-dtype", "'w'"):
        write_checkpoint(tmp_path / "c", CheckpointData({"w": np.zeros(2, dtype)}, {}))
    assert list(tmp_path.iterdir()) == []


# An independent reader: the bindings that flatc generated for ONNX Runtime. They run in a process
# of their own, because they have to be reached through sys.path.
BINDINGS = """
import json, sys
import onnxruntime, os
sys.path.append(os.path.join(os.path.dirname(onnxruntime.__file__), "tools/ort_format_model"))
from ort_flatbuffers_py.fbs.Checkpoint import Checkpoint

def tensor(t):
    raw = "" if t.RawDataIsNone() else bytes(t.RawData(j) for j in range(t.RawDataLength())).hex()
    dims = [t.Dims(j) for j in range(t.DimsLength())]
    return [t.Name().decode(), dims, t.DataType(), raw, t.ExternalDataOffset()]

data = bytearray(open(sys.argv[1], "rb").read())
assert Checkpoint.CheckpointBufferHasIdentifier(data, 0)
root = Checkpoint.GetRootAs(data)
module, bag, group = root.ModuleState(), root.PropertyBag(), root.OptimizerGroups(0)
states = [group.OptimizerStates(j) for j in range(group.OptimizerStatesLength())]
print(json.dumps({
    "version": root.Version(),
    "nominal": module.IsNominalState(),
    "external": module.HasExternalData(),
    "trainable": [tensor(module.RequiresGradParams(j))
                  for j in range(module.RequiresGradParamsLength())],
    "frozen": [tensor(module.FrozenParams(j)) for j in range(module.FrozenParamsLength())],
    "group": [group.GroupName().decode(), group.Step(), group.InitialLearningRate()],
    "moments": {s.ParamName().decode(): [tensor(s.Momentums(j))
                for j in range(s.MomentumsLength())] for s in states},
    "ints": {bag.Ints(j).Name().decode(): bag.Ints(j).Value() for j in range(bag.IntsLength())},
    "floats": {bag.Floats(j).Name().decode(): bag.Floats(j).Value()
               for j in range(bag.FloatsLength())},
    "strings": {bag.Strings(j).Name().decode(): bag.Strings(j).Value().decode()
                for j in range(bag.StringsLength())},
}))
"""


def test_generated_bindings_read_the_same(tmp_path):
    data = sample()
    write_checkpoint(tmp_path / "c", data)
    seen = json.loads(ran(sys.executable, "-W", "error", "-c", BINDINGS, tmp_path / "c").stdout)
    codes = {dtype: code for code, dtype in DTYPES.items()}

    def described(arrays: dict[str, np.ndarray]) -> list[list[object]]:
        return [
            [name, list(a.shape), codes[a.dtype], a.tobytes().hex(), -1]
            for name, a in arrays.items()
        ]

    assert seen == {
        "version": 2,
        "nominal": False,
        "external": False,
        "trainable": described(data.trainable),
        "frozen": described(data.frozen),
        "group": ["group0", 41, float(np.float32(0.03))],
        "moments": {
            name: described({f"momentum{i}": m for i, m in enumerate(moments)})
            for name, moments in data.optimizer.moments.items()
        },
        "ints": {"epoch": 3, "zero": 0},
        "floats": {"loss": float(np.float32(0.1))},
        "strings": {"note": "grüße", "odtpack.optimizer": "adamw"},
    }


def test_a_foreign_file_is_read():
    f = Foreign()
    data = parse_checkpoint(f.finish([f.tensor(raw=np.float32([1, 2]).tobytes())]))
    assert data.trainable["w"].tolist() == [1, 2]


def test_optimizer_groups(tmp_path):
    """Each group holds its own parameters; some moments are shorter than theirs."""
    data = sample()
    data.optimizer.groups = (("b",), ("layer.W", "empty"))
    data.optimizer.moments["layer.W"] = [np.ones((3, 1), np.float32), np.ones((1, 4), np.float32)]
    data.optimizer.moments = {
        name: data.optimizer.moments[name] for name in ("b", "layer.W", "empty")
    }
    write_checkpoint(tmp_path / "c", data)
    again = read_checkpoint(tmp_path / "c")
    assert_same(again, data)
    assert again.optimizer.groups == data.optimizer.groups
    # Without moments the groups are still told apart.
    data.optimizer.moments = {}
    write_checkpoint(tmp_path / "d", data)
    assert read_checkpoint(tmp_path / "d").optimizer.groups == ((), ())


shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)
dtypes = st.sampled_from([np.float32, np.int64, np.uint8, np.bool_])


@given(shapes, st.data())
@settings(deadline=None)
def test_slots_are_aligned_disjoint_and_shared(shapes, data):
    tensors = [
        (f"t{index}", shape, np.dtype(data.draw(dtypes))) for index, shape in enumerate(shapes)
    ]
    layout = Layout.pack(tensors)
    memory = allocate(layout.nbytes)
    assert layout.nbytes == 0 or address(memory) % ALIGNMENT == 0
    assert memory.nbytes == layout.nbytes
    assert not memory.any()
    for index, slot in enumerate(layout.slots):
        array = view(memory, slot)
        assert (array.shape, array.dtype) == tensors[index][1:]
        assert slot.offset % ALIGNMENT == 0
        assert slot.nbytes == array.nbytes
        assert array.size == 0 or address(array) == address(memory) + slot.offset
        array.fill(1)
    # Every element was set once and nothing in between: the slots are disjoint.
    expected = sum(
        np.ones(slot.shape, slot.dtype).reshape(-1).view(np.uint8).astype(np.int64).sum()
        for slot in layout.slots
    )
    assert memory.astype(np.int64).sum() == expected


# The shipped schema of checkpoints is that of the files: ``flatc`` reads and writes them by it.

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
    weight = np.random.default_rng(0).random((2, 3), np.float32)
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


def test_flatc_finds_the_fields_that_were_written(flatc, tmp_path):
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


def test_what_flatc_builds_is_read(flatc, tmp_path):
    written = data()
    write_checkpoint(tmp_path / "checkpoint", written)
    to_json(flatc, tmp_path / "checkpoint")
    found = read_checkpoint(build(flatc, tmp_path / "checkpoint.json"))
    assert found.checked
    assert found.properties == written.properties
    for name, array in {**written.trainable, **written.frozen}.items():
        np.testing.assert_array_equal({**found.trainable, **found.frozen}[name], array, strict=True)
    assert (found.optimizer.step, found.optimizer.learning_rate) == (9, 0.25)
    moments = (each.optimizer.moments["fc.weight"] for each in (found, written))
    np.testing.assert_array_equal(*map(np.stack, moments), strict=True)


def test_a_file_without_a_version_is_refused(flatc, tmp_path):
    """The schema's default of the version is 0, so a writer must write it."""
    (tmp_path / "none.json").write_text('{"module_state": {}}')
    with pytest.raises(OdtpackError, match="version"):
        read_checkpoint(build(flatc, tmp_path / "none.json"))


def build(flatc: str, source: Path) -> Path:
    command = [flatc, "-b", "-o", source.parent / "built", SCHEMA, source]
    subprocess.run(command, check=True, capture_output=True)
    return source.parent / "built" / f"{source.stem}.bin"


_SLOT = re.compile(r"\.Prepend(\w+?)Slot\((\d+), .*, (\S+)\)")


@pytest.mark.parametrize("table", [
    "Checkpoint", "ModuleState", "OptimizerGroup", "ParameterOptimizerState", "PropertyBag",
    "IntProperty", "FloatProperty", "StringProperty", "Tensor",
])  # fmt: skip
def test_fields_are_those_of_the_bindings_of_onnx_runtime(table):
    """Number, kind and default of each field, as the bindings in ONNX Runtime's wheel have them."""
    module = importlib.import_module(f"ort_flatbuffers_py.fbs.{table}")
    text = Path(str(module.__file__)).read_text()
    bound = [(int(number), kind, float(default)) for kind, number, default in _SLOT.findall(text)]
    match = re.search(rf"^table {table} \{{\n(.*?)^\}}", SCHEMA.read_text(), re.M | re.S)
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
