"""Commands of ``odtpack`` in the process of a test, and how they end."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from odtpack.cli import main


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``odtpack`` in this process with what a process would print.

    If a code is given, the command has to end with it.
    """

    def call(*arguments: object, code: int | None = None) -> Outcome:
        capfd.readouterr()
        ended = main([str(argument) for argument in arguments])
        printed = capfd.readouterr()
        assert code in (None, ended), printed.err
        return Outcome(ended, printed.out, printed.err)

    return call


def assert_refused(outcome: Outcome, code: str, *words: str) -> None:
    """One clear error: its code, words that it must hold, a way out, and no traceback."""
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    assert f"error[{code}]: " in outcome.err, outcome.err
    assert outcome.err.count("error[") == 1
    assert "\n  help: " in outcome.err, outcome.err
    assert outcome.err.endswith(f"\n  see: odtpack explain {code}\n"), outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, outcome.err
