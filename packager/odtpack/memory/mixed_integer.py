"""A mixed-integer linear program, solved by HiGHS (Huangfu and Hall 2018).

One thread, a fixed seed, and limits in nodes of the search, never in time: the same program has
the same solution on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def is_installed() -> bool:
    """Whether HiGHS is there: ``pip install odtpack[solver]``."""
    return importlib.util.find_spec("highspy") is not None


@dataclasses.dataclass(frozen=True)
class Solution:
    """What was found.

    Attributes:
        values: One for each column.
        bound: No solution is less.
    """

    values: tuple[float, ...]
    bound: float


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep what HiGHS says of itself out of the standard output, where it writes by itself."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class Program:
    """Minimizes a sum of its columns; a column is known by its index."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._upper: list[float] = []
        self._integer: list[bool] = []
        self._rows: list[tuple[dict[int, float], float]] = []

    def column(self, cost: float = 0.0, *, upper: float = 1.0, is_integer: bool = False) -> int:
        """Add a column from 0 on; return its index."""
        self._costs.append(cost)
        self._upper.append(upper)
        self._integer.append(is_integer)
        return len(self._costs) - 1

    def at_most(self, terms: Iterable[tuple[int, float]], most: float) -> None:
        """Let a sum of columns, with their factors, be at most a number."""
        row: dict[int, float] = {}
        for column, factor in terms:
            row[column] = row.get(column, 0.0) + factor
        self._rows.append(({c: f for c, f in row.items() if f}, most))

    def solve(self, start: Mapping[int, float], *, gap: float, nodes: int) -> Solution | None:
        """Solve it.

        Args:
            start: Integer columns of a solution that is known.
            gap: What a better solution may be better by.
            nodes: Nodes of the search.

        Returns:
            The best solution found; None if there is none.
        """
        highspy: Any = importlib.import_module("highspy")  # its types are not complete
        with _silent():
            solver = highspy.Highs()
        for name, value in {
            "output_flag": False, "threads": 1, "random_seed": 0, "parallel": "off",
            "mip_rel_gap": 0.0, "mip_abs_gap": gap, "mip_max_nodes": nodes,
        }.items():  # fmt: skip
            solver.setOptionValue(name, value)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._costs), len(self._rows)
        model.col_cost_ = np.array(self._costs)
        model.col_lower_ = np.zeros(len(self._costs))
        model.col_upper_ = np.array(self._upper)
        model.row_lower_ = np.full(len(self._rows), -highspy.kHighsInf)
        model.row_upper_ = np.array([most for _, most in self._rows])
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        model.integrality_ = [kinds[each] for each in self._integer]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lengths = [len(row) for row, _ in self._rows]
        model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        model.a_matrix_.index_ = np.array([c for row, _ in self._rows for c in row], np.int32)
        model.a_matrix_.value_ = np.array([f for row, _ in self._rows for f in row.values()])
        solver.passModel(model)
        if start:
            columns = np.array(sorted(start), np.int32)
            solver.setSolution(len(columns), columns, np.array([start[c] for c in sorted(start)]))
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        return Solution(tuple(solver.getSolution().col_value), info.mip_dual_bound)
