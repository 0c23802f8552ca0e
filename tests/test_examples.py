"""The examples run, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_federated_average_learns(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / "federated_average.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(tmp_path) < 1.0  # ln 8 = 2.08 before
