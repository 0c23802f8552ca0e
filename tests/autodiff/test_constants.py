"""Constants that rules write grow no faster than what they are about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from odtpack.autodiff.rules import resampling
from odtpack.errors import OdtpackError
from tests.autodiff.oracle import Case, check, gradient_model, torch_outputs
from tests.autodiff.test_rules import CASES

GROWN = 128  # times as long
BOUND = 1 << 18  # bytes that a constant may have in any case: a small matrix is a quick one
MOST = 1 << 19  # bytes of a case that is worth growing


def first_cases() -> list[Case]:
    """The last case of each operator with static sizes, which is one of its newest rule."""
    found = {case.op: case for case in CASES if not (case.batch or case.symbols)}
    known = {(case.op, case.attrs.get("mode")): case for case in CASES if case.op in MODES}
    return [*found.values(), *(c for c in known.values() if not (c.batch or c.symbols))]


MODES = ("Pad", "Resize")
KEY = "coordinate_transformation_mode"


def grown(case: Case) -> Iterator[tuple[str, Case, int]]:
    """A case with one axis that is longer, alone or with those of its length; bytes of values."""
    fed = {n: a for n, a in case.present.items() if n not in case.constants}
    for name, array in fed.items():
        for axis in range(array.ndim):
            for alone in (True, False):
                inputs = dict(case.inputs)
                for other, each in fed.items():
                    same = [
                        i for i, size in enumerate(each.shape)
                        if (other, i) == (name, axis) or (size == array.shape[axis] and not alone)
                    ]  # fmt: skip
                    shape = [s * GROWN if i in same else s for i, s in enumerate(each.shape)]
                    if np.prod(shape) > MOST:
                        break
                    inputs[other] = np.resize(each, shape)
                longer = dataclasses.replace(case, inputs=inputs)
                try:
                    given = [torch.tensor(a) for a in longer.present.values()]
                    results = torch_outputs(longer, given).values()
                except (RuntimeError, ValueError, IndexError, KeyError, AssertionError, TypeError):
                    continue  # not sizes of this operator
                size = sum(t.numel() * t.element_size() for t in (*given, *results))
                if size <= MOST:
                    yield f"{name}[{axis}]", longer, size
                break


@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.id)
def test_constants_are_linear(case: Case) -> None:
    for where, longer, size in grown(case):
        try:
            model, _ = gradient_model(longer)
        except (OdtpackError, IndexError):
            continue  # nor of this one
        graphs = (model.graph, *model.graph.subgraphs())
        made = [
            v for graph in graphs for n, v in graph.initializers.items() if n not in case.inputs
        ]
        held = sum(value.const_value.nbytes for value in made if value.const_value is not None)
        assert held <= BOUND + 16 * size, f"{where}: {held} bytes for {size}"


# Of each mode, coordinate mode and filter the first case with known sizes.
RESIZED = {
    tuple(str(case.attrs.get(name)) for name in ("mode", "antialias", KEY)): case
    for case in reversed(CASES)
    if case.op == "Resize" and not (case.batch or case.symbols)
}


@pytest.mark.parametrize("case", RESIZED.values(), ids=lambda case: case.id)
def test_resize_of_long_axes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that are not zero do for the matrix, a few rows at a time."""
    monkeypatch.setattr(resampling, "_LARGEST", 0)
    monkeypatch.setattr(resampling, "_ROWS", 3)
    check(case)
