"""Python decides on every case of the corpus as the corpus says, at a cost that is bounded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.guard import outcome
from tests.fuzz.test_fuzz import traced
from tests.hostile import python_reader
from tests.hostile.cases import READERS
from tests.hostile.checkpoints import many_tensors, plain, shared_table, written
from tests.hostile.compare import damaged, wrong_decisions
from tests.hostile.content import content_digest
from tests.hostile.corpus import INDEX, write_corpus
from tests.once import made_once
from tests.runtime.checkpoint_samples import sample
from tests.sweep import split

__all__ = ["traced"]
LEAST = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "hostile-corpus", write_corpus)


def test_the_index(corpus):
    content = json.loads((corpus / INDEX).read_text())
    assert content["format"] == 1
    cases = content["cases"]
    assert len(cases) >= LEAST
    assert {case["action"] for case in cases} == {"open", "checkpoint", "session"}
    for case in cases:
        assert bool(case["codes"]) == (case["expect"] == "refuse")
        assert set(case["stricter"]) <= set(READERS)


def test_python_decides_as_the_corpus_says(corpus):
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    found = dict(line.split("\t") for line in python_reader.hostile(corpus))
    assert wrong_decisions(corpus / INDEX, "python", found) == []
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before
    # A wrong decision is found.
    wrong = {"manifest_byte_order_mark": "ok", "manifest_unchanged": "foreign:KeyError"}
    del found["checkpoint_whole"]
    assert len(wrong_decisions(corpus / INDEX, "python", found | wrong)) == 3


def test_the_digest_of_the_content_tells_contents_apart():
    other = plain()
    other.trainable["fc1.bias"][0] += 1
    named = plain()
    named.frozen["fc1.bias"] = named.trainable.pop("fc1.bias")
    assert len({content_digest(data) for data in (sample(), plain(), other, named)}) == 4


def test_damaged_checkpoints_are_refused_or_whole(tmp_path):
    """Whatever still reads holds what was saved: no loss of parameters, moments or properties."""
    whole = [sample(), plain()]
    contents = {content_digest(data) for data in whole}
    source = damaged([written(data) for data in whole], [b"{}"], seed=5)
    for _ in range(800):
        name, data = next(source)
        (tmp_path / name).write_bytes(data)
    lines = dict(line.split("\t", 1) for line in python_reader.read(tmp_path))
    assert len(lines) == 800
    for name, line in lines.items():
        assert not line.startswith("foreign:"), name
        if line.startswith("ok") and name.endswith(".ckpt"):
            assert line.split("\t")[1] in contents, name


COSTLY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "one table": ("checkpoint", lambda: shared_table(60_000)),
    "tensors": ("checkpoint", lambda: many_tensors(20_000)),
    "one table, often": ("checkpoint", lambda: shared_table(900_000)),
    "many tensors": ("checkpoint", lambda: many_tensors(300_000)),
    "60 MiB": ("manifest", lambda: b'{"parameters": [' + b"[]," * 20_000_000 + b"[]]}"),
    "lists": ("manifest", lambda: b'{"parameters": [' + b"[]," * 1_300_000 + b"[]]}"),
    "keys": ("manifest", lambda: b'{"loss_options": {'
             + b",".join(b'"k%d":1' % i for i in range(190_000)) + b"}}"),
    "quotes": ("manifest", lambda: b'{"a": "' + b'\\"' * 2_000_000),
    "backslashes": ("manifest", lambda: b'{"a": "' + b"\\" * 4_000_000),
    "texts": ("manifest", lambda: b'"' * 4_000_000),
}  # fmt: skip
LARGEST = ("one table, often", "many tensors")


@pytest.mark.parametrize("name", split(COSTLY, lambda name: name not in LARGEST))
def test_what_is_large_costs_in_proportion(name, traced, tmp_path):
    """Within the time and memory of the threat model; what it decides is the corpus's affair."""
    reader, make = COSTLY[name]
    outcome(reader, make(), tmp_path)
