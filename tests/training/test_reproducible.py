"""The same model and recipe give the same bytes, whatever the process and its surroundings."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

from odtpack import optimizers
from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack.package.write import model_digest
from odtpack_runtime.package.manifest import Manifest
from tests import zoo
from tests.sweep import split

BUILD = """
import os, sys
from pathlib import Path
from tests import zoo
from tests.packaging_tools import OPTIMIZERS, generate

os.umask(int(sys.argv[2], 8))
models = {
    "cnn": zoo.cnn(size=12, width=(4, 6), hidden=8),
    "mobilenet": zoo.mobilenet_v2(size=32, width_mult=0.25, batch_norm="train", stages=3),
    "transformer": zoo.transformer_encoder(vocab=20, d=16, layers=1, T=8, ff=32, opset=14),
}
for name, model in models.items():
    generate(model, Path(sys.argv[1]) / name, OPTIMIZERS["adamw"], nominal_checkpoint=True)
"""
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What should not matter."""

    seed: str = "1"
    threads: str = "1"
    locale: str = "C"
    umask: str = "022"
    zone: str = "UTC"
    folder: Path = ROOT


VARIANTS = {
    "all": Surroundings("2", "4", "tr_TR.UTF-8", "077", "Pacific/Kiritimati", Path("/")),
    "hash seed": Surroundings(seed="2"),
    "threads": Surroundings(threads="4"),
    "locale, zone": Surroundings(locale="tr_TR.UTF-8", zone="Pacific/Kiritimati"),
    "umask, folder": Surroundings(umask="077", folder=Path("/")),
}


def _build(folder: Path, around: Surroundings) -> dict[str, bytes]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {
        "PYTHONHASHSEED": around.seed, "OMP_NUM_THREADS": around.threads,
        "OPENBLAS_NUM_THREADS": around.threads, "LC_ALL": around.locale, "LANG": around.locale,
        "TZ": around.zone, "PYTHONPATH": path,
    }  # fmt: skip
    subprocess.run(
        [sys.executable, "-c", BUILD, folder, around.umask], check=True, env=environment,
        cwd=around.folder,
    )  # fmt: skip
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return _build(tmp_path_factory.mktemp("usual"), Surroundings())


@pytest.mark.parametrize("variant", split(VARIANTS, lambda variant: variant == "all"))
def test_processes_write_the_same_bytes(usual, tmp_path, variant):
    found = _build(tmp_path, VARIANTS[variant])
    assert len(usual) == 3 * 7
    assert [name for name in usual if usual[name] != found.get(name)] == []
    assert set(usual) == set(found)


def test_it_does_not_matter_where_the_model_comes_from(tmp_path):
    """In memory, in a file, or with its values in another file; nor what was built before."""
    model = zoo.cnn(size=12, width=(4, 6))
    onnx.save(model, tmp_path / "one.onnx")
    onnx.save(
        zoo.cnn(size=12, width=(4, 6)), tmp_path / "two.onnx", save_as_external_data=True,
        location="two.data", size_threshold=0,
    )  # fmt: skip
    built = [
        build_package(source, tmp_path / str(index), loss="cross_entropy")
        for index, source in enumerate((model, tmp_path / "one.onnx", tmp_path / "two.onnx"))
    ]
    assert built[0] == built[1] == built[2]
    build_package(model, tmp_path / "1", loss="mse", nominal=True)
    build_package(model, tmp_path / "1", loss="cross_entropy")
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "2")


class TestRecipeDigest:
    def digest(self, folder: Path, model: onnx.ModelProto | None = None, **options: object) -> str:
        settings: dict[str, object] = {"loss": "cross_entropy"} | options
        build_package(model or zoo.mlp((6, 4, 3)), folder, **settings)  # type: ignore[arg-type]
        found = Manifest.from_json((folder / "manifest.json").read_bytes(), "m").recipe_digest
        assert found is not None
        return found

    def test_every_setting_counts(self, tmp_path):
        other = zoo.mlp((6, 4, 3))
        values = onnx.numpy_helper.to_array(other.graph.initializer[0]).copy()
        values.flat[0] += 1
        tensor = onnx.numpy_helper.from_array(values, other.graph.initializer[0].name)
        other.graph.initializer[0].CopyFrom(tensor)
        settings: dict[str, dict[str, Any]] = {
            "plain": {}, "model": {"model": other}, "loss": {"loss": "mse"},
            "loss option": {"loss_options": {"label_smoothing": 0.1}},
            "optimizer": {"optimizer": optimizers.SGD()},
            "setting": {"optimizer": optimizers.AdamW(beta1=0.8)},
            "frozen": {"freeze": ["*.bias"]},
            "constant": {"train": ["*.weight"], "freeze": ["fc1.bias"]},
            "outputs": {"outputs": ["output"]}, "nominal": {"nominal": True},
            "steps": {"accumulation_steps": 2},
        }  # fmt: skip
        digests = {name: self.digest(tmp_path / name, **each) for name, each in settings.items()}
        assert len(set(digests.values())) == len(digests), json.dumps(digests, indent=1)

    def test_how_a_setting_is_written_does_not(self, tmp_path):
        plain = self.digest(tmp_path / "a")
        assert plain == self.digest(tmp_path / "b", optimizer=optimizers.AdamW())
        assert plain == self.digest(tmp_path / "c", train=["*"])
        assert plain == self.digest(tmp_path / "d", train=["fc2.*", "fc1.*"])

    def test_names_count_where_values_do_not(self):
        """Two initializers of equal bytes do not change places unseen."""
        model = zoo.mlp((4, 4, 4))
        renamed = zoo.mlp((4, 4, 4))
        weights = [t for t in renamed.graph.initializer if len(t.dims) == 2]
        one, other = weights[0].raw_data, weights[1].raw_data
        weights[0].raw_data, weights[1].raw_data = other, one
        assert model_digest(load_model(model)) == model_digest(load_model(zoo.mlp((4, 4, 4))))
        assert model_digest(load_model(model)) != model_digest(load_model(renamed))
