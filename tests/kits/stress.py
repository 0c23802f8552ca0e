"""What an app may do with a session, again and again, in each kit that has its tools here.

Close during a step, two threads or calls at once, a batch with a NaN, use after close: the error
that ``docs/formats/kits.md`` names, and the state as before, to the bit.


    python -m tests.kits.stress                          # every kit
    python -m tests.kits.stress --times 1000 --kit kotlin js
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.kits import cpp_kit, cpp_stress, csharp_kit, javascript, js_stress, kotlin_kit, swift_kit
from tests.programs import ran
from tests.reports.browser import CHROMIUM

TIMES = int(os.environ.get("ODTPACK_STRESS", "20"))
"""How often the tests of the kits' sessions do each of the four."""


def _kotlin(times: int) -> None:
    """Run its tests with :data:`TIMES` as given; none of them may be left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-o",
               "faulthandler_timeout=0", "test_kotlin_sessions.py", "-k",
               "again_and_again"]  # fmt: skip
    environment = {**os.environ, "ODTPACK_STRESS": str(times)}
    done = ran(*command, code=None, cwd=Path(__file__).parent, env=environment)
    if done.returncode != 0 or "skipped" in done.stdout:
        raise AssertionError(done.stdout[-4000:] + done.stderr[-1000:])


NO_CHROMIUM = None if CHROMIUM else "no Chromium on this machine"
KITS: dict[str, tuple[Callable[[], str | None], Callable[[int], None]]] = {
    "kotlin": (kotlin_kit.unavailable, _kotlin),
    "js": (javascript.unavailable, js_stress.js),
    "chromium": (lambda: javascript.unavailable() or NO_CHROMIUM, js_stress.chromium),
    "cpp": (cpp_kit.unavailable, cpp_stress.cpp),
    "swift": (swift_kit.unavailable, lambda times: cpp_stress.layer(swift_kit, times)),
    "csharp": (csharp_kit.unavailable, lambda times: cpp_stress.layer(csharp_kit, times)),
}  # fmt: skip
"""Why a kit is not here, and what raises an error that says what went wrong."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200, help="of each")
    parser.add_argument("--kit", nargs="+", choices=KITS, default=list(KITS))
    arguments = parser.parse_args()
    failed = False
    for name in arguments.kit:
        begun, result = time.monotonic(), f"{arguments.times} times each: good"
        unavailable, stress = KITS[name]
        try:
            if reason := unavailable():
                result = f"not run, {reason}"
            else:
                stress(arguments.times)
        except AssertionError as error:
            failed, result = True, f"failed\n{error}"
        print(f"{name:8}  {time.monotonic() - begun:6.0f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
