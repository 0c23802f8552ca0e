"""Trains the clients of a round, in this process or in several; the bits are the same."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
from odtpack_simulator.replay.executor import guarded, unwrapped, worker_lost
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
    """

    def __init__(
        self,
        trainer: LocalTrainer,
        package: Package,
        data: Mapping[str, Array],
        settings: LocalSettings,
        jobs: int = 1,
    ) -> None:
        self._trainer, self._package, self._data = trainer, package, data
        self._settings, self._jobs = settings, jobs
        self._pool: ProcessPoolExecutor | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        if self._jobs > 1:
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
        if self._pool is None:
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
        try:
            futures = [
                self._pool.submit(
                    guarded,
                    _train,
                    _Piece(arrays, self._settings, round_number, tuple(clients[at : at + size])),
                )
                for at in range(0, len(clients), size)
            ]
            for future in futures:
                updates += unwrapped(future.result())
                tell(len(updates), len(clients))
        except BrokenExecutor as error:
            raise worker_lost(error) from error
        return updates


_here: dict[str, Any] = {}
"""The trainer and the data of a process of a pool."""


def _open(package: str, files: Mapping[str, str]) -> None:
    _here["trainer"] = LocalTrainer(Package.open(package))
    _here["data"] = {
        name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in files.items()
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
