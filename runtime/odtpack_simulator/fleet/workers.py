"""Trains the clients of a round: here, in several processes, or on Ray; the bits are the same."""

from __future__ import annotations

import multiprocessing
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
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
    guarded,
    relocate,
    unwrapped,
    worker_lost,
)
from odtpack_simulator.replay.prepare import write_data

_PIECES = 4
"""Pieces of work per process and round: few, since each carries the parameters."""

OnClient = Callable[[int, int], None]
"""Called with the number of clients trained and of all in the round."""


@dataclass(frozen=True)
class _Piece:
    """Some clients of a round, for one process."""

    arrays: Arrays
    settings: LocalSettings
    round_number: int
    clients: tuple[tuple[int, Indices], ...]


class ClientPool:
    """Trains clients; use it in a ``with`` statement.

    Args:
        trainer: Trains in this process.
        package: The package, for other processes.
        data: Arrays by name of input.
        settings: How every client trains.
        jobs: Processes; 1 keeps everything in this one.
        ray: A cluster that trains, in place of processes here.
    """

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
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        if self._ray is not None:
            with tempfile.TemporaryDirectory(prefix="odtpack-fleet-") as folder:
                files = write_data(self._data, Path(folder))
                path = self._package.path
                self._sent = _Sent(
                    uuid.uuid4().hex,
                    str(path),
                    files,
                    [self._ray.share(path), self._ray.share(Path(folder))],
                )
        elif self._jobs > 1:
            self._folder = tempfile.TemporaryDirectory(prefix="odtpack-fleet-")
            files = write_data(self._data, Path(self._folder.name))
            # A fork would copy the threads' locks of ONNX Runtime without the threads.
            self._pool = ProcessPoolExecutor(
                self._jobs,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_open,
                initargs=(str(self._package.path), files),
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._folder is not None:
            self._folder.cleanup()

    def train(
        self,
        arrays: Arrays,
        round_number: int,
        clients: Sequence[tuple[int, Indices]],
        on_client: OnClient | None = None,
    ) -> list[LocalUpdate]:
        """Train clients from the same parameters.

        Args:
            arrays: What the server sends.
            round_number: Number of the round.
            clients: Number and samples of each.
            on_client: Called as clients finish.

        Returns:
            Their answers, in the same order.

        Raises:
            OdtpackError: ``worker-lost`` if a process died.
        """
        tell = on_client or (lambda done, of: None)
        updates: list[LocalUpdate] = []
        if self._pool is None and self._sent is None:
            for number, indices in clients:
                updates.append(
                    self._trainer.train(
                        arrays,
                        self._data,
                        indices,
                        self._settings,
                        round_number=round_number,
                        client=number,
                    )
                )
                tell(len(updates), len(clients))
            return updates
        size = max(1, -(-len(clients) // (self._jobs * _PIECES)))
        pieces = [
            _Piece(arrays, self._settings, round_number, tuple(clients[at : at + size]))
            for at in range(0, len(clients), size)
        ]
        for found in self._in_processes(pieces):
            updates += found
            tell(len(updates), len(clients))
        return updates

    def _in_processes(self, pieces: Sequence[_Piece]) -> Iterator[list[LocalUpdate]]:
        if self._ray is not None:
            yield from self._ray.in_order(_train_on_ray, [(p, self._sent) for p in pieces])
        if self._pool is None:
            return
        try:
            futures = [self._pool.submit(guarded, _train, piece) for piece in pieces]
            for future in futures:
                yield unwrapped(future.result())
        except BrokenExecutor as error:
            raise worker_lost(error) from error


@dataclass(frozen=True)
class _Sent:
    """What the workers of a cluster train: where it was, and what it arrives in.

    Attributes:
        key: A worker opens it once for each key.
        package: Folder of the package.
        files: The data by name of input.
        shipments: References of Ray to both.
    """

    key: str
    package: str
    files: Mapping[str, str]
    shipments: list[Any]


def _train_on_ray(piece: _Piece, sent: _Sent) -> list[LocalUpdate]:
    if _here.get("key") != sent.key:
        import ray

        with tempfile.TemporaryDirectory(prefix="odtpack-ray-") as folder:
            arrived = [ray.get(each) for each in sent.shipments]
            moved = {each.origin: each.unpack(Path(folder)) for each in arrived}
            _open(relocate(sent.package, moved), relocate(dict(sent.files), moved), mapped=False)
        _here["key"] = sent.key
    return _train(piece)


_here: dict[str, Any] = {}
"""The trainer and the data of a process of a pool."""


def _open(package: str, files: Mapping[str, str], *, mapped: bool = True) -> None:
    _here["trainer"] = LocalTrainer(Package.open(package))
    _here["data"] = {
        name: np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        for name, path in files.items()
    }


def _train(piece: _Piece) -> list[LocalUpdate]:
    trainer: LocalTrainer = _here["trainer"]
    return [
        trainer.train(
            piece.arrays,
            _here["data"],
            indices,
            piece.settings,
            round_number=piece.round_number,
            client=number,
        )
        for number, indices in piece.clients
    ]
