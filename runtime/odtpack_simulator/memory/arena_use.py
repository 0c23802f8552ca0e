"""What the arenas of a training's sessions hold from one part of an app's life to the next.

An arena gives nothing back before the last of its sessions is closed. So what counts is the
order of all requests, those of every session that shares it: run after run what
:mod:`odtpack_simulator.memory.allocation` planned. Constants, and most copies that kernels
rearrange, are no part of it: ONNX Runtime reserves memory for each by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.manifest_device import SessionInfo
from odtpack_simulator.device.kits import KITS, STEP_MODEL_KITS, Kit, Sharing
from odtpack_simulator.memory.allocation import Allocation
from odtpack_simulator.memory.arena import Arena, Chunk


def sharing_of(session: SessionInfo | None, kit: Kit = "python") -> Sharing:
    """How the sessions of a package come by their memory in a kit.

    Args:
        session: What the manifest says.
        kit: The kit, of which some cannot let sessions share an arena.
    """
    if session is None:
        return "own"
    if not session.arena:
        return "none"
    return "shared" if session.shared_allocator and KITS[kit] else "own"


class SessionUse(NamedTuple):
    """The sessions of a training in a kit: how they come by their memory, and of which models.

    ``step_model``: the package's step model makes the steps, and no gradients are kept.
    ``weights_bytes``: Frozen weights that the kit holds in memory, as it cannot map their file.
    """

    sharing: Sharing
    step_model: bool
    weights_bytes: int = 0


def session_use(manifest: Manifest, kit: Kit = "python") -> SessionUse:
    """What a kit does with a package."""
    has = manifest.files.step_model is not None and manifest.accumulation_steps == 1
    sharing = sharing_of(manifest.session, kit)
    if sharing == "own" and manifest.segments is not None and not KITS[kit]:
        sharing = "none"  # an arena for each of so many sessions would hold their peaks at once
    return SessionUse(sharing, has and kit in STEP_MODEL_KITS)


_LARGE_RESULT: Final = 1 << 16
"""Bytes of a result that no app keeps longer than it must."""


class Arenas:
    """The arenas of the sessions of one process.

    Where a freed chunk is used again depends on every request before it, of a few bytes too, and a
    region is touched or not. So what a binding does with small results, of which this knows
    nothing, counts as what takes more: it lets go of them at once, or before the session's next
    run. Large ones go at once, as in the kits for C++ and Swift.

    Args:
        sharing: Who has which.
        session: What the manifest says of an arena that all share.
        ballast: Bytes that something else takes of that arena first, and keeps.
    """

    def __init__(self, sharing: Sharing, session: SessionInfo | None, ballast: int = 0) -> None:
        self._variants = [
            _Arenas(sharing, session, ballast, keeps_results=keeps) for keeps in (False, True)
        ]

    @property
    def resident(self) -> int:
        """Bytes of the system's memory that they hold, whatever of it is in use."""
        return max(variant.resident for variant in self._variants)

    def load(self, session: str, copies: Iterable[int]) -> None:
        """Load a session, whose kernels take so many bytes for as long as it is open."""
        sizes = list(copies)
        for variant in self._variants:
            variant.load(session, sizes)

    def run(self, session: str, plan: Allocation) -> int:
        """Run a session once: buffers come and go, a kernel's working memory with its node.

        Returns:
            Bytes that kernels take from the heap at the worst, beyond what the arenas come to hold.
        """
        most = max(variant.run(session, plan) for variant in self._variants)
        return max(0, most - self.resident)


class _Arenas:
    """The arenas of a process that keeps results until a session's next run, or does not."""

    def __init__(
        self, sharing: Sharing, session: SessionInfo | None, ballast: int, *, keeps_results: bool
    ) -> None:
        self._is_shared, self._keeps_results = sharing == "shared", keeps_results
        self._one = Arena.of(session)
        self._one.allocate(ballast)
        self._own: dict[str, Arena] = {}
        self._results: dict[str, list[Chunk | None]] = {}

    @property
    def resident(self) -> int:
        return sum(arena.resident for arena in (self._one, *self._own.values()))

    def load(self, session: str, copies: Iterable[int]) -> None:
        for nbytes in copies:
            self._of(session).allocate(nbytes)

    def run(self, session: str, plan: Allocation) -> int:
        """Run a session once; return the most bytes, those of the heap included, or 0."""
        most = 0
        arena = self._of(session)
        for chunk in self._results.pop(session, []):
            arena.release(chunk)
        held: dict[str, Chunk | None] = {}
        begun: dict[int, list[str]] = {}
        ended: dict[int, list[str]] = {}
        sizes = {}
        for buffer in plan.buffers:
            sizes[buffer.name] = buffer.nbytes
            begun.setdefault(buffer.first, []).append(buffer.name)
            ended.setdefault(buffer.last, []).append(buffer.name)
        for index, use in enumerate(plan.uses):
            scratch = [arena.allocate(n) for n in use.scratch] if use.scratch_first else []
            for name in begun.get(index, ()):
                held[name] = arena.allocate(sizes[name])
            if not use.scratch_first:
                scratch = [arena.allocate(nbytes) for nbytes in use.scratch]
            for chunk in scratch:
                arena.release(chunk)
            if use.outside:
                most = max(most, self.resident + use.outside)
            for name in ended.get(index, ()):
                kept = self._keeps_results and name in plan.results
                if not kept or sizes[name] >= _LARGE_RESULT:
                    arena.release(held.pop(name))
        self._results[session] = list(held.values())
        return most

    def _of(self, session: str) -> Arena:
        if self._is_shared:
            return self._one
        return self._own.setdefault(session, Arena())
