"""Lines of Python by room: code, docstrings, imports, comments and blank lines.

    python -m scripts.lines

A line counts once: as docstring, import, comment, blank or, if none of these, code. Tests,
benchmarks, scripts and examples are counted apart.
"""

from __future__ import annotations

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCTION = ("packager/odtpack", "runtime/odtpack_runtime", "runtime/odtpack_simulator")
OTHERS = ("tests", "benchmarks", "scripts", "examples")
KINDS = ("code", "docstrings", "imports", "comments", "blank")


class Count(collections.Counter[str]):
    """Lines by kind, and the number of files."""

    @property
    def total_lines(self) -> int:
        """All lines."""
        return sum(self[kind] for kind in KINDS)


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
    found = Count(files=1)
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        usual = "blank" if not bare else "comments" if bare.startswith("#") else "code"
        found[kinds.get(number, usual)] += 1
    return found


def rooms(root: Path) -> list[tuple[str, Count]]:
    """Each room of a package, a folder below it, with its count; files beside them as "."."""
    found: dict[str, Count] = collections.defaultdict(Count)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        found[parts[0] if len(parts) > 1 else "."].update(count(path))
    return sorted(found.items(), key=lambda item: -item[1].total_lines)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _mark(kinds: dict[int, str], node: ast.stmt, kind: str) -> None:
    for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
        kinds.setdefault(line, kind)


def _print(name: str, *counts: Count) -> Count:
    whole = Count()
    for each in counts:
        whole.update(each)
    cells = "".join(f"{whole[kind]:>12,}" for kind in KINDS)
    print(f"{name:<40}{whole['files']:>6,}{whole.total_lines:>9,}{cells}")
    return whole


def main() -> None:
    """Print the table."""
    print(f"{'':<40}{'files':>6}{'lines':>9}" + "".join(f"{kind:>12}" for kind in KINDS))
    packages = []
    for package in PRODUCTION:
        found = [_print(f"{package}/{room}", each) for room, each in rooms(ROOT / package)]
        packages.append(_print(package, *found))
    _print("production", *packages)
    for folder in OTHERS:
        _print(folder, *(each for _, each in rooms(ROOT / folder)))


if __name__ == "__main__":
    main()
