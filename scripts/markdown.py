"""Tables in Markdown, and pages of the documentation parts of which are generated."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def head(*titles: str) -> str:
    """The first two lines of a table; a column whose title ends in a colon is one of figures."""
    rule = "|".join("--:" if title.endswith(":") else "---" for title in titles)
    return f"{row(*(title.removesuffix(':') for title in titles))}\n|{rule}|"


def row(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A whole table."""
    return "\n".join([head(*titles), *(row(*cells) for cells in rows)])


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def filled(page: Path, parts: Mapping[str, object]) -> str:
    """A page with what is between ``<!-- generated: NAME -->`` and ``<!-- end -->`` replaced."""
    # A line that begins with a mark and has text would be taken for HTML: such marks stand alone.
    text = page.read_text("utf-8")
    for name, part in parts.items():
        mark, end = f"<!-- generated: {name} -->", "<!-- end -->"
        before, rest = text.split(mark)
        space = "\n\n" if "\n" in str(part) else ""  # what is no part of a line stands apart
        text = f"{before}{mark}{space}{part}{space}{end}{rest.partition(end)[2]}"
    return text
