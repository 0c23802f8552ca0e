"""The machine is calibrated once for all tests, and is taken to be quiet, whatever else runs on it.

No test asserts a time, and three quarters of a simulation of a small network went into it. On a
busy machine times are not judged, and what follows from them is not there. As a program,
``python -m tests.calibrated simulate ...`` is ``odtpack simulate ...``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from odtpack_simulator.replay.job import Job, Message

FOLDER = "ODTPACK_TESTS_CALIBRATIONS"
"""Variable that names the folder of what was measured, a file for each number of threads."""


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Let simulations take over what the first of them measured, in this or another process.

    Their steps waited for nothing, and the machine was as fast after them as before.
    """
    from odtpack_runtime.files.atomic import atomic_write
    from odtpack_simulator import latency

    original = latency.run_child

    def once(job: Job, **options: Any) -> Generator[Message, None, None]:
        path = Path(os.environ[FOLDER], f"{job.threads}.json")
        if path.exists():
            job = dataclasses.replace(job, calibration=json.loads(path.read_bytes()))
        with contextlib.closing(original(job, **options)) as messages:
            for message in messages:
                if message["event"] == "timed":
                    known = message["calibration"]
                    # Threads that shared a core would be too slow to be judged.
                    known["core_flops"] = known["gemm_flops"] / known["threads"]
                    with atomic_write(path) as stream:
                        stream.write(json.dumps(known).encode())
                    message |= {
                        "first_waited_ms": 0.0, "waited_ms": [0.0] * len(message["steps_ms"]),
                        "rates_after": [known["gemm_flops"], known["copy_bandwidth"]],
                        "stolen_share": 0.0, "others_share": 0.0,
                    }  # fmt: skip
                yield message

    with mock.patch.object(latency, "run_child", once):
        yield


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Let simulations measure the machine, as busy as it is."""
    from odtpack_simulator.replay.replay import run_child

    with mock.patch("odtpack_simulator.latency.run_child", run_child):
        yield


if __name__ == "__main__":
    from odtpack.cli import main

    with shared():
        sys.exit(main())
