"""Fixtures of other folders that these tests use."""

from __future__ import annotations

from tests.cli.conftest import run
from tests.training.conftest import one_torch_thread

__all__ = ["one_torch_thread", "run"]
