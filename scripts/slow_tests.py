"""Chooses which tests make sweep runs in place of make test: the slowest.

    .venv/bin/python -m pytest -n 1 --durations=0 -vv -m "..." > durations.txt
    python -m scripts.slow_tests durations.txt

writes ``tests/slow_tests.txt``, by which ``tests/conftest.py`` marks them. The fastest case of a
test function stays in make test, as does the fastest test of a file, if they are fast enough. What
sets a test up does not count: the next one would need it. Tests that were not timed stay in the
list; those of ``tests/kits`` and ``tests/federated`` were chosen by hand.
"""

import collections
import re
from pathlib import Path

from scripts.harness import options

LIST = Path(__file__).resolve().parents[1] / "tests/slow_tests.txt"
TARGET = 430.0
"""Seconds of one core that the calls of tests that stay may take together."""
MOST, MOST_OF_FILE = 3.0, 10.0
"""Seconds of the slowest test that stays for its function, and for its file."""

STAY = (
    # What any change to the tree may break.
    "tests/autodiff/test_rules.py::test_every",
    "tests/test_contributing.py",
    "tests/test_rooms.py",
    "tests/test_walk.py",
    "tests/test_docs.py::test_every_code",
    "tests/test_docs.py::test_generated",
    "tests/test_docs.py::test_readme",
    # What every command and every training pays for, and what a plan is worth.
    "tests/recipe/test_build.py::TestCacheKey::test_needs_no_large_import",
    "tests/simulator/memory/test_allocation.py::test_plan_and_replay_agree",
    "tests/simulator/replay/test_executor.py::test_a_replay_loads_no_more_than_the_app_and_the_clock",
)
"""How the names of tests begin that stay in make test."""

_LINE = re.compile(r"^\s*([\d.]+)s call\s+(\S.*?)\s*$", re.MULTILINE)


def chosen(seconds: dict[str, float]) -> list[str]:
    """Return the tests that go to make sweep, sorted, by the time of each."""
    functions, files = collections.defaultdict(list), collections.defaultdict(list)
    for test in sorted(seconds, key=lambda test: seconds[test]):
        functions[test.partition("[")[0]].append(test)
        files[test.partition("::")[0]].append(test)
    stay = {tests[0] for tests in functions.values() if seconds[tests[0]] < MOST}
    stay |= {tests[0] for tests in files.values() if seconds[tests[0]] < MOST_OF_FILE}
    stay |= {test for test in seconds if test.startswith(STAY)}
    left, found = sum(seconds.values()), []
    for test in sorted(seconds, key=lambda test: -seconds[test]):
        if left <= TARGET:
            break
        if test not in stay:
            found.append(test)
            left -= seconds[test]
    print(f"{len(found)} tests of {sum(seconds[t] for t in found):.0f} s go, {left:.0f} s stay")
    return sorted(found)


def main() -> None:
    durations = options(__doc__, "durations", durations=Path).durations
    seconds: dict[str, float] = collections.defaultdict(float)
    for time, test in _LINE.findall(durations.read_text()):
        seconds[test] += float(time)
    known = [test for test in LIST.read_text().splitlines() if test not in seconds]
    LIST.write_text("".join(f"{test}\n" for test in sorted([*known, *chosen(seconds)])))


if __name__ == "__main__":
    main()
