"""The same model and recipe give the same bytes, whatever the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUILD = """
import sys
from pathlib import Path
from odtpack import zoo
from tests.packaging_tools import OPTIMIZERS, generate

models = {
    "cnn": zoo.cnn(size=12, width=(4, 6), hidden=8),
    "mobilenet": zoo.mobilenet_v2(size=32, width_mult=0.25, batch_norm="train"),
    "transformer": zoo.transformer_encoder(vocab=20, d=16, layers=1, T=8, ff=32, opset=14),
}
for name, model in models.items():
    generate(model, Path(sys.argv[1]) / name, OPTIMIZERS["adamw"], nominal_checkpoint=True)
"""
ROOT = Path(__file__).parents[2]


def _build(folder: Path, seed: str) -> dict[str, bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", BUILD, folder], check=True, env=environment, cwd=ROOT)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    first, second = (_build(tmp_path / seed, seed) for seed in ("1", "2"))
    assert len(first) == 3 * 6
    assert [name for name in first if first[name] != second.get(name)] == []
    assert set(first) == set(second)
