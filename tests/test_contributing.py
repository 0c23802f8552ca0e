"""CONTRIBUTING followed literally: a loss in one file, used from the command line."""

import json
import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import zoo
from tests.model_text import computed
from tests.packaging_tools import open_training
from tests.programs import ran

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
GUIDES = ROOT / "docs" / "guides"
SCALE = 2.0


COMMANDS = (
    ("build", "--help"),
    ("build", "--recipe", "recipe.toml"),
    ("train", "package", "--data", "data.npz", "--epochs", "20", "--lr", "0.01", "--out",
     "trained.ckpt"),
)  # fmt: skip
# One process runs them all: it takes longer to start than a command.
PROGRAM = """
import json, sys
from odtpack.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
    print("====")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which a copy of the packager, with one more file, did its work; what it said."""
    folder = tmp_path_factory.mktemp("contributing")
    shutil.copytree(ROOT / "packager", folder / "packager")
    (program,) = re.findall(r"^### A loss\n.*?^```python\n(.*?)^```$", CONTRIBUTING, re.M | re.S)
    (folder / "packager" / "odtpack" / "losses" / "log_cosh.py").write_text(program)
    onnx.save(zoo.mlp((4, 8, 2)), folder / "model.onnx")
    x = np.random.default_rng(0).standard_normal((64, 4), dtype=np.float32)
    np.savez(folder / "data.npz", input=x, target=3 * x[:, :2] - x[:, 2:])
    (folder / "recipe.toml").write_text(
        'model = "model.onnx"\npackage = "by-recipe"\n[loss]\nkind = "log_cosh"\nscale = 2.0\n'
    )
    (command,) = re.findall(r"^(odtpack build .* --loss log_cosh .*)$", CONTRIBUTING, re.M)
    words = json.dumps([command.split()[1:], *COMMANDS])
    paths = [str(folder / "packager"), str(ROOT / "runtime")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    return folder, ran(sys.executable, "-c", PROGRAM, words, cwd=folder, env=environment).stdout


def test_a_loss_is_one_file(made):
    folder, _ = made
    manifest = json.loads((folder / "package" / "manifest.json").read_text())
    assert manifest["loss"] == "log_cosh"
    assert manifest["loss_options"] == {"reduction": "mean", "scale": SCALE}

    _, module, _ = open_training(folder / "package")
    with np.load(folder / "data.npz") as data:
        x, target = data["input"], data["target"]
    loss = module.eval()(x, target)
    (prediction,) = computed(folder / "model.onnx", input=x)
    wanted = np.mean(SCALE**2 * np.log(np.cosh((prediction - target) / SCALE)))
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)

    _, fresh, _ = open_training(folder / "package", checkpoint=folder / "trained.ckpt")
    assert fresh.eval()(x, target) < 0.5 * loss


def test_what_follows_from_the_declaration(made):
    folder, said = made
    assert "log_cosh" in said.split("====")[1]  # of --help
    models = [(folder / name / "training_model.onnx").read_bytes()
              for name in ("package", "by-recipe")]  # fmt: skip
    assert models[0] == models[1]


@pytest.mark.parametrize("name", re.findall(r"`([\w/]+\.py)`", CONTRIBUTING))
def test_the_files_to_copy_from_exist(name):
    rooms = ("packager", "runtime", "tests")
    assert (ROOT / name).exists() or any(any((ROOT / room).rglob(name)) for room in rooms)


@pytest.mark.parametrize("room", re.findall(r"^- `(\w+)`", CONTRIBUTING, re.M))
def test_the_rooms_exist(room):
    roots = (ROOT / "packager/odtpack", ROOT / "runtime/odtpack_runtime")
    assert any((root / room).is_dir() for root in (*roots, ROOT / "runtime/odtpack_simulator"))


def test_every_room_is_on_the_map():
    roots = ("packager/odtpack", "runtime/odtpack_runtime", "runtime/odtpack_simulator")
    rooms = {path.parent.name for root in roots for path in ROOT.glob(f"{root}/*/__init__.py")}
    assert rooms <= set(re.findall(r"`(\w+)`", CONTRIBUTING))


@pytest.mark.parametrize("page", ["README.md", *sorted(p.name for p in GUIDES.glob("*.md"))])
def test_a_page_begins_with_how_to_install(page):
    path = ROOT / page if page == "README.md" else GUIDES / page
    assert "pip install ./runtime ." in "\n".join(path.read_text().splitlines()[:14])


PUBLIC = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", (ROOT / "docs/stability.md").read_text(), re.M)


@pytest.mark.parametrize(("module", "names"), PUBLIC)
def test_public_names_exist_and_are_documented(module, names):
    found = import_module(module)
    for name in re.findall(r"`(\w+)`", names):
        value = getattr(found, name)
        assert not callable(value) or value.__doc__, name


def test_what_modules_export_is_public():
    """The names in ``__all__`` of what users import are those of the page."""
    listed = {module: set(re.findall(r"`(\w+)`", names)) for module, names in PUBLIC}
    for module in (
        "odtpack_runtime", "odtpack_simulator", "odtpack.artifacts", "odtpack.onnxblock",
    ):  # fmt: skip
        assert set(import_module(module).__all__) == listed[module], module
