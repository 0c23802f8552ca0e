"""Each kit's digests and its way back to the save before, against Python's."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import (
    OPTIMIZER_PROPERTY,
    CheckpointData,
    OptimizerState,
    read_checkpoint,
)
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests import zoo
from tests.kits import cpp_kit, javascript, kotlin_kit
from tests.packages.samples import build
from tests.packaging_tools import open_training
from tests.programs import ran
from tests.runtime.checkpoint_samples import Foreign, assert_same, sample

pytestmark = pytest.mark.kits


Kit = Callable[..., tuple[str, str]]
"""Gives the answer to a command, and what is said of it: ``load PATH`` says what became of a
checkpoint, ``keep FROM PATH EXTERNAL_ABOVE`` saves over another one, which is kept."""


@pytest.fixture
def kit(every: Any) -> Kit:
    if every is javascript:
        return lambda *words: tuple(javascript.node("trust.mjs", *words))

    def answer(*words: object) -> tuple[str, str]:
        done = every.run(*(("trust",) if every is cpp_kit else ()), *words)
        first, _, rest = getattr(done, "stdout", done).partition("\n")
        return first, rest.strip()

    return answer


def exported(kit: Any, folder: Path) -> str:
    """What a kit says is wrong when it exports ``package`` of a folder as ``m.onnx``."""
    package, to = folder / "package", folder / "m.onnx"
    if kit is javascript:
        return str(javascript.refused_export(package, to)[1])
    if kit is kotlin_kit:
        return ran(*kotlin_kit.command("exports", package, folder / "1.ckpt", to), code=None).stderr
    return str(kit.run(*(("saves",) if kit is cpp_kit else ()), "export", folder).stderr)


@pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable()))
@pytest.mark.parametrize("variant", ["native", "arm64"])
def test_sha256_with_and_without_instructions(variant):
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 1000, 100_003):
        data = bytes((i * 7 + i // 251) & 255 for i in range(size))
        plain, fast, _ = cpp_kit.run("trust", "sha256", size, variant=variant).stdout.split()
        assert plain == fast == hashlib.sha256(data).hexdigest(), size


@pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable()))
@pytest.mark.parametrize("variant", ["sanitized", "arm64"])
def test_a_digest_is_right_elsewhere(variant, tmp_path):
    write_checkpoint(tmp_path / "full", sample())
    assert cpp_kit.run("trust", "load", tmp_path / "full", variant=variant).stdout == "checked\n"


@pytest.mark.parametrize("above", [2**30, 64], ids=["one file", "external data"])
def test_digests_travel_both_ways(kit, above, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", above)
    data = sample()
    data.properties |= {"least": -0.0, "none": float("nan")}
    for name, content in (
        ("full", data),
        ("nominal", CheckpointData(data.trainable, data.frozen, nominal=True)),
        ("plain", CheckpointData(data.trainable, {})),
    ):
        path = tmp_path / name
        write_checkpoint(path, content)
        assert kit("load", path) == ("checked", "")
        kit("keep", path, tmp_path / f"{name}.kit", above)
        back = read_checkpoint(tmp_path / f"{name}.kit")
        assert back.checked
        assert back.properties.keys() == content.properties.keys()
        assert np.isnan(back.properties.pop("none", np.nan))
        assert all(content.properties[name] == value for name, value in back.properties.items())


def test_the_kind_of_an_optimizer_goes_with_its_state(kit, tmp_path):
    """onnxruntime-training keeps the property where it saves a file without the state again."""
    data = CheckpointData({"w": np.ones(3, np.float32)}, {}, properties={OPTIMIZER_PROPERTY: "sgd"})
    write_checkpoint(tmp_path / "c", data)
    kit("keep", tmp_path / "c", tmp_path / "kit", 2**30)
    assert OPTIMIZER_PROPERTY.encode() in (tmp_path / "c").read_bytes()
    assert OPTIMIZER_PROPERTY.encode() not in (tmp_path / "kit").read_bytes()
    assert not read_checkpoint(tmp_path / "c").properties


@pytest.mark.parametrize("above", [2**40, 64], ids=["one file", "external data"])
def test_large_tensors(kit, above, tmp_path):
    """They are hashed while they are written, in pieces."""
    large = np.random.default_rng(0).random(3_000_000, np.float32)
    data = CheckpointData({"a": large, "b": large[:-5] + 1}, {"c": large[:5_000]})
    write_checkpoint(tmp_path / "c", data)
    kit("keep", tmp_path / "c", tmp_path / "kit", above)
    back = read_checkpoint(tmp_path / "kit")
    assert back.checked
    assert_same(data, back)
    assert kit("load", tmp_path / "kit") == ("checked", "")


def test_a_file_without_a_digest_loads_unchecked(kit, tmp_path):
    f = Foreign()
    (tmp_path / "c").write_bytes(f.finish([f.tensor()]))
    assert kit("load", tmp_path / "c") == ("unchecked", "")


def test_damage_is_refused_and_named(kit, tmp_path):
    path = tmp_path / "c"
    write_checkpoint(path, sample())
    good = path.read_bytes()
    weight = sample().trainable["layer.W"].tobytes()
    at = good.index(weight)
    for place, words in ((at, "'layer.W'"), (good.index(b"note"), "names, shapes")):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        code, message = kit("load", path)
        assert code == "checkpoint-corrupt"
        assert "is not what was saved" in message
        assert words in message
    # A file that lost its digest, but not those of the tensors.
    f = Foreign()
    path.write_bytes(f.finish([f.tensor(doc="sha256:" + "0" * 64)]))
    assert kit("load", path)[0] == "checkpoint-corrupt"


def test_what_is_loaded_is_what_was_saved(kit, tmp_path):
    """Some bits are flipped, of which not all are ever read."""
    path = tmp_path / "c"
    write_checkpoint(path, sample())
    good = path.read_bytes()
    want = sample()
    want.trainable = dict(sorted(want.trainable.items()))
    want.frozen = dict(sorted(want.frozen.items()))
    rng = np.random.default_rng(4)
    refused = 0
    for _ in range(20):
        data = bytearray(good)
        for position in rng.integers(0, len(good) * 8, rng.integers(1, 4)):
            data[position // 8] ^= 1 << (position % 8)
        path.write_bytes(data)
        if kit("load", path)[0] == "checked":
            kit("keep", path, tmp_path / "again", 2**30)
            assert_same(read_checkpoint(tmp_path / "again"), want)
        else:
            refused += 1
    assert refused > 13


@pytest.mark.parametrize("above", [2**30, 64], ids=["one file", "external data"])
def test_the_save_before_is_kept_and_gone_back_to(kit, above, tmp_path):
    path = tmp_path / "trained"
    for value in (1, 2, 3):
        array = np.full(99, value, np.float32)
        moments = {"w": [array]}
        content = CheckpointData(
            {"w": array}, {}, optimizer=OptimizerState(5 * value, 0.1, moments)
        )
        write_checkpoint(tmp_path / "start", content)
        kit("keep", tmp_path / "start", path, above)
    for name, value in (("trained", 3), ("trained.previous", 2)):
        assert set(read_checkpoint(tmp_path / name).trainable["w"]) == {value}
    assert not list(tmp_path.glob(".*"))
    values = tmp_path / "trained.data" if above == 64 else path
    data = values.read_bytes()
    values.write_bytes(data.replace(np.float32([3, 3]).tobytes(), np.float32([3, 4]).tobytes()))
    first, rest = kit("load", path)
    assert first == "checked"
    assert "not what was saved: 'w'" in rest
    assert "5 optimizer steps made since are lost" in rest
    state = CheckpointState.load_checkpoint(path)  # Python goes back to it as well
    assert set(state.parameters["w"].data) == {2}
    path.unlink()
    first, rest = kit("load", path)
    assert first == "checked"
    assert "of optimizer step 10: what was trained since is lost" in rest
    (tmp_path / "trained.previous").unlink()
    assert kit("load", path)[0] == "checkpoint-not-found"


@pytest.mark.parametrize("above", [2**30, 64], ids=["one file", "external data"])
def test_a_save_keeps_permissions_and_links(kit, above, tmp_path):
    start, path, link = tmp_path / "start", tmp_path / "trained", tmp_path / "link"
    write_checkpoint(start, CheckpointData({"w": np.zeros(99, np.float32)}, {}))
    write_checkpoint(path, CheckpointData({"w": np.ones(99, np.float32)}, {}))
    path.chmod(0o640)
    for _ in range(2):
        assert kit("keep", start, path, above)[1] == ""
    assert {each.stat().st_mode & 0o777 for each in tmp_path.glob("trained*")} == {0o640}
    link.symlink_to(start)
    code, message = kit("keep", path, link, above)
    assert code == "file-not-written"
    assert "is a link, and nothing is saved through a link or in its place" in message
    assert link.is_symlink()
    assert sorted(each.name for each in tmp_path.glob("link*")) == ["link"]
    start.unlink()  # the link leads nowhere
    assert kit("keep", path, link, above)[0] == "file-not-written"
    assert link.is_symlink()


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with a package, its checkpoint, and a link where the model is exported to."""
    package = build(tmp_path / "package", zoo.cnn(size=8, width=(4, 8), classes=3))
    shutil.copy(package / "checkpoint", tmp_path / "1.ckpt")
    (tmp_path / "m.onnx").symlink_to(tmp_path / "other.onnx")
    (tmp_path / "other.onnx").write_bytes(b"old")
    return tmp_path


def left_alone(linked: Path, said: str) -> None:
    assert "m.onnx is a link, and nothing is saved through a link or in its place" in said
    assert (linked / "m.onnx").is_symlink()
    assert (linked / "other.onnx").read_bytes() == b"old"


def test_an_export_replaces_no_link(every, linked):
    left_alone(linked, exported(every, linked))


def test_an_export_of_python_replaces_no_link(linked):
    _, module, _ = open_training(linked / "package")
    with pytest.raises(OdtpackError) as error:
        module.export_model_for_inferencing(linked / "m.onnx", ["output"])
    left_alone(linked, str(error.value))
