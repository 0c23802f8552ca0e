"""Text from a result for plain formats: bounded length, places in files."""

from __future__ import annotations

import re
from typing import Final

from odtpack_simulator.result.result import Verdict
from odtpack_simulator.values.plain_text import clean

MOST_TEXT: Final = 400
"""Characters of one text in Markdown."""
VERDICT_SYMBOLS: Final[dict[Verdict, str]] = {
    "pass": "✅",
    "warn": "⚠️",
    "fail": "❌",
    "not judged": "❔",
}


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters, with an ellipsis where something was left out."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def location(text: str | None) -> tuple[str, int] | None:
    """File and line of a ``budget_location`` such as ``ci/budgets.toml:12``."""
    path, colon, line = (text or "").rpartition(":")
    if not colon or not path or not re.fullmatch(r"[0-9]{1,9}", line):
        return None
    return path, int(line)


def markdown_text(text: str) -> str:
    """Text that Markdown, HTML and GitHub's mentions, references and links leave alone."""
    short = shortened(clean(text), MOST_TEXT)
    entities = short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", entities)
    # A zero-width space between a sign and a name breaks what GitHub would link or notify.
    return re.sub(r"(@|#(?=\w)|:(?=//)|\bwww(?=\.))", "\\1\N{ZERO WIDTH SPACE}", escaped)
