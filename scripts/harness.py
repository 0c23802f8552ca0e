"""What scripts and benchmarks share: command lines, tables, pages, records, turns and folders."""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def options(description: str | None, *places: str, **defaults: Any) -> argparse.Namespace:
    """Read the options of these names; those in ``places`` stand on the line without their name.

    False is a flag, a tuple has choices, of which the first is the default, and a type has no
    default. A list takes numbers or some of its names, repeated, with spaces or with commas; that
    of a type takes whatever has it. Anything else is a default, of whose type the option is.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, type):
            kind = {"type": default}
        elif isinstance(default, tuple):
            kind = {"default": default[0], "choices": [*dict.fromkeys(filter(None, default))]}
        elif isinstance(default, list):
            kind = {"type": lambda text, default=default: _several(text, default)}
            kind |= {"action": "extend", "nargs": "*" if name in places else "+"}
        elif name in places:
            kind["nargs"] = "?"
        parser.add_argument(name if name in places else f"--{name.replace('_', '-')}", **kind)
    given = parser.parse_args()
    for name, default in defaults.items():
        if isinstance(default, list):
            usual = [each for each in default if not isinstance(each, type)]
            setattr(given, name, [*chain(*getattr(given, name) or ())] or usual)
    return given


def _several(text: str, known: list[Any]) -> list[Any]:
    """The elements of a text with commas, of the type of what is known."""
    kind = known[0] if isinstance(known[0], type) else type(known[0])
    found = [kind(each) for each in text.split(",")]
    if isinstance(known[0], str) and (unknown := [each for each in found if each not in known]):
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return found


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="odtpack-bench-") as name:
        yield Path(name)


def in_turns(rounds: int, ways: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """What each way returns, of rounds in which all take turns."""
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for name, way in rounds * [*ways.items()]:
        found[name].append(way())
    return found


def head(*titles: str) -> str:
    """The first two lines of a table; a column whose title ends in a colon is one of figures."""
    rule = "|".join("--:" if title.endswith(":") else "---" for title in titles)
    return f"{row(*(title.removesuffix(':') for title in titles))}\n|{rule}|"


def row(*cells: object) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
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
