"""A child that somebody stops (SIGSTOP) is noticed: with the limit of a minute or less."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

from odtpack_runtime.apart import worker
from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.replay.executor import LocalExecutor


def test_the_limit_is_below_a_minute() -> None:
    assert worker.STOPPED_SECONDS < 60


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_worker_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STOPPED_SECONDS", 1.0)

    def stop() -> None:
        time.sleep(5)
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGSTOP)

    threading.Thread(target=stop).start()
    start = time.monotonic()
    with pytest.raises(OdtpackError) as caught:
        LocalExecutor(2).map(_sleep, [60.0, 60.0])
    assert caught.value.code == "worker-lost"
    assert "SIGSTOP" in caught.value.what
    assert time.monotonic() - start < 30
