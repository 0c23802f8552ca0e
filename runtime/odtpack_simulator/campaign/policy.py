"""Checks of how an app is said to train."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.result.result import Policy
from odtpack_simulator.values.schema_errors import first_problem


def make_policy(**values: Any) -> Policy:
    """The policy of these values, see :class:`~odtpack_simulator.result.result.Policy`.

    Raises:
        OdtpackError: ``bad-policy``: a value is out of its range.
    """
    try:
        return Policy(**values)
    except ValidationError as error:
        key, problem = first_problem(error, Policy)
        raise OdtpackError("bad-policy", f"--{key.replace('_', '-')} {problem}") from error
