"""A model and what was made of it: those that are there are of one training, whatever happens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.folder_update import replace_together, staged_beside

NAMES = ("m.onnx", "m.ort", "m.arm.ort")


def export(folder: Path, text: str) -> None:
    with staged_beside(folder / "m.onnx") as stage:
        for name in NAMES:
            (stage / name).write_text(text)
        replace_together(folder / "m.onnx", stage / "m.onnx", [stage / name for name in NAMES[1:]])


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_all_are_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        export(tmp_path, text)
        assert held(tmp_path) == dict.fromkeys(NAMES, text)


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("at", range(1, 8))
def test_at_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, killed: bool, at: int
) -> None:
    export(tmp_path, "old")
    owner = Path if call == "replace" else os
    original, left = getattr(owner, call), at

    def counted(*arguments: object) -> object:
        nonlocal left
        left -= 1
        if left == 0 or (killed and left < 0):
            raise KeyboardInterrupt if killed else OSError(5, os.strerror(5))
        return original(*arguments)

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, call, counted)
        try:
            export(tmp_path, "new")
        except OdtpackError as error:
            said = error.what
        except KeyboardInterrupt:
            said = "killed"
    found = held(tmp_path)
    assert len(set(found.values())) == 1, "of one training"
    if killed and said:
        assert "m.onnx" in found
    elif "was written" in said:
        assert found["m.onnx"] == "new"
    else:
        assert found == dict.fromkeys(NAMES, "old" if said else "new")
