"""Readers under hostile inputs: refused with one clear error, or read as what they say.

``make test`` replays the corpus and some damaged inputs, CI more, ``make sweep`` ten thousand and
more, and ``make fuzz MINUTES=5`` goes on with random ones.
"""

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from odtpack_runtime.errors import OdtpackError
from tests.fuzz import guard
from tests.fuzz.guard import DefectError, outcome
from tests.fuzz.mutate import mutate
from tests.fuzz.readers import READERS, Reader
from tests.fuzz.run import main, replay
from tests.sweep import EVERY

FEW = 25
# Most of the time goes into what is kept and made for each reader: a sample asks every fourth.
MANY, ASKED = (10_000, [*READERS]) if EVERY == 1 else (150, [*READERS][1::4])


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("reader", READERS)
def test_the_corpus_and_some_more(reader, traced, tmp_path):
    for seed in READERS[reader].seeds():
        assert outcome(reader, seed, tmp_path) == "read"
    found = replay(reader, FEW, seed=1)
    assert found.defects == []
    assert found.ends.total() >= FEW


@pytest.mark.sweep
def test_many(capsys):
    readers = [word for reader in ASKED for word in ("--reader", reader)]
    assert main_of(["replay", "--count", str(MANY), *readers]) == 0
    assert f"hostile inputs over {len(ASKED)} readers, 0 defects" in capsys.readouterr().out


def main_of(arguments: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["run", *arguments])
        return main()


def test_inputs_can_be_had_again():
    one, other = ([mutate([b"abc" * 50], random.Random(3)) for _ in range(5)] for _ in range(2))
    assert one == other


@pytest.mark.parametrize("harm", ["crash", "hang", "memory", "wrong"])
def test_what_is_a_defect(harm, traced, tmp_path, monkeypatch):
    """The guard is no guard unless it finds them."""

    def read(path: Path) -> object:
        if harm == "crash":
            raise KeyError(path)
        while harm == "hang":
            pass
        if harm == "memory":
            return bytearray(guard.MEMORY_BYTES + 2**20)
        raise AssertionError("other values")

    monkeypatch.setattr(guard, "SECONDS", 1)
    monkeypatch.setitem(READERS, "plan", Reader(".json", list, read))
    with pytest.raises(DefectError):
        outcome("plan", b"{}", tmp_path)


def test_a_refusal_is_no_defect(tmp_path, monkeypatch):
    def read(path: Path) -> object:
        raise OdtpackError("bad-argument", f"{path} is 17 bytes of rubbish.")

    monkeypatch.setitem(READERS, "plan", Reader(".json", list, read))
    assert outcome("plan", b"{}", tmp_path).startswith("bad-argument")
