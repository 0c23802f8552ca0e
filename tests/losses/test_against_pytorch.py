"""Every loss with its options follows PyTorch through ten training steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from odtpack.losses import LOSSES
from tests.losses.cases import CASES
from tests.losses.harness import check


@pytest.mark.parametrize("name", [name for name in CASES if name != "ctc"])  # test_ctc.py
def test_ten_steps(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    check(tmp_path, case.name, case.options, case.xs, case.targets, case.oracle)


@pytest.mark.parametrize("opset", [12, 13, 18, 21])
@pytest.mark.parametrize(
    "name", [name for name in CASES if not name.endswith("sequence") and name != "ctc"]
)
def test_every_opset_without_optimizations(name: str, opset: int, tmp_path: Path) -> None:
    case = CASES[name]
    check(
        *(tmp_path, case.name, case.options, case.xs, case.targets, case.oracle),
        opset=opset,
        optimized=False,
        steps=1,
    )


def test_every_loss_is_here() -> None:
    assert {case.name for case in CASES.values()} == set(LOSSES)
