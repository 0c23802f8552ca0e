"""Make system calls go wrong, one after the other, and count what is lost: nothing should be.

    python -m benchmarks.faults             # every call, many minutes
    python -m benchmarks.faults --every 10  # every tenth

Every action of a user or an app is repeated, and each time another of its calls fails. What is left
must be the state before, the state after, or a save in between, and the next run come to its end.
"""

import sys
import time
from collections import Counter

from scripts.harness import head, options, row, scratch, table
from tests.faults.actions import ACTIONS
from tests.faults.inject import FAULTS, compile_library, run_faults


def main() -> int:
    given = options(__doc__, every=1, action=[*ACTIONS])
    start = time.perf_counter()
    totals: Counter[str] = Counter()
    wrong: list[str] = []
    print(head("action", "calls:", "faults:", "refused:", "killed:", "lost:"))
    with scratch() as place:
        library = compile_library(place)
        for index, action in enumerate(given.action):
            folder = place / str(index)
            folder.mkdir()
            made = [*run_faults(library, action, folder, given.every)]
            lost = [each for each in made if each["wrong"]]
            wrong += [f"{action}: {e['fault']} at {e['at']}: {e['wrong']}" for e in lost]
            calls = max((each["calls"] for each in made), default=0)
            refused = sum(each["code"] in (3, 4) for each in made)
            killed = sum(each["signal"] != 0 for each in made)
            totals.update(each["fault"] for each in made)
            print(row(action, calls, len(made), refused, killed, len(lost)), flush=True)
    print("\n" + table(("fault", "times:"), ((each.name, totals[each.name]) for each in FAULTS)))
    print("", *wrong, sep="\n")
    print(
        f"{totals.total()} faults, {len(wrong)} of them lost something or ended badly "
        f"({time.perf_counter() - start:.0f} s)"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
