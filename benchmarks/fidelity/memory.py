"""Predicted against measured peak memory of the held-out models, and verdicts under real limits.

Measured is an app, ``odtpack-measure``, the C++ kit's program. It loads the package with its own
options, evaluates, trains, evaluates, saves and exports. It is killed with everything open, and a
second process resumes from the file and does the same again. What counts is resident anonymous
memory above what the process had before the package. Beside it stands what a replay in Python
measures.
"""

import argparse
import dataclasses
import itertools
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fidelity.models import CASES, STEPS, Built, build
from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.app import MemoryFit, memory_fit
from odtpack_simulator.device.kits import Loop
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.replay import run_training_child, with_sessions
from scripts.harness import scratch
from tests.kits import cpp_kit

LIMITS = (0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 1.01, 1.02, 1.03, 1.05, 1.1, 1.15, 1.2)
"""Limits, as shares of the measured need."""
SESSIONS: dict[str, dict[str, Any]] = {
    "package": {},
    "own": {"shared_allocator": False},
    "default": {
        "shared_allocator": False, "optimization_level": "all", "memory_pattern": True,
        "config": {},
    },
}  # fmt: skip
"""Session options: the package's; an arena of each session's own, as Kotlin and JavaScript have to;
and ONNX Runtime's defaults."""
NEAR = 0.03
"""Share of the need within which a limit is too close to call."""
_OVER, _SECONDS = 3, 600.0
"""Exit code of the app where memory goes beyond the limit, and how long it may take."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The prediction for a memory limit, and the outcome of a training under that limit."""

    share: float  # the limit, as a share of the measured need
    limit_bytes: int
    said: MemoryFit  # by `odtpack simulate`: fits, close (which fails) or over
    did: bool  # whether it was completed

    @property
    def wrong(self) -> str:
        """What is wrong about it; empty if it is right, or wrong too near the need to count."""
        if (self.said == "fits") == self.did:
            return ""
        if self.said == "fits":
            return "said fits"
        return "said no" if self.share > 1 + NEAR else ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One model, trained in one way."""

    model: str
    batch_size: int
    threads: int
    predicted_bytes: int  # peak of the plan
    measured_bytes: int  # highest peak of the app
    python_bytes: int | None  # peak of a replay in Python; None if it was not measured
    predicted_phase: str  # phase of the plan that is its peak
    loop: Loop  # how the app makes its steps
    phases: dict[str, int]  # measured by phase of the app, the resumed one's after ``resumed``
    verdicts: tuple[Verdict, ...] = ()  # one for each limit

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


class App:
    """A training in the app, whose files are in a folder."""

    def __init__(
        self, folder: Path, built: Built, batch_size: int, threads: int, loop: Loop
    ) -> None:
        if (reason := cpp_kit.unavailable()) is not None:
            raise OdtpackError("kit-missing", f"The app cannot be built: {reason}.")
        self._folder, accumulate = folder, built.case.accumulation_steps
        self._job: dict[str, Any] = {
            "package": built.package.path, "accumulate": accumulate, "count": STEPS * accumulate,
            "steps": [cpp_kit.save_batch(folder, built.batch(batch_size))], "threads": threads,
            "plain": loop == "train", "learning_rate": 1e-4, "evaluate_first": True,
            "evaluation": True, "save": "saved", "wait": "done",
        }  # fmt: skip
        if built.package.manifest.inference is not None:
            self._job["export"] = "exported.onnx"

    def measure(self) -> tuple[dict[str, int], dict[str, int]]:
        """Peak in bytes of each phase, in the process that is killed and in the resumed one."""
        first = self._live({})
        (self._folder / "saved").rename(self._folder / "resumed from")
        return first, self._live({"checkpoint": "resumed from", "evaluate_first": False})

    def completes(self, limit: int) -> bool:
        """Whether both lives come to their ends within a limit in bytes, after :meth:`measure`."""
        lives = ({}, {"checkpoint": "resumed from", "evaluate_first": False})
        return all(self._live({**life, "limit_bytes": limit}) is not None for life in lives)

    def _live(self, more: dict[str, Any]) -> dict[str, int] | None:
        """Run the program until it waits, and kill it; None if it went beyond its limit."""
        job, done = self._folder / "job.json", self._folder / "done"
        output, errors = self._folder / "output.json", self._folder / "errors.txt"
        job.write_text(json.dumps(self._job | more, default=str))
        done.unlink(missing_ok=True)
        with output.open("w") as stdout, errors.open("w") as stderr:
            process = subprocess.Popen(cpp_kit.measuring(job), stdout=stdout, stderr=stderr)
            end = time.monotonic() + _SECONDS
            try:
                while process.poll() is None and not done.exists():
                    assert time.monotonic() < end, "the app does not end"
                    time.sleep(0.01)
            finally:
                process.kill()
                code = process.wait()
        if code == _OVER and "limit_bytes" in more:
            return None
        assert done.exists(), errors.read_text()[-2000:]
        found = json.loads(output.read_text())
        before = found["before_anonymous_bytes"]
        peaks = {name: phase["peak_anonymous_bytes"] for name, phase in found["phases"].items()}
        return {phase: peak - before for phase, peak in peaks.items()}


def measure(given: argparse.Namespace) -> Iterator[Row]:
    """Plan and measure cases, and hold them to limits; rows come in order.

    ``given`` is what the command line of the benchmark says.
    """
    tasks = []
    with scratch() as folder:
        for case in map(CASES.__getitem__, given.models):
            built = build(case, native=given.native)
            if given.sessions != "package":
                built = built.with_session(folder / case.name, **SESSIONS[given.sessions])
            stepped = session_use(built.package.manifest, "cpp").step_model
            loops, threads = ["step", "train"][not stepped :], given.threads or [1, 2]
            # Threads take the larger share of a small batch.
            for loop, n in itertools.product(loops, [1] if given.quick else threads):
                for size in case.batches[:1] if given.quick or n > 1 else case.batches:
                    # In turn a third or a quarter of the limits, from the first ones on.
                    part = 3 if n == 1 else 4
                    limits = () if given.no_limits else LIMITS[len(tasks) % part :: part]
                    tasks.append((built, loop, n, size, limits))
        with ThreadPoolExecutor(given.jobs) as pool:
            yield from pool.map(lambda task: _row(*task), tasks)


def _row(built: Built, loop: Loop, threads: int, batch_size: int, limits: Sequence[float]) -> Row:
    package = built.package
    use = session_use(package.manifest, "cpp", loop)
    plan = plan_memory(package, built.shapes(batch_size), use, threads=threads)
    with scratch() as folder:
        app = App(folder, built, batch_size, threads, loop)
        first, second = app.measure()
        need = max(*first.values(), *second.values())
        verdicts = [
            Verdict(share, limit, memory_fit(plan.peak.nbytes, limit), app.completes(limit))
            for share in limits
            for limit in [int(share * need)]
        ]
        python = None
        if threads == 1:
            job = with_sessions(built.job(folder, batch_size, threads), package, use)
            python = run_training_child(job).peak_bytes
    phases = first | {f"resumed: {phase}": peak for phase, peak in second.items()}
    return Row(
        built.case.name, batch_size, threads, plan.peak.nbytes, need, python, plan.peak.name, loop,
        phases, tuple(verdicts),
    )  # fmt: skip


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """All rows together; errors are magnitudes but for the lowest and the highest."""
    errors = np.array([row.error for row in rows])
    sizes = np.abs(errors)
    verdicts = [verdict for row in rows for verdict in row.verdicts]
    far = [verdict for verdict in verdicts if verdict.share > 1 + NEAR]
    return {
        "models": len({row.model for row in rows}), "cases": len(rows),
        "median_error": float(np.median(sizes)), "p95_error": float(np.percentile(sizes, 95)),
        "largest_error": float(sizes.max()), "verdicts": len(verdicts),
        "said_fits_did_not": sum(v.wrong == "said fits" for v in verdicts),
        "said_no_did": sum(v.wrong == "said no" for v in verdicts) / max(1, len(far)),
        "close": sum(v.said == "close" for v in verdicts) / max(1, len(verdicts)),
        "lowest_error": float(errors.min()), "highest_error": float(errors.max()),
    }  # fmt: skip
