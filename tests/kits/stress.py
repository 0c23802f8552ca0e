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
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import ran

TIMES = int(os.environ.get("ODTPACK_STRESS", "20"))
"""How often the tests of the kits' sessions do each of the four."""


def _run_tests(times: int, *words: str) -> None:
    """Run tests of this folder, with :data:`TIMES` as given; none of them may be left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-o",
               "faulthandler_timeout=0", *words]  # fmt: skip
    environment = {**os.environ, "ODTPACK_STRESS": str(times)}
    done = ran(*command, code=None, cwd=Path(__file__).parent, env=environment)
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
    from tests.kits import javascript, js_stress

    _need(javascript.unavailable())
    js_stress.js(times)


def chromium(times: int) -> None:
    """In a browser."""
    from tests.kits import javascript, js_stress
    from tests.reports.browser import CHROMIUM

    _need(javascript.unavailable() or (None if CHROMIUM else "no Chromium on this machine"))
    js_stress.chromium(times)


def cpp(times: int) -> None:
    """With and without running statistics and a step model."""
    from tests.kits import cpp_kit, cpp_stress

    _need(cpp_kit.unavailable())
    cpp_stress.cpp(times)


def swift(times: int) -> None:
    """The same program as for C++, through the C interface."""
    from tests.kits import cpp_stress, swift_kit

    _need(swift_kit.unavailable())
    cpp_stress.layer(swift_kit, times)


def csharp(times: int) -> None:
    """The same under Mono."""
    from tests.kits import cpp_stress, csharp_kit

    _need(csharp_kit.unavailable())
    cpp_stress.layer(csharp_kit, times)


KITS: dict[str, Callable[[int], None]] = {
    "kotlin": kotlin, "js": js, "chromium": chromium, "cpp": cpp, "swift": swift, "csharp": csharp,
}  # fmt: skip
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
