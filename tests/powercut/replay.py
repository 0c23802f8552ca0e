"""The states of a folder that a power cut may leave after a recorded sequence of calls.

Two models of a file system:

- ``ordered``, as ext4 with data=ordered: names change in the order of the calls, and a sync of any
  file or folder makes all of them durable that came before; of an unsynced file nothing, half,
  all, or all with zeros may be there.
- ``weak``: each change of a name is durable or not on its own until its folder (of a rename, both
  folders) is synced; a file's content likewise until the file is synced.

In both a change of one name is whole or not there.
"""

import hashlib
import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from tests.powercut.record import Call

Model = Literal["ordered", "weak"]
_ALL_UP_TO, _SAMPLES = 7, 96
"""Unsynced changes of which every subset is tried, and how many subsets of more."""


@dataclass(eq=False)
class Node:
    """A file or folder, whatever it is called.

    Attributes:
        folder: Whether it is a folder.
        content: What is durable of a file.
        pending: Its unsynced writes and truncations, in order.
    """

    folder: bool
    content: bytes = b""
    pending: list[Call] = field(default_factory=list)

    def with_pending(self, calls: Sequence[Call]) -> bytes:
        data = bytearray(self.content)
        for call in calls:
            if call.kind == "truncate":
                del data[call.offset :]
                data.extend(bytes(call.offset - len(data)))
            else:
                at = len(data) if call.offset < 0 else call.offset
                data.extend(bytes(max(0, at - len(data))))
                data[at : at + len(call.data)] = call.data
        return bytes(data)

    def contents(self) -> list[bytes]:
        """What may be there after a power cut: nothing new, half of it, all, zeros."""
        if not self.pending:
            return [self.content]
        whole = self.with_pending(self.pending)
        half = list(self.pending[: (len(self.pending) + 1) // 2])
        if half[-1].kind == "write":
            last = half[-1]
            half[-1] = Call("write", last.path, "", last.offset, last.data[: len(last.data) // 2])
        zeros = self.content + bytes(max(0, len(whole) - len(self.content)))
        return list(dict.fromkeys([self.content, self.with_pending(half), whole, zeros]))


Entry = tuple[Node, str]
"""A name: the folder in which it stands, and itself."""


@dataclass(eq=False)
class Change:
    """A change of names: what each stands for afterwards, None for nothing.

    A name is only taken away from what had it when the call was made.
    """

    sets: dict[Entry, Node | None]
    had: dict[Entry, Node | None]
    unsynced: set[Node] = field(default_factory=set)


Names = dict[Entry, Node]


class Disk:
    """A folder as it is and what of it is durable."""

    def __init__(self, start: Path) -> None:
        self.root = Node(folder=True)
        self.durable: Names = {}
        self._read(start, self.root)
        self.names: Names = dict(self.durable)
        self.changes: list[Change] = []

    def _read(self, path: Path, node: Node) -> None:
        for entry in sorted(path.iterdir()):
            known = next(
                (made for made, inode in getattr(self, "_links", []) if entry.is_file()
                 and inode == (entry.stat().st_dev, entry.stat().st_ino)), None
            )  # fmt: skip
            made = known or Node(entry.is_dir(), b"" if entry.is_dir() else entry.read_bytes())
            self._links = [
                *getattr(self, "_links", []),
                (made, (entry.stat().st_dev, entry.stat().st_ino)),
            ]
            self.durable[node, entry.name] = made
            if made.folder:
                self._read(entry, made)

    def _entry(self, path: str) -> Entry:
        parts = PurePosixPath(path).parts
        node = self.root
        for part in parts[:-1]:
            node = self.names[node, part]
        return node, parts[-1]

    def _node(self, path: str) -> Node | None:
        return self.root if path == "." else self.names.get(self._entry(path))

    def call(self, call: Call, model: Model) -> bool:
        """Make a call; return whether it changed anything."""
        node = self._node(call.path)
        if call.kind == "sync":
            if node is not None:
                self._sync(node, model)
            return False
        if call.kind in ("write", "truncate"):
            assert node is not None, call
            if call.kind == "truncate" and len(node.with_pending(node.pending)) == call.offset:
                return False
            node.pending.append(call)
            return True
        one = self._entry(call.path)
        sets: dict[Entry, Node | None] = {}
        if call.kind in ("create", "mkdir"):
            if node is not None:
                return False
            sets[one] = Node(folder=call.kind == "mkdir")
        elif call.kind == "unlink":
            sets[one] = None
        else:
            other = self._entry(call.other)
            if call.kind == "rename" and self.names.get(other) is node:
                return False
            if call.kind != "link":
                sets[one] = self.names.get(other) if call.kind == "exchange" else None
            sets[other] = node
        had = {entry: self.names.get(entry) for entry in sets}
        change = Change(sets, had, {entry[0] for entry in sets})
        _apply(self.names, change)
        self.changes.append(change)
        return True

    def _sync(self, node: Node, model: Model) -> None:
        if not node.folder:
            node.content, node.pending = node.with_pending(node.pending), []
        for change in self.changes:
            change.unsynced.discard(node)
            if model == "ordered":
                change.unsynced.clear()
        # A change that is durable has those before it to the same names behind it.
        while self.changes and not self.changes[0].unsynced:
            _apply(self.durable, self.changes.pop(0))

    def states(self, model: Model, rng: random.Random) -> Iterator[dict[str, bytes | None]]:
        """Yield what a power cut may leave now: files and folders (None) by path."""
        open_changes = [change for change in self.changes if change.unsynced]
        for kept in self._subsets(open_changes, model, rng):
            names = dict(self.durable)
            for change in self.changes:
                if not change.unsynced or change in kept:
                    _apply(names, change)
            reached = list(_walk(names, self.root, ""))
            pending = [node for _, node in reached if node.pending]
            choices = [node.contents() for node in dict.fromkeys(pending)]
            every = list(itertools.islice(itertools.product(*choices), 64))
            for combination in every:
                content = dict(zip(dict.fromkeys(pending), combination, strict=True))
                yield {
                    path: None if node.folder else content.get(node, node.content)
                    for path, node in reached
                }

    def _subsets(
        self, changes: list[Change], model: Model, rng: random.Random
    ) -> Iterator[list[Change]]:
        if model == "ordered":
            yield from (changes[:count] for count in range(len(changes) + 1))
        elif len(changes) <= _ALL_UP_TO:
            for count in range(len(changes) + 1):
                yield from map(list, itertools.combinations(changes, count))
        else:
            yield from ([], changes)
            for index, change in enumerate(changes):
                yield from ([change], changes[:index], changes[:index] + changes[index + 1 :])
            for _ in range(_SAMPLES):
                yield [change for change in changes if rng.random() < 0.5]


def _apply(names: Names, change: Change) -> None:
    for entry, node in change.sets.items():
        if node is not None:
            names[entry] = node
        elif names.get(entry) is change.had[entry]:
            names.pop(entry, None)


def _walk(names: Names, folder: Node, start: str) -> Iterator[tuple[str, Node]]:
    for (parent, name), node in list(names.items()):
        if parent is folder:
            yield f"{start}{name}", node
            if node.folder:
                yield from _walk(names, node, f"{start}{name}/")


def replay(
    start: Path, calls: Sequence[Call], model: Model, seed: int = 5
) -> Iterator[tuple[int, dict[str, bytes | None]]]:
    """Yield each state that a power cut may leave, once, with the last number printed before."""
    rng, disk, mark = random.Random(seed), Disk(start), 0
    seen: set[tuple[int, str]] = set()
    changed = True
    for call in [*calls, None]:
        if call is not None and call.kind == "mark":
            mark, changed = call.offset, True
        elif call is not None:
            changed = disk.call(call, model)
        if not changed:
            continue
        for state in disk.states(model, rng):
            key = hashlib.sha256()
            for path, content in sorted(state.items()):
                key.update(f"{path}\0{content is None}\0{len(content or b'')}\0".encode())
                key.update(content or b"")
            if (mark, key.hexdigest()) not in seen:
                seen.add((mark, key.hexdigest()))
                yield mark, state


def materialize(state: dict[str, bytes | None], folder: Path) -> None:
    """Make a state a real folder, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, content in sorted(state.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)
