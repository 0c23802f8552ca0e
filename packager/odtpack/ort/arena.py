"""Fits the arena that a package's sessions share to the requests that a training makes.

Of what ONNX Runtime's arena holds a part is not in use: where a freed chunk is too small for the
next request, or a larger one is taken for it. How much that is hangs on two settings, and on every
request in an order that is known (:mod:`odtpack_simulator.memory.arena`). So settings are
tried on the plan, and the manifest has the best.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SessionInfo
from odtpack_simulator.memory.arena import SessionUse, sharing_of
from odtpack_simulator.memory.memory_plan import plan_arenas

_INITIAL_CHUNKS: Final = (None, *(2**20 * size for size in (2, 3, 4, 6, 8, 12, 16, 24, 32)))
"""ONNX Runtime's own is a MiB. What is reserved takes no memory before it is written to, but for an
index of a 32nd of it."""

_DEAD_BYTES: Final = (None, 2**20, 2**18, 2**16)

_BALLASTS: Final = (2**12, 2**16, 2**18)
"""What the requests of a kit may differ by from those that are planned. Where so little makes the
arena open another region, its settings suit the plan and not the kits."""


def fitted(
    package: Package, shapes: Mapping[str, Sequence[int]], *, step_model: bool
) -> SessionInfo:
    """Return a package's session options with the arena that holds least."""
    manifest = package.manifest
    assert manifest.session is not None  # noqa: S101 - it says that sessions share an arena
    sizes = {i.name: shapes.get(i.name, i.shape) for i in manifest.inputs}

    use = SessionUse(sharing_of(manifest.session), step_model)
    plans = plan_arenas(package, sizes, use)  # type: ignore[arg-type]

    def tried(session: SessionInfo) -> Iterator[tuple[int, ...]]:
        """The most in all variants, and in that of the plan: peak, and what training holds."""
        # Where something else is the peak. What is known so far, phase after phase.
        most = planned = (0, 0)
        for ballast, evaluates in ((0, True), (0, False), *((each, True) for each in _BALLASTS)):
            peak = steps = 0
            for keeps in (True, False):  # the first is mostly the larger
                arenas = plans.arenas(session, ballast, [keeps])
                for phase in plans.phases(arenas, evaluates=evaluates):
                    peak = max(peak, phase.nbytes - ballast)
                    if phase.name == "training step":
                        steps = max(steps, phase.nbytes - ballast)
                    if evaluates and not ballast:
                        planned = peak, steps
                    most = max(most, (peak, steps))
                    yield *most, *planned

    # No phase takes any of these figures down: what is complete and still lowest is the best.
    choices = [
        dataclasses.replace(
            manifest.session, initial_chunk_size_bytes=first, max_dead_bytes_per_chunk=dead
        )
        for first, dead in itertools.product(_INITIAL_CHUNKS, _DEAD_BYTES)
    ]
    trials = [tried(session) for session in choices]
    queue: list[tuple[tuple[int, ...], int]] = [((), index) for index in range(len(choices))]
    while (found := next(trials[index := queue[0][1]], None)) is not None:
        heapq.heapreplace(queue, (found, index))
    return choices[index]
