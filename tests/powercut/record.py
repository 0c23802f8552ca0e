"""Record what a program does to the files of a folder: its calls of the system, by strace."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

STRACE = shutil.which("strace")
_CALLS = (
    "open,openat,creat,close,dup,dup2,dup3,lseek,write,pwrite64,writev,pwritev,sendfile,"
    "copy_file_range,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,"
    "mkdirat,rmdir,ftruncate,truncate,chdir,clone,clone3,fork,vfork,read"
)
Kind = Literal["create", "link", "unlink", "rename", "exchange", "mkdir", "write", "truncate",
               "sync", "mark"]  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A change, or what makes changes durable.

    Attributes:
        kind: Which. ``mark`` is a number that the program printed: that save is done.
        path: What it is about, relative to the folder.
        other: The second path of a rename, link or exchange.
        offset: Where a write begins, or the length after a truncation; the number of a mark.
        data: What is written.
    """

    kind: Kind
    path: str = ""
    other: str = ""
    offset: int = 0
    data: bytes = field(default=b"", repr=False)


def record(
    command: Sequence[str], root: Path, *, saves: int | None = None, **environment: str
) -> list[Call]:
    """Run a program, and return what it did to the files below a folder, in order.

    Args:
        command: The program; it prints a number when a save is done.
        root: The folder.
        saves: It never ends, and is killed after so many numbers.
        environment: Added to that of this process.

    Raises:
        RuntimeError: It failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace"
        words = ["strace", "-f", "--seccomp-bpf", "-xx", "-s", "16777216", "-o", str(trace),
                 "-e", f"trace={_CALLS}", "-e", "signal=none", *command]  # fmt: skip
        env = {**os.environ, **environment}
        with (Path(scratch) / "errors").open("w+") as errors, subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, env=env,
            start_new_session=True,
        ) as process:  # fmt: skip
            # strace writes a call down after it returned: the next number says that it has.
            for _ in range(saves + 1 if saves else 0):
                process.stdout.readline()
            if saves:
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()
            code = process.wait()
            errors.seek(0)
            if code and not saves:
                raise RuntimeError(f"{command}: {code}\n{errors.read()[-2000:]}")
        with trace.open(errors="replace") as lines:
            return list(_Reader(root.resolve()).read(lines))


@dataclass
class _Open:
    path: Path
    position: int = 0
    append: bool = False


_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


def _decode(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class _Reader:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._tables: dict[int, dict[int, _Open]] = {}
        self._here: dict[int, Path] = {}
        self._started: dict[int, str] = {}
        self._renamed: list[tuple[Path, Path]] = []

    def read(self, lines: Iterator[str]) -> Iterator[Call]:
        for line in lines:
            head, _, text = line.strip().partition(" ")
            pid, text = int(head), text.strip()
            if text.endswith("<unfinished ...>"):
                self._started[pid] = text.removesuffix("<unfinished ...>").rstrip()
                continue
            if resumed := re.match(r"<\.\.\. \w+ resumed>", text):
                text = self._started.pop(pid, "") + text[resumed.end() :]
            if text.startswith("read("):  # its bytes, all that Python imports, are not looked at
                result = text.rpartition(" = ")[2].split()[0]  # "?" of a process that ended
                opened = self._table(pid).get(int(text[5 : text.index(",")]))
                if opened is not None and result.isdigit():
                    opened.position += int(result)
                continue
            match = re.match(r"(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+)", text)
            if match and not match[3].startswith("-"):
                yield from self._call(pid, match[1], match[2], int(match[3], 0))

    def _table(self, pid: int) -> dict[int, _Open]:
        return self._tables.setdefault(pid, {})

    def _path(self, pid: int, folder: str, raw: bytes) -> Path:
        path = Path(os.fsdecode(raw))
        if not path.is_absolute():
            base = self._table(pid).get(int(folder)) if folder.isdigit() else None
            path = (base.path if base else self._here.get(pid, Path.cwd())) / path
        path = Path(os.path.normpath(path))
        return path.parent.resolve() / path.name

    def _name(self, path: Path) -> str | None:
        if path == self._root:
            return "."
        return str(path.relative_to(self._root)) if self._root in path.parents else None

    def _call(  # noqa: C901 - a case for each call
        self, pid: int, name: str, text: str, result: int
    ) -> Iterator[Call]:
        table = self._table(pid)
        texts = [_decode(found) for found in _TEXT.findall(text)]
        words = [word.strip() for word in _TEXT.sub("", text).split(",")]
        if name in ("clone", "clone3", "fork", "vfork"):
            shared = "CLONE_FILES" in text
            self._tables[result] = (
                table
                if shared
                else {
                    key: _Open(each.path, each.position, each.append) for key, each in table.items()
                }
            )
            if pid in self._here:
                self._here[result] = self._here[pid]
        elif name == "chdir":
            self._here[pid] = self._path(pid, "", texts[0])
        elif name in ("open", "openat", "creat"):
            path = self._path(pid, words[0] if name == "openat" else "", texts[0])
            table[result] = _Open(path, 0, "O_APPEND" in text)
            here = self._name(path)
            if here is not None and ("O_CREAT" in text or name == "creat"):
                yield Call("create", here)
            if here is not None and ("O_TRUNC" in text or name == "creat"):
                yield Call("truncate", here)
        elif name == "close":
            table.pop(int(words[0]), None)
        elif name in ("dup", "dup2", "dup3"):
            if int(words[0]) in table:
                table[result] = table[int(words[0])]
        elif name in ("rename", "renameat", "renameat2", "link", "linkat"):
            at = name not in ("rename", "link")
            one, other = (self._path(pid, words[2 * i] if at else "", texts[i]) for i in range(2))
            exchange = "RENAME_EXCHANGE" in text
            kind: Kind = "link" if "link" in name else "exchange" if exchange else "rename"
            if kind != "link":
                self._move(one, other, exchange)
            first, second = self._name(one), self._name(other)
            if first is not None and second is not None:
                yield Call(kind, first, second)
        elif name in ("unlink", "unlinkat", "rmdir"):
            here = self._name(self._path(pid, words[0] if name == "unlinkat" else "", texts[0]))
            if here is not None:
                yield Call("unlink", here)
        elif name in ("mkdir", "mkdirat"):
            here = self._name(self._path(pid, words[0] if name == "mkdirat" else "", texts[0]))
            if here is not None:
                yield Call("mkdir", here)
        elif name == "truncate":
            here = self._name(self._path(pid, "", texts[0]))
            if here is not None:
                yield Call("truncate", here, offset=int(words[-1]))
        else:
            yield from self._on_descriptor(table, name, words, texts, result)

    def _on_descriptor(
        self, table: dict[int, _Open], name: str, words: list[str], texts: list[bytes], result: int
    ) -> Iterator[Call]:
        number = int(words[2] if name == "copy_file_range" else words[0])
        if number == 1 and name == "write" and 1 not in table:
            yield from (
                Call("mark", offset=int(word)) for word in texts[0].split() if word.isdigit()
            )
        opened = table.get(number)
        if opened is None:
            return
        here = self._name(opened.path)
        if name == "lseek":
            opened.position = result
        elif name in ("fsync", "fdatasync"):
            if here is not None:
                yield Call("sync", here)
        elif name == "ftruncate":
            if here is not None:
                yield Call("truncate", here, offset=int(words[1]))
        elif name in ("write", "writev", "pwrite64", "pwritev", "sendfile", "copy_file_range"):
            if name in ("sendfile", "copy_file_range"):
                source = table[int(words[1] if name == "sendfile" else words[0])]
                with source.path.open("rb") as stream:
                    stream.seek(source.position)
                    data = stream.read(result)
                source.position += result
            else:
                data = b"".join(texts)[:result]
            at = opened.position
            if name.startswith("p"):
                at = int(words[-1])
            else:
                opened.position += result
            if here is not None:
                yield Call("write", here, offset=-1 if opened.append else at, data=data)

    def _move(self, one: Path, other: Path, exchange: bool) -> None:
        """Files that are open go with their names."""
        for table in {id(table): table for table in self._tables.values()}.values():
            for each in table.values():
                for old, new in ((one, other), (other, one)) if exchange else ((one, other),):
                    if each.path == old or old in each.path.parents:
                        each.path = new / each.path.relative_to(old)
                        break
