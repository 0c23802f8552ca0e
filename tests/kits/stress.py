"""What an app may do with a session, again and again, in each kit that has its tools here.

Close during a step, two threads or calls at once, a batch with a NaN, use after close: no crash,
the error that ``docs/formats/kits.md`` names, and the state as before, to the bit. ``make kits``
does each 20 times, and this program 200 times.

    python -m tests.kits.stress                          # every kit
    python -m tests.kits.stress --times 1000 --kit kotlin js
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TIMES = int(os.environ.get("ODTPACK_STRESS", "20"))
"""How often the tests of the kits' sessions do each of the four."""


def _run_tests(times: int, *words: str) -> None:
    """Run tests of this folder, with :data:`TIMES` as given; none of them may be left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-o",
               "faulthandler_timeout=0", *words]  # fmt: skip
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        env={**os.environ, "ODTPACK_STRESS": str(times)},
    )  # fmt: skip
    if done.returncode != 0 or "skipped" in done.stdout:
        raise AssertionError(done.stdout[-4000:] + done.stderr[-1000:])


def _need(reason: str | None) -> None:
    if reason:
        pytest.skip(reason)


def kotlin(times: int) -> None:
    """Three packages: plain, with a step model, with accumulation."""
    from tests.kits import kotlin_kit

    _need(kotlin_kit.unavailable())
    _run_tests(times, "test_kotlin_sessions.py", "-k", "again_and_again")


def js(times: int) -> None:
    """In Node."""
    from tests.kits import javascript

    _need(javascript.unavailable())
    _run_tests(times, "test_js_sessions.py::test_sessions_in_node")


def chromium(times: int) -> None:
    """In a browser."""
    from tests.kits import javascript
    from tests.reports.browser import CHROMIUM

    _need(javascript.unavailable() or (None if CHROMIUM else "no Chromium on this machine"))
    _run_tests(times, "test_js_sessions.py::test_sessions_in_a_browser")


def cpp(times: int) -> None:
    """With and without running statistics and a step model; the program checks itself."""
    from tests.kits import cpp_kit
    from tests.kits.cases import CASES
    from tests.kits.test_cpp_calls import calls, write_job

    _need(cpp_kit.unavailable())
    for name in ("adam", "mobilenet_batch_norm", "step_adamw"):
        with tempfile.TemporaryDirectory(prefix="odtpack-stress-") as folder:
            job = write_job(CASES[name], Path(folder))
            for command in ("close", "threads", "nan", "closed"):
                for _ in range(times if command == "closed" else 1):
                    calls(command, job, times)


def swift(times: int) -> None:
    """A plain package and one with a step model; the program does each 20 times."""
    from odtpack.build import build_package
    from tests.kits import models, swift_kit

    _need(swift_kit.unavailable())
    for step_model in ("never", "always"):
        with tempfile.TemporaryDirectory(prefix="odtpack-stress-") as folder:
            package = Path(folder) / "package"
            build_package(models.mlp(), package, loss="cross_entropy", step_model=step_model)
            for _ in range(-(-times // 20)):
                done = swift_kit.run("calls", package)
                assert done.stdout.strip() == "20", done.stderr[-4000:]


KITS: dict[str, Callable[[int], None]] = {
    "kotlin": kotlin,
    "js": js,
    "chromium": chromium,
    "cpp": cpp,
    "swift": swift,
}
"""Each raises an error that says what went wrong, or skips where its tools are missing."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="of each")
    parser.add_argument("--kit", nargs="+", choices=KITS, default=list(KITS))
    arguments = parser.parse_args()
    failed = False
    for name in arguments.kit:
        begun, result = time.monotonic(), f"{arguments.times} times each: good"
        try:
            KITS[name](arguments.times)
        except pytest.skip.Exception as reason:
            result = f"not run, {reason}"
        except AssertionError as error:
            failed, result = True, f"failed\n{error}"
        print(f"{name:8}  {time.monotonic() - begun:6.0f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
