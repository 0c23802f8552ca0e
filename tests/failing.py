"""Calls that fail."""

from collections.abc import Callable
from typing import Any


def failing(call: Callable[..., Any], error: BaseException, when: Callable[..., bool]) -> Any:
    """The call, which raises an error where its arguments are such."""

    def made(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            raise error
        return call(*arguments, **options)

    return made
