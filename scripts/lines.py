"""Lines of Python by room: code, docstrings, imports, comments and blank lines.

    python -m scripts.lines

A line counts once: as docstring, import, comment, blank or, if none of these, code. Tests,
benchmarks, scripts and examples are counted apart.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCTION = ("packager/odtpack", "runtime/odtpack_runtime", "runtime/odtpack_simulator")
OTHERS = ("tests", "benchmarks", "scripts", "examples")
KINDS = ("code", "docstrings", "imports", "comments", "blank")


@dataclasses.dataclass
class Count:
    """Lines by kind of the files of a room."""

    files: int = 0
    lines: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        """All lines."""
        return self.lines.total()

    def add(self, other: Count) -> None:
        """Add the files and lines of another count."""
        self.files += other.files
        self.lines += other.lines


def count(path: Path) -> Count:
    """Count the lines of a file."""
    text = path.read_text("utf-8")
    kinds = dict[int, str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # A string alone after an assignment documents it, as Sphinx and mkdocstrings read it.
            for statement in node.body:
                if isinstance(statement, ast.Expr) and _is_text(statement.value):
                    _mark(kinds, statement, "docstrings")
        if isinstance(node, ast.Import | ast.ImportFrom):
            _mark(kinds, node, "imports")
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            kinds[node.lineno] = "imports"
    found = Count(1)
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        usual = "blank" if not bare else "comments" if bare.startswith("#") else "code"
        found.lines[kinds.get(number, usual)] += 1
    return found


def rooms(root: Path) -> Iterator[tuple[str, Count]]:
    """Yield each room of a package, a folder below it, with its count; files beside them as "."."""
    found: dict[str, Count] = collections.defaultdict(Count)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        found[parts[0] if len(parts) > 1 else "."].add(count(path))
    yield from sorted(found.items(), key=lambda item: -item[1].total)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _mark(kinds: dict[int, str], node: ast.stmt, kind: str) -> None:
    for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
        kinds.setdefault(line, kind)


def _row(name: str, each: Count) -> str:
    cells = "".join(f"{each.lines[kind]:>12,}" for kind in KINDS)
    return f"{name:<40}{each.files:>6,}{each.total:>9,}{cells}"


def main() -> None:
    """Print the table."""
    print(f"{'':<40}{'files':>6}{'lines':>9}" + "".join(f"{kind:>12}" for kind in KINDS))
    production = Count()
    for package in PRODUCTION:
        whole = Count()
        for room, each in rooms(ROOT / package):
            print(_row(f"{package}/{room}", each))
            whole.add(each)
        print(_row(package, whole))
        production.add(whole)
    print(_row("production", production))
    for folder in OTHERS:
        whole = Count()
        for _, each in rooms(ROOT / folder):
            whole.add(each)
        print(_row(folder, whole))


if __name__ == "__main__":
    main()
