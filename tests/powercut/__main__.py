"""Replay each save as the states that a power cut may leave, and look at every one.

python -m tests.powercut                       # every way in which Python saves
python -m tests.powercut --path build install
python -m tests.powercut --kit C++ Node.js     # the kits' own programs (make kits)
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.kits.kills import KITS
from tests.powercut.check import check_kit, check_path, kit_paths
from tests.powercut.paths import PATHS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", nargs="*", choices=PATHS, help="of Python; all by default")
    parser.add_argument("--kit", nargs="*", choices=KITS, default=[], help="kits to record")
    arguments = parser.parse_args()
    paths = arguments.path if arguments.path is not None else [] if arguments.kit else list(PATHS)
    broken = 0
    print(f"{'save':48}  {'model':8}  {'states':>6}  {'broken':>6}", flush=True)
    with tempfile.TemporaryDirectory(prefix="odtpack-powercut-") as scratch:
        jobs = [(name, lambda name=name: check_path(name, Path(scratch))) for name in paths]
        for kit in arguments.kit:
            if reason := KITS[kit][0]():
                print(f"{kit:48}  {reason}")
                continue
            for name in kit_paths(kit):
                job = lambda kit=kit, name=name: check_kit(kit, name, Path(scratch))  # noqa: E731
                jobs.append((name, job))
        for label, job in jobs:
            for model, states, problems in job():
                print(f"{label:48}  {model:8}  {states:>6}  {len(problems):>6}", flush=True)
                for problem in problems[:3]:
                    print(f"    {problem}")
                broken += len(problems)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
