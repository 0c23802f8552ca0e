"""Where the bytes of a package go: a tree on the console, and reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odtpack.cli import _console

if TYPE_CHECKING:
    from rich.tree import Tree

    from odtpack_runtime.package.package import Package
    from odtpack_simulator.reports.sizes import Piece

_LEAST_SHARE = 0.01  # of a file, below which a part is not shown by itself
_MOST_PARTS = 8
_DEPTH = 2
_WIDTH = 44


def show_sizes(package: Package, opened: Path, reports: Sequence[str]) -> dict[str, Any]:
    """Print the sizes of a package's files and of what is in them, and write reports.

    Args:
        package: The package.
        opened: The path by which it was opened: its folder or its manifest.
        reports: Destinations, see :func:`odtpack_simulator.reports.parse_destination`.

    Returns:
        The tree for JSON.
    """
    from rich.tree import Tree

    from odtpack_simulator.reports.sizes import package_anatomy, write_size_report

    root = package_anatomy(package, _manifest(package, opened))
    tree = Tree(_line(root, root.nbytes, 0))
    for part in root.parts:
        _grow(
            tree,
            part.collapsed(int(part.nbytes * _LEAST_SHARE), _MOST_PARTS, _DEPTH),
            root.nbytes,
            1,
        )
    _console.console().print(tree, soft_wrap=True)
    for destination in reports:
        written = write_size_report(root, destination)
        _console.status(f"wrote {written}")
    return root.as_dict()


def check_reports(reports: Sequence[str], package: Package | None) -> None:
    """Refuse a report that cannot be written, before the work.

    Raises:
        OdtpackError: Unknown format, a place that cannot be written, or no package.
    """
    from odtpack.cli._files import check_writable
    from odtpack.errors import OdtpackError
    from odtpack_simulator.reports import parse_destination

    for destination in reports:
        if package is None:
            raise OdtpackError(
                "option-not-used",
                "--report shows the sizes in a package, and this is none",
                hint="pass the folder of a package, or leave --report out",
            )
        check_writable(parse_destination(destination)[1], "--report", outside=package)


def _manifest(package: Package, opened: Path) -> Path:
    if opened.is_file():
        return opened
    usual = package.path / "manifest.json"
    return usual if usual.is_file() else next(package.path.glob("*manifest.json"))


def _grow(tree: Tree, part: Piece, total: int, depth: int) -> None:
    branch = tree.add(_line(part, total, depth))
    for inner in part.parts:
        _grow(branch, inner, total, depth + 1)


def _line(part: Piece, total: int, depth: int) -> str:
    """Name, size and share, in columns whatever the depth."""
    from odtpack_simulator.values.units import format_bytes

    name = _console.clean(part.name)
    width = max(0, _WIDTH - 4 * depth)
    return f"{name:<{width}} {format_bytes(part.nbytes):>10} {part.nbytes / total:>7.1%}"
