"""Of many cases of one question ``make test`` asks a part, and ``make sweep`` the rest."""

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import pytest

EVERY: Final = int(os.environ.get("ODTPACK_SWEEP_EVERY", "1"))
"""``make sweep-sample`` asks one in so many."""


class Asked:
    """Whether the rest is asked, too: pytest took as long to leave tests out as to collect them."""

    rest = True


def split(
    cases: Iterable[Any], part: Callable[[Any], bool], *, name: Callable[[Any], str] = str
) -> list[Any]:
    """Return the cases as parameters; those that are not in the part are marked ``sweep``."""
    cases = list(cases)
    return split_rows([(case,) for case in cases], part, [name(case) for case in cases])


def split_rows(
    rows: Iterable[tuple[Any, ...]], part: Callable[..., bool], ids: Collection[str] | None = None
) -> list[Any]:
    """As :func:`split`, for cases of several arguments."""
    rows = list(rows)
    names: list[str | None] = [*ids] if ids is not None else [None] * len(rows)
    return [
        pytest.param(*row, id=name, marks=[] if inside else [pytest.mark.sweep])
        for row, name in zip(rows, names, strict=True)
        if (inside := part(*row)) or Asked.rest
    ]
