"""Fixtures of other folders that these tests use."""

from tests.cli.conftest import run

__all__ = ["run"]
