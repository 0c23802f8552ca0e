"""Tables in Markdown, pages parts of which are generated, and the records that they show."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def keep(record: Path, figures: Mapping[str, Any], *keys: str, sort: bool = False) -> None:
    """Add to a record in JSON, or to the part of it that keys lead to."""
    content = json.loads(record.read_text()) if record.exists() else {}
    known = content
    for key in keys:
        known = known.setdefault(key, {})
    known.update(figures)
    record.write_text(json.dumps(content, indent=1, sort_keys=sort) + "\n")
