"""Feed a reader with inputs that atheris makes, guided by the coverage of the code that reads them.

``python -m tests.fuzz.run fuzz`` starts it for each reader. A defect does not end it.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import atheris

# Before anything imports them: what is imported here is what counts its branches.
with atheris.instrument_imports(
    include=["odtpack", "odtpack_runtime", "odtpack_simulator", "json", "tomllib", "zipfile"]
):
    from tests.fuzz.run import Watch, keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", required=True)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--keep", action="store_true")
    arguments, _ = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="odtpack-fuzz-"))
    watch = Watch(arguments.only, folder, learn=arguments.keep)
    watch.begin()
    for data in watch.seeds:
        keep(folder / "corpus", data)
    end = time.monotonic() + arguments.minutes * 60

    def read(data: bytes) -> None:
        watch.read(data)
        if time.monotonic() > end:  # libFuzzer would end the process, and say nothing
            print(f"\n{watch.found()}", flush=True)
            shutil.rmtree(folder)
            os._exit(0)

    longest = 2 * max(map(len, watch.seeds))
    options = [f"-max_len={longest}", "-rss_limit_mb=0", "-timeout=60", "-verbosity=0"]
    atheris.Setup([sys.argv[0], str(folder / "corpus"), *options], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
