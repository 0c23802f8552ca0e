"""Compare a kit with Python on the same damaged files: accept or refuse, and the values read.

``python -m tests.hostile.compare --kit cpp --cases 20000``, or ``--kit all``. The kit's command
comes from :mod:`tests.kits.hostile_kits`.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from odtpack_runtime.checkpoint.format import CheckpointData
from tests.fuzz.mutate import mutate
from tests.hostile import python_reader
from tests.hostile.checkpoints import checkpoints, plain, written
from tests.hostile.corpus import build_base
from tests.hostile.walk import places
from tests.runtime.checkpoint_samples import sample

_AT_ONCE = 500  # files in one run of a kit's program
_SHOWN = 20


def command_of(kit: str) -> list[str]:
    """The command of a reader, to which ``hostile DIR`` or ``read DIR`` is added."""
    from tests.kits import hostile_kits

    return hostile_kits.hostile_command(kit)


def lines_of(command: Sequence[str], verb: str, folder: Path) -> dict[str, str]:
    """Let a reader read; return the outcome by name."""
    done = subprocess.run(
        [*command, verb, str(folder)], capture_output=True, text=True, encoding="utf-8",
        errors="replace", check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)


UNSEEN = {
    ("browser", "file_a_link"): "a server follows its own links, and a page does not see them"
}
"""Cases that a reader cannot see, and why."""


def wrong_decisions(index: Path, kit: str, found: dict[str, str]) -> list[str]:
    """Cases of a corpus on which a reader decides otherwise."""
    names = {kit, "js"} if kit in ("node", "browser") else {kit}
    wrong = []
    for case in json.loads(index.read_text())["cases"]:
        if (kit, case["name"]) in UNSEEN:
            continue
        outcome = found.get(case["name"], "nothing")
        good = outcome == "ok" if case["expect"] == "accept" else outcome in case["codes"]
        if not good and names & case["stricter"].keys():
            good = outcome == "ok" or not outcome.startswith(("foreign:", "nothing"))
        if not good:
            expected = case["expect"] if case["expect"] == "accept" else ", ".join(case["codes"])
            wrong.append(f"{case['name']}: {outcome}, and expected is {expected}")
    return wrong


def damaged(seeds: Sequence[bytes], manifests: Sequence[bytes], seed: int) -> Iterator[
    tuple[str, bytes]
]:  # fmt: skip
    """Yield names and contents of damaged checkpoints, and of a manifest among five, for ever."""
    rng = random.Random(seed)
    spots = {data: [place.position for place in places(data)] for data in seeds}
    index = 0
    while True:
        if index % 5 == 4:
            yield f"{index:06}.json", mutate(manifests, rng)
        elif index % 2:
            yield f"{index:06}.ckpt", mutate(seeds, rng)
        else:  # the numbers that lead somewhere, which chance seldom finds in a file of values
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.choice((1, 1, 2))):
                at = rng.choice(spots[bytes(data)] if bytes(data) in spots else spots[seeds[0]])
                at = min(at + rng.randrange(4), len(data) - 1)
                data[at] = rng.choice((0, 1, 4, 0x40, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            yield f"{index:06}.ckpt", bytes(data)
        index += 1


def disagreements(command: Sequence[str], cases: int, seed: int, work: Path) -> list[str]:
    """Files that Python and a kit read differently.

    A kit may refuse a manifest that Python takes, or take one that Python refuses for a key that
    no kit reads: of manifests only what is no error of the kit's own counts.
    """
    base = build_base(work / "base")
    seeds = [written(sample()), written(plain())]
    seeds += [written(CheckpointData(sample().trainable, {}, nominal=True))]
    seeds += [data for name, data, codes in checkpoints() if "foreign" in name and not codes]
    source = damaged(seeds, [(base / "manifest.json").read_bytes()], seed)
    found: list[str] = []
    while cases > 0:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            for _, (name, data) in zip(range(min(cases, _AT_ONCE)), source, strict=False):
                (Path(folder) / name).write_bytes(data)
            ours = dict(line.split("\t", 1) for line in python_reader.read(Path(folder)))
            theirs = lines_of(command, "read", Path(folder))
            for name, outcome in ours.items():
                if _differ(name, outcome, other := theirs.get(name, "nothing")):
                    kept = work / f"found-{len(found):03}-{name}"
                    kept.write_bytes((Path(folder) / name).read_bytes())
                    found.append(f"{kept}: Python {outcome[:40]}, the kit {other[:40]}")
        cases -= _AT_ONCE
    return found


def _differ(name: str, ours: str, theirs: str) -> bool:
    if theirs.startswith(("foreign:", "nothing")) or ours.startswith("foreign:"):
        return True
    if name.endswith(".json"):
        return False
    return ours != theirs if "ok" in (ours[:2], theirs[:2]) else False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kit", required=True, help="or all, of those whose tools are there")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    arguments = parser.parse_args()
    from tests.kits.hostile_kits import KITS

    failed = False
    for kit in KITS if arguments.kit == "all" else [arguments.kit]:
        work = Path(tempfile.mkdtemp(prefix="odtpack-compare-"))
        try:
            command = command_of(kit)
        except pytest.skip.Exception as reason:
            print(f"{kit}: not compared, {reason}")
            continue
        found = disagreements(command, arguments.cases, arguments.seed, work)
        print(f"{kit}: {arguments.cases} files, seed {arguments.seed}: {len(found)} differ")
        for line in found[:_SHOWN]:
            print(f"  {line}")
        failed |= bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
