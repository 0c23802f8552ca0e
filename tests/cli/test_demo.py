"""What ``odtpack demo`` tells to paste."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from odtpack.cli.device.demo import _finish


def test_the_command_to_go_on_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("my demo's folder")
    _finish([0.5, 0.9], 100, [], out, 5, 1.0)
    lines = "".join(capsys.readouterr()).splitlines()
    words = shlex.split(next(line for line in lines if "odtpack simulate" in line))
    assert words[2] == str(out / "package")
    assert words[words.index("--data") + 1] == str(out / "digits.npz")
    assert words[words.index("--budget") + 1] == str(out / "budgets.toml")
