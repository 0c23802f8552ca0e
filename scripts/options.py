"""Command lines of scripts whose options are numbers, flags and choices."""

from __future__ import annotations

import argparse
from typing import Any


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the options of these names: False is a flag, choices a tuple, anything else a default.

    The first of the choices is the default; numbers and paths are of the type of theirs.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = {"default": default[0], "choices": [each for each in default if each]}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser.parse_args()
