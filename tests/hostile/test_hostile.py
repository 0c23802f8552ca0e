"""Python decides on every case of the corpus as the corpus says, at a cost that is bounded."""

import json
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.package.manifest import Manifest
from tests.fuzz.guard import MEMORY_BYTES, SECONDS
from tests.hostile import python_reader
from tests.hostile.cases import READERS
from tests.hostile.checkpoints import many_tensors, plain, shared_table, written
from tests.hostile.compare import damaged, wrong_decisions
from tests.hostile.content import content_digest
from tests.hostile.corpus import INDEX, write_corpus
from tests.once import made_once
from tests.runtime.checkpoint_samples import sample

LEAST = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "hostile-corpus", write_corpus)


def test_the_index(corpus: Path) -> None:
    content = json.loads((corpus / INDEX).read_text())
    assert content["format"] == 1
    cases = content["cases"]
    assert len(cases) >= LEAST
    assert {case["action"] for case in cases} == {"open", "checkpoint", "session"}
    for case in cases:
        assert bool(case["codes"]) == (case["expect"] == "refuse")
        assert set(case["stricter"]) <= set(READERS)


def test_python_decides_as_the_corpus_says(corpus: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    found = dict(line.split("\t") for line in python_reader.hostile(corpus))
    assert wrong_decisions(corpus / INDEX, "python", found) == []
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before


def test_a_wrong_decision_is_found(corpus: Path) -> None:
    found = dict(line.split("\t") for line in python_reader.hostile(corpus))
    found["manifest_byte_order_mark"] = "ok"
    found["manifest_unchanged"] = "foreign:KeyError"
    del found["checkpoint_whole"]
    assert len(wrong_decisions(corpus / INDEX, "python", found)) == 3


def test_the_digest_of_the_content_tells_contents_apart() -> None:
    other = plain()
    other.trainable["fc1.bias"][0] += 1
    named = plain()
    named.frozen["fc1.bias"] = named.trainable.pop("fc1.bias")
    assert len({content_digest(data) for data in (sample(), plain(), other, named)}) == 4


def test_damaged_checkpoints_are_refused_or_whole(tmp_path: Path) -> None:
    """Whatever still reads holds what was saved: no loss of parameters, moments or properties."""
    whole = [sample(), plain()]
    contents = {content_digest(data) for data in whole}
    source = damaged([written(data) for data in whole], [b"{}"], seed=5)
    for _ in range(800):
        name, data = next(source)
        (tmp_path / name).write_bytes(data)
    lines = dict(line.split("\t", 1) for line in python_reader.read(tmp_path))
    assert len(lines) == 800
    for name, outcome in lines.items():
        assert not outcome.startswith("foreign:"), name
        if outcome.startswith("ok") and name.endswith(".ckpt"):
            assert outcome.split("\t")[1] in contents, name


@pytest.mark.parametrize("make", [shared_table, many_tensors], ids=["one table", "tensors"])
@pytest.mark.parametrize("count", [20_000, pytest.param(300_000, marks=pytest.mark.sweep)])
def test_checkpoints_cost_in_proportion(
    make: Callable[[int], bytes], count: int, tmp_path: Path
) -> None:
    data = make(3 * count if make is shared_table else count)
    path = tmp_path / "state.ckpt"
    path.write_bytes(data)
    _bounded(lambda: read_checkpoint(path), data)


@pytest.mark.parametrize(
    "data",
    [b'{"parameters": [' + b"[]," * 20_000_000 + b"[]]}",
     b'{"parameters": [' + b"[]," * 1_300_000 + b"[]]}",
     b'{"loss_options": {' + b",".join(b'"k%d":1' % i for i in range(190_000)) + b"}}",
     b'{"a": "' + b'\\"' * 2_000_000, b'{"a": "' + b"\\" * 4_000_000, b'"' * 4_000_000],
    ids=["60 MiB", "lists", "keys", "quotes", "backslashes", "texts"],
)  # fmt: skip
def test_manifests_cost_in_proportion(data: bytes) -> None:
    _bounded(lambda: Manifest.from_json(data, "manifest.json"), data)


def _bounded(read: Callable[[], object], data: bytes) -> None:
    """Within the time, of this process alone, and the memory that the threat model promises."""
    for traced in (False, True):  # tracing takes longer than reading
        start = time.process_time()
        if traced:
            tracemalloc.start(1)
        with suppress(OdtpackError):  # what it decides is the corpus's affair
            read()
        if traced:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= 10 * len(data) + MEMORY_BYTES
        else:
            assert time.process_time() - start < SECONDS
