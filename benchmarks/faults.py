"""Make system calls go wrong, one after the other, and count what is lost: nothing should be.

    python -m benchmarks.faults             # every call, many minutes
    python -m benchmarks.faults --every 10  # every tenth

Every action of a user or an app is repeated, and each time another of its calls fails. What is left
must be the state before, the state after, or a save in between, and the next run come to its end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.actions import ACTIONS
from tests.faults.inject import FAULTS, compile_library, run_faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--action", action="append", choices=ACTIONS)
    arguments = parser.parse_args()
    start = time.perf_counter()
    totals: Counter[str] = Counter()
    wrong: list[str] = []
    width = max(map(len, ACTIONS))
    print(f"{'action':{width}}  {'calls':>6}  {'faults':>6}  {'refused':>7}  {'killed':>6}  lost")
    with tempfile.TemporaryDirectory(prefix="odtpack-faults-") as scratch:
        library = compile_library(Path(scratch))
        for index, action in enumerate(arguments.action or ACTIONS):
            folder = Path(scratch) / str(index)
            folder.mkdir()
            rows, lost = [], []
            for row in run_faults(library, action, folder, arguments.every):
                rows.append(row)
                if row["wrong"]:
                    lost.append(row)
                    wrong.append(f"{action}: {row['fault']} at {row['at']}: {row['wrong']}")
                    print(wrong[-1], flush=True)
            calls = max((row["calls"] for row in rows), default=0)
            refused = sum(row["code"] in (3, 4) for row in rows)
            killed = sum(row["signal"] != 0 for row in rows)
            totals.update(row["fault"] for row in rows)
            print(
                f"{action:{width}}  {calls:>6}  {len(rows):>6}  {refused:>7}  {killed:>6}  "
                f"{len(lost)}",
                flush=True,
            )
    print()
    for fault in FAULTS:
        print(f"{fault.name:{width}}  {totals[fault.name]:>6}")
    print(
        f"{totals.total()} faults, {len(wrong)} of them lost something or ended badly "
        f"({time.perf_counter() - start:.0f} s)"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
