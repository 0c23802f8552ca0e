"""Seeded damage to packages: what happens to files, and what somebody may do to them."""

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from odtpack_runtime.package.manifest import Manifest

HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**400, -(2**63), 1e308, "", "x" * 10_000, "../checkpoint",
    "/etc/passwd", "C:\\x", "checkpoint", "manifest.json", "nul", "a\0b", "é", [], {}, [[]],
    {"": {}}, [1] * 1000, "CHECKPOINT", "./checkpoint", "checkpoint/", "con.txt", "a" * 300,
    "checkpoint ", "\u202e", "%s", "{}", 0.5,
)  # fmt: skip
PATHS = (
    "..", "../checkpoint", "a/../../checkpoint", "/etc/passwd", "//host/share", "C:\\checkpoint",
    "C:checkpoint", "..\\checkpoint", "\\\\?\\checkpoint", "check\0point", "checkpoint/",
    "./checkpoint", "checkpoint/.", "", ".", " checkpoint", "checkpoint.", "checkpoint ",
    "CON", "nul.onnx", "com1", "LPT9.txt", "aux/checkpoint", "Training_Model.onnx",
    "TRAINING_MODEL.ONNX", "training_model.onnx", "manifest.json", "MANIFEST.JSON",
    "manifest.sig", "~/checkpoint", "$HOME/x", "check\npoint", "check\u202epoint", "a" * 300,
    "checkpoint:stream", "check*point", "check|point", "file:///etc/passwd", "/proc/self/mem",
    "/dev/stdin", "checkpo\u0131nt", "\u0000", "x/" * 200 + "x",
)  # fmt: skip
"""None is the path of the checkpoint: they leave the package, or name another file."""

Mutation = tuple[str, Callable[[Path], None]]


def damage(names: list[str], count: int, seed: int) -> Iterator[Mutation]:
    """Yield what damages a package of these files without anybody's intent, and crude tampering."""
    rng = random.Random(seed)
    fixed = [*_folders(names), *_paths(), *_duplicate_keys(), *_texts()]
    yield from fixed[:count]
    kinds = [_flip, _flip, _flip, _truncate, _truncate, _cut, _repeat, _insert, _append, _zero]
    for index in range(max(count - len(fixed), 0)):
        name = "manifest.json" if index % 2 else rng.choice(names)
        kind = kinds[index // 2 % len(kinds)]
        change = kind(rng)
        yield f"{kind.__name__[1:]} {name} {index}", _on_bytes(name, change)


def forged_manifests(content: dict[str, Any], count: int, seed: int) -> Iterator[bytes]:
    """Yield manifests with a wrong value somewhere, whose digest is right wherever it can be."""
    rng = random.Random(seed)
    places = list(_places(content))
    for _ in range(count):
        forged = copy.deepcopy(content)
        for place in rng.sample(places, rng.choice((1, 1, 2, 4))):
            *way, last = place
            at: Any = forged
            try:
                for step in way:
                    at = at[step]
                value = at[last]
            except (KeyError, IndexError, TypeError):
                continue
            if not isinstance(at, dict | list):  # text that an earlier forgery put there
                continue
            how = rng.randrange(4)
            if how == 0 and isinstance(at, dict):
                del at[last]
            elif how == 1 and isinstance(value, int):
                at[last] = value + rng.choice((-1, 1, 2**31, 2**62))
            elif how == 2 and isinstance(value, str) and value:
                at[last] = value[:-1] + chr(rng.randrange(32, 0x2FFF))
            else:
                at[last] = copy.deepcopy(rng.choice(HOSTILE_VALUES))
        yield seal(forged)


def seal(content: dict[str, Any]) -> bytes:
    """The text of a manifest with the digest that its content has, if it has any."""
    content = {key: value for key, value in content.items() if key != "digest"}
    try:
        return Manifest.from_json(json.dumps(content).encode(), "m").to_json().encode()
    except RuntimeError:
        return json.dumps(content).encode()


def edit(folder: Path, change: Callable[[dict[str, Any]], object], *, sealed: bool = True) -> bytes:
    """Change a package's manifest, which has no digest then if it is not to be sealed."""
    path = folder / "manifest.json"
    content = json.loads(path.read_bytes())
    content.pop("digest", None)
    change(content)
    data = seal(content) if sealed else json.dumps(content).encode()
    path.write_bytes(data)
    return data


def rehash(folder: Path, *names: str) -> None:
    """Make a package's manifest agree with its files as they are now."""

    def change(content: dict[str, Any]) -> None:
        files = content["files"]
        for entry in (*(file for file in files.values() if isinstance(file, dict)),
                      *files.get("extra", ())):  # fmt: skip
            if entry["path"] in names:
                data = (folder / entry["path"]).read_bytes()
                entry["size_bytes"] = len(data)
                entry["sha256"] = hashlib.sha256(data).hexdigest()

    edit(folder, change)


@contextmanager
def changed_model(folder: Path, name: str = "eval_model.onnx") -> Iterator[onnx.ModelProto]:
    """A model of a package, whose changes the manifest is told."""
    model = onnx.load_model(folder / name)
    yield model
    (folder / name).write_bytes(model.SerializeToString())
    rehash(folder, name)


def byte_changes(seed: int, count: int) -> Iterator[Callable[[bytes], bytes]]:
    """Yield changes of a file's bytes."""
    rng = random.Random(seed)
    kinds = [_flip, _flip, _flip, _truncate, _cut, _repeat, _insert, _append, _zero, _word]
    for index in range(count):
        yield kinds[index % len(kinds)](rng)


def _on_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def _flip(rng: random.Random) -> Callable[[bytes], bytes]:
    at, bit, more = rng.random(), rng.randrange(8), rng.choice((0, 0, 0, 3))

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for extra in range(more + 1):
            changed[(int(at * len(data)) + 17 * extra) % len(data)] ^= 1 << bit
        return bytes(changed)

    return change


def _truncate(rng: random.Random) -> Callable[[bytes], bytes]:
    at = rng.random()
    return lambda data: data[: int(at * len(data))]


def _cut(rng: random.Random) -> Callable[[bytes], bytes]:
    at, length = rng.random(), rng.choice((1, 2, 8, 64))
    return lambda data: data[: int(at * len(data))] + data[int(at * len(data)) + length :]


def _repeat(rng: random.Random) -> Callable[[bytes], bytes]:
    at, length = rng.random(), rng.choice((1, 8, 64, 512))

    def change(data: bytes) -> bytes:
        start = int(at * len(data))
        return data[: start + length] + data[start:]

    return change


def _insert(rng: random.Random) -> Callable[[bytes], bytes]:
    at, junk = rng.random(), rng.choice((b"\0", b"\xff\xff", b"{}", b"9" * 5000, b"[" * 3000, b" "))
    return lambda data: data[: int(at * len(data))] + junk + data[int(at * len(data)) :]


def _append(rng: random.Random) -> Callable[[bytes], bytes]:
    junk = rng.choice((b"\0", b"\n", b"}", b"\0" * 4096, b"PK\x05\x06" + b"\0" * 18))
    return lambda data: data + junk


def _zero(rng: random.Random) -> Callable[[bytes], bytes]:
    at, length = rng.random(), rng.choice((4, 32, 10**9))

    def change(data: bytes) -> bytes:
        start = int(at * len(data))
        return data[:start] + bytes(len(data[start : start + length])) + data[start + length :]

    return change


def _word(rng: random.Random) -> Callable[[bytes], bytes]:
    at = rng.random()
    word = rng.choice((b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\x01\0\0\0"))

    def change(data: bytes) -> bytes:
        start = int(at * len(data)) // 4 * 4
        return data[:start] + word + data[start + 4 :]

    return change


def _places(content: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        yield (*way, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*way, key))


def _folders(names: list[str]) -> Iterator[Mutation]:
    """Files that are gone, empty, swapped, links, folders or pipes, and files too many."""
    for name in names:
        yield f"{name} is gone", lambda folder, name=name: (folder / name).unlink()
        yield f"{name} is empty", lambda folder, name=name: (folder / name).write_bytes(b"")
        yield f"{name} is a link", lambda folder, name=name: _to_link(folder / name)
        yield f"{name} is a folder", lambda folder, name=name: _to_folder(folder / name)
        yield f"{name} is a pipe", lambda folder, name=name: _to_pipe(folder / name)
        yield f"{name} has another case", lambda folder, name=name: _upper(folder / name)
    for one in names:
        for other in names:
            if one < other:
                yield f"{one} is {other}", lambda folder, a=one, b=other: _swap(folder, a, b)
    for name in (
        "more.onnx", "training_model.onnx.data", "checkpoint.data", ".hidden", "manifest.json.bak",
        "__pycache__", ".odtpack-1-0123456789ab", "CHECKPOINT", "weights.pkl",
    ):  # fmt: skip
        yield f"{name} too many", lambda folder, name=name: (folder / name).write_bytes(b"x")
        yield f"folder {name} too many", lambda folder, name=name: (folder / name).mkdir()
        link = lambda folder, name=name: (folder / name).symlink_to("/etc/passwd")  # noqa: E731
        yield f"link {name} too many", link
    for plan in (
        b"", b"{}", b"[" * 9999, b'{"remove": 1, "move": []}', b'{"remove": [], "move": [3]}',
        b'{"remove": ["../../x"], "move": []}', b'{"remove": ["eval_model.onnx"], "move": ["x"]}',
        b'{"remove": ["/etc/passwd"], "move": []}', b'{"remove": [], "move": ["x"]}',
    ):  # fmt: skip
        yield f"update {plan[:40]!r}", lambda folder, plan=plan: _update(folder, plan)
    yield "update is a link", lambda folder: (folder / ".odtpack-update").symlink_to(folder.parent)
    yield "update is a file", lambda folder: (folder / ".odtpack-update").write_text("")


def _to_link(path: Path) -> None:
    target = path.parent.parent / f"outside {path.name}"
    path.replace(target)
    path.symlink_to(target)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _upper(path: Path) -> None:
    path.rename(path.with_name(path.name.upper()))


def _swap(folder: Path, one: str, other: str) -> None:
    first, second = (folder / one).read_bytes(), (folder / other).read_bytes()
    (folder / one).write_bytes(second)
    (folder / other).write_bytes(first)


def _update(folder: Path, plan: bytes) -> None:
    update = folder / ".odtpack-update"
    update.mkdir()
    (update / "plan.json").write_bytes(plan)
    (update / "x").write_bytes(b"x")


def _paths() -> Iterator[Mutation]:
    for path in PATHS:

        def rename(content: dict[str, Any], path: str = path) -> None:
            content["files"]["checkpoint"]["path"] = path

        def add(content: dict[str, Any], path: str = path) -> None:
            entry = content["files"]["checkpoint"] | {"path": path, "role": "recipe"}
            content["files"]["extra"] = [entry]

        yield f"the checkpoint is {path!r}", lambda folder, change=rename: edit(folder, change)
        yield f"a file more, {path!r}", lambda folder, change=add: edit(folder, change)


def _duplicate_keys() -> Iterator[Mutation]:
    for key, value in (
        ('"schema_version"', "1"), ('"files"', "{}"), ('"path"', '"checkpoint"'),
        ('"sha256"', '"' + "0" * 64 + '"'), ('"ai.onnx"', "{}"), ('"digest"', '"' + "0" * 64 + '"'),
    ):  # fmt: skip
        for first in (True, False):
            yield f"{key} twice", _on_bytes("manifest.json", _twice(key, value, first=first))


def _twice(key: str, value: str, *, first: bool) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        text = data.decode()
        at = text.index(key)
        if first:
            return f"{text[:at]}{key}: {value}, {text[at:]}".encode()
        end = text.rindex("\n}") if text[:at].count("{") == 1 else text.index("}", at)
        return f"{text[:end]}, {key}: {value}{text[end:]}".encode()

    return change


def _texts() -> Iterator[Mutation]:
    for name, text in {
        "nothing": b"", "null": b"null", "a list": b"[]", "a number": b"1", "not JSON": b"MZ\x90",
        "deep lists": b"[" * 100_000, "deep objects": b'{"a":' * 100_000,
        "a huge number": b"9" * 10**5, "NaN": b'{"schema_version": NaN}',
        "a huge version": b'{"schema_version": ' + b"9" * 10**5 + b"}",
        "UTF-16": '{"schema_version": 1}'.encode("utf-16"), "not UTF-8": b'{"\xff": 1}',
        "another version": b'{"schema_version": 2}', "version true": b'{"schema_version": true}',
        "version deep": b'{"schema_version": ' + b"[" * 500 + b"]" * 500 + b"}",
        "a surrogate": b'{"schema_version": 1, "tool": {"a": "\\ud800"}}',
    }.items():  # fmt: skip
        yield f"the manifest is {name}", _on_bytes("manifest.json", lambda _, text=text: text)
