"""Update archives that were damaged, or written to do harm."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from odtpack.update.update_archive import write_update
from odtpack_runtime import OdtpackError
from odtpack_runtime.package.apply_update import apply_update
from odtpack_runtime.package.update_archive import INDEX_NAME, MAX_FILES
from tests.packages.samples import build, small_model, tree, with_values

MUTATIONS = 500


@dataclass
class Content:
    """What an archive is made of, to be changed before it is made."""

    index: Any
    members: dict[str, bytes]
    options: dict[str, int] = field(default_factory=dict)
    twice: tuple[str, ...] = ()

    def describe(self, name: str, data: bytes) -> None:
        """Put a file into the archive, its index and the new manifest, all in agreement."""
        self.members[name] = data
        if name != "manifest.json":
            manifest = json.loads(self.members["manifest.json"])
            manifest["files"][name].update(entry(name, data))
            manifest.pop("digest", None)
            self.describe("manifest.json", json.dumps(manifest).encode())
        self.file(name).update(entry(name, data))

    def file(self, name: str) -> dict[str, Any]:
        """The entry of a file in the index."""
        (found,) = (each for each in self.index["files"] if each["path"] == name)
        assert isinstance(found, dict)
        return found

    def to_bytes(self) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            text = json.dumps(self.index).encode()
            for name, data in [(INDEX_NAME, text), *self.members.items()]:
                kind = self.options.get(name, zipfile.ZIP_DEFLATED)
                archive.writestr(zipfile.ZipInfo(name), data, compress_type=kind)
            for name in self.twice:
                archive.writestr(zipfile.ZipInfo(name), b"again")
        return stream.getvalue()


def entry(name: str, data: bytes) -> dict[str, Any]:
    return {
        "path": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()
    }  # fmt: skip


@dataclass(frozen=True)
class Shared:
    old: Path
    new: Path
    update: bytes

    def content(self) -> Content:
        with zipfile.ZipFile(io.BytesIO(self.update)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        return Content(json.loads(members.pop(INDEX_NAME)), members)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("hostile")
    old = build(folder / "old")
    new = build(folder / "new", with_values(small_model(), "conv1.weight"), nominal=True)
    write_update(old, new, folder / "update")
    found = Shared(old, new, (folder / "update").read_bytes())
    names = {each["path"] for each in found.content().index["files"]}
    assert found.content().members.keys() < names  # some files are the old package's
    return found


def refuse(
    shared: Shared, data: bytes, tmp_path: Path, words: str, code: str = "delta-damaged"
) -> None:
    """One error with these words, beside the package and in its place; nothing is changed."""
    (tmp_path / "update").write_bytes(data)
    before = tree(shared.old)
    for out in (tmp_path / "out", None):
        with pytest.raises(OdtpackError) as caught:
            apply_update(shared.old, tmp_path / "update", out)
        assert caught.value.code == code, caught.value
        assert words in caught.value.what
        assert caught.value.hint
    assert tree(shared.old) == before
    assert [path.name for path in tmp_path.iterdir()] == ["update"]


def test_crafted_as_it_is_gives_the_new_package(shared: Shared, tmp_path: Path) -> None:
    (tmp_path / "update").write_bytes(shared.content().to_bytes())
    apply_update(shared.old, tmp_path / "update", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(shared.new)


def mutated(data: bytes, number: int) -> bytes:
    """One of endless variants: bits, bytes, ranges, numbers, ends; half in the directory."""
    rng = random.Random(number)
    changed = bytearray(data)
    directory = data.rindex(b"PK\x05\x06") - 60 * 8
    for _ in range(rng.randint(1, 3)):
        start = min(directory, len(changed)) if rng.random() < 0.5 else 0
        at = rng.randrange(start, max(len(changed), start + 1))
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = rng.choice([0, 1, 2, 8, 127, 255])
        elif kind == 2:
            del changed[at : at + rng.randint(1, 40)]
        elif kind == 3:
            changed[at:at] = rng.randbytes(rng.randint(1, 40))
        elif kind == 4:
            changed[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2**16, 2**31, 2**32 - 1]))
        else:
            del changed[at:]
    return bytes(changed)


def test_mutated_updates_are_refused_or_right(shared: Shared, tmp_path: Path) -> None:
    before, wanted = tree(shared.old), tree(shared.new)
    codes: dict[str, int] = {}
    file, out = tmp_path / "update", tmp_path / "out"
    for number in range(MUTATIONS):
        file.write_bytes(mutated(shared.update, number))
        try:
            apply_update(shared.old, file, out)
        except OdtpackError as error:
            codes[error.code] = codes.get(error.code, 0) + 1
            assert not out.exists(), number
        else:
            assert tree(out) == wanted, number
            shutil.rmtree(out)
        assert [path.name for path in tmp_path.iterdir()] == ["update"], number
    assert tree(shared.old) == before
    assert sum(codes.values()) > 0.5 * MUTATIONS  # a zip has fields that nothing reads
    assert codes.keys() <= {"delta-damaged", "delta-version", "delta-base"}


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "a\\b", "C:x", "..", ".", "", "a\nb", "x" * 256, "con", "a.",
     "ODTPACK-update.json"],
    ids=ascii,
)  # fmt: skip
def test_names_that_lead_elsewhere(shared: Shared, tmp_path: Path, name: str) -> None:
    content = shared.content()
    data = b"harm"
    content.index["files"].append(entry(name, data))
    content.members[name] = data
    refuse(shared, content.to_bytes(), tmp_path, "in its index, ")


def test_files_that_occur_twice(shared: Shared, tmp_path: Path) -> None:
    content = shared.content()
    content.twice = ("checkpoint",)
    with pytest.warns(UserWarning, match="Duplicate"):
        data = content.to_bytes()
    refuse(shared, data, tmp_path, "two files of one name")
    content = shared.content()
    content.index["files"].append(content.file("checkpoint"))
    refuse(shared, content.to_bytes(), tmp_path, "one name on some systems")
    content = shared.content()
    content.index["files"].append({**content.file("checkpoint"), "path": "CHECKPOINT"})
    refuse(shared, content.to_bytes(), tmp_path, "one name on some systems")


def change_manifest_name(content: Content) -> None:
    content.index["manifest"] = "checkpoint"


def name_no_file(content: Content) -> None:
    content.index["manifest"] = "other_manifest.json"


def drop_from_index(content: Content) -> None:
    content.index["files"].remove(content.file("checkpoint"))


def drop_from_both(content: Content) -> None:
    drop_from_index(content)
    del content.members["checkpoint"]


def drop_from_archive(content: Content) -> None:
    del content.members["checkpoint"]


def list_another(content: Content) -> None:
    content.index["files"].append(entry("zzz", b"more"))
    content.members["zzz"] = b"more"


def bring_another(content: Content) -> None:
    content.members["zzz"] = b"more"


def bring_a_folder(content: Content) -> None:
    content.members["zzz/"] = b""


def change_bytes(content: Content) -> None:
    data = bytearray(content.members["checkpoint"])
    data[-1] ^= 1
    content.members["checkpoint"] = bytes(data)


def change_manifest(content: Content) -> None:
    content.members["manifest.json"] = content.members["manifest.json"].replace(b"a", b"b")


def give_another_size(content: Content) -> None:
    next(f for f in content.index["files"] if f["path"] == "checkpoint")["size_bytes"] += 1


def give_a_negative_size(content: Content) -> None:
    next(f for f in content.index["files"] if f["path"] == "checkpoint")["size_bytes"] = -1


def give_another_digest(content: Content) -> None:
    next(f for f in content.index["files"] if f["path"] == "checkpoint")["sha256"] = "0" * 64


def add_a_key(content: Content) -> None:
    content.index["run"] = "rm"


def leave_out_the_format(content: Content) -> None:
    del content.index["format"]


def list_too_many(content: Content) -> None:
    content.index["files"] += [entry(f"f{i}", b"") for i in range(MAX_FILES)]


def be_a_list(content: Content) -> None:
    content.index = [content.index]


def compress_otherwise(content: Content) -> None:
    content.options["checkpoint"] = zipfile.ZIP_LZMA


def compress_the_index_otherwise(content: Content) -> None:
    content.options[INDEX_NAME] = zipfile.ZIP_BZIP2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_manifest_name, "is not the manifest"),
        (name_no_file, "is not the manifest"),
        (drop_from_index, "which its index does not list"),
        (drop_from_both, "disagree about 'checkpoint'"),
        (drop_from_archive, "it lacks 'checkpoint'"),
        (list_another, "disagree about 'zzz'"),
        (bring_another, "which its index does not list"),
        (bring_a_folder, "which its index does not list"),
        (change_bytes, "'checkpoint' is not the file"),
        (change_manifest, "'manifest.json' is not the file"),
        (give_another_size, "about the size of 'checkpoint'"),
        (give_a_negative_size, "it must be 0 or more"),
        (give_another_digest, "disagree about 'checkpoint'"),
        (add_a_key, "there is no such key"),
        (leave_out_the_format, "this key is missing"),
        (list_too_many, "entries or fewer"),
        (be_a_list, "it must be an object"),
        (compress_otherwise, "compressed in a way"),
        (compress_the_index_otherwise, "compressed in a way"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_does_not_hold_together(
    shared: Shared, tmp_path: Path, change: Callable[[Content], None], words: str
) -> None:
    content = shared.content()
    change(content)
    refuse(shared, content.to_bytes(), tmp_path, words)


def test_a_later_version(shared: Shared, tmp_path: Path) -> None:
    content = shared.content()
    content.index.update(version=2, more="of it")
    refuse(shared, content.to_bytes(), tmp_path, "has version 2", "delta-version")


def test_a_package_of_another_base(shared: Shared, tmp_path: Path) -> None:
    content = shared.content()
    content.index["base"] = "0" * 64
    refuse(shared, content.to_bytes(), tmp_path, "starts from", "delta-base")


def test_a_manifest_that_this_runtime_cannot_open(shared: Shared, tmp_path: Path) -> None:
    content = shared.content()
    content.describe("manifest.json", b'{"schema_version": 99}')
    refuse(shared, content.to_bytes(), tmp_path, "", "manifest-version")


def test_a_file_of_the_folder_is_not_taken_for_one_of_the_package(
    shared: Shared, tmp_path: Path
) -> None:
    """Bytes that lie in the folder and are not of the package are not read."""
    old = tmp_path / "old"
    shutil.copytree(shared.old, old)
    (old / "secret").write_bytes(b"secret")
    content = shared.content()
    content.describe("checkpoint", b"secret")
    del content.members["checkpoint"]
    (tmp_path / "update").write_bytes(content.to_bytes())
    with pytest.raises(OdtpackError, match="lacks 'checkpoint'"):
        apply_update(old, tmp_path / "update", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def patched(data: bytes, name: str, size: int) -> bytes:
    """The archive whose directory and local header say that a file unpacks to another size."""
    changed = bytearray(data)
    for signature, at_size, at_name in ((b"PK\x03\x04", 22, 30), (b"PK\x01\x02", 24, 46)):
        at = -1
        while (at := data.find(signature, at + 1)) >= 0:
            if data[at + at_name : at + at_name + len(name)] == name.encode():
                changed[at + at_size : at + at_size + 4] = struct.pack("<I", size)
    assert bytes(changed) != data
    return bytes(changed)


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """What Python allocates in the block stays below so many bytes at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


def test_a_bomb_is_cut_off_at_what_it_declares(shared: Shared, tmp_path: Path) -> None:
    """200 MB of zeros in 200 kB: memory is not taken for them, nor disk beyond what it says."""
    content = shared.content()
    content.describe("checkpoint", bytes(1000))
    content.members["checkpoint"] = bytes(200 * 2**20)
    data = patched(content.to_bytes(), "checkpoint", 1000)
    with memory_below(10 * 2**20):
        refuse(shared, data, tmp_path, "'checkpoint' cannot be unpacked")


def test_a_bomb_that_says_so_needs_the_room(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = shared.content()
    content.describe("checkpoint", bytes(200 * 2**20))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100 * 2**20))
    refuse(shared, content.to_bytes(), tmp_path, "are free", "package-not-written")


def test_an_index_that_is_a_bomb(shared: Shared, tmp_path: Path) -> None:
    content = shared.content()
    content.index["files"] += [entry(f"{'f' * 200}{i}", b"") for i in range(10_000)]
    refuse(shared, content.to_bytes(), tmp_path, "its index is too large")
    content = shared.content()
    content.index["more"] = "x" * 10**6
    data = patched(content.to_bytes(), INDEX_NAME, 1000)
    refuse(shared, data, tmp_path, "cannot be unpacked")
    deep = shared.content()
    text = b"[" * 100_000
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(INDEX_NAME, text)
        for name, member in deep.members.items():
            archive.writestr(name, member)
    refuse(shared, stream.getvalue(), tmp_path, "in its index, ")


def test_a_directory_that_is_a_bomb(shared: Shared, tmp_path: Path) -> None:
    """zipfile would read all of it, whatever its size."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for number in range(20_000):
            archive.writestr(zipfile.ZipInfo(str(number)), b"")
    with memory_below(10 * 2**20):
        refuse(shared, stream.getvalue(), tmp_path, "directory is too large")


def test_encrypted_and_cut_off(shared: Shared, tmp_path: Path) -> None:
    data = shared.update
    encrypted = bytearray(data)
    for signature, at_flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := data.find(signature, at + 1)) >= 0:
            encrypted[at + at_flags] |= 1
    refuse(shared, bytes(encrypted), tmp_path, "cannot be unpacked")
    for size in (0, 3, 22, len(data) // 2, len(data) - 1):
        refuse(shared, data[:size], tmp_path, "cannot be read as a zip file")
    refuse(shared, b"ODTDELTA" + bytes(200), tmp_path, "cannot be read as a zip file")
