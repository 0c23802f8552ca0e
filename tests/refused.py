"""The error that a block of code has to end in."""

import contextlib
import re
from collections.abc import Iterator

import pytest

from odtpack_runtime.errors import OdtpackError


@contextlib.contextmanager
def refused(
    code: str, *patterns: str, kind: type[OdtpackError] = OdtpackError, what: str = "",
    hint: str | None = None, where: object = None,
) -> Iterator[pytest.ExceptionInfo[OdtpackError]]:  # fmt: skip
    """An error of this kind and code whose text has each of the patterns in it.

    ``what`` stands in the sentence that says what is wrong, and ``hint`` in that of what to do;
    ``where`` is the whole place.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code
    assert what in caught.value.what
    assert hint is None or hint in str(caught.value.hint)
    assert where is None or caught.value.where == str(where)
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in {caught.value}"
