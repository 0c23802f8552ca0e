"""Feed readers with damaged inputs.

``python -m tests.fuzz.run replay --count 10000`` reads as many inputs, always the same, and the
corpus; it prints how many ended how. ``python -m tests.fuzz.run fuzz --minutes 5`` goes on from
the corpus, guided by the coverage of the code where atheris is installed and at random
elsewhere, and with ``--keep`` adds what ends in a way that was not seen before. Each reader has a
process of its own: a crash is a finding, and not the end.
"""

import argparse
import faulthandler
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.guard import DefectError, outcome
from tests.fuzz.mutate import mutate
from tests.fuzz.readers import READERS

CORPUS = Path(__file__).with_name("corpus")
FINDINGS = Path("build") / "fuzz"
ENGINES = ("marks", "atheris")
ATHERIS = importlib.util.find_spec("atheris") is not None


def corpus(reader: str) -> list[bytes]:
    """The inputs that are kept for a reader, and those that are made."""
    kept = [path.read_bytes() for path in sorted((CORPUS / reader).glob("*"))]
    return [*kept, *READERS[reader].costly()]


_LARGEST_SEED = 20_000  # bytes; damaging larger ones takes longer than reading them


def inputs(reader: str, count: int, seed: int) -> Iterator[bytes]:
    """Yield the corpus and as many damaged inputs; equal arguments give equal inputs."""
    kept, seeds = corpus(reader), READERS[reader].seeds()
    yield from kept
    kept = [data for data in kept if len(data) < _LARGEST_SEED]
    rng = random.Random(f"{reader} {seed}")
    for _ in range(count):
        yield mutate([*seeds, *kept] if rng.random() < 0.3 else seeds, rng)


class Watch:
    """Reads inputs, counts how they end, and keeps those that end in a new way.

    Attributes:
        ends: How many ended in which way.
        defects: What may not happen, with the file of each input.
    """

    def __init__(self, reader: str, folder: Path, *, learn: bool = False) -> None:
        self._reader, self._folder, self._learn = reader, folder, learn
        self.seeds: list[bytes] = []
        self.ends: Counter[str] = Counter()
        self.defects: list[str] = []
        self._seen: set[str] = set()

    def begin(self) -> None:
        """Begin with what is known, and note how it ends."""
        kept = [data for data in corpus(self._reader) if len(data) < _LARGEST_SEED]
        self.seeds = [*READERS[self._reader].seeds(), *kept]
        for data in [*self.seeds, *READERS[self._reader].costly()]:
            self.read(data, new=False)

    def read(self, data: bytes, *, new: bool = True) -> None:
        """Read an input; of those that are not new the end is noted alone."""
        try:
            mark = outcome(self._reader, data, self._folder)
        except DefectError as error:
            self.defects.append(f"{keep(FINDINGS / self._reader, data)}: {error}")
            return
        self.ends[mark.split(" ", 1)[0]] += 1
        if new and mark not in self._seen:
            self.seeds.append(data)
            if self._learn and len(data) < _LARGEST_SEED:
                keep(CORPUS / self._reader, data)
        self._seen.add(mark)

    def found(self) -> str:
        """What was found, as JSON."""
        return json.dumps({"reader": self._reader, "ends": self.ends, "defects": self.defects})


def replay(reader: str, count: int, seed: int) -> Watch:
    """Read inputs; see how they ended."""
    with tempfile.TemporaryDirectory(prefix="odtpack-fuzz-") as folder:
        watch = Watch(reader, Path(folder))
        for data in inputs(reader, count, seed):
            watch.read(data, new=False)
    return watch


def fuzz(reader: str, seconds: float, *, learn: bool) -> Watch:
    """Read random inputs for a while."""
    rng = random.Random()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="odtpack-fuzz-") as folder:
        watch = Watch(reader, Path(folder), learn=learn)
        watch.begin()
        while time.monotonic() < end:
            watch.read(mutate(watch.seeds, rng))
    return watch


def keep(folder: Path, data: bytes) -> Path:
    """Write an input under its digest; return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path


def apart(module: str, arguments: list[str]) -> tuple[Counter[str], list[str]]:
    """Run this module, or that which coverage guides, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, errors="replace", check=False, env=os.environ,
    )  # fmt: skip
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        reason = f"exit {done.returncode}: {done.stderr[-1500:]}"
        return Counter(), [reason] if done.returncode else []
    return Counter(found["ends"]), found["defects"]


_SHOWN = 20  # defects in the output; all inputs are kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["replay", "fuzz"])
    parser.add_argument("--count", type=int, default=10_000, help="inputs over all readers")
    parser.add_argument("--minutes", type=float, default=1.0, help="over all readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[-1] if ATHERIS else ENGINES[0])
    parser.add_argument("--keep", action="store_true", help="add what is new to the corpus")
    parser.add_argument("--reader", action="append", choices=READERS)
    parser.add_argument("--only", choices=READERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine == "atheris" and not ATHERIS:
        parser.error("atheris is not installed (pip install atheris)")
    readers = arguments.reader or list(READERS)
    if arguments.only is not None:
        if arguments.command == "replay":
            tracemalloc.start(1)
            watch = replay(arguments.only, arguments.count, arguments.seed)
        else:
            watch = fuzz(arguments.only, arguments.minutes * 60, learn=arguments.keep)
        print(watch.found())
        return 0
    guided = arguments.command == "fuzz" and arguments.engine == "atheris"
    module = "tests.fuzz.guided" if guided else "tests.fuzz.run"
    shares = sum(READERS[reader].share for reader in readers)
    total, defects = 0, []
    for reader in readers:
        count = round(arguments.count * READERS[reader].share / shares)
        minutes = arguments.minutes / len(readers)
        own = ["--only", reader, "--count", str(count), "--minutes", str(minutes)]
        ends, wrong = apart(module, [*sys.argv[1:], *own])  # of an option the last one counts
        defects += [f"{reader}: {defect}" for defect in wrong]
        total += ends.total() + len(wrong)
        read = ends.pop("read", 0)
        print(
            f"{reader:<12}{read:>7} read{ends.total():>7} refused{len(wrong):>4} defects   "
            + ", ".join(f"{code} {n}" for code, n in ends.most_common(3)),
            flush=True,
        )
    print(f"{total} hostile inputs over {len(readers)} readers, {len(defects)} defects")
    for defect in defects[:_SHOWN]:
        print(f"  {defect}")
    return 1 if defects else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
