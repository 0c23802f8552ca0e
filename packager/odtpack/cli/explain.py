"""``odtpack explain``: what an error code means and what to do about it."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

from odtpack.cli import _completion, _console
from odtpack.cli._options import Json


def explain(
    code: Annotated[str | None, ("autocompletion", _completion.error_codes)] = None,
) -> Json:
    """Explain an error code. Say what it means, its typical cause and what to do.

    Parameters:
        code CODE: Code of an error, as in error[CODE]. Without one, all codes are listed.

    Examples:
        odtpack explain data-shape
        odtpack explain data-shape --json
    """
    from odtpack_runtime.errors import error_codes

    _console.results()
    codes = error_codes()
    if code is None:
        _console.table(((name, entry.means) for name, entry in codes.items()), ("Code", "Meaning"))
        listed = [{"code": name} | dataclasses.asdict(entry) for name, entry in codes.items()]
        return {"codes": listed}
    name = re.sub(r"^error\[(.*)\]:?$", r"\1", code.strip())
    if name not in codes:
        from odtpack.errors import OdtpackError, near_names

        hint = near_names(name, codes, "odtpack explain")
        raise OdtpackError("unknown-error-code", f"there is no error code {name!r}", hint=hint)
    entry = codes[name]
    _console.say(f"error[{name}]", style="bold")
    kits = "The training kits of other languages raise this error too." if entry.kits else None
    for title, text in (
        (None, entry.means),
        ("Typical cause", entry.cause),
        ("What to do", entry.advice),
        ("Example", entry.example),
        (None, kits),
    ):
        if text:
            _console.say()
            if title:
                _console.say(title, style="bold")
            for line in text.splitlines():
                _console.say(f"  {line}" if title else line)
    return {"code": name} | dataclasses.asdict(entry)
