"""What people see: results on stdout, progress and remarks on stderr.

With --json stdout is for JSON alone, and the text of a result goes to stderr.

Colour only on a terminal and without ``NO_COLOR``; a moving bar only on a terminal and
outside CI, plain lines elsewhere.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from odtpack_simulator.values.text import clean, clean_lines

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console

_QUIET_SECONDS: Final = 10.0
"""Without a terminal, long work says at least this often how far it is."""


_UNBROKEN: Final = 100_000
"""Columns where nothing is a terminal: a name that is broken into lines could begin one."""

_PLAINER: Final = "odtpack-plainer"
_PLAIN: Final = str.maketrans(
    {"✓": "+", "✗": "x", "→": "->", "≈": "~", "±": "+-", "µ": "u", "–": "-", "−": "-"}
    | {"×": "x", "²": "^2", "…": "...", "\N{NO-BREAK SPACE}": " "}
)
"""What stands for a character that the encoding lacks; others get their number."""


def _plainer(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(_PLAINER, _plainer)

wants_json: Final = ContextVar("wants_json", default=False)
"""Whether ``--json`` asks for what the command returns."""

_text_is_result: Final = ContextVar("text_is_result", default=False)


def results(reports: Iterable[str] | None = ()) -> None:
    """From here on the text of this command is its result, for stdout unless that is taken."""
    # By JSON, or by a report to standard output, FORMAT:-.
    taken = wants_json.get() or any(report.endswith(":-") for report in reports or ())
    _text_is_result.set(not taken)


def console() -> Console:
    """The console for people: stderr, or stdout where their text is the result."""
    return _open(stderr=not _text_is_result.get())


def _open(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=_PLAINER)  # no locale stops a command
    width = None if stream.isatty() else _UNBROKEN  # files and CI logs have no width to keep to
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def lines(text: str) -> None:
    """Print a text of several lines, in whose lines no name has a line break."""
    console().print(clean_lines(text), soft_wrap=True)


def say(text: str = "", style: str = "", on: Console | None = None) -> None:
    """Print a line, in one line, however long."""
    (on or console()).print(clean(text), style=style or None, soft_wrap=True)


def status(text: str) -> None:
    """Print a line about what was done, which is never a result: on stderr."""
    _open(stderr=True).print(clean(text), soft_wrap=True)


def error(code: str, what: str, *, where: str | None = None, hint: str | None = None) -> None:
    """Print an error: what, where, what to do, and where to read more."""
    from rich.text import Text

    text = Text.assemble((f"error[{clean(code)}]", "bold red"), f": {clean(what)}")
    if where:
        text.append(f"\n  in: {clean(where)}")
    if hint:
        text.append(f"\n  help: {clean(hint)}", style="cyan")
    text.append(f"\n  see: odtpack explain {clean(code)}", style="dim")
    _open(stderr=True).print(text, soft_wrap=True)


def warn(*sentences: str) -> None:
    """Print warnings."""
    from rich.text import Text

    for each in sentences:
        text = Text.assemble(("warning", "bold yellow"), f": {clean(each)}")
        _open(stderr=True).print(text, soft_wrap=True)


def table(rows: Iterable[Sequence[str]], header: Sequence[str], *, figures: str = "") -> None:
    """Print a table; the first column is never broken, and no word of the others."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    cells = [tuple(clean(cell) for cell in row) for row in rows]
    needed = 0
    for index, column in enumerate(zip(header, *cells, strict=True)):
        flush = column[0] in figures.split(",")
        whole = index == 0 or flush
        parts = column if whole else " ".join(column).split()
        least = max(map(cell_len, parts), default=0)
        needed += least + 3  # with the space between two columns
        justify: Literal["left", "right"] = "right" if flush else "left"
        shown.add_column(column[0], justify=justify, no_wrap=whole, min_width=least)
    for row in cells:
        shown.add_row(*row)
    to = console()
    to.width = max(to.width, needed)
    to.print(shown, crop=False)


def json_text(content: Any) -> str:
    """JSON as commands print it; only ASCII, so that every locale can hold it; NaN is null."""
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def print_plain(text: str) -> None:
    """Print a text on stdout as it is, in UTF-8: what a program or a file takes."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.flush()


def json_result(content: Any) -> None:
    """Print the result of a command as JSON, if ``--json`` asks for it."""
    if wants_json.get():
        sys.stdout.write(json_text(content))
        sys.stdout.flush()


def wrote(*paths: object) -> None:
    """Say which files were written."""
    for path in paths:
        status(f"wrote {path}")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def working(title: str, after: float = 1.0) -> Iterator[Console]:
    """Show on a terminal, after some seconds, that work goes on whose end is not known."""
    # Lines that are printed meanwhile go to the console that this gives.
    target = console()
    shown = target.status(clean(title))
    timer = threading.Timer(after, shown.start)
    if target.is_terminal and not os.environ.get("CI"):
        timer.start()
    try:
        yield target
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        shown.stop()


class Progress:
    """Shows how far long work is: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = _open(stderr=True)
        self._bar: rich.progress.Progress | None = None
        self._spoken = time.monotonic()
        if self._console.is_terminal and not os.environ.get("CI"):
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task(clean(title), total=None)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int, title: str | None = None) -> None:
        """Report how many of how many units are done."""
        before, self._title = self._title, self._title if title is None else title
        if self._bar is not None:
            (task,), name = self._bar.task_ids, clean(self._title)
            self._bar.update(task, completed=done, total=total or None, description=name)
        elif self._title != before or time.monotonic() - self._spoken > _QUIET_SECONDS:
            self._spoken = time.monotonic()
            self.line(f"{self._title}: {done} of {total}" if done else self._title)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(clean(text), soft_wrap=True)
