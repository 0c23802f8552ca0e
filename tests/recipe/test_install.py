"""What a phone needs of a package, and nothing else, goes into an app."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.choices import OrtFormat
from odtpack.errors import OdtpackError
from odtpack.ort.files import add_ort_files
from odtpack.update.release import install
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.verify import verify_package
from tests.adapters import llama
from tests.cli.conftest import arrays, assert_refused, tree
from tests.packaging_tools import losses_of_steps
from tests.recipe.conftest import Run, Write
from tests.refused import refused

NAMES = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
TEMPLATE = "inference_template.onnx"


@pytest.fixture
def package(run: Run, folder: Path, write: Write) -> Path:
    assert run("build", "--recipe", write("[formats]\nort = true\nnominal = true\n")).code == 0
    return folder / "package"


def losses(path: Path) -> list[float]:
    """Train what lies in a folder as an app does, by its manifest."""
    opened = Package.open(path)
    state = CheckpointState.load_checkpoint(opened.checkpoint)
    module = Module(opened.training_model, state, opened.eval_model)
    optimizer = Optimizer(opened.optimizer_model, module)
    data = arrays()
    return losses_of_steps(module, optimizer, [(data["input"], data["labels"])] * 3)


@pytest.mark.parametrize("ort", [False, True])
def test_the_copy_trains_as_the_package(package, tmp_path, ort):
    app = tmp_path / "app" / "assets" / "odtpack"
    done = install(package, app, ort=ort)
    names = {name.replace(".onnx", ".ort") if ort else name for name in NAMES} | {TEMPLATE}
    assert done.changed
    assert set(tree(app)) == {*names, "manifest.json"} == set(done.names)
    assert losses(app) == pytest.approx(losses(package), rel=1e-5)


def test_a_copy_that_fails_leaves_what_was_there(package, tmp_path, monkeypatch):
    app = tmp_path / "odtpack"
    install(package, app, ort=True)
    before = tree(app)

    def full(source: Path, target: Path) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OdtpackError, match="No space left"):
        install(package, app)
    assert tree(app) == before
    assert {path.name for path in tmp_path.iterdir()} >= {"odtpack"}
    assert not list(tmp_path.glob(".odtpack*"))


def test_a_second_time_nothing_is_written(package, tmp_path):
    app = tmp_path / "odtpack"
    install(package, app)
    times = {path: path.stat().st_mtime_ns for path in app.iterdir()}
    assert not install(package, app).changed
    assert {path: path.stat().st_mtime_ns for path in app.iterdir()} == times


def test_what_is_not_of_this_package_is_replaced(package, tmp_path):
    app = tmp_path / "odtpack"
    install(package, app, ort=True)
    assert install(package, app).changed
    whole = tree(app)
    assert set(whole) == {*NAMES, TEMPLATE, "manifest.json"}
    for name in set(whole) - {"manifest.json"}:
        (app / name).write_bytes(b"damaged")
        assert install(package, app).changed
        assert tree(app) == whole
    (app / "manifest.json").unlink()  # as a killed copy leaves it
    (app / "checkpoint").unlink()
    assert install(package, app).changed
    assert tree(app) == whole


def test_what_may_be_the_user_s_is_not_replaced(package, tmp_path):
    app = tmp_path / "odtpack"
    install(package, app, ort=True)
    whole = tree(app)
    for name, text in (("eval_model.ort", b"changed"), ("manifest.json", b"{}")):
        (app / name).write_bytes(text)
        with refused("folder-not-empty", name):
            install(package, app)
        assert tree(app) == {**whole, name: text}
        (app / name).write_bytes(whole[name] or b"")
    (app / "manifest.json").unlink()
    with refused("folder-not-empty", "eval_model.ort"):
        install(package, app)


def test_a_package_with_a_subfolder_is_refused(package, tmp_path):
    """Files are replaced together in one folder; ``ort`` left its own behind and said it wrote."""
    content = json.loads((package / "manifest.json").read_text())
    del content["digest"]
    content["files"]["training_model"]["path"] = "deep/training_model.onnx"
    (package / "manifest.json").write_text(json.dumps(content))
    (package / "deep").mkdir()
    (package / "training_model.onnx").rename(package / "deep" / "training_model.onnx")
    before, opened = tree(package), Package.open(package)
    for call in (partial(install, package, tmp_path / "app"),
                 partial(add_ort_files, opened, OrtFormat())):  # fmt: skip
        with refused("package-path", "'deep/training_model.onnx' in a subfolder"):
            call()
    assert tree(package) == before
    assert not (tmp_path / "app").exists()


def test_a_package_without_other_files_keeps_its_manifest(run, folder, tmp_path):
    assert run("build", "--recipe", folder / "recipe.toml").code == 0
    app = tmp_path / "odtpack"
    install(folder / "package", app)
    assert tree(app) == tree(folder / "package")
    (folder / "package" / "manifest.sig").write_bytes(b"of that manifest")
    assert install(folder / "package", app).changed
    assert tree(app) == tree(folder / "package")
    assert not install(folder / "package", app).changed


@pytest.mark.parametrize("options", [{"segments": True}, {"step_model": "always"}])
def test_segments_and_the_step_model_are_installed(options, tmp_path):
    """Nothing of them is left out, so that the manifest stays as it is, and verify accepts it."""
    package, app = tmp_path / "package", tmp_path / "app"
    model = llama.exported(llama.llama(), tmp_path / "model.onnx")
    lora = AdapterSpec("lora", ("*_proj",), (), 3, 7.0)
    build_package(model, package, loss="next_token", adapter=lora, **options)
    assert not {"segments.weights", "step_model.onnx"}.isdisjoint(tree(package))
    install(package, app)
    assert tree(app) == tree(package)
    verify_package(app)


def test_command(run, package, tmp_path):
    app, bundle = tmp_path / "app", tmp_path / "bundle"
    outcome = run("install", package, "--android", app, "--ios", bundle, "--json", code=0)
    assert 'noCompress += listOf("onnx"' in outcome.err
    content = outcome.json()
    assert content["android"]["changed"] is True
    assert set(content["android"]["files"]) == set(tree(app)) == set(tree(bundle))
    assert "no_compress" not in content["ios"]
    again = run("install", package, "--android", app, "--json")
    assert again.json()["android"]["changed"] is False
    assert "noCompress" not in again.err


def test_refused(run, package, tmp_path):
    assert_refused(run("install", package), "usage", "--android")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "fonts.bin").write_text("mine")
    assert_refused(run("install", package, "--ios", mixed), "folder-not-empty", "fonts.bin")
    assert set(tree(mixed)) == {"fonts.bin"}
    for inside in (package, package / "sub" / "deep"):
        assert_refused(run("install", package, "--ios", inside), "installed-into-itself")
    file = mixed / "fonts.bin"
    assert_refused(run("install", package, "--ios", file), "package-not-installed", "file")
    damaged = tmp_path / "damaged"
    shutil.copytree(package, damaged)
    (damaged / "checkpoint").write_bytes(b"x")
    assert_refused(run("install", damaged, "--ios", tmp_path / "new"), "package-changed")
    assert not (tmp_path / "new").exists()


def test_ort_format_must_be_there(package, tmp_path):
    (package / "eval_model.ort").unlink()
    with pytest.raises(OdtpackError) as caught:
        install(package, tmp_path / "odtpack", ort=True)
    # A build that lists its models in ORT format misses the file by its name.
    assert caught.value.code in ("no-ort-format", "package-incomplete")
    assert "eval_model.ort" in caught.value.what


def test_a_hostile_manifest_removes_nothing_outside(package, tmp_path):
    app = tmp_path / "app" / "odtpack"
    install(package, app)
    victim = tmp_path / "app" / "victim"
    victim.write_text("mine")
    content = json.loads((app / "manifest.json").read_text())
    content.pop("digest", None)
    content["files"]["eval_model"]["path"] = "../victim"
    (app / "manifest.json").write_text(json.dumps(content))
    install(package, app)
    assert victim.read_text() == "mine"
