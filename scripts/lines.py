"""Lines of Python by room: code, docstrings, imports, comments and blank lines.

    python -m scripts.lines

A line counts once: as docstring, import, comment, blank or, if none of these, code. Tests,
benchmarks, scripts and examples are counted apart, and so is the gallery of examples.
"""

import ast
import collections
from collections.abc import Iterable
from pathlib import Path

from scripts.harness import ROOT

PRODUCTION = ("packager/odtpack", "runtime/odtpack_runtime", "runtime/odtpack_simulator")
TOOLS = ("benchmarks", "scripts", "examples")
GALLERY = "examples/gallery"
KINDS = ("code", "docstrings", "imports", "comments", "blank")


Count = collections.Counter[str]
"""Lines by kind, and the number of files."""


def count(path: Path) -> Count:
    """Count the lines of a file."""
    text = path.read_text("utf-8")
    kinds = dict[int, str]()
    for node in ast.walk(ast.parse(text)):
        kind, found = "docstrings", list[ast.stmt]()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # A string alone after an assignment documents it, as Sphinx and mkdocstrings read it.
            found = [each for each in node.body if _is_text(each)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            kind, found = "imports", [node]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            kinds[node.lineno] = "imports"
        for statement in found:
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                kinds.setdefault(line, kind)
    counted = Count(files=1)
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        usual = "blank" if not bare else "comments" if bare.startswith("#") else "code"
        counted[kinds.get(number, usual)] += 1
    return counted


def rooms(root: Path) -> dict[str, Count]:
    """Each room of a package, a folder below it, with its count; files beside them as "."."""
    found: dict[str, Count] = collections.defaultdict(Count)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        found[parts[0] if len(parts) > 1 else "."].update(count(path))
    return dict(sorted(found.items(), key=lambda item: -total([item[1]])))


def tools() -> list[Count]:
    """Each room of the benchmarks, scripts and examples, the gallery left out."""
    found = (rooms(ROOT / folder) for folder in TOOLS)
    return [count for each in found for name, count in each.items() if name != "gallery"]


def total(counts: Iterable[Count]) -> int:
    """Lines of all kinds."""
    return sum(count[kind] for count in counts for kind in KINDS)


def _is_text(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _print(name: str, counts: Iterable[Count]) -> Count:
    whole = sum(counts, Count())
    cells = "".join(f"{whole[kind]:>12,}" for kind in KINDS)
    print(f"{name:<40}{whole['files']:>6,}{total([whole]):>9,}{cells}")
    return whole


def main() -> None:
    print(f"{'':<40}{'files':>6}{'lines':>9}" + "".join(f"{kind:>12}" for kind in KINDS))
    packages = []
    for package in PRODUCTION:
        found = [
            _print(f"{package}/{name}", [each]) for name, each in rooms(ROOT / package).items()
        ]
        packages.append(_print(package, found))
    _print("production", packages)
    for folder in ("tests", *TOOLS, GALLERY):
        _print(folder, rooms(ROOT / folder).values())
    _print(f"{', '.join(TOOLS)}, no gallery", tools())


if __name__ == "__main__":
    main()
