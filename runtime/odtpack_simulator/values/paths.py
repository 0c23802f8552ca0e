"""Paths as reports show them."""

from __future__ import annotations

import re
from pathlib import Path


def shown_path(path: Path) -> str:
    """Return a path without the folders above the working one: their names may be a person's."""
    # One that lies elsewhere is its last part.
    if not path.is_absolute():
        return str(path)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name or str(path)


def last_part(path: str) -> str:
    """The name at the end of a path, of this system or another."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path
