"""ONNX Runtime's arena: which pages of it a training touches.

A reimplementation of its best-fit allocator with coalescing (``BFCArena``, after TensorFlow's)
with the way to grow that it has by default. Memory comes from the system in regions, each twice
as large as the one before, and never goes back while the arena exists. A request

1. is rounded up to :data:`UNIT` bytes;
2. takes the smallest free chunk that is large enough, of several the one at the lowest address,
   searched bin by bin: a bin holds chunks of one power of two;
3. splits that chunk if it is at least twice as large, or :attr:`Arena.max_dead_bytes` larger;
4. opens a new region if there is no such chunk.

Linux places a region below those before it, which decides between chunks of one size. What is
freed is joined with free neighbours in its region. A page of a region counts once it was part of
a chunk: the system gives memory when it is written to. For every :data:`UNIT` bytes of a region
the arena keeps an index of :data:`_HANDLE_BYTES`, written when it is opened.
"""

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.native import has_native_nodes
from odtpack_runtime.package.records import SessionInfo
from odtpack_runtime.session.native import VARIABLE, native_library
from odtpack_simulator.device.kits import KERNEL_KITS, KITS, STEP_MODEL_KITS, Kit, Loop, Sharing
from odtpack_simulator.memory.allocation import Allocation, Request
from odtpack_simulator.memory.process_memory import PAGE

UNIT: Final = 256
FIRST_REGION_BYTES: Final = 2**20
_LARGEST_GROWTH: Final = 2**30
MAX_DEAD_BYTES: Final = 128 * 2**20
_HANDLE_BYTES: Final = 8
_TOP: Final = 2**62


@dataclass(slots=True)
class Arena:
    """An arena of one process. A chunk is named by its address."""

    growth: int = FIRST_REGION_BYTES  # Bytes of the next region
    # What is left of a chunk that is larger than what is asked for.
    max_dead_bytes: int = MAX_DEAD_BYTES
    touched: int = 0  # Bytes of pages that were part of a chunk so far
    reserved: int = 0  # Bytes of all regions
    chunks: dict[int, int] = field(default_factory=dict)  # In use: bytes by address
    # Free ones: bytes and address, in the order in which they are tried; addresses of their ends;
    # and at which end each begins. Between regions lies a page that is never theirs.
    free: list[tuple[int, int]] = field(default_factory=list)
    _ends: dict[int, int] = field(default_factory=dict)
    _starts: dict[int, int] = field(default_factory=dict)
    _lowest: int = _TOP  # Address of the newest region
    # Ranges of pages that were touched, apart from each other, in the order of their addresses.
    _pages: list[int] = field(default_factory=list)
    _pages_end: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, session: SessionInfo | None) -> Self:
        """The arena that the sessions of a package share, by what its manifest says."""
        if session is None:
            return cls()
        first = session.initial_chunk_size_bytes or FIRST_REGION_BYTES
        return cls(-(-first // UNIT) * UNIT, session.max_dead_bytes_per_chunk or MAX_DEAD_BYTES)

    @property
    def resident(self) -> int:
        """Bytes that the arena holds of the system's memory, its index included."""
        return self.touched + self.reserved // UNIT * _HANDLE_BYTES

    def allocate(self, nbytes: int) -> int | None:
        """Take memory that is written to; None for none."""
        held: dict[Hashable, int] = {}
        self.play([(0, nbytes)] if nbytes > 0 else [], held)
        return held.get(0)

    def release(self, start: int | None) -> None:
        """Free memory."""
        if start is not None:
            self.play([(0, 0)], {0: start})

    def play(self, requests: Iterable[Request], held: dict[Hashable, int]) -> int:
        """Take and free memory as :attr:`Allocation.requests` has it; ``held`` are addresses."""
        # Returns the most that it holds where a kernel takes memory from the heap, with that.
        # All in one loop: a fit plays half a million requests.
        free, ends, starts, chunks = self.free, self._ends, self._starts, self.chunks
        pages, pages_end, dead, most = self._pages, self._pages_end, self.max_dead_bytes, 0
        search, insert, after = bisect.bisect_left, bisect.insort, bisect.bisect_right
        for name, nbytes in requests:
            if nbytes > 0:
                size = -(-nbytes // UNIT) * UNIT
                # Bins are in the order of sizes, too: the first that fits is the smallest.
                at = search(free, (size, 0))
                if at < len(free):
                    length, start = free.pop(at)
                    del starts[ends.pop(start)]
                else:
                    length, start = self._open_region(size)
                rest = length - size
                if rest >= size or rest >= dead:
                    begin, end = start + size, start + length
                    insert(free, (rest, begin))
                    ends[begin], starts[end] = end, begin
                    length = size
                chunks[start] = length
                held[name] = start
                first, last = start // PAGE, -(-(start + nbytes) // PAGE)
                at = after(pages, first) - 1
                if at < 0 or pages_end[at] < last:
                    self._touch(first, last)
            elif nbytes == 0:
                start = held.pop(name, -1)
                if start < 0:
                    continue
                end = start + chunks.pop(start)
                if end in ends:
                    begin, end = end, ends.pop(end)
                    del starts[end], free[search(free, (end - begin, begin))]
                if start in starts:
                    end_of, start = start, starts.pop(start)
                    del ends[start], free[search(free, (end_of - start, start))]
                insert(free, (end - start, start))
                ends[start], starts[end] = end, start
            else:
                most = max(most, self.resident - nbytes)
        return most

    def _open_region(self, size: int) -> tuple[int, int]:
        grown = False
        while size > self.growth:
            self.growth *= 2
            grown = True
        length = self.growth
        if not grown:
            self.growth = min(2 * self.growth, _LARGEST_GROWTH)
        self.reserved += length
        self._lowest = (self._lowest - length) // PAGE * PAGE - PAGE
        return length, self._lowest

    def _touch(self, first: int, last: int) -> None:
        """Count pages, and join their range with those that it meets."""
        low = bisect.bisect_left(self._pages_end, first)
        high = bisect.bisect_right(self._pages, last)
        known = sum(self._pages_end[low:high]) - sum(self._pages[low:high])
        first = min([first, *self._pages[low:high]])
        last = max([last, *self._pages_end[low:high]])
        self._pages[low:high], self._pages_end[low:high] = [first], [last]
        self.touched += (last - first - known) * PAGE


# What the arenas of a training's sessions hold from one part of an app's life to the next.
#
# An arena gives nothing back before the last of its sessions is closed. So what counts is the
# order of all requests, those of every session that shares it: run after run what
# :mod:`odtpack_simulator.memory.allocation` planned. Constants, and most copies that kernels
# rearrange, are no part of it: ONNX Runtime reserves memory for each by itself.


def sharing_of(session: SessionInfo | None, kit: Kit = "python") -> Sharing:
    """How the sessions of a package allocate memory in a kit."""
    # `kit`: The kit, of which some cannot let sessions share an arena.
    if session is None:
        return "own"
    if not session.arena:
        return "none"
    return "shared" if session.shared_allocator and KITS[kit] else "own"


class SessionUse(NamedTuple):
    """The sessions of a training in a kit: how they allocate memory, and of which models."""

    # `step_model`: the package's step model makes the steps, and no gradients are kept.
    # `weights_bytes`: Frozen weights that the kit holds in memory, as it cannot map their file:
    # :func:`~odtpack_simulator.memory.planning.held_weights`.
    # `native`: The sessions run native kernels, of the library that the environment names.
    # `switches`: The step model is loaded first, and the other two when gradients are asked for.
    sharing: Sharing
    step_model: bool
    weights_bytes: int = 0
    native: bool = False
    switches: bool = False

    @property
    def work(self) -> tuple[bool, bool]:
        """What decides how long its steps take."""
        return self.step_model, self.native


def session_use(
    manifest: Manifest, kit: Kit = "python", loop: Loop = "step", native: bool | None = None
) -> SessionUse:
    """What a kit does with a package; it steps with the step model where both have one."""
    # `native`: Whether sessions run native kernels; None for what the kit does by itself.
    if native and kit == "js":
        raise OdtpackError(
            "no-native-kernels",
            "JavaScript has no way to register native kernels.",
            hint="--native no, or another kit",
        )
    native = (kit in KERNEL_KITS if native is None else native) and has_native_nodes(manifest)
    if native and native_library() is None:
        raise OdtpackError(
            "no-native-kernels",
            "The library of native kernels, which this simulation needs, was not found.",
            hint=f"name a library that you built, in {VARIABLE} (docs/native.md); or --native no, "
            "for an app that turns kernels off",
        )
    has = (
        kit in STEP_MODEL_KITS
        and manifest.files.step_model is not None
        and manifest.accumulation_steps == 1
    )
    steps, switches = has and loop == "step", has and loop == "train" and kit != "python"
    sharing = sharing_of(manifest.session, kit)
    if sharing == "own" and manifest.segments is not None and not KITS[kit]:
        sharing = "none"  # an arena for each of so many sessions would hold their peaks at once
    return SessionUse(sharing, steps, native=native, switches=switches)


class Arenas:
    """The arenas of the sessions of one process."""

    # Where a freed chunk is used again depends on every request before it, of a few bytes too, and
    # a region is touched or not. So what a binding does with small results, of which this knows
    # nothing, counts as what takes more: it lets go of them at once, or before the session's next
    # run. Large ones go at once, as in the kits for C++ and Swift.
    # `session`: What the manifest says of an arena that all share.
    # `ballast`: Bytes that something else takes of that arena first, and keeps: how near a plan is
    # to another region of it.
    # `keeps_results`: Which of the two is looked at: what both hold is what the larger holds.

    def __init__(
        self,
        sharing: Sharing,
        session: SessionInfo | None,
        ballast: int = 0,
        keeps_results: Iterable[bool] = (False, True),
    ) -> None:
        self._variants = [
            _Arenas(sharing, session, ballast, keeps_results=keeps) for keeps in keeps_results
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
        """Run a session once: buffers come and go, a kernel's working memory with its node."""
        # Returns: Bytes that kernels take from the heap at the worst, beyond what the arenas come
        # to hold.
        return max(0, max(variant.run(session, plan) for variant in self._variants) - self.resident)


class _Arenas:
    """The arenas of a process that keeps results until a session's next run, or does not."""

    def __init__(
        self, sharing: Sharing, session: SessionInfo | None, ballast: int, *, keeps_results: bool
    ) -> None:
        self._is_shared, self._keeps_results = sharing == "shared", keeps_results
        self._one = Arena.of(session)
        self._one.allocate(ballast)
        self._own: dict[str, Arena] = {}
        self._results: dict[str, tuple[int, ...]] = {}
        self._steady: dict[tuple[object, ...], int] = {}
        # Sessions whose next run has a memory pattern; None where the options have none.
        self._known: set[Allocation] | None = None
        if session is not None and session.memory_pattern:
            self._known = set()

    @property
    def resident(self) -> int:
        return sum(arena.resident for arena in (self._one, *self._own.values()))

    def load(self, session: str, copies: Iterable[int]) -> None:
        for nbytes in copies:
            self._of(session).allocate(nbytes)

    def run(self, session: str, plan: Allocation) -> int:
        """Run a session once; return the most bytes, those of the heap included, or 0."""
        arena, most = self._of(session), 0
        before = self._state(session, plan)
        if before in self._steady:  # it would leave everything as it is
            return self._steady[before]
        for chunk in self._results.pop(session, ()):
            arena.release(chunk)
        requests = plan.requests[self._keeps_results]
        if self._known is not None:
            requests = plan.in_pattern if plan in self._known else requests
            self._known.add(plan)
        held: dict[Hashable, int] = {}
        if more := arena.play(requests, held):
            most = self.resident - arena.resident + more
        self._results[session] = tuple(held.values())
        if self._state(session, plan) == before:
            self._steady[before] = most
        return most

    def _state(self, session: str, plan: Allocation) -> tuple[object, ...]:
        """All that a run hangs on."""
        kept = self._results.get(session)
        pattern = self._known is not None and plan in self._known
        return session, plan, pattern, kept, self.resident, *self._of(session).free

    def _of(self, session: str) -> Arena:
        if self._is_shared:
            return self._one
        return self._own.setdefault(session, Arena())
