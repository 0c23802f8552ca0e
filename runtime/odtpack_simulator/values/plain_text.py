"""Text from outside made safe to show: on a terminal, in a CI job's log, in every report."""

from __future__ import annotations

import re
from typing import Final

# Control characters (line breaks and ANSI sequences among them), invisible characters and those
# that change the reading order, and what XML does not allow.
_CONTROL: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
# What a CI job's log carries out: "::error ::" at the start of a line, which a terminal's width may
# make of any place, "##[error]" and "##vso[task...]" anywhere.
_COMMAND: Final = re.compile(
    r"^(\s*):(?=:)|#(?=#\w*\[)|:(?=:(?:add|debug|echo|endgroup|error|group|notice|remove|save|set|stop"
    r"|warning)(?:-[a-z]+)?(?: |::))"
)
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


def clean(text: str) -> str:
    """The text in one line, with a replacement for each character that controls or reorders."""
    # Line breaks become spaces. What is left neither begins a line nor a workflow command, moves no
    # cursor and hides nothing. It still has to be escaped for the format that it goes to.
    flat = _CONTROL.sub(_REPLACEMENT, text.replace("\n", " "))
    return _COMMAND.sub(lambda found: (found[1] or "") + _REPLACEMENT, flat)


def clean_lines(text: str) -> str:
    """:func:`clean` each line of a text that has lines of its own, whose parts are clean."""
    return "\n".join(map(clean, text.split("\n")))
