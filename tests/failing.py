"""Calls that fail."""

from collections.abc import Callable
from typing import Any


def failing(call: Callable[..., Any], error: BaseException, when: Callable[..., bool]) -> Any:
    """The call; where `when` is true of its positional arguments, it raises the error."""

    def made(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise error
        return call(*arguments, **options)

    return made
