"""Predict a step of this machine in another configuration from calibrated ones. Pure functions.

A calibrated step is known operator by operator. At a batch size between two calibrated ones
each operator takes what lies between its two times, by its roofs at the three sizes; what the
runtime takes for any operator is part of both.
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

from odtpack_simulator.latency import added_us, without_profile
from odtpack_simulator.memory.operator_work import Work

Points = Sequence[tuple[float, float]]

SERIAL = {"Abs", "Cast", "CumSum", "Expand", "Not", "Pad", "ScatterND", "Sign", "Slice", "Sum",
          "Tile", "Where"}  # fmt: skip
"""Operators that ONNX Runtime 1.31 runs in one thread.

Forty operators were run alone on a tensor of a million elements with one and two threads,
the quickest of a thousand runs and more: these gained 7 % at most, all others 50 % or more.
"""


@dataclass(frozen=True, slots=True)
class Curves:
    """Seconds of products by FLOP, and of copies by bytes moved, at some sizes."""

    products: Points
    copies: Points

    @classmethod
    def best(cls, turns: Sequence[Mapping[str, Any]], node_us: float) -> Curves:
        """The quickest of several measurements, without what starting a run takes.

        ``least`` of a turn are the seconds of a run of one operator that has nothing to do,
        ``node_us`` is what such an operator takes within a longer run.
        """
        start, least = min(turn["least"] for turn in turns) - node_us / 1e6, node_us / 1e6
        products, copies = (
            [
                (same[0][0], max(least, min(seconds for _, seconds in same) - start))
                for same in zip(*(turn[kind] for turn in turns), strict=True)
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


Step = tuple[Sequence[Node], float]
"""The nodes of a step, and its milliseconds."""


def calibrated_nodes(
    nodes: Sequence[Node], step_ms: float, costs: tuple[float, float]
) -> tuple[list[float], float]:
    """Microseconds of each node without the profile, and of the rest of the step.

    Both sum to ``step_ms``, the step without a profile. ``costs`` are the microseconds that the
    runtime takes for any node, and that a profile adds.
    """
    node_us, profile_us = costs
    added = added_us([(node.us, 1) for node in nodes], node_us, profile_us, 1e3 * step_ms)
    times = [without_profile(node.us, 1, added, node_us) for node in nodes]
    fit = min(1.0, 1e3 * step_ms / sum(times)) if any(times) else 1.0
    return [fit * us for us in times], max(0.0, 1e3 * step_ms - fit * sum(times))


@dataclass(frozen=True, slots=True)
class Between:
    """A step at a batch size between two calibrated ones, with one thread.

    Each node's time is linear in what its roof takes, through both its times: what does not depend
    on the batch size needs no model.
    """

    small: Step
    large: Step
    costs: tuple[float, float]  # those of :func:`calibrated_nodes`
    curves: Curves
    works: Sequence[Work]  # of the same nodes at the batch size asked for

    def nodes(self) -> tuple[list[float], float]:
        """Microseconds of each node, and of the rest."""
        (low, rest_low), (high, rest_high) = (
            calibrated_nodes(*step, self.costs) for step in (self.small, self.large)
        )
        times, seconds = [], self.curves.seconds
        for first, last, at_first, at_last, work in zip(
            self.small[0], self.large[0], low, high, self.works, strict=True
        ):
            least, most = seconds(first.work), seconds(last.work)
            share = (seconds(work) - least) / (most - least) if most > least else 0.5
            times.append(at_first + share * (at_last - at_first))
        return times, (rest_low + rest_high) / 2

    def step_ms(self) -> float:
        """Milliseconds of the step."""
        times, rest = self.nodes()
        return (sum(times) + rest) / 1e3

    def threaded_ms(self, threaded: Step) -> float:
        """Milliseconds of the step with more threads, known at the larger batch size.

        Each node gains what it gained there; operators that run in one thread gain nothing, however
        the two timings scattered. The step with more threads there is both predicted in this way
        and measured. Its relative error is assumed here, too.
        """
        times, rest = self.nodes()
        alone, rest_alone = calibrated_nodes(*self.large, self.costs)
        together, _ = calibrated_nodes(*threaded, self.costs)
        gains = [
            _gain(node.op_type, one, many)
            for node, one, many in zip(self.large[0], alone, together, strict=True)
        ]
        here = rest + sum(us * gain for us, gain in zip(times, gains, strict=True))
        there = rest_alone + sum(us * gain for us, gain in zip(alone, gains, strict=True))
        return threaded[1] * here / there


def _gain(op_type: str, one: float, many: float) -> float:
    """What a node's time is multiplied by with more threads."""
    gain = many / one if one > 0 else 1.0
    return max(1.0, gain) if op_type in SERIAL else gain
