"""The Kotlin kit decides on hostile files as Python does, and reads the same values from others."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.hostile.content import content_digest
from tests.kits import hostile_kits, kotlin_kit

pytestmark = [
    pytest.mark.kits,
    pytest.mark.skipif(kotlin_kit.unavailable() is not None, reason=str(kotlin_kit.unavailable())),
]


def answers(command: str, folder: Path, memory: str = "256m") -> dict[str, list[str]]:
    """What the kit says of each, with a heap and direct memory of 256 MB."""
    words = hostile_kits.kotlin()
    words[words.index("java") + 1 : words.index("java") + 1] = [f"-XX:MaxDirectMemorySize={memory}"]
    words[words.index("-Xmx512m")] = f"-Xmx{memory}"
    done = subprocess.run(
        [*words, command, str(folder)], capture_output=True, text=True, timeout=600, check=True
    )
    return {name: said for name, *said in (line.split("\t") for line in done.stdout.splitlines())}


def mutated(good: bytes, count: int) -> list[bytes]:
    """Bytes and words of the tables changed, and ends cut off."""
    rng = random.Random(3)
    made = []
    for index in range(count):
        data = bytearray(good)
        if index % 8 == 0:
            data = data[: rng.randrange(len(data))]
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(min(len(data), 3000) if index % 2 else len(data)) if data else 0
            value = rng.choice((0, 1, 4, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            if rng.random() < 0.2:
                data[at : at + 4] = rng.choice((0x40000001, 2**31, 2**32 - 1, 8)).to_bytes(
                    4, "little"
                )
            elif at < len(data):
                data[at] = value
        made.append(bytes(data))
    return made


def test_2000_mutated_checkpoints_hold_what_python_reads(tmp_path: Path) -> None:
    """Accepted by both, with the same content, or refused by both: no other exception."""
    folder = tmp_path / "mutated"
    folder.mkdir()
    corpus = tmp_path / "corpus"
    kotlin_kit.python("tests.hostile", "--out", corpus)
    goods = sorted(corpus.glob("checkpoint_*unchanged*/*.ckpt"))[:4]
    assert goods
    for number, good in enumerate(goods):
        for index, data in enumerate(mutated(good.read_bytes(), 2000 // len(goods))):
            (folder / f"{number}-{index:04}.ckpt").write_bytes(data)
    found = answers("read", folder)
    assert len(found) == 2000 // len(goods) * len(goods)
    other = []
    refused = 0
    for name, said in found.items():
        try:
            wanted = ["ok", content_digest(read_checkpoint(folder / name))]
        except OdtpackError as error:
            wanted = [error.code]
            refused += 1
        if wanted[0] != "ok" and said[0] != "ok":
            assert not said[0].startswith("foreign"), (name, said)
        elif wanted != said:
            other.append((name, said, wanted))
    assert other == []
    assert refused > 1000


def test_the_corpus_is_decided_as_it_says(tmp_path: Path) -> None:
    kotlin_kit.python("tests.hostile", "--out", tmp_path)
    cases = json.loads((tmp_path / "index.json").read_text())["cases"]
    found = answers("hostile", tmp_path)
    assert list(found) == [case["name"] for case in cases]
    assert len(cases) > 1000
    wrong = []
    for case in cases:
        (said,) = found[case["name"]]
        accepted, wanted = said == "ok", case["expect"] == "accept"
        free = "kotlin" in case["stricter"] and not said.startswith("foreign")
        if (accepted != wanted and not free) or (not accepted and not wanted and (
            said not in case["codes"]
        )):  # fmt: skip
            wrong.append((case["name"], said, case["codes"]))
    assert wrong == []
