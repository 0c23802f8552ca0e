"""Every kit decides on the hostile corpus as it says, and reads damaged files as Python does."""

from pathlib import Path

import pytest

from tests.hostile.compare import disagreements, lines_of, wrong_decisions
from tests.hostile.corpus import INDEX, write_corpus
from tests.kits import hostile_kits
from tests.once import made_once

COMPARED = 500


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "hostile-corpus", write_corpus)


@pytest.mark.kits
@pytest.mark.parametrize("kit", hostile_kits.KITS)
def test_the_corpus(corpus, kit):
    found = lines_of(hostile_kits.hostile_command(kit), "hostile", corpus)
    assert wrong_decisions(corpus / INDEX, kit, found) == []


@pytest.mark.kits
@pytest.mark.parametrize("kit", hostile_kits.KITS)
def test_damaged_files(kit, tmp_path):
    command = hostile_kits.hostile_command(kit)
    assert disagreements(command, COMPARED, seed=1, work=tmp_path) == []
