"""Hostile checkpoints: lengths, offsets, vtables, shared tables, lost digests, counts."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.hostile.walk import Place, field_entry, places
from tests.model_text import drawn
from tests.runtime.checkpoint_samples import Foreign, sample

CORRUPT = ("checkpoint-corrupt",)
Made = tuple[str, bytes, tuple[str, ...]]


def written(data: CheckpointData) -> bytes:
    """The bytes of a checkpoint as odtpack writes it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        write_checkpoint(path, data)
        return path.read_bytes()


def plain() -> CheckpointData:
    """Parameters alone, as a package holds them."""
    rng = np.random.default_rng(1)
    shapes = {"fc1.weight": (3, 4), "fc1.bias": (3,)}
    return CheckpointData(drawn(rng, **shapes), {})


def checkpoints() -> Iterator[Made]:
    """Yield checkpoints, and the codes with which they are refused."""
    whole, bare = written(sample()), written(plain())
    nominal = written(CheckpointData(sample().trainable, {}, nominal=True))
    for name, data, codes in (
        *(("whole", whole, ()), ("plain", bare, ()), ("nominal", nominal, ())),
        *_bytes(whole), *_numbers(whole, "whole"), *_numbers(bare, "plain"),
        *_lost_digests(whole, bare), *_foreign(), *_costly(),
    ):  # fmt: skip
        yield f"checkpoint_{name}", data, codes


def _patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def _bytes(data: bytes) -> Iterator[Made]:
    for name, wrong in {
        "empty": b"", "seven_bytes": data[:7], "eight_bytes": data[:8], "zeros": bytes(len(data)),
        "ones": b"\xff" * len(data), "first_four_zero": _patched(data, 0, bytes(4)),
        "other_identifier": _patched(data, 4, b"ORTM"), "zip": b"PK\3\4" * 64,
        "json": b'{"a": [1, 2, 3]}',
    }.items():  # fmt: skip
        yield name, wrong, CORRUPT
    for part in range(1, 16):
        yield f"cut_{part}_of_16", data[: len(data) * part // 16], CORRUPT
    yield "last_byte_cut", data[:-1], CORRUPT
    yield "second_half_zero", data[: len(data) // 2] + bytes(len(data) - len(data) // 2), CORRUPT
    for place in places(data):
        at = place.position + 4
        if place.kind == "length" and data[at - 4 : at] != bytes(4) and "[1]" not in place.path:
            tensor = place.path.startswith("root.1.") or place.path.count("[") == 3
            doc_string = tensor and place.path.endswith("].1")  # the digest of the whole counts
            changed = _patched(data, at, bytes([data[at] ^ 1]))
            yield f"value_{_words(place)}", changed, () if doc_string else CORRUPT


_HOSTILE = {
    "length": (0x40000001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x20000000),
    "offset": (0xFFFFFFFF, 0x80000000, 0x7FFFFFFF), "vtable offset": (0x7FFFFFFF, 0x80000000, 0),
    "vtable size": (0, 3, 0xFFFF), "table size": (0, 3), "field": (0xFFFF, 2),
}  # fmt: skip


def _numbers(data: bytes, which: str) -> Iterator[Made]:
    """Each number that leads somewhere, with values that lead out of the file."""
    seen: set[int] = set()
    for place in places(data):
        if place.position in seen or place.path.count("[1]"):
            continue  # of like tables one is enough
        seen.add(place.position)
        values = _HOSTILE[place.kind]
        # All of them where the table is a large one, one elsewhere.
        for value in values if place.path.count("[") == 0 else values[:1]:
            changed = struct.pack("<I" if place.width == 4 else "<H", value)
            if changed == data[place.position : place.position + place.width]:
                continue
            name = f"{which}_{_words(place)}_{value:x}"
            yield name, _patched(data, place.position, changed), CORRUPT


def _words(place: Place) -> str:
    path = place.path.replace(".", "_").replace("[", "_").replace("]", "")
    return f"{place.kind.replace(' ', '_')}_{path}"


def _hidden(data: bytes, *entries: int) -> bytes:
    """With fields whose vtable says that they are not there."""
    for entry in entries:
        assert data[entry : entry + 2] != bytes(2)
        data = _patched(data, entry, bytes(2))
    return data


def _lost_digests(whole: bytes, bare: bytes) -> Iterator[Made]:
    """Files of odtpack that lost their digest, and more with it."""
    for name, data in (("whole", whole), ("plain", bare)):
        digest, module = field_entry(data, 4), field_entry(data, 1)
        trainable = field_entry(data, 1, 0)
        (doc_string,) = (
            place.position for place in places(data) if place[:2] == ("field", "root.1.0[0].1")
        )
        yield f"{name}_digest_hidden", _hidden(data, digest), CORRUPT
        yield f"{name}_parameters_hidden", _hidden(data, trainable), CORRUPT
        yield f"{name}_module_hidden", _hidden(data, module), CORRUPT
        # The digest of the whole says that it is whole.
        yield f"{name}_doc_strings_hidden", _hidden(data, doc_string), ()
        yield f"{name}_digest_and_parameters_hidden", _hidden(data, digest, trainable), CORRUPT
        yield f"{name}_digest_and_doc_strings_hidden", _hidden(data, digest, doc_string), CORRUPT
        shorter = _patched(data, _vtable(data), struct.pack("<H", 4 + 2 * 4))
        yield f"{name}_digest_out_of_vtable", shorter, CORRUPT
        length = next(p.position for p in places(data) if p == ("length", "root.4", p.position, 4))
        yield f"{name}_digest_length_0", _patched(data, length, bytes(4)), CORRUPT
    for name, fields in {
        "properties": (3,), "optimizer": (2,), "digest_and_optimizer": (2, 4),
        "digest_and_properties": (3, 4),
    }.items():  # fmt: skip
        hidden = _hidden(whole, *(field_entry(whole, field) for field in fields))
        yield f"whole_{name}_hidden", hidden, CORRUPT


def _vtable(data: bytes) -> int:
    root = struct.unpack_from("<I", data)[0]
    return int(root - struct.unpack_from("<i", data, root)[0])


def _foreign() -> Iterator[Made]:
    """What another program wrote: the reference, or somebody who means harm."""

    def of(*tensors: dict[str, object], **options: object) -> bytes:
        made = Foreign()
        return made.finish([made.tensor(**each) for each in tensors], **options)  # type: ignore[arg-type]

    yield "foreign_without_digest", of({}), ()
    yield "foreign_no_parameters", of(), ()
    yield "foreign_nominal", of({"dims": (), "raw": None}, nominal=True), ()
    for name, version in {"1": 1, "0": 0, "negative": -1}.items():
        yield f"foreign_version_{name}", of({}, version=version), ("checkpoint-version",)
    for name, tensor in {
        "no_name": {"name": ""}, "dims_product_2_62": {"dims": (2**31, 2**31)},
        "dims_overflow": {"dims": (2**32, 2**32)}, "dims_overflow_to_2": {"dims": (2**63 - 1, 4)},
        "dims_negative": {"dims": (-2,)}, "dims_two_negatives": {"dims": (-1, -2)},
        "dims_of_33": {"dims": (1,) * 32 + (2,)}, "dims_more": {"dims": (3,)},
        "dims_less": {"dims": (1,)}, "raw_odd": {"raw": bytes(7)}, "raw_absent": {"raw": None},
        "raw_longer": {"raw": bytes(12)}, "external_without_file": {"offset": 0},
        "bool_2": {"code": 9, "raw": b"\2\1"},
    }.items():  # fmt: skip
        yield f"foreign_{name}", of(tensor), CORRUPT
    # Zero times anything is nothing, in memory too.
    yield "foreign_zero_and_2_49", of({"dims": (0, 2**49), "raw": b""}), CORRUPT
    for code in (0, -1, 14, 15, 16, 17, 23, 99, 2**31 - 1):
        yield f"foreign_type_{code}", of({"code": code}), ("checkpoint-dtype", *CORRUPT)
    yield "foreign_strings", of({"code": 8}), ("checkpoint-dtype", *CORRUPT)
    yield "foreign_name_twice", of({}, {}), CORRUPT
    yield "foreign_table_twice", shared_table(2), CORRUPT
    made = Foreign()
    one = made.tensor()
    yield "foreign_trainable_and_frozen", made.finish([one], [one]), CORRUPT
    made = Foreign()
    one, other = made.tensor("a"), made.tensor("a")
    yield "foreign_name_trainable_and_frozen", made.finish([one], [other]), CORRUPT
    yield "foreign_doc_string_of_ours", of({"doc": "sha256:" + "0" * 64}), CORRUPT
    yield "foreign_doc_string", of({"doc": "a note"}), ()
    yield from _foreign_groups()
    yield from _foreign_properties()
    for name, raw in (("not_utf8", b"\xff\xfe"), ("overlong", b"\xc0\xaf"),
                      ("surrogate", b"\xed\xa0\x80")):  # fmt: skip
        data = of({"name": "q" * len(raw)})
        yield f"foreign_name_{name}", data.replace(b"q" * len(raw) + b"\0", raw + b"\0"), CORRUPT
    data = of({"name": "qqq"})
    yield "foreign_text_not_ended", _patched(data, data.index(b"qqq\0") + 3, b"x"), CORRUPT


def _foreign_groups() -> Iterator[Made]:
    def of(
        *groups: tuple[str, int], moments: Sequence[str] = (), name: str = "w", times: int = 1,
        **of_moment: Any,
    ) -> bytes:  # fmt: skip
        made = Foreign()
        entries = []
        for label, step in groups:
            tensors = [made.tensor(each, **of_moment) for each in moments]
            states = [made.state(name, tensors)] if moments else []
            entries.append(made.group(label, states, step))
        vector = made.vector(entries * times)
        return made.finish([made.tensor()], groups=vector)

    first = ["momentum0"]
    yield "groups_one", of(("group0", 1), moments=[*first, "momentum1"]), ()
    yield "groups_name", of(("group1", 1)), CORRUPT
    yield "groups_step_negative", of(("group0", -1)), CORRUPT
    yield "groups_steps_differ", of(("group0", 1), ("group1", 2)), CORRUPT
    yield "groups_moment_twice", of(("group0", 1), ("group1", 1), moments=first), CORRUPT
    yield "groups_of_no_parameter", of(("group0", 1), moments=first, name="v"), CORRUPT
    yield "groups_moment_name", of(("group0", 1), moments=["momentum1"]), CORRUPT
    other = of(("group0", 1), moments=first, dims=(3,), raw=bytes(12))
    yield "groups_moment_shape", other, CORRUPT
    yield "groups_table_twice", of(("group0", 1), times=2), CORRUPT


def _foreign_properties() -> Iterator[Made]:
    def of(kind: str, *names: str) -> bytes:
        made = Foreign()
        tables = []
        for name in names:
            label = made.b.CreateString(name)
            content = {"ints": ("Int64", 3), "floats": ("Float32", 0.5)}.get(kind)
            content = content or ("UOffsetTRelative", made.b.CreateString("text"))
            tables.append(made.table({0: ("UOffsetTRelative", label), 1: content}))
        number = ("ints", "floats", "strings").index(kind)
        bag = made.table({number: ("UOffsetTRelative", made.vector(tables))})
        return made.finish([made.tensor()], bag=bag)

    for kind in ("ints", "floats", "strings"):
        yield f"properties_{kind}", of(kind, "epoch"), ()
        yield f"properties_{kind}_proto", of(kind, "__proto__", "constructor", "toString"), ()
        yield f"properties_{kind}_twice", of(kind, "epoch", "epoch"), CORRUPT
        yield f"properties_{kind}_no_name", of(kind, ""), CORRUPT
        yield f"properties_{kind}_of_ours", of(kind, "odtpack.optimizer"), ()
        yield f"properties_{kind}_of_ours_schedule", of(kind, "odtpack.schedule"), ()


def shared_table(count: int) -> bytes:
    """A vector of so many offsets to one table: four bytes for each."""
    made = Foreign()
    return made.finish([made.tensor()] * count)


def many_tensors(count: int) -> bytes:
    """A checkpoint of so many empty tensors, which is whole."""
    made = Foreign()
    dims = made.b.CreateNumpyVector(np.array((0,), np.int64))
    empty = made.b.CreateByteVector(b"")
    tables = []
    for index in range(count):
        name = made.b.CreateString(f"p{index}")
        tables.append(
            made.table({0: ("UOffsetTRelative", name), 2: ("UOffsetTRelative", dims),
                        3: ("Int32", 1), 4: ("UOffsetTRelative", empty)}),
        )  # fmt: skip
    return made.finish(tables)


def _costly() -> Iterator[Made]:
    yield "offsets_to_one_table", shared_table(20_000), CORRUPT
    yield "tensors_5000", many_tensors(5_000), ()
