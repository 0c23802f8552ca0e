"""Deltas that were damaged, or written to do harm."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odtpack.update.delta import write_delta
from odtpack_runtime import OdtpackError
from odtpack_runtime.delta import apply_delta
from odtpack_runtime.delta_format import (
    CHUNK,
    COPY_STEP,
    MAX_ENTRIES,
    Codec,
    DeltaReader,
    Entry,
    Header,
    Kind,
)
from tests.packages.samples import build, small_model, tree, with_values

_FIXED = struct.Struct("<8sHHIQ32s32s")
MUTATIONS = 500


@dataclasses.dataclass(frozen=True)
class Shared:
    old: Path
    new: Path
    delta: bytes
    header: Header
    payloads: dict[str, bytes]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    folder = tmp_path_factory.mktemp("hostile")
    old = build(folder / "old")
    new = build(folder / "new", with_values(small_model(hidden=4), "conv1.weight"), nominal=True)
    write_delta(old, new, folder / "delta")
    data = (folder / "delta").read_bytes()
    header = DeltaReader(io.BytesIO(data), "delta").header
    assert {entry.kind for entry in header.entries} == set(Kind)
    payloads, at = {}, len(header.to_bytes())
    for entry in header.entries:
        payloads[entry.path] = data[at : at + entry.stored]
        at += entry.stored
    return Shared(old, new, data, header, payloads)


def sealed(data: bytearray) -> bytes:
    """The delta with the sizes and the digest that its header should have, where it has one."""
    if len(data) < _FIXED.size:
        return bytes(data)
    magic, version, count, length, _, old, new = _FIXED.unpack_from(data)
    data[: _FIXED.size] = _FIXED.pack(magic, version, count, length, len(data), old, new)
    if _FIXED.size <= length - 32 <= len(data) - 32:
        data[length - 32 : length] = hashlib.sha256(data[: length - 32]).digest()
    return bytes(data)


def mutated(delta: bytes, number: int) -> bytes:
    """One of endless variants: bits, bytes, ranges, ends; half of them with a right digest."""
    rng = random.Random(number)
    data = bytearray(delta)
    head = _FIXED.unpack_from(delta)[3]
    for _ in range(rng.randint(1, 3)):
        # Every other change hits the header, which is small beside the payloads.
        at = rng.randrange(head if rng.random() < 0.5 and len(data) > head else max(len(data), 1))
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.choice([0, 1, 2, 127, 128, 255])
        elif kind == 2:
            del data[at : at + rng.randint(1, 40)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 40))
        elif kind == 4:
            data[at : at + 8] = struct.pack(
                "<Q", rng.choice([0, 1, 2**31, 2**48, 2**63, 2**64 - 1])
            )
        else:
            del data[rng.randrange(len(data) + 1) :]
    return sealed(data) if number % 2 else bytes(data)


def test_mutated_deltas_are_refused_or_right(shared: Shared, tmp_path: Path) -> None:
    before, wanted = tree(shared.old), tree(shared.new)
    codes: dict[str, int] = {}
    file, out = tmp_path / "delta", tmp_path / "out"
    for number in range(MUTATIONS):
        file.write_bytes(mutated(shared.delta, number))
        try:
            apply_delta(shared.old, file, out)
        except OdtpackError as error:
            codes[error.code] = codes.get(error.code, 0) + 1
            assert not out.exists(), number
        else:
            assert tree(out) == wanted, number
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
        assert [path.name for path in tmp_path.iterdir()] == ["delta"], number
    assert tree(shared.old) == before
    assert sum(codes.values()) > 0.9 * MUTATIONS
    assert codes.keys() <= {"delta-damaged", "delta-version", "delta-base", "package-not-written",
                            "manifest-invalid"}  # fmt: skip


def crafted(
    shared: Shared,
    change: Callable[[list[Entry], dict[str, bytes]], None] = lambda entries, payloads: None,
    **header: bytes,
) -> bytes:
    """A delta whose entries and payloads were changed, with everything else put right."""
    entries, payloads = list(shared.header.entries), dict(shared.payloads)
    change(entries, payloads)
    made = dataclasses.replace(shared.header, entries=tuple(entries), **header)
    return made.to_bytes() + b"".join(payloads[entry.path] for entry in entries)


def refuse(
    shared: Shared, data: bytes, tmp_path: Path, words: str, code: str = "delta-damaged"
) -> None:
    (tmp_path / "delta").write_bytes(data)
    before = tree(shared.old)
    for out in (tmp_path / "out", None):
        with pytest.raises(OdtpackError) as caught:
            apply_delta(shared.old, tmp_path / "delta", out)
        assert caught.value.code == code, caught.value
        assert words in caught.value.what
        assert caught.value.hint
    assert tree(shared.old) == before
    assert [path.name for path in tmp_path.iterdir()] == ["delta"]


def replace(path: str, /, **fields: object) -> Callable[[list[Entry], dict[str, bytes]], None]:
    def change(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        index = next(i for i, entry in enumerate(entries) if entry.path == path)
        entries[index] = dataclasses.replace(entries[index], **fields)
        if "path" in fields:
            payloads[entries[index].path] = payloads[path]

    return change


def patched(shared: Shared) -> str:
    return next(entry.path for entry in shared.header.entries if entry.kind is Kind.PATCH)


def test_crafted_as_it_is_gives_the_new_package(shared: Shared, tmp_path: Path) -> None:
    assert crafted(shared) == shared.delta
    (tmp_path / "delta").write_bytes(crafted(shared))
    apply_delta(shared.old, tmp_path / "delta", tmp_path / "out")
    assert tree(tmp_path / "out") == tree(shared.new)


@pytest.mark.parametrize(
    "name",
    [
        "../checkpoint",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "C:x",
        "..",
        ".",
        "",
        "a\0b",
        "a\nb",
        "x" * 256,
    ],
    ids=ascii,
)
def test_names_that_lead_elsewhere(shared: Shared, tmp_path: Path, name: str) -> None:
    data = crafted(shared, replace("checkpoint", path=name))
    with pytest.raises(OdtpackError, match=r"plain name|control|bytes|sorted"):
        DeltaReader(io.BytesIO(data), "delta")

    # Sorted, so that nothing but the name is wrong.
    def resort(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        replace("checkpoint", path=name)(entries, payloads)
        entries.sort(key=lambda entry: entry.path)

    refuse(shared, crafted(shared, resort), tmp_path, "the name")
    refuse(shared, crafted(shared, replace(patched(shared), source=name)), tmp_path, "the name")


def test_entries_that_occur_twice(shared: Shared, tmp_path: Path) -> None:
    def twice(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        entries.insert(0, entries[0])

    refuse(shared, crafted(shared, twice), tmp_path, "occurs twice")

    def by_case(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        entries.insert(0, dataclasses.replace(entries[0], path=entries[0].path.upper()))
        payloads[entries[0].path] = payloads[entries[1].path]

    refuse(shared, crafted(shared, by_case), tmp_path, "one name on some systems")


def test_a_file_more_or_less_than_the_manifest_lists(shared: Shared, tmp_path: Path) -> None:
    def less(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        entries.remove(next(entry for entry in entries if entry.path == "checkpoint"))

    def more(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        entries.append(dataclasses.replace(entries[0], path="zzz"))
        payloads["zzz"] = payloads[entries[0].path]

    refuse(shared, crafted(shared, less), tmp_path, "disagree about 'checkpoint'")
    refuse(shared, crafted(shared, more), tmp_path, "disagree about 'zzz'")
    refuse(
        shared, crafted(shared, replace("checkpoint", sha256=bytes(32))), tmp_path, "disagree about"
    )


def test_a_manifest_of_another_package(shared: Shared, tmp_path: Path) -> None:
    refuse(shared, crafted(shared, new=bytes(32)), tmp_path, "one manifest")
    (tmp_path / "delta").write_bytes(crafted(shared, old=bytes(32)))
    with pytest.raises(OdtpackError) as caught:
        apply_delta(shared.old, tmp_path / "delta", tmp_path / "out")
    assert caught.value.code == "delta-base"


def test_sources_outside_the_package(shared: Shared, tmp_path: Path) -> None:
    """A file that lies in the folder and is not of the package is not read either."""
    data = crafted(shared, replace(patched(shared), source="secret"))
    refuse(shared, data, tmp_path, "no file of the package")


@pytest.mark.parametrize("size", [0, 1, 2**48, 2**48 + 1, 2**63])
@pytest.mark.parametrize("field", ["size", "unpacked", "stored"])
@pytest.mark.parametrize("path", ["checkpoint", "manifest.json", "optimizer_model.onnx"])
def test_sizes_that_lie(shared: Shared, tmp_path: Path, path: str, field: str, size: int) -> None:
    (entry,) = (entry for entry in shared.header.entries if entry.path == path)
    if getattr(entry, field) == size:
        return
    # No disk has room for the largest size that a file may have; a whole file is as large as
    # its payload unpacks to.
    fits = (field, size) == ("size", 2**48) and entry.kind is not Kind.WHOLE
    code = "package-not-written" if fits else "delta-damaged"
    refuse(shared, crafted(shared, replace(path, **{field: size})), tmp_path, "", code)


def whole(shared: Shared, payload: bytes, unpacked: int) -> bytes:
    """A delta whose checkpoint is a whole file with this payload."""

    def change(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        payloads["checkpoint"] = payload
        replace(
            "checkpoint", kind=Kind.WHOLE, codec=Codec.ZLIB, source="", stored=len(payload),
            unpacked=unpacked, size=unpacked,
        )(entries, payloads)  # fmt: skip

    return crafted(shared, change)


def consistent(shared: Shared, data: bytes, size: int, digest: bytes) -> bytes:
    """The same delta with a manifest that agrees with what it says of the checkpoint."""
    content = json.loads((shared.new / "manifest.json").read_bytes())
    content["files"]["checkpoint"].update(size_bytes=size, sha256=digest.hex())
    text = json.dumps(content).encode()
    reader = DeltaReader(io.BytesIO(data), "delta")
    payloads, at = [], len(reader.header.to_bytes())
    entries = []
    for entry in reader.header.entries:
        payload = data[at : at + entry.stored]
        at += entry.stored
        if entry.path == "manifest.json":
            entry = Entry(entry.path, Kind.WHOLE, Codec.STORED, "", len(text),  # noqa: PLW2901
                          hashlib.sha256(text).digest(), len(text), len(text))  # fmt: skip
            payload = text
        if entry.path == "checkpoint":
            entry = dataclasses.replace(entry, size=size, sha256=digest)  # noqa: PLW2901
        entries.append(entry)
        payloads.append(payload)
    new = hashlib.sha256(text).digest()
    return Header(reader.header.old, new, tuple(entries)).to_bytes() + b"".join(payloads)


def test_a_bomb_is_cut_off_at_what_it_declares(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 MB of zeros in 200 kB: neither memory nor disk is taken for more than declared."""
    bomb = zlib.compress(bytes(200 * 2**20), 9)
    data = consistent(shared, whole(shared, bomb, 1000), 1000, bytes(32))
    unpacked = []

    class Counting:
        def __init__(self) -> None:
            self._real = original()

        def decompress(self, *arguments: Any) -> bytes:
            piece: bytes = self._real.decompress(*arguments)
            unpacked.append(len(piece))
            return piece

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    original = zlib.decompressobj
    monkeypatch.setattr("odtpack_runtime.delta_format.zlib.decompressobj", Counting)
    tracemalloc.start()
    refuse(shared, data, tmp_path, "more than it declares")
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()
    # The bomb is given up within its first portion, and no other file is so large.
    assert max(unpacked) <= CHUNK
    assert sum(unpacked) < 4 * CHUNK


def test_what_cannot_be_unpacked_to_that_much(shared: Shared, tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(1000), 9)
    refuse(shared, whole(shared, bomb, 2**40), tmp_path, "cannot unpack to")


def test_more_than_the_disk_holds(shared: Shared, tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(1000), 9) * 2**16
    size = len(bomb) * 1000
    data = consistent(shared, whole(shared, bomb, size), size, bytes(32))
    import shutil

    if shutil.disk_usage(tmp_path).free < size:
        refuse(shared, data, tmp_path, "are free", "package-not-written")
    else:
        refuse(shared, data, tmp_path, "follow the end")


@pytest.mark.parametrize(
    ("payload", "unpacked", "words"),
    [
        (zlib.compress(bytes(1000)) + b"x", 1000, "follow the end"),
        (zlib.compress(bytes(1000))[:-1], 1000, "cannot be unpacked"),
        (zlib.compress(bytes(1000))[:-5], 1000, "cannot be unpacked"),
        (zlib.compress(bytes(999)), 1000, "does not unpack to"),
        (zlib.compress(bytes(1001)), 1000, "more than it declares"),
        (zlib.compress(bytes(1000)), 1000, "does not become"),
        (b"no zlib at all", 1000, "cannot be unpacked"),
    ],
    ids=["more", "checksum", "short", "less", "beyond", "digest", "noise"],
)
def test_payloads(
    shared: Shared, tmp_path: Path, payload: bytes, unpacked: int, words: str
) -> None:
    data = consistent(shared, whole(shared, payload, unpacked), unpacked, bytes(32))
    refuse(shared, data, tmp_path, words)


def patch(shared: Shared, steps: bytes, result: bytes) -> bytes:
    """A delta whose checkpoint is patched by these steps."""

    def change(entries: list[Entry], payloads: dict[str, bytes]) -> None:
        payloads["checkpoint"] = steps
        replace(
            "checkpoint", kind=Kind.PATCH, codec=Codec.STORED, source="checkpoint",
            stored=len(steps), unpacked=len(steps), size=len(result),
        )(entries, payloads)  # fmt: skip

    digest = hashlib.sha256(result).digest()
    return consistent(shared, crafted(shared, change), len(result), digest)


def test_steps(shared: Shared, tmp_path: Path) -> None:
    base = (shared.old / "checkpoint").read_bytes()
    end = len(base)
    fine = COPY_STEP.pack(10, 5, 2) + b"ab" + COPY_STEP.pack(0, 3, 0)
    result = base[10:15] + b"ab" + base[:3]
    (tmp_path / "delta").write_bytes(patch(shared, fine, result))
    apply_delta(shared.old, tmp_path / "delta", tmp_path / "out")
    assert (tmp_path / "out" / "checkpoint").read_bytes() == result
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    (tmp_path / "out").rmdir()
    for steps, words in [
        (COPY_STEP.pack(end, 1, 0), "out of its source"),
        (COPY_STEP.pack(2**64 - 1, 2, 0), "out of its source"),
        (COPY_STEP.pack(0, 0, 0) + fine, "or nowhere"),
        (COPY_STEP.pack(0, 5, 3) + b"ab", "cut off"),
        (fine + b"xy", "cut off"),
        (fine + COPY_STEP.pack(0, 1, 0), "larger than it declares"),
        (COPY_STEP.pack(10, 5, 0), "does not become"),
    ]:
        refuse(shared, patch(shared, steps, result), tmp_path, words)


def test_copies_do_not_multiply(shared: Shared, tmp_path: Path) -> None:
    """A few steps that copy the same range again and again would fill any disk."""
    base = (shared.old / "checkpoint").read_bytes()
    steps = COPY_STEP.pack(0, len(base), 0) * 50
    refuse(shared, patch(shared, steps, base * 50), tmp_path, "larger than its parts")


def test_header_fields(shared: Shared, tmp_path: Path) -> None:
    data = shared.delta
    magic, version, count, length, total, old, new = _FIXED.unpack_from(data)

    def with_fields(*fields: object) -> bytes:
        return sealed(bytearray(_FIXED.pack(*fields) + data[_FIXED.size :]))

    refuse(shared, b"", tmp_path, "does not begin")
    refuse(shared, b"PK" + data[2:], tmp_path, "does not begin")
    refuse(shared, data[:50], tmp_path, "cut off")
    refuse(shared, data[:-1], tmp_path, "and says")
    refuse(shared, data + b"x", tmp_path, "and says")
    refuse(shared, with_fields(magic, 2, count, length, total, old, new), tmp_path, "version 2",
           "delta-version")  # fmt: skip
    for entries in (0, count - 1, count + 1, MAX_ENTRIES + 1, 65535):
        refuse(shared, with_fields(magic, version, entries, length, total, old, new), tmp_path, "")
    for size in (0, _FIXED.size, length - 1, length + 1, len(data) + 1, 2**32 - 1):
        refuse(shared, with_fields(magic, version, count, size, total, old, new), tmp_path, "")
    flipped = bytearray(data)
    flipped[_FIXED.size] ^= 1
    refuse(shared, bytes(flipped), tmp_path, "digest")
