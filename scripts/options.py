"""Command lines of scripts whose options are numbers, flags and choices."""

from __future__ import annotations

import argparse
from typing import Any


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the options of these names: False is a flag, a tuple has choices, of which the first is
    the default, a list several of them; anything else is a default, of whose type the option is."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"default": default, "type": type(default)}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = {"default": default[0], "choices": [each for each in default if each]}
        elif isinstance(default, list):
            kind = {"default": default, "choices": default, "nargs": "+"}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser.parse_args()
