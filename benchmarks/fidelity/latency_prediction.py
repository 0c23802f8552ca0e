"""Predict a step of this machine in another configuration from a calibrated one. Pure functions.

The calibrated step is known operator by operator. In another configuration each
operator takes what it took, times the ratio of its roofs there and here; what the
runtime takes for any operator, and the time around operators, stay as they are.
The roofs are curves here: products and copies were timed at several sizes, since
small ones are slower, and copies within a cache quicker, than large ones (the
cache-aware roofline: A. Ilic, F. Pratas, L. Sousa, "Cache-aware Roofline model:
Upgrading the loft", IEEE Computer Architecture Letters 13 (1), 2014).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odtpack_runtime.simulator.host_timing import added_us, without_profile
from odtpack_runtime.simulator.operator_work import Work
from odtpack_runtime.simulator.roofline import SMALL

Points = Sequence[tuple[float, float]]

SERIAL = frozenset({"Cast", "Expand", "GatherElements", "Pad", "Slice", "Sum", "Tile"})
"""Operators that ONNX Runtime 1.31 runs in one thread.

Each was run alone on a megabyte-sized tensor with one and two threads, the quickest
of 1500 runs: these gained 7 % at most, all others 60 % or more.
"""


@dataclass(frozen=True, slots=True)
class Curves:
    """Seconds of products by FLOP, and of copies by bytes moved, at some sizes."""

    products: Points
    copies: Points

    @classmethod
    def best(cls, turns: Sequence[Mapping[str, Any]], node_us: float) -> Curves:
        """The quickest of several measurements, without what starting a run takes.

        Args:
            turns: ``products`` and ``copies``, and ``least``: the seconds of a run of one
                operator that has nothing to do.
            node_us: What such an operator takes within a longer run.
        """
        start = min(turn["least"] for turn in turns) - node_us / 1e6
        products, copies = (
            [
                (size, max(node_us / 1e6, min(seconds for _, seconds in same) - start))
                for same in zip(*(turn[kind] for turn in turns), strict=True)
                for size in [same[0][0]]
            ]
            for kind in ("products", "copies")
        )
        return cls(products, copies)

    def seconds(self, work: Work) -> float:
        """The least time of one run of an operator."""
        arithmetic = work.flops / rate(self.products, work.flops) if work.flops else 0.0
        traffic = work.moved_bytes / rate(self.copies, work.moved_bytes) if work.moved_bytes else 0
        return max(arithmetic, traffic)


def rate(points: Points, amount: float) -> float:
    """Amount per second, between the two nearest sizes linearly in the logarithm of the size."""
    rates = [(size, size / seconds) for size, seconds in points]
    if amount <= rates[0][0]:
        return rates[0][1]
    for (small, low), (large, high) in itertools.pairwise(rates):
        if amount <= large:
            share = math.log(amount / small) / math.log(large / small)
            return low + (high - low) * share
    return rates[-1][1]


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of a step: its microseconds in the profile, and its work."""

    op_type: str
    us: float
    work: Work


def scaled_step(
    nodes: Sequence[Node],
    step_ms: float,
    costs: tuple[float, float],
    here: Curves,
    there: Curves,
    works: Sequence[Work],
) -> float:
    """Milliseconds of a step in another configuration.

    Args:
        nodes: Of the calibrated step.
        step_ms: Its time without a profile, to which nodes and the rest sum.
        costs: Microseconds that the runtime takes for any node, and that a profile adds.
        here: Curves of the calibrated configuration.
        there: Curves of the other one.
        works: Work of the same nodes there.
    """
    node_us, profile_us = costs
    runs = [(node.us, 1) for node in nodes]
    added = added_us(runs, node_us, profile_us, 1e3 * step_ms)
    times = [without_profile(us, calls, added, node_us) for us, calls in runs]
    fit = min(1.0, 1e3 * step_ms / sum(times)) if any(times) else 1.0
    total = max(0.0, 1e3 * step_ms - fit * sum(times))
    for node, us, work in zip(nodes, times, works, strict=True):
        fixed = min(fit * us, node_us)
        total += fixed + (fit * us - fixed) * _ratio(node, work, here, there)
    return total / 1e3


def _ratio(node: Node, work: Work, here: Curves, there: Curves) -> float:
    least = here.seconds(node.work)
    if node.op_type in SMALL or least == 0:
        return 1.0
    if node.op_type in SERIAL:  # on one thread here as there
        return here.seconds(work) / least
    return there.seconds(work) / least
