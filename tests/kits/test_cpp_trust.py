"""The C++ kit's digests and recovery, against Python's."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.kits import cpp_kit
from tests.kits.cpp_kit import run
from tests.runtime.checkpoint_samples import Foreign, assert_same, sample

pytestmark = [
    pytest.mark.kits,
    pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable())),
]


def load(path: Path, variant: str = "native") -> tuple[str, str]:
    """First line and rest of what the kit says of a checkpoint."""
    first, _, rest = run("trust", "load", path, variant=variant).stdout.partition("\n")
    return first, rest


@pytest.mark.parametrize("variant", ["native", "arm64"])
def test_sha256_with_and_without_instructions(variant: str) -> None:
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 1000, 100_003):
        data = bytes((i * 7 + i // 251) & 255 for i in range(size))
        plain, fast, _ = run("trust", "sha256", size, variant=variant).stdout.split()
        assert plain == fast == hashlib.sha256(data).hexdigest(), size


@pytest.mark.parametrize("above", [2**30, 64], ids=["one file", "external data"])
def test_digests_travel_both_ways(
    above: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", above)
    data = sample()
    data.properties["least"] = -0.0
    for name, content in (
        ("full", data),
        ("nominal", CheckpointData(data.trainable, data.frozen, nominal=True)),
        ("plain", CheckpointData(data.trainable, {})),
    ):
        path = tmp_path / name
        write_checkpoint(path, content)
        assert load(path) == ("checked", "")
        assert run("trust", "save", path, tmp_path / f"{name}.cpp", above).returncode == 0
        back = read_checkpoint(tmp_path / f"{name}.cpp")
        assert back.checked
        assert back.properties == content.properties
    assert load(tmp_path / "full", "arm64") == ("checked", "")
    assert load(tmp_path / "full", "sanitized") == ("checked", "")


def test_a_file_without_a_digest_loads_unchecked(tmp_path: Path) -> None:
    f = Foreign()
    (tmp_path / "c").write_bytes(f.finish([f.tensor()]))
    assert load(tmp_path / "c") == ("unchecked", "")


def test_damage_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "c"
    write_checkpoint(path, sample())
    good = path.read_bytes()
    weight = sample().trainable["layer.W"].tobytes()
    at = good.index(weight)
    for place, words in ((at, "'layer.W'"), (good.index(b"note"), "names, shapes")):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        code, message = load(path)
        assert code == "checkpoint-corrupt"
        assert "is not what was saved" in message
        assert words in message
    # Whatever the kit loads Python loads as well, and as what was saved.
    rng = np.random.default_rng(4)
    refused = 0
    for _ in range(60):
        data = bytearray(good)
        for position in rng.integers(0, len(good) * 8, rng.integers(1, 4)):
            data[position // 8] ^= 1 << (position % 8)
        path.write_bytes(data)
        if load(path)[0] == "checked":
            assert run("trust", "save", path, tmp_path / "again", 2**30).returncode == 0
            again = read_checkpoint(tmp_path / "again")
            want = sample()
            want.trainable = dict(sorted(want.trainable.items()))
            want.frozen = dict(sorted(want.frozen.items()))
            assert_same(again, want)
        else:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("above", [2**30, 64], ids=["one file", "external data"])
def test_the_save_before_is_kept_and_gone_back_to(above: int, tmp_path: Path) -> None:
    path = tmp_path / "trained"
    for value in (1.0, 2.0, 3.0):
        write_checkpoint(tmp_path / "start", CheckpointData({"w": np.full(99, value, "f4")}, {}))
        assert run("trust", "save", tmp_path / "start", path, above).returncode == 0
    for name, value in (("trained", 3), ("trained.previous", 2)):
        assert set(read_checkpoint(tmp_path / name).trainable["w"]) == {value}
    values = tmp_path / "trained.data" if above == 64 else path
    data = values.read_bytes()
    values.write_bytes(data.replace(np.float32([3, 3]).tobytes(), np.float32([3, 4]).tobytes()))
    first, rest = load(path)
    assert first == "checked"
    assert "not what was saved: 'w'" in rest
    assert "trained.previous" in rest
    state = CheckpointState.load_checkpoint(path)  # Python goes back to it as well
    assert set(state.parameters["w"].data) == {2}
