"""Shows the progress of a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from odtpack.cli._console import Progress as Shown
    from odtpack_simulator.replay.replay import Progress

_WORDS = {
    "predicting": "predict the memory",
    "timing": "time the operators",
    "measuring": "train in measured memory",
    "replaying": "train within limits, and interrupted",
}


def teller(shown: Shown) -> Callable[[Progress], None]:
    """A callback for ``simulate`` that reports its progress."""

    def report(now: Progress) -> None:
        what = f"{_WORDS[now.stage]} {now.detail}".rstrip()
        shown.update(now.step, now.steps, f"{now.run}/{now.runs} {what}")

    return report
