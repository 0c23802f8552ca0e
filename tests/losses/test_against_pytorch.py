"""Every loss with its options follows PyTorch through ten training steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from odtpack.losses import LOSSES
from tests.losses.cases import CASES
from tests.losses.harness import check
from tests.sweep import split_rows


@pytest.mark.parametrize("name", [name for name in CASES if name != "ctc"])  # test_ctc.py
def test_ten_steps(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    check(tmp_path, case.name, case.options, case.xs, case.targets, case.oracle)


# At every opset the first case of each loss, and at one of them all others.
FIRST = {case.name: name for name, case in reversed(CASES.items())}.values()
AT_OPSETS = [
    (name, opset)
    for name in CASES
    if not name.endswith("sequence") and name != "ctc"
    for opset in (12, 13, 18, 21)
]


@pytest.mark.parametrize(
    ("name", "opset"), split_rows(AT_OPSETS, lambda name, opset: name in FIRST or opset == 13)
)
def test_every_opset_without_optimizations(name: str, opset: int, tmp_path: Path) -> None:
    case = CASES[name]
    check(
        *(tmp_path, case.name, case.options, case.xs, case.targets, case.oracle),
        opset=opset,
        optimized=False,
        steps=1,
    )


def test_every_loss_has_a_case_and_every_option_another_value() -> None:
    assert {case.name for case in CASES.values()} == set(LOSSES)
    defaults = {name: loss.defaults() for name, loss in LOSSES.items()}
    changed = {
        (case.name, option)
        for case in CASES.values()
        for option, value in case.options.items()
        if not np.array_equal(value, defaults[case.name][option])
    }
    missing = {(name, o) for name, options in defaults.items() for o in options} - changed
    # test_ctc has all of its options, and tests/adapters/test_vocabulary.py the words.
    assert {(name, o) for name, o in missing if name != "ctc"} <= {("next_token", "words")}
