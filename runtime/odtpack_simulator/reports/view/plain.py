"""Text from a result made safe for plain formats: no control characters, bounded length."""

from __future__ import annotations

import re
from typing import Final

# Control characters of a hostile name could move the cursor, recolour a terminal, reverse the
# reading order, or are not allowed in XML; line breaks would end a line of a format.
_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def clean(text: str) -> str:
    """The text in one line; a replacement character for each that controls or reorders."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text.replace("\n", " "))


def shortened(text: str, most: int) -> str:
    """At most ``most`` characters, with an ellipsis where something was left out."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def location(text: str | None) -> tuple[str, int] | None:
    """File and line of a ``budget_location`` such as ``ci/budgets.toml:12``."""
    path, colon, line = (text or "").rpartition(":")
    if not colon or not path or not re.fullmatch(r"[0-9]{1,9}", line):
        return None
    return path, int(line)
