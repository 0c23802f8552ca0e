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


def replay(reader: str, count: int, seed: int) -> dict[str, object]:
    """Read inputs; say how they ended."""
    ends: Counter[str] = Counter()
    defects: list[str] = []
    with tempfile.TemporaryDirectory(prefix="odtpack-fuzz-") as folder:
        for index, data in enumerate(inputs(reader, count, seed)):
            try:
                ends[outcome(reader, data, Path(folder)).split(" ", 1)[0]] += 1
            except DefectError as error:
                defects.append(f"{keep(FINDINGS / reader, data)} (input {index}): {error}")
    return {"reader": reader, "ends": ends, "defects": defects}


class Watch:
    """Reads inputs, counts how they end, and keeps those that end in a new way.

    Attributes:
        ends: How many ended in which way.
        defects: What may not happen, with the file of each input.
    """

    def __init__(self, reader: str, folder: Path, *, learn: bool) -> None:
        self._reader, self._folder, self._learn = reader, folder, learn
        kept = [data for data in corpus(reader) if len(data) < _LARGEST_SEED]
        self.seeds = [*READERS[reader].seeds(), *kept]
        self.ends: Counter[str] = Counter()
        self.defects: list[str] = []
        self._seen: set[str] = set()
        for data in [*self.seeds, *READERS[reader].costly()]:
            self.read(data, new=False)

    def read(self, data: bytes, *, new: bool = True) -> None:
        """Read an input; of those that are not new the end is noted alone."""
        try:
            mark = outcome(self._reader, data, self._folder)
        except DefectError as error:
            self.defects.append(f"{keep(FINDINGS / self._reader, data)}: {error}")
            return
        self.ends[mark.split(" ", 1)[0]] += 1
        if mark not in self._seen:
            self._seen.add(mark)
            if not new:
                return
            self.seeds.append(data)
            if self._learn and len(data) < _LARGEST_SEED:
                keep(CORPUS / self._reader, data)

    def found(self) -> str:
        """What was found, as JSON."""
        return json.dumps({"reader": self._reader, "ends": self.ends, "defects": self.defects})


def fuzz(reader: str, seconds: float, *, learn: bool) -> str:
    """Read random inputs for a while; return what was found, as JSON."""
    rng = random.Random()
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="odtpack-fuzz-") as folder:
        watch = Watch(reader, Path(folder), learn=learn)
        while time.monotonic() < end:
            watch.read(mutate(watch.seeds, rng))
    return watch.found()


def keep(folder: Path, data: bytes) -> Path:
    """Write an input under its digest; return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:16]
    path.write_bytes(data)
    return path


def apart(arguments: list[str]) -> dict[str, object]:
    """Run this module, or that which coverage guides, in a process of its own."""
    module = "tests.fuzz.guided" if ENGINES[-1] in arguments else "tests.fuzz.run"
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, errors="replace", check=False, env=os.environ,
    )  # fmt: skip
    reader = arguments[arguments.index("--only") + 1]
    try:
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        reason = f"exit {done.returncode}: {done.stderr[-1500:]}"
        return {"reader": reader, "ends": {}, "defects": [reason] if done.returncode else []}
    return found


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
        reader = arguments.only
        if arguments.command == "replay":
            tracemalloc.start(1)
            print(json.dumps(replay(reader, arguments.count, arguments.seed)))
        else:
            print(fuzz(reader, arguments.minutes * 60, learn=arguments.keep))
        return 0
    shares = sum(READERS[reader].share for reader in readers)
    total, defects = 0, []
    for reader in readers:
        count = round(arguments.count * READERS[reader].share / shares)
        words = [arguments.command, "--only", reader, "--count", str(count)]
        words += ["--minutes", str(arguments.minutes / len(readers))]
        words += ["--seed", str(arguments.seed)]
        if arguments.command == "fuzz":
            words += ["--engine", arguments.engine]
        found = apart([*words, *(["--keep"] if arguments.keep else [])])
        ends = found["ends"]
        assert isinstance(ends, dict)
        assert isinstance(found["defects"], list)
        defects += [f"{reader}: {defect}" for defect in found["defects"]]
        total += sum(ends.values()) + len(found["defects"])
        read = ends.pop("read", 0)
        print(
            f"{reader:<12}{read:>7} read{sum(ends.values()):>7} refused"
            f"{len(found['defects']):>4} defects   "
            + ", ".join(f"{code} {n}" for code, n in Counter(ends).most_common(3)),
            flush=True,
        )
    print(f"{total} hostile inputs over {len(readers)} readers, {len(defects)} defects")
    for defect in defects[:_SHOWN]:
        print(f"  {defect}")
    return 1 if defects else 0


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main())
