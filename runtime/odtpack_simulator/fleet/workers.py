"""Trains the clients of a round: here, in several processes, or on Ray; the bits are the same."""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.local_training import (
    Arrays,
    Indices,
    LocalSettings,
    LocalTrainer,
    LocalUpdate,
)
from odtpack_simulator.replay.executor import (
    RayExecutor,
    completed,
    guarded,
    relocate,
    unwrapped,
    worker_lost,
)
from odtpack_simulator.replay.replay import write_data

_PIECES = 4  # Pieces of work per process and round: few, since each carries the parameters

OnClient = Callable[[int, int], None]
"""Called with the number of clients trained and of all in the round."""


@dataclass(frozen=True)
class Group:
    """Clients that train from the same parameters."""

    arrays: Arrays  # What the server sends
    round_number: int  # Number of the round in which it does
    clients: Sequence[tuple[int, Indices]]  # Number and samples of each

    def pieces(self, size: int) -> Iterator[Group]:
        """The same in groups of so many clients at most."""
        for at in range(0, len(self.clients), size):
            yield Group(self.arrays, self.round_number, self.clients[at : at + size])


class ClientPool:
    """Trains clients; use it in a ``with`` statement."""

    # `jobs`: Processes; 1 keeps everything in this one.
    # `ray`: A cluster that trains, in place of processes here.

    def __init__(
        self,
        trainer: LocalTrainer,
        package: Package,
        data: Mapping[str, Array],
        settings: LocalSettings,
        jobs: int = 1,
        ray: RayExecutor | None = None,
    ) -> None:
        self._trainer, self._package, self._data = trainer, package, data
        self._settings, self._ray = settings, ray
        self._jobs = jobs if ray is None else ray.cores
        self._sent: _Sent | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._folder = ExitStack()

    def __enter__(self) -> Self:
        if self._ray is not None:
            with scratch_folder("fleet") as folder:
                files = write_data(self._data, Path(folder))
                path = self._package.path
                self._sent = _Sent(
                    uuid.uuid4().hex,
                    str(path),
                    files,
                    [self._ray.share(path), self._ray.share(Path(folder))],
                )
        elif self._jobs > 1:
            folder = self._folder.enter_context(scratch_folder("fleet"))
            files = write_data(self._data, Path(folder))
            # A fork would copy the threads' locks of ONNX Runtime without the threads.
            self._pool = ProcessPoolExecutor(
                self._jobs,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_open,
                initargs=(str(self._package.path), files),
            )
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._folder.close()

    def train(
        self, groups: Sequence[Group], on_client: OnClient | None = None
    ) -> list[LocalUpdate]:
        """Train clients; their answers in the same order."""
        report = on_client or (lambda done, of: None)
        updates: list[LocalUpdate] = []
        count = sum(len(group.clients) for group in groups)
        if self._pool is None and self._sent is None:
            for group in groups:
                for update in _updates(self._trainer, self._data, self._settings, group):
                    updates.append(update)
                    report(len(updates), count)
            return updates
        size = max(1, -(-count // (self._jobs * _PIECES)))
        pieces = [piece for group in groups for piece in group.pieces(size)]
        for found in self._in_processes(pieces):
            updates += found
            report(len(updates), count)
        return updates

    def _in_processes(self, pieces: Sequence[Group]) -> Iterator[list[LocalUpdate]]:
        if self._ray is not None:
            work = [(piece, self._settings, self._sent) for piece in pieces]
            yield from self._ray.in_order(_train_on_ray, work)
        if self._pool is None:
            return
        try:
            futures = [
                self._pool.submit(guarded, _train, piece, self._settings) for piece in pieces
            ]
            for future in futures:
                for _ in completed([future]):  # notices a process that is stopped
                    yield unwrapped(future.result())
        except BrokenExecutor as error:
            raise worker_lost(error) from error


@dataclass(frozen=True)
class _Sent:
    """What the workers of a cluster train: where it was, and what it arrives in."""

    key: str  # A worker opens it once for each key
    package: str  # Folder of the package
    files: Mapping[str, str]  # The data by name of input
    shipments: list[Any]  # References of Ray to both


def _train_on_ray(piece: Group, settings: LocalSettings, sent: _Sent) -> list[LocalUpdate]:
    if _here.get("key") != sent.key:
        import ray

        with scratch_folder("ray") as folder:
            arrived = [ray.get(each) for each in sent.shipments]
            moved = {each.origin: each.unpack(Path(folder)) for each in arrived}
            _open(relocate(sent.package, moved), relocate(dict(sent.files), moved), mapped=False)
        _here["key"] = sent.key
    return _train(piece, settings)


_here: dict[str, Any] = {}  # The trainer and the data of a process of a pool


def _open(package: str, files: Mapping[str, str], *, mapped: bool = True) -> None:
    _here["trainer"] = LocalTrainer(Package.open(package))
    _here["data"] = {
        name: np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        for name, path in files.items()
    }


def _train(piece: Group, settings: LocalSettings) -> list[LocalUpdate]:
    return list(_updates(_here["trainer"], _here["data"], settings, piece))


def _updates(
    trainer: LocalTrainer, data: Mapping[str, Array], settings: LocalSettings, group: Group
) -> Iterator[LocalUpdate]:
    for number, indices in group.clients:
        yield trainer.train(
            group.arrays, data, indices, settings, round_number=group.round_number, client=number
        )
