"""Where the bytes of a package go: a tree of its files and of what is in them, as page or JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.package.package import Package
from odtpack_simulator.reports import charts, parse_destination, write_out
from odtpack_simulator.reports.html_report import render_page
from odtpack_simulator.values.units import format_percent

_MODELS = ("training_model", "eval_model", "optimizer_model", "step_model")


@dataclass(frozen=True, slots=True)
class Piece:
    """Something in a package that takes ``nbytes``, and what it consists of, largest first."""

    name: str
    nbytes: int
    parts: tuple[Piece, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The tree as JSON holds it."""
        inner = {"parts": [part.as_dict() for part in self.parts]} if self.parts else {}
        return {"name": self.name, "size_bytes": self.nbytes, **inner}

    def collapsed(self, least: int, most: int, depth: int) -> Piece:
        """The tree without small parts."""
        # `least`: Bytes below which a part is not shown by itself.
        shown = [part for part in self.parts[:most] if depth and part.nbytes >= least]
        rest = self.parts[len(shown) :]
        if not shown:
            return replace(self, parts=())
        parts = [part.collapsed(least, most, depth - 1) for part in shown]
        if rest:
            name = rest[0].name if len(rest) == 1 else f"{len(rest)} smaller"
            parts.append(Piece(name, sum(part.nbytes for part in rest)))
        return replace(self, parts=tuple(parts))


def package_anatomy(package: Package, manifest: Path) -> Piece:
    """Take a package apart."""
    files = package.manifest.files
    entries = {each.name: getattr(files, each.name) for each in fields(files)}
    parts = []
    for key, value in entries.items():
        for entry in value if isinstance(value, tuple) else (value,):
            if entry is None or key == "checkpoint_data":
                continue
            path = package.path / entry.path
            if key in _MODELS:
                parts.append(_model(path, entry.size_bytes))
            elif key == "checkpoint":
                data = files.checkpoint_data
                nbytes = entry.size_bytes + (data.size_bytes if data else 0)
                name = f"{entry.path} and {data.path}" if data else entry.path
                parts.append(_checkpoint(path, name, nbytes))
            else:
                parts.append(Piece(entry.path, entry.size_bytes))
    parts.append(Piece(manifest.name, manifest.stat().st_size))
    return _whole(package.path.name, parts)


def _whole(name: str, parts: Iterable[Piece]) -> Piece:
    ordered = sorted((p for p in parts if p.nbytes), key=lambda part: (-part.nbytes, part.name))
    return Piece(name, sum(part.nbytes for part in ordered), tuple(ordered))


def _checkpoint(path: Path, name: str, nbytes: int) -> Piece:
    """Parameters by module; what is left are names, shapes and tables."""
    data = read_checkpoint(path)
    sizes = {key: array.nbytes for key, array in (data.trainable | data.frozen).items()}
    tables = Piece("names and tables", nbytes - sum(sizes.values()))
    leaves = {tuple(key.split(".")): size for key, size in sizes.items()}
    return _whole(name, [*_modules(leaves), tables])


def _modules(leaves: Mapping[tuple[str, ...], int]) -> Sequence[Piece]:
    """Parameters by the words of their names; a word that all share is joined to the next."""
    groups: dict[str, dict[tuple[str, ...], int]] = {}
    for words, size in leaves.items():
        groups.setdefault(words[0], {})[words[1:]] = size
    parts = []
    for word, inner in groups.items():
        if set(inner) == {()}:
            parts.append(Piece(word, inner[()]))
            continue
        own = inner.pop((), 0)
        found = [*_modules(inner), *([Piece("itself", own)] if own else [])]
        if len(found) == 1:
            parts.append(replace(found[0], name=f"{word}.{found[0].name}"))
        else:
            parts.append(_whole(word, found))
    return parts


def _model(path: Path, nbytes: int) -> Piece:
    """Nodes by operator, constants, names, and what describes inputs, outputs and values."""
    from odtpack_runtime.package.checks import read_model

    model = read_model(path)
    kinds: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    _graph(model.graph, kinds, operators, counts)
    nodes = [Piece(f"{counts[name]} × {name}", size) for name, size in operators.items()]
    parts = [_whole("nodes", nodes), *(Piece(name, size) for name, size in kinds.items())]
    rest = nbytes - sum(part.nbytes for part in parts)
    return replace(
        _whole(path.name, [*parts, Piece("framing and properties", rest)]), nbytes=nbytes
    )


def _graph(graph: Any, kinds: Counter[str], operators: Counter[str], counts: Counter[str]) -> None:
    """Count the bytes of a graph and those inside it, names apart from what bears them."""
    for node in graph.node:
        inner = [a.g for a in node.attribute if a.HasField("g")]
        inner += [g for a in node.attribute for g in a.graphs]
        names = sum(_length(name) for name in (node.name, *node.input, *node.output))
        operators[node.op_type] += node.ByteSize() - sum(each.ByteSize() for each in inner) - names
        counts[node.op_type] += 1
        kinds["names"] += names
        for each in inner:
            _graph(each, kinds, operators, counts)
    for tensor in graph.initializer:
        kinds["names"] += _length(tensor.name)
        kinds["constants"] += tensor.ByteSize() - _length(tensor.name)
    for what, infos in (
        ("inputs and outputs", (*graph.input, *graph.output)),
        ("types and shapes of values", graph.value_info),
    ):
        kinds[what] += sum(info.ByteSize() for info in infos)


def _length(text: str) -> int:
    return len(text.encode())


FORMATS: Final = ("html", "json")
_LEAST_SHARE: Final = 0.002
_MOST_PARTS: Final = 24
_DEPTH: Final = 4


def write_size_report(root: Piece, destination: str) -> Path:
    """Write a report whole or not at all."""
    name, path = parse_destination(destination, FORMATS)
    if name == "html":
        data = render_size_html(root)
    else:
        data = (json.dumps(root.as_dict(), indent=1) + "\n").encode()
    return write_out(data, path)


def render_size_html(root: Piece) -> bytes:
    """The page as UTF-8 HTML. The same tree gives the same bytes."""
    return render_page(
        "size.html.j2",
        root=root,
        files=[(part, list(_rows(_shown(part)))) for part in root.parts],
        share=lambda part: format_percent(part.nbytes / root.nbytes),
        bar=lambda part: charts.share_bar(part.nbytes / root.nbytes),
    )


def _shown(part: Piece) -> Piece:
    return part.collapsed(int(part.nbytes * _LEAST_SHARE), _MOST_PARTS, _DEPTH)


def _rows(part: Piece, depth: int = 0) -> Iterator[tuple[int, Piece, str]]:
    """Every part below one, with its depth and its share of the file."""
    for inner in part.parts:
        yield depth, inner, format_percent(inner.nbytes / part.nbytes)
        yield from _rows(inner, depth + 1)
