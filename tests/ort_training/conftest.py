"""Fixtures of other folders that these tests use."""

from __future__ import annotations

from tests.cli.conftest import run

__all__ = ["run"]
