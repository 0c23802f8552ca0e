"""Keys and values of TOML on one line, for files whose layout is part of what people read.

The text of a value is tomli-w's. It has no comments and gives every list and table lines of its
own, so what stands on which line is ours.
"""

from __future__ import annotations

from collections.abc import Mapping

import tomli_w


def toml_value(value: object) -> str:
    """Return a value as TOML: lists and tables in one line."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{toml_key(k)} = {toml_value(v)}' for k, v in value.items())} }}"
    return tomli_w.dumps({"k": value}).removeprefix("k = ").removesuffix("\n")


def toml_key(*parts: str) -> str:
    """Return a key, in quotes where it must be; several parts are joined by dots."""
    return ".".join(tomli_w.dumps({part: 0}).removesuffix(" = 0\n") for part in parts)
