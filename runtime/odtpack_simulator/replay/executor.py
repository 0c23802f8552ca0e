"""Run independent pieces of work side by side: in this process, in several, or on Ray.

Work is a function at the top of a module and items that can be pickled. The three
ways give the same results in the same order; an error of one item ends the rest.
Items name files by path. On Ray a machine may not see these paths: what stands
below ``files`` is sent there, and paths in items are rewritten to where it arrived.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import math
import multiprocessing
import os
import socket
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from odtpack_runtime.apart.worker import Watch
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder

T = TypeVar("T")
R = TypeVar("R")

_CONNECT_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 1.0

OnDone = Callable[[int, int], None]  # Called with the number of finished items and of all items


def default_jobs() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_executor(jobs: int = 1, ray: str | None = None) -> Executor:
    """The executor that options ask for."""
    if not 0 <= jobs <= 4096:
        raise OdtpackError(
            "bad-jobs",
            f"The number of jobs is {jobs}; it must be between 1 and 4096, or 0 for one per core.",
        )
    if ray is not None:
        return RayExecutor(ray, jobs or default_jobs())
    return LocalExecutor(jobs or default_jobs())


class Executor:
    """Runs items of work; what a ``with`` statement around it keeps ends with it."""

    jobs: int  # Items at a time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def share(self, paths: Iterable[Path]) -> list[Any]:
        """Send files and folders to workers that do not see them, as a :class:`Shipment` each."""
        return []

    def in_order(self, function: Callable[..., R], calls: Sequence[tuple[Any, ...]]) -> Iterator[R]:
        """Call a function in workers, which keep what they hold; results in order, as they come."""
        # `calls`: Its arguments; what share gave stands in lists, which are not unpacked.
        results: dict[int, Any] = {}
        wanted = 0
        with closing(self._finished(guarded, [(function, *each) for each in calls])) as finished:
            for index, result in finished:
                results[index] = result
                while wanted in results:
                    yield unwrapped(results.pop(wanted))
                    wanted += 1

    def map(
        self,
        function: Callable[[T], R],
        items: Sequence[T],
        *,
        files: Sequence[Path] = (),
        on_done: OnDone | None = None,
    ) -> list[R]:
        """Apply a function to every item; results in the order of the items."""
        # `files`: Folders and files that items name, or that lie below what they name.
        shipments = self.share(files)
        calls = [(function, item, *shipments) for item in items]
        results: dict[int, R] = {}
        with closing(self._finished(_on_worker if shipments else guarded, calls)) as finished:
            for index, result in finished:
                results[index] = unwrapped(result)
                if on_done is not None:
                    on_done(len(results), len(items))
        return [results[index] for index in range(len(items))]

    def _finished(
        self, run: Callable[..., R], calls: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, R], None, None]:
        """Run calls in workers; their places and results as they end."""
        raise NotImplementedError


class LocalExecutor(Executor):
    """Runs items in this process one after the other, or in several at a time."""

    # `jobs`: Processes at a time; 1 keeps everything in this process. A `with` statement keeps them
    # from one call to the next.

    def __init__(self, jobs: int = 1) -> None:
        self.jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        assert self._pool is None, "one with statement at a time"  # noqa: S101
        if self.jobs > 1:
            # A fork would copy the threads' locks of ONNX Runtime without the threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.jobs, mp_context=context)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _finished(
        self, run: Callable[..., R], calls: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, R], None, None]:
        if self._pool is None and len(calls) > 1 and self.jobs > 1:
            with self:
                yield from self._finished(run, calls)
        elif self._pool is None:
            for index, (function, *arguments) in enumerate(calls):
                yield index, function(*arguments)
        else:
            try:
                futures = {self._pool.submit(run, *each): i for i, each in enumerate(calls)}
                for future in completed(futures):
                    yield futures[future], future.result()
            except BrokenExecutor as error:
                raise worker_lost(error) from error


def completed(futures: Iterable[Future[R]]) -> Iterator[Future[R]]:
    """Yield the futures of a pool of processes as they end."""
    watch, waiting = Watch(math.inf), set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
        yield from done
        children = multiprocessing.active_children()
        reason = watch.overdue([child.pid for child in children if child.pid is not None])
        if reason and not done:
            for child in children:
                child.kill()
            raise OdtpackError("worker-lost", f"A worker process was killed: {reason}.")


class RayExecutor(Executor):
    """Runs items on a Ray cluster."""

    # `address`: Of the cluster; `local` starts one on this machine.
    # `jobs`: Processor cores of a cluster that is started here.

    def __init__(self, address: str = "local", jobs: int = 1) -> None:
        try:
            import ray
        except ImportError as error:
            raise OdtpackError("ray-missing", "Ray is not installed.") from error
        self._ray: Any = ray
        # Ray itself would try for minutes. Other addresses are "local" and "auto".
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon:
            try:
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            except (OSError, ValueError, OverflowError) as error:
                raise _unreachable(address) from error
        # "local" is said as well: else Ray goes to a cluster that runs on this machine.
        options: dict[str, Any] = {
            "address": address, "log_to_driver": False, "logging_level": "ERROR"
        }  # fmt: skip
        if address == "local":
            options |= {"num_cpus": jobs, "include_dashboard": False}
        if not ray.is_initialized():
            try:
                ray.init(**options)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise _unreachable(address) from error

    @property
    def jobs(self) -> int:  # type: ignore[override]
        """Processor cores of the cluster."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def share(self, paths: Iterable[Path]) -> list[Any]:
        """Send each once, whatever the number of calls; see :class:`Executor`."""
        return [self._ray.put(Shipment.pack(path)) for path in paths]

    def _finished(
        self, run: Callable[..., R], calls: Sequence[tuple[Any, ...]]
    ) -> Generator[tuple[int, R], None, None]:
        # Twice as many calls as there are cores are under way, so that none waits for this process
        # and a cluster that grows on demand does. None is ever cancelled: Ray's driver aborts where
        # a call answers in the moment in which it is cancelled (Ray 2.60).
        # Killed workers are started anew by Ray: a second try could hide a crash.
        remote = self._ray.remote(num_cpus=1, max_retries=0)(run)
        waiting = enumerate(calls)
        under_way: dict[Any, int] = {}
        while True:
            room = max(0, 2 * self.jobs - len(under_way))
            for index, arguments in itertools.islice(waiting, room):
                under_way[remote.remote(*arguments)] = index
            if not under_way:
                return
            try:
                ready, _ = self._ray.wait(list(under_way))
                done = [(under_way.pop(each), self._ray.get(each)) for each in ready]
            except self._ray.exceptions.RayError as error:
                raise worker_lost(error) from error
            yield from done


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A file or folder on its way to another machine."""

    origin: str  # Where it lies here
    digest: str  # SHA-256 of `data`
    data: bytes  # A tar archive of it

    @classmethod
    def pack(cls, path: Path) -> Shipment:
        """Archive a file or folder: regular files and folders only."""
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(path, path.name, filter=lambda e: e if e.isreg() or e.isdir() else None)
        data = stream.getvalue()
        return cls(str(path), hashlib.sha256(data).hexdigest(), data)

    def unpack(self, root: Path) -> str:
        """Write it below ``root``; return where it lies now."""
        folder = root / self.digest
        folder.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(self.data)) as archive:
            archive.extractall(folder, filter="data")
        return str(folder / Path(self.origin).name)


@dataclasses.dataclass(frozen=True)
class _Raised:
    """An error of odtpack's own on its way back: pickling would lose its parts."""

    code: str
    what: str
    where: str | None
    hint: str | None


def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Apply a function in another process; :func:`unwrapped` raises its error in this one."""
    try:
        return function(*arguments)
    except OdtpackError as error:
        return _Raised(error.code, error.what, error.where, error.hint)


def unwrapped(result: Any) -> Any:
    """What :func:`guarded` returned, without its wrapping."""
    if isinstance(result, _Raised):
        raise OdtpackError(result.code, result.what, where=result.where, hint=result.hint)
    return result


def _on_worker(function: Callable[[Any], Any], item: Any, *shipments: Shipment) -> Any:
    """Run one item on a machine that has none of the files."""
    with scratch_folder("ray") as folder:
        moved = {each.origin: each.unpack(Path(folder)) for each in shipments}
        return guarded(function, relocate(item, moved))


def relocate(value: Any, moved: dict[str, str]) -> Any:
    """A copy of an item in which paths at or below the keys lead to where these are now."""
    if isinstance(value, str):
        for origin, place in moved.items():
            if value == origin or value.startswith(origin.rstrip(os.sep) + os.sep):
                return place + value[len(origin) :]
        return value
    if isinstance(value, Path):
        return Path(relocate(str(value), moved))
    if isinstance(value, dict):
        return {key: relocate(each, moved) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(relocate(each, moved) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        after = {name: relocate(before, moved) for name, before in fields.items()}
        changes = {name: each for name, each in after.items() if each != fields[name]}
        return dataclasses.replace(value, **changes) if changes else value
    return value


def _unreachable(address: str) -> OdtpackError:
    return OdtpackError("ray-unreachable", f"No Ray cluster answers at '{address[:200]}'.")


def worker_lost(error: Exception) -> OdtpackError:
    """The error for a process that died."""
    what = f"A process that worked on a part of this ended: {type(error).__name__}"
    return OdtpackError("worker-lost", f"{what}.")
