"""Text from outside made safe to show: no control characters."""

from __future__ import annotations

import re
from typing import Final

# Control characters, invisible ones that change the reading order, and what XML does not allow.
_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def clean(text: str, *, line_end: str = " ") -> str:
    """Return the text with a replacement character for each that controls or reorders.

    Args:
        text: The text.
        line_end: What stands for a line break, which would end a line of most formats.
    """
    return line_end.join(
        _CONTROL.sub("\N{REPLACEMENT CHARACTER}", part) for part in text.split("\n")
    )
