"""Text from a result for plain formats: bounded length, places in files."""

from __future__ import annotations

import re


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters, with an ellipsis where something was left out."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def location(text: str | None) -> tuple[str, int] | None:
    """File and line of a ``budget_location`` such as ``ci/budgets.toml:12``."""
    path, colon, line = (text or "").rpartition(":")
    if not colon or not path or not re.fullmatch(r"[0-9]{1,9}", line):
        return None
    return path, int(line)
