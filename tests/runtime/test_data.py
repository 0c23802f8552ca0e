import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_runtime.training.loop import load_dataset
from tests.model_text import parsed
from tests.packaging_tools import built_package
from tests.refused import refused

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
SPECS = (TensorSpec("input", F32, (8, 3, "len")), TensorSpec("labels", I64, (8, "len")))


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def good(count: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "input": rng.standard_normal((count, 3, 4)).astype(np.float32),
        "labels": rng.integers(0, 10, (count, 4)),
    }


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_arrays_come_back(tmp_path, write):
    arrays = good()
    arrays["input"] = np.asfortranarray(arrays["input"])
    write(tmp_path / "data.npz", extra=np.array([{}], object), **arrays)
    loaded = load_dataset(tmp_path / "data.npz", SPECS, class_count=10)
    assert list(loaded) == ["input", "labels"]
    for name, array in loaded.items():
        assert np.array_equal(array, arrays[name])
        assert array.flags.c_contiguous
        assert array.dtype == arrays[name].dtype


def test_text_and_inputs_of_any_rank(tmp_path):
    path = save(tmp_path / "d.npz", words=np.array(["a", "bc"]), any=np.ones((2, 1, 1)))
    specs = (
        TensorSpec("words", np.dtype(object), ("n",)),
        TensorSpec("any", np.dtype(np.float64), ()),
    )
    assert load_dataset(path, specs)["words"].tolist() == ["a", "bc"]


@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
@pytest.mark.parametrize(
    ("row", "fits"),
    [([0, 0, 1, 1], False), ([1, 0, 1, 1], False), ([1, 1, 0, 0], True), ([0] * 4, True)],
)
def test_padding_that_a_mask_would_hide(row, fits, dtype, tmp_path):
    mask = np.ones((5, 4), dtype)
    mask[3] = row
    path = save(tmp_path / "d.npz", attention_mask=mask, **good())
    if fits:
        assert load_dataset(path, SPECS).keys() == good().keys()
        return
    assert load_dataset(path, []) == {}  # what the model takes is not known yet
    with refused("data-padding", "sample 3"):
        load_dataset(path, SPECS)
    taken = TensorSpec("attention_mask", np.dtype(dtype), ("n", 4))
    assert "attention_mask" in load_dataset(path, (*SPECS, taken))
    with refused("data-too-large"):
        load_dataset(path, SPECS, max_bytes=700)


@pytest.mark.parametrize("mask", [np.array(0), np.zeros((2, 2, 2)), np.array([["a", "b"]])])
def test_a_mask_of_another_kind_is_ignored(mask, tmp_path):
    assert load_dataset(save(tmp_path / "d.npz", attention_mask=mask, **good()), SPECS)


def spoilt(name: str, *place: int, value: float) -> dict[str, np.ndarray]:
    array = good()[name]
    array[place] = value
    return {name: array}


@pytest.mark.parametrize(("change", "code", "says"), [
    ({"input": None}, "data-missing", "no array 'input'.*float32"),
    ({"labels": None}, "data-missing", "no array 'labels'"),
    ({"input": good()["input"].astype(np.float64)}, "data-type", "'input' has elements of f"),
    ({"input": good()["input"].astype(">f4")}, "data-type", "'input'"),
    ({"input": good()["input"].astype(object)}, "data-type", "'input'"),
    ({"labels": good()["labels"].astype(np.int32)}, "data-type", "'labels'"),
    ({"input": good()["input"][:, :2]}, "data-shape", r"'input'.*\[5, 2, 4\].*\[8, 3, len\]"),
    ({"input": good()["input"][0]}, "data-shape", "'input'"),
    ({"labels": good()["labels"][:, 0]}, "data-shape", "'labels'"),
    ({"labels": np.array(3)}, "data-shape", "'labels'"),
    ({"labels": good()["labels"][:, :3]}, "data-shape", "'len' is 4 in array 'input' and 3"),
    ({"labels": good()["labels"][:4]}, "data-length", "'labels' has 4 .* 'input' has 5"),
    ({"input": good(0)["input"], "labels": good(0)["labels"]}, "data-empty", "'input'"),
    (spoilt("input", 3, 1, 1, value=np.nan), "data-not-finite", "'input'.*sample 3"),
    (spoilt("input", 4, 0, 0, value=-np.inf), "data-not-finite", "'input'.*sample 4"),
    (spoilt("labels", 2, 3, value=10), "label-out-of-range", r"label 10 at \[2, 3\]"),
    (spoilt("labels", 0, 1, value=-1), "label-out-of-range", r"label -1 at \[0, 1\]"),
])  # fmt: skip
def test_arrays_that_do_not_fit(tmp_path, change, code, says):
    arrays = {k: v for k, v in {**good(), **change}.items() if v is not None}
    path = save(tmp_path / "data.npz", **arrays)
    with refused(code, f"(?s){says}"):
        load_dataset(path, SPECS, class_count=10)


GIVEN = "a = IsNaN(x) b = Where(a, missing, x)"


@pytest.mark.parametrize(
    ("replaced", "odd", "says"),
    [
        (GIVEN, {"x": np.nan}, None),
        ("s = Mul(x, missing) a = Cast<to=9>(m) z = Sub(m, m) b = Where(a, s, z)", {}, None),
        (GIVEN, {"x": np.inf}, "'x' holds infinity, first in sample 2"),
        (GIVEN, {"x": -np.inf}, "'x' holds infinity, first in sample 2"),
        (GIVEN, {"x": np.nan, "target": np.nan}, "'target' holds NaN"),
        # A processor may make 0 of NaN here, and the frozen product before it has no gradient.
        ("b = Relu(x)", {"x": np.nan}, "'x' holds NaN, first in sample 2"),
        # Something else computes with it.
        (f"{GIVEN.replace('b =', 'c =')} z = Neg(x) b = Add(c, z)", {"x": np.nan}, "'x' holds NaN"),
    ],
    ids=["NaN", "mask", "infinity", "negative", "target", "relu", "beside"],
)
def test_what_the_model_replaces_may_stay(replaced, odd, says, tmp_path):
    """A model that handles missing values trains on them; what it does not handle is refused."""
    masked = ", float[N, 3] m" if "m)" in replaced else ""
    one, w = np.float32([1, 2, 3]), np.float32([[1], [2], [3]])
    text = f"(float[N, 3] x{masked}) => (float[N, 1] y) {{ {replaced} y = MatMul(b, w) }}"
    model = parsed(text, 20, ir_version=10, missing=one, w=w)
    package = built_package(model, tmp_path / "package", loss="mse", train=["w"])
    arrays = {"x": np.ones((6, 3), np.float32), "target": np.ones((6, 1), np.float32)}
    if masked:
        arrays["m"] = np.ones((6, 3), np.float32)
        arrays["m"][2, 0], odd = 0, {"x": np.nan}
    for name, value in odd.items():
        arrays[name][2, 0] = value
    path = save(tmp_path / "data.npz", **arrays)
    if says is None:
        assert np.isnan(package.load_data(path)["x"][2, 0])
        return
    with refused("data-not-finite", says):
        package.load_data(path)


def test_files_that_are_no_archives(tmp_path):
    with refused("data-not-found"):
        load_dataset(tmp_path / "absent.npz", SPECS)
    (tmp_path / "text.npz").write_text("not an archive")
    np.save(tmp_path / "one.npy", good()["input"])
    for name in ("text.npz", "one.npy"):
        with refused("data-unreadable"):
            load_dataset(tmp_path / name, SPECS)


def archive(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members:
            file.writestr(name, data)
    return path


def npy(array: np.ndarray, *, pickled: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=pickled)
    return buffer.getvalue()


def test_nothing_is_unpickled(tmp_path):
    data = npy(np.array([print], object), pickled=True)
    path = archive(tmp_path / "d.npz", [("input.npy", data)])
    with refused("data-type"):
        load_dataset(path, (TensorSpec("input", np.dtype(object), ("n",)),))


def test_sizes_are_checked_before_anything_is_loaded(tmp_path):
    spec = (TensorSpec("input", np.dtype(np.float32), ("n",)),)
    bomb = archive(tmp_path / "bomb.npz", [("input.npy", npy(np.zeros(5_000_000, np.float32)))])
    assert bomb.stat().st_size < 50_000
    with refused("data-too-large"):
        load_dataset(bomb, spec, max_bytes=10_000_000)
    # A header that promises more than the archive holds.
    small = npy(np.zeros(10, np.float32))
    lie = small.replace(b"(10,)", b"(10000000000,)".ljust(5))
    lie = lie.replace(b"}          ", b"} ", 1)
    for data in (lie, small[:-4], small + bytes(4), small[:20], b"", b"\x93NUMPY\x09\x09"):
        path = archive(tmp_path / "lie.npz", [("input.npy", data)])
        with refused("data-unreadable"):
            load_dataset(path, spec)


def test_odd_archives(tmp_path):
    spec = (TensorSpec("input", np.dtype(np.float32), ("n",)),)
    data = npy(np.zeros(10, np.float32))
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = archive(tmp_path / "twice.npz", [("input.npy", data), ("input.npy", data)])
    with pytest.raises(OdtpackError, match="twice"):
        load_dataset(path, spec)
    whole = archive(tmp_path / "good.npz", [("input.npy", data)]).read_bytes()
    encrypted = bytearray(whole)
    encrypted[6] |= 1  # the flag of the local header
    central = encrypted.index(b"PK\x01\x02")
    encrypted[central + 8] |= 1
    (tmp_path / "encrypted.npz").write_bytes(encrypted)
    with pytest.raises(OdtpackError, match="encrypted"):
        load_dataset(tmp_path / "encrypted.npz", spec)
    unknown = bytearray(whole)
    struct.pack_into("<H", unknown, 8, 77)
    struct.pack_into("<H", unknown, central + 10, 77)
    (tmp_path / "unknown.npz").write_bytes(unknown)
    with refused("data-unreadable"):
        load_dataset(tmp_path / "unknown.npz", spec)


def test_damaged_archives(tmp_path):
    path = tmp_path / "d.npz"
    np.savez_compressed(path, **good())
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, len(whole), 2):
            data[position] ^= 1 << rng.integers(8)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.2 else data)
        try:
            loaded = load_dataset(path, SPECS, class_count=10)
        except OdtpackError:
            continue
        assert loaded["input"].shape == (5, 3, 4)
