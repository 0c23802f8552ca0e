"""Which lines of ONNX Runtime's log are shown. Imports nothing of ours: see cli._supervisor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LINE: Final = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ (?:\[thread:[^\]]*\])?"
    r"\[(?P<severity>[VIWEF]):[^\]]*\] (?P<text>.*)"
)


def log_lines(text: str) -> Iterator[str]:
    """Messages of warnings and errors in a log, without colour, time and place in the source."""
    # They may name nodes of the model: they are foreign text.
    for line in _ANSI.sub("", text).splitlines():
        found = _LINE.match(line)
        if found is not None and found["severity"] in "WEF":
            yield found["text"].strip()
