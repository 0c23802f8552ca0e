"""What the two distributions contain, and that each of them works where nothing else is.

Everything here installs from the configured package index, into environments of its own.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, Package
from tests import zoo
from tests.programs import ran

pytestmark = pytest.mark.distribution

ROOT = Path(__file__).parents[2]

TRAIN = """
import json, sys
import numpy as np
from odtpack_runtime import CheckpointState, Module, Optimizer, Package, self_check

folder, data, out = sys.argv[1:]
package = Package.open(folder)
checked = self_check(package)
state = CheckpointState.load_checkpoint(package.checkpoint)
module = Module(package.training_model, state, package.eval_model)
optimizer = Optimizer(package.optimizer_model, module)
with np.load(data) as arrays:
    feeds = [arrays["input"], arrays["labels"]]
losses = []
for _ in range(20):
    losses.append(float(module(*feeds)))
    optimizer.step()
    module.lazy_reset_grad()
CheckpointState.save_checkpoint(state, out + "/trained.ckpt", include_optimizer_state=True)
module.export_model_for_inferencing(out + "/personal.onnx", ["output"])
print(json.dumps({"losses": losses, "check": checked.largest_part}))
"""

TRAIN_AND_REPLAY = """
set -eu
odtpack --version
odtpack init --example next-word --out "$1/example"
odtpack build "$1/model.onnx" --loss cross_entropy --out "$1/package"
odtpack train "$1/package" --data "$1/data.npz" --epochs 1 --out "$1/trained.ckpt"
odtpack simulate "$1/package" --data "$1/data.npz" --device google/pixel-8a
"""

INSTALLED = """
import json, re
from importlib.metadata import distributions, requires

def name(text):
    return re.match(r"[A-Za-z0-9._-]+", text)[0].lower().replace("_", "-").replace(".", "-")

print(json.dumps({
    name(found.metadata["Name"]): [
        name(text) for text in found.requires or () if "extra ==" not in text
    ]
    for found in distributions()
}))
"""


def clean() -> dict[str, str]:
    """The environment without what leads Python to other trees."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def python(interpreter: str | Path, *arguments: str | Path) -> str:
    return ran(interpreter, *arguments, env=clean()).stdout


def pip(interpreter: str | Path, *arguments: str | Path) -> None:
    python(interpreter, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def environment(folder: Path) -> Path:
    python(sys.executable, "-m", "venv", folder)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def wheel(source: Path, folder: Path) -> Path:
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", folder, source)
    (made,) = folder.glob("*.whl")
    return made


def modules(root: Path) -> set[str]:
    """The files below an import root, as a wheel names them."""
    return {
        path.relative_to(root.parent).as_posix()
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def described(made: Path) -> tuple[set[str], email.message.Message]:
    """The files of a wheel but those about itself, and its metadata."""
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(about))
    return {name for name in names if ".dist-info/" not in name}, metadata


@pytest.fixture(scope="module")
def runtime_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(ROOT / "runtime", tmp_path_factory.mktemp("runtime"))


@pytest.fixture(scope="module")
def whole_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(ROOT, tmp_path_factory.mktemp("whole"))


def samples(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Write data.npz; return inputs and labels."""
    random = np.random.default_rng(0)
    x, labels = random.random((16, 6), np.float32), random.integers(0, 3, 16)
    np.savez(folder / "data.npz", input=x, labels=labels)
    return x, labels


def test_the_runtime_s_wheel(runtime_wheel):
    files, metadata = described(runtime_wheel)
    assert files == modules(ROOT / "runtime" / "odtpack_runtime")
    assert "odtpack_runtime/py.typed" in files
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {text.split(">=")[0] for text in needed} == {"flatbuffers", "numpy", "onnxruntime"}
    assert metadata["Name"] == "odtpack-runtime"


def test_the_versions_are_one(runtime_wheel):
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    _, metadata = described(runtime_wheel)
    assert metadata["Version"] == whole["version"]
    assert f"odtpack-runtime=={whole['version']}" in whole["dependencies"]
    assert metadata["Project-URL"] == f"Repository, {whole['urls']['Repository']}"
    assert metadata["Requires-Python"] == whole["requires-python"]
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "runtime" / "LICENSE").read_bytes()


def test_the_runtime_alone_trains(runtime_wheel, tmp_path):
    """In an environment that holds nothing but what the runtime's distribution brings."""
    interpreter = environment(tmp_path / "venv")
    before = set(json.loads(python(interpreter, "-c", INSTALLED)))
    pip(interpreter, "install", runtime_wheel)
    installed = json.loads(python(interpreter, "-c", INSTALLED))
    brought, waiting = set(), ["odtpack-runtime"]
    while waiting:
        each = waiting.pop()
        if each in installed and each not in brought:
            brought.add(each)
            waiting += installed[each]
    assert set(installed) - before == brought - before
    assert not {"onnx", "onnx-ir", "pydantic", "odtpack"} & set(installed)

    folder = tmp_path / "package"
    build_package(zoo.mlp((6, 5, 3)), folder, loss="cross_entropy")
    x, labels = samples(tmp_path)
    data = str(tmp_path / "data.npz")
    told = json.loads(python(interpreter, "-W", "error", "-c", TRAIN, folder, data, tmp_path))
    assert told["check"] <= 1
    assert told["losses"][-1] < told["losses"][0]

    # What it saved and exported is as the environment of the tests reads and computes it.
    package = Package.open(folder)
    state = CheckpointState.load_checkpoint(tmp_path / "trained.ckpt")
    results = Module(package.training_model, state, package.eval_model).eval()(x, labels)
    loss = float(results[0] if isinstance(results, tuple) else results)
    personal = onnx.load(tmp_path / "personal.onnx")
    (scores,) = ReferenceEvaluator(personal).run(["output"], {"input": x})
    shifted = scores - scores.max(axis=1, keepdims=True)
    chosen = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))[range(16), labels]
    np.testing.assert_allclose(loss, -chosen.mean(), rtol=1e-5)
    assert loss < told["losses"][-1]


def test_the_whole_wheel(whole_wheel, runtime_wheel):
    files, metadata = described(whole_wheel)
    assert metadata["Name"] == "odtpack"
    roots = ("packager/odtpack", "runtime/odtpack_simulator")
    profiles = {
        f"odtpack_simulator/{name}"
        for name in modules(ROOT / "device_profiles")
        if name.endswith(".toml")
    }
    assert profiles
    gallery = {f"odtpack/{name}" for name in modules(ROOT / "examples" / "gallery")}
    wanted = {name for root in roots for name in modules(ROOT / root)} | profiles | gallery
    assert wanted <= files
    assert {name.split("/")[0] for name in files} == {Path(root).name for root in roots}
    assert not files & described(runtime_wheel)[0]
    with zipfile.ZipFile(whole_wheel) as archive:
        (entries,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        assert "odtpack = odtpack.cli:main" in archive.read(entries).decode()


def test_links_of_a_readme_work_on_an_index(whole_wheel, runtime_wheel):
    for made in (whole_wheel, runtime_wheel):
        targets = re.findall(r'(?:\]\(|src=")([^")]+)', str(described(made)[1].get_payload()))
        address = "https://odtpack.example/raw/main/"
        assert targets
        for target in targets:
            assert target.startswith((address, "#")), target
            path = target.removeprefix(address).partition("#")[0]
            assert (ROOT / path).exists(), target


def interpreter_of(version: str) -> Path:
    """A Python of that version that this machine has, pyenv's included."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return Path(sys.executable)
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *kept.glob(f"{version}*/bin/python{version}")]
    for candidate in found:
        if candidate and not subprocess.run([candidate, "-c", ""], capture_output=True,
                                            check=False).returncode:  # fmt: skip
            return Path(candidate)
    pytest.skip(f"Python {version} is not installed")


@pytest.mark.parametrize("version", ["3.11", "3.13"])
def test_both_wheels_train_and_replay(version, whole_wheel, runtime_wheel, tmp_path):
    """Removing one of them leaves the other one whole."""
    python(interpreter_of(version), "-m", "venv", tmp_path / "venv")
    interpreter = tmp_path / "venv" / "bin" / "python"
    pip(interpreter, "install", runtime_wheel, whole_wheel)
    onnx.save(zoo.mlp((6, 5, 3)), tmp_path / "model.onnx")
    samples(tmp_path)
    script = ["bash", "-c", TRAIN_AND_REPLAY, "bash", str(tmp_path)]
    path = f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}"
    assert "Pass" in ran(*script, env={**clean(), "PATH": path}).stdout
    pip(interpreter, "uninstall", "--yes", "odtpack")
    python(interpreter, "-c", TRAIN, tmp_path / "package", tmp_path / "data.npz", tmp_path)


def test_the_demo_works_in_the_source_distribution(tmp_path):
    interpreter = environment(tmp_path / "venv")
    pip(interpreter, "install", "build")
    python(interpreter, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT)
    (made,) = tmp_path.glob("odtpack-*.tar.gz")
    shutil.unpack_archive(made, tmp_path, filter="data")
    folder = tmp_path / made.name.removesuffix(".tar.gz")
    assert not (folder / "runtime/js/node_modules").exists()
    ran("make", "demo", f"PYTHON={sys.executable}", cwd=folder, env=clean())
    assert (folder / "build/demo/report.html").exists()


def test_the_action_installs_its_own_checkout(tmp_path):
    action = ROOT / "examples/app-builds/github-action"
    text = (action / "action.yml").read_text()
    script = re.search(
        r"CHECKOUT: .*?action_path \}\}(.*?)\n      run: \|\n(.*?)\n    - ", text, re.S
    )
    interpreter = environment(tmp_path / "venv")
    path = f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}"
    given = {"REQUIREMENT": "", "CHECKOUT": f"{action}{script[1]}", "PATH": path}
    subprocess.run(["bash", "-c", script[2]], env=clean() | given, check=True)
    assert python(interpreter.with_name("odtpack"), "--version").startswith("odtpack ")


def test_an_editable_installation_has_all_import_roots(tmp_path):
    interpreter = environment(tmp_path / "venv")
    pip(interpreter, "install", "--no-deps", "-e", ROOT / "runtime", "-e", ROOT)
    code = (
        "from importlib.util import find_spec\n"
        "for name in ('odtpack', 'odtpack_runtime', 'odtpack_simulator'):\n"
        "    print(find_spec(name).origin)"
    )
    found = [Path(line) for line in python(interpreter, "-I", "-c", code).splitlines()]
    parents = ROOT / "packager", ROOT / "runtime", ROOT / "runtime"
    assert [path.parents[1].resolve() for path in found] == [path.resolve() for path in parents]
    assert interpreter.with_name("odtpack").exists()
