"""The onnx package's own node cases: each is right, refused clearly or not differentiable."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.autodiff.node_cases import VERDICTS, collect, judge

PARTS = 4  # that run at once where there are processors for them
collect_once = functools.cache(collect)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(PARTS))
def test_no_gradient_of_a_node_case_is_wrong(
    part: int, record_property: Callable[[str, Any], None]
) -> None:
    cases = collect_once()[part::PARTS]
    assert cases
    verdicts = {case.name: judge(case) for case in cases}
    counts = collections.Counter(verdict.kind for verdict in verdicts.values())
    for kind in VERDICTS:
        record_property(f"node cases {kind}", counts[kind])
    wrong = {name: v.why for name, v in verdicts.items() if v.kind == "wrong"}
    assert not wrong
    # What is left out is left out for a reason: most of what has a derivative is right.
    assert counts["right"] > 0.8 * (counts["right"] + counts["refused"] + counts["not run"])
