"""CONTRIBUTING followed literally: a loss in one file, used from the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tests import zoo
from tests.packaging_tools import open_training
from tests.programs import ran

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
GUIDES = ROOT / "docs" / "guides"
SCALE = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packager with one more file, a model, data and a package."""
    folder = tmp_path_factory.mktemp("contributing")
    shutil.copytree(ROOT / "packager", folder / "packager")
    (program,) = re.findall(r"^### A loss\n.*?^```python\n(.*?)^```$", CONTRIBUTING, re.M | re.S)
    (folder / "packager" / "odtpack" / "losses" / "log_cosh.py").write_text(program)
    onnx.save(zoo.mlp((4, 8, 2)), folder / "model.onnx")
    x = np.random.default_rng(0).standard_normal((64, 4), dtype=np.float32)
    np.savez(folder / "data.npz", input=x, target=3 * x[:, :2] - x[:, 2:])
    (command,) = re.findall(r"^(odtpack build .* --loss log_cosh .*)$", CONTRIBUTING, re.M)
    odtpack(folder, *command.split()[1:])
    return folder


def odtpack(folder: Path, *arguments: str) -> str:
    """Run the command line of the copy, and return what it prints."""
    paths = [str(folder / "packager"), str(ROOT / "runtime")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    done = ran(sys.executable, "-m", "odtpack", *arguments, cwd=folder, env=environment)
    return done.stdout + done.stderr


def test_a_loss_is_one_file(folder: Path) -> None:
    manifest = json.loads((folder / "package" / "manifest.json").read_text())
    assert manifest["loss"] == "log_cosh"
    assert manifest["loss_options"] == {"reduction": "mean", "scale": SCALE}

    state, module, _ = open_training(folder / "package")
    with np.load(folder / "data.npz") as data:
        x, target = data["input"], data["target"]
    loss = module.eval()(x, target)
    (prediction,) = onnxruntime.InferenceSession(folder / "model.onnx").run(None, {"input": x})
    wanted = np.mean(SCALE**2 * np.log(np.cosh((prediction - target) / SCALE)))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)

    odtpack(
        folder, "train", "package", "--data", "data.npz", "--epochs", "20", "--lr", "0.01",
        "--out", "trained.ckpt",
    )  # fmt: skip
    trained = type(state).load_checkpoint(folder / "trained.ckpt")
    fresh = type(module)(
        folder / "package" / "training_model.onnx", trained, folder / "package" / "eval_model.onnx"
    )
    assert fresh.eval()(x, target) < 0.5 * loss


def test_what_follows_from_the_declaration(folder: Path) -> None:
    assert "log_cosh" in odtpack(folder, "build", "--help")
    (folder / "recipe.toml").write_text(
        'model = "model.onnx"\npackage = "by-recipe"\n[loss]\nkind = "log_cosh"\nscale = 2.0\n'
    )
    odtpack(folder, "build", "--recipe", "recipe.toml")
    digests = {
        json.loads((folder / name / "manifest.json").read_text())["files"]["training_model"][
            "sha256"
        ]
        for name in ("package", "by-recipe")
    }
    assert len(digests) == 1


@pytest.mark.parametrize("name", re.findall(r"`([\w/]+\.py)`", CONTRIBUTING))
def test_the_files_to_copy_from_exist(name: str) -> None:
    assert (
        list(ROOT.glob(f"packager/odtpack/**/{name}"))
        or (ROOT / name).exists()
        or list(ROOT.glob(f"*/**/{name}"))
    )


@pytest.mark.parametrize("room", re.findall(r"^- `(\w+)`", CONTRIBUTING, re.M))
def test_the_rooms_exist(room: str) -> None:
    roots = (ROOT / "packager/odtpack", ROOT / "runtime/odtpack_runtime")
    assert any((root / room).is_dir() for root in (*roots, ROOT / "runtime/odtpack_simulator"))


def test_every_room_is_on_the_map() -> None:
    roots = ("packager/odtpack", "runtime/odtpack_runtime", "runtime/odtpack_simulator")
    rooms = {path.parent.name for root in roots for path in ROOT.glob(f"{root}/*/__init__.py")}
    assert rooms <= set(re.findall(r"`(\w+)`", CONTRIBUTING))


@pytest.mark.parametrize("page", ["README.md", *sorted(p.name for p in GUIDES.glob("*.md"))])
def test_a_page_begins_with_how_to_install(page: str) -> None:
    path = ROOT / page if page == "README.md" else GUIDES / page
    assert "pip install ./runtime ." in "\n".join(path.read_text().splitlines()[:14])


PUBLIC = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", (ROOT / "docs/stability.md").read_text(), re.M)


@pytest.mark.parametrize(("module", "names"), PUBLIC)
def test_public_names_exist_and_are_documented(module: str, names: str) -> None:
    found = import_module(module)
    for name in re.findall(r"`(\w+)`", names):
        value = getattr(found, name)
        assert not callable(value) or value.__doc__, name


def test_what_modules_export_is_public() -> None:
    """The names in ``__all__`` of what users import are those of the page."""
    listed = {module: set(re.findall(r"`(\w+)`", names)) for module, names in PUBLIC}
    for module in (
        "odtpack_runtime", "odtpack_simulator", "odtpack.artifacts", "odtpack.onnxblock",
    ):  # fmt: skip
        assert set(import_module(module).__all__) == listed[module], module
