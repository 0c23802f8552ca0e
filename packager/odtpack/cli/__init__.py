"""Command line: parse, call, render, exit code.

Heavy imports stay inside the commands, so that ``odtpack --help`` answers at once. To add
a command, write a file with one function and name it in ``_app.py``.
"""

from odtpack.cli._app import main

__all__ = ["main"]
