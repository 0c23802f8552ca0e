"""Checkpoints that are damaged or made to do harm: an OdtpackError, and no other end."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from odtpack_runtime.checkpoint.format import CheckpointData, parse_checkpoint, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.refused import refused
from tests.runtime.checkpoint_samples import Foreign, assert_same, sample


def _shared_data(f: Foreign) -> bytes:
    """Three tensors of 400 bytes that are one: memory that the file does not pay for."""
    one = f.b.CreateByteVector(bytes(400))
    dims = f.b.CreateNumpyVector(np.array([100], np.int64))
    names = [f.b.CreateString(name) for name in "abc"]
    return f.finish([f.table({0: name, 2: dims, 4: one, 3: ("Int32", 1)}) for name in names])


def _shared_text(f: Foreign) -> bytes:
    """Properties whose values are one long text."""
    text = f.b.CreateString("x" * 1000)
    names = [f.b.CreateString(name) for name in "abc"]
    entries = f.vector([f.table({0: name, 1: text}) for name in names])
    return f.finish([], bag=f.table({2: entries}))


def _property_twice(f: Foreign) -> bytes:
    labels = [f.b.CreateString("p") for _ in range(2)]
    entries = f.vector([f.table({0: label, 1: ("Int64", 1)}) for label in labels])
    return f.finish([], bag=f.table({0: entries}))


Make = Callable[[Foreign], bytes]


def _tensor(**of: Any) -> Make:
    return lambda f: f.finish([f.tensor(**of)])


def _groups(*groups: dict[str, Any]) -> Make:
    return lambda f: f.finish([f.tensor()], groups=f.vector([f.group(**each) for each in groups]))


def _states(names: str = "w", **states: dict[str, Any] | None) -> Make:
    """A file of these parameters, with a moment or none of some."""

    def make(f: Foreign) -> bytes:
        entries = [
            f.state(of, [] if each is None else [f.tensor(**{"name": "momentum0"} | each)])
            for of, each in states.items()
        ]
        return f.finish([f.tensor(n) for n in names], groups=f.vector([f.group(states=entries)]))

    return make


def _two_groups(f: Foreign, first: str, second: str) -> bytes:
    tensors = [f.tensor(name) for name in "wvu"]
    groups = [
        f.group(f"group{i}", [f.state(name, [f.tensor("momentum0")])])
        for i, name in enumerate((first, second))
    ]
    return f.finish(tensors, groups=f.vector(groups))


CORRUPT: dict[str, Make] = {
    "too short": _tensor(raw=bytes(7)), "too long": _tensor(raw=bytes(9)),
    "no data": _tensor(raw=None), "negative dimension": _tensor(dims=(-1, -2)),
    "huge dimensions": _tensor(dims=(2**62, 2**62)),
    "huge and empty": _tensor(dims=(0, 2**62), raw=b""),
    "rank 33": _tensor(dims=(1,) * 33, raw=bytes(4)),
    "bool 2": lambda f: f.finish([], [f.tensor(code=9, raw=b"\x02\x00")]),
    "no name": _tensor(name=""),
    "twice": lambda f: f.finish([f.tensor(), f.tensor()]),
    "trainable and frozen": lambda f: f.finish([f.tensor()], [f.tensor()]),
    "shared data": _shared_data, "shared text": _shared_text,
    "external without flag": _tensor(raw=None, offset=0),
    "external in memory": lambda f: f.finish([f.tensor(raw=None, offset=0)], external=True),
    "negative offset": _tensor(raw=None, offset=-2),
    "nominal with a value": lambda f: f.finish([f.tensor()], nominal=True),
    "other group": _groups({"name": "other"}), "two groups": _groups({}, {}),
    "groups in another order": _groups({"name": "group1"}, {"name": "group0"}),
    "groups at different steps": _groups({}, {"name": "group1", "step": 2}),
    "a parameter in two groups": lambda f: _two_groups(f, "w", "w"),
    "a parameter in no group": lambda f: _two_groups(f, "w", "v"),
    "moment of another rank": _states(w={"dims": (2, 1)}),
    "moment of another length": _states(w={"dims": (3,), "raw": bytes(12)}),
    "negative step": _groups({"step": -1}), "state of nothing": _states(v={}),
    "moment of another shape": _states(w={"dims": (1, 2)}),
    "moment of another name": _states(w={"name": "momentum1"}),
    "uneven moments": _states("wv", w={}, v=None), "state of some": _states("wv", w={}),
    "property twice": _property_twice,
    "name not UTF-8": lambda f: f.finish([f.tensor(name="ä")]).replace(b"\xc3\xa4", b"\xc3\xc3"),
    "another identifier": lambda f: f.finish([f.tensor()]).replace(b"ODTC", b"ORTM"),
    "empty": lambda f: b"", "text": lambda f: b"this is not a checkpoint, not at all",
}  # fmt: skip
OTHER = {
    "version 1": ("checkpoint-version", lambda f: f.finish([f.tensor()], version=1)),
    "version -1": ("checkpoint-version", lambda f: f.finish([f.tensor()], version=-1)),
    "strings": ("checkpoint-dtype", _tensor(code=8)),
    "bfloat16": ("checkpoint-dtype", _tensor(code=16, raw=bytes(4))),
    "unknown type": ("checkpoint-dtype", _tensor(code=999)),
    "negative type": ("checkpoint-dtype", _tensor(code=-1)),
}
WRONG = {name: ("checkpoint-corrupt", make) for name, make in CORRUPT.items()} | OTHER


@pytest.mark.parametrize(("code", "make"), WRONG.values(), ids=list(WRONG))
def test_wrong_files_are_refused(code, make):
    with refused(code, r"some\.ckpt"):
        parse_checkpoint(make(Foreign()), "some.ckpt")


def _outcome(data: bytes) -> CheckpointData | None:
    """The contents, or None for a refusal; any other exception fails the test."""
    try:
        return parse_checkpoint(data)
    except OdtpackError:
        return None


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "c"
    write_checkpoint(path, sample())
    return path.read_bytes()


def test_no_truncation_is_read(small):
    assert _outcome(small) is not None
    for length in range(len(small)):
        assert _outcome(small[:length]) is None, length


def test_flipped_bits_are_refused_or_harmless(small):
    """Whatever loads holds what was saved: damage that is read changed nothing that is used."""
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(1500):
        data = bytearray(small)
        for position in rng.integers(0, len(small) * 8, rng.integers(1, 4)):
            data[position // 8] ^= 1 << (position % 8)
        found = _outcome(bytes(data))
        refused += found is None
        if found is not None:
            assert_same(found, sample())
    assert refused > 1000


def test_overwritten_words_are_refused_or_harmless(small):
    rng = np.random.default_rng(2)
    words = [b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4), b"\x00\x00\x00\x80"]
    for position in range(0, len(small) - 4, 4):
        word = words[rng.integers(len(words))]
        found = _outcome(small[:position] + word + small[position + 4 :])
        if found is not None:
            assert_same(found, sample())


def _patched(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1
    assert len(old) == len(new)
    return data.replace(old, new)


def test_the_message_names_what_differs(small):
    weight = sample().trainable["layer.W"].tobytes()
    changed = {
        "'layer.W'": _patched(small, weight, weight[:-1] + bytes([weight[-1] ^ 1])),
        "'b'": _patched(small, np.float32(2.5).tobytes(), np.float32(2.25).tobytes()),
        "names, shapes, optimizer state or properties": _patched(small, b"note", b"nope"),
        "'momentum0 of layer.W', 'momentum0 of b'": small.replace(
            np.float32(0.5).tobytes(), np.float32(0.25).tobytes()
        ),
    }
    for words, data in changed.items():
        with pytest.raises(OdtpackError, match=f"do not match their digests: .*{words}"):
            parse_checkpoint(data)


def test_a_digest_that_is_lost_is_missed(small):
    """Both are taken off by hand; with one of them left, the file is known to be damaged."""
    last = small.rindex(b"sha256:")
    whole = small[:last] + b"SHA256:" + small[last + 7 :]
    for data in (small.replace(b"sha256:", b"SHA256:"), whole):
        assert _outcome(data) is None


def test_appended_bytes_change_nothing(small):
    data = _outcome(small + bytes(100))
    assert data is not None
    assert_same(data, sample())


def test_files_that_cannot_be_read(tmp_path):
    with refused("checkpoint-not-found"):
        read_checkpoint(tmp_path / "absent")
    for path in (tmp_path, tmp_path / "a\0b"):
        with refused("checkpoint-unreadable"):
            read_checkpoint(path)
