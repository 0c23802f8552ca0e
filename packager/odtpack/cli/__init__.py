"""Command line: parse, call, render, exit code.

Heavy imports stay inside the commands, so that ``odtpack --help`` answers at once. To add
a command, write a file with one function and name it in ``_app.py``. Its docstring is its help,
with its parameters and examples at its end (``_options.py``).
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    try:
        from odtpack.cli import _app
    except KeyboardInterrupt:  # Ctrl-C while libraries are imported
        sys.stderr.write("error[interrupted]: stopped before the end\n")
        return 130
    return _app.main(arguments)
