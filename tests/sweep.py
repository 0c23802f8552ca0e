"""Of many cases of one question ``make test`` asks a part, and ``make sweep`` the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def split(
    cases: Iterable[Any], part: Callable[[Any], bool], *, name: Callable[[Any], str] = str
) -> list[Any]:
    """Return the cases as parameters; those that are not in the part are marked ``sweep``."""
    return [
        pytest.param(case, id=name(case), marks=[] if part(case) else [pytest.mark.sweep])
        for case in cases
    ]


def split_rows(
    rows: Iterable[tuple[Any, ...]], part: Callable[..., bool], ids: Collection[str] | None = None
) -> list[Any]:
    """As :func:`split`, for cases of several arguments."""
    rows = list(rows)
    names: list[str | None] = [*ids] if ids is not None else [None] * len(rows)
    return [
        pytest.param(*row, id=name, marks=[] if part(*row) else [pytest.mark.sweep])
        for row, name in zip(rows, names, strict=True)
    ]
