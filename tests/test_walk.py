"""The way of a model through the files of a build does not become longer."""

from pathlib import Path

import pytest

import odtpack
from scripts import walk


@pytest.mark.skipif(
    walk.ROOT not in Path(odtpack.__file__).parents, reason="odtpack is not imported from the tree"
)
def test_visits_and_revisits():
    imported = walk.files()
    leaves = {path for path, names in imported.items() if not names}
    visits = walk.trace(imported.keys() - leaves)
    assert visits[0].endswith("odtpack/spec.py")
    assert any(path.endswith("odtpack/package/write.py") for path in visits)
    assert len(visits) <= 40
    assert len(visits) - len(set(visits)) <= 14


def test_a_leaf_imports_nothing_of_ours_but_errors():
    imported = walk.files()
    names = {path.rpartition("packager/")[2]: found for path, found in imported.items()}
    assert not names["odtpack/targets.py"]
    assert any(path.endswith("odtpack/spec.py") for path in names["odtpack/build.py"])
