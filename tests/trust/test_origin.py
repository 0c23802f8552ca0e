"""Who signed a package, which release it is, and what it may ask for."""

import dataclasses
import json
import os
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack.build import build_package
from odtpack.cli._describe import of_fleet, of_properties, of_simulation
from odtpack.update.release import new_key, sign_package
from odtpack_runtime import telemetry
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package import checks
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from odtpack_simulator.values.text import shown_path
from tests import zoo
from tests.cli.conftest import tree
from tests.packages.mutations import rehash


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "package"
    build_package(zoo.mlp((6, 4, 3)), folder, loss="cross_entropy")
    return folder


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name in ("old", "new", "other"):
        new_key(folder / f"{name}.pem")
    return folder


@pytest.fixture
def package(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "package"))


def code_of(call: object, *args: object, **options: object) -> str:
    with pytest.raises(OdtpackError) as caught:
        call(*args, **options)  # type: ignore[operator]
    return caught.value.code


def test_what_is_signed_is_what_was_checked(package, keys, monkeypatch):
    opened = Package.open

    def swapped(path: Path) -> Package:
        found = opened(path)
        (package / "manifest.json").write_text('{"not": "what was checked"}')
        return found

    monkeypatch.setattr(Package, "open", swapped)
    assert code_of(sign_package, package, keys / "old.pem") == "package-changed"
    assert not (package / "manifest.sig").exists()


@pytest.mark.parametrize("name", ["eval_model.onnx", "inference_template.onnx"])
def test_names_that_are_not_text_are_refused(name, package, run):
    """protobuf gives them as bytes, which are not compared with text, nor written again."""
    model = onnx.load(package / name)
    for old in (model.graph.node[-1].output[0], *(each.name for each in model.graph.initializer)):
        data = (package / name).read_bytes()
        (package / name).write_bytes(data.replace(old.encode(), b"\xff" + old.encode()[1:]))
    rehash(package, name)
    assert code_of(verify_package, package) == "model-not-readable"
    commands = [("export", package, "--checkpoint", package / "checkpoint", "--out", "e.onnx")]
    if name == "eval_model.onnx":
        commands += [("inspect", package), ("ort", package), ("diff", package, package)]
    before = tree(package)
    for command in commands:
        outcome = run(*command, code=2)
        assert f"error[model-not-readable]: {name} holds a text that is not UTF-8" in outcome.err
    assert tree(package) == before


def test_a_model_is_checked_again_only_where_it_changed(package, monkeypatch):
    path, checked = package / "eval_model.onnx", list[str]()

    def not_text(model: onnx.ModelProto) -> list[bytes]:
        checked.append(model.doc_string)
        return []

    monkeypatch.setattr(checks, "not_text", not_text)
    texts = [f"{number} of {package}" for number in (1, 2)]  # nothing has read these before
    model = onnx.load(path)
    for text in texts:
        model.doc_string = text
        path.write_bytes(model.SerializeToString())
        assert checks.read_model(path) == checks.read_model(path) == model
    assert checked == texts


def test_the_signature_covers_every_file_and_every_key(package, keys):
    sign_package(package, keys / "old.pem")
    public = keys / "old.pub"
    for path in sorted(package.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        assert code_of(verify_package, package, public_key=public) in (
            "package-changed", "signature-wrong"
        ), path.name  # fmt: skip
        path.write_bytes(data)
    manifest = package / "manifest.json"
    text = manifest.read_text()
    content = json.loads(text)
    assert {"session", "self_check", "layout", "files", "operators"} <= content.keys()
    for key in content:
        manifest.write_text(json.dumps({name: content[name] for name in content if name != key}))
        assert code_of(verify_package, package, public_key=public) == "signature-wrong"
    manifest.write_text(text)
    found = verify_package(package, public_key=public)
    assert found.signature == "valid"
    assert found.signed_with == str(public)
    assert "self-check" in " ".join(found.checked)


def test_keys_are_rotated(package, keys):
    """An app that trusts both keys takes packages signed with either; with one, of that one."""
    both = [keys / "old.pub", keys / "new.pub"]
    for name in ("old", "new"):
        sign_package(package, keys / f"{name}.pem")
        assert verify_package(package, public_key=both).signed_with == str(keys / f"{name}.pub")
    assert code_of(verify_package, package, public_key=both[:1]) == "signature-wrong"
    sign_package(package, keys / "other.pem")
    assert code_of(verify_package, package, public_key=both) == "signature-wrong"


def test_releases_only_grow(package, keys):
    assert code_of(verify_package, package, minimum_release=0) == "package-downgrade"
    sign_package(package, keys / "old.pem", release=3)
    assert Package.open(package).manifest.release == 3
    assert verify_package(package, public_key=keys / "old.pub", minimum_release=3).release == 3
    assert code_of(verify_package, package, minimum_release=4) == "package-downgrade"
    assert code_of(sign_package, package, keys / "old.pem", release=2) == "package-downgrade"
    sign_package(package, keys / "new.pem")
    assert Package.open(package).manifest.release == 3


def test_limits_of_what_a_stranger_may_ask(package):
    manifest = Package.open(package).manifest
    Limits().check(manifest, "here")
    layout = manifest.layout
    parameters = sum(item.size_bytes or 0 for item in manifest.parameters)
    exact = Limits(
        disk_bytes=sum(file.size_bytes for file in manifest.files.all()),
        # Gradients and both moments, with the gaps of the layout.
        state_bytes=parameters + layout.elements * 4 * 3,
        tensors=len(manifest.parameters) + len(manifest.inputs) + len(manifest.all_outputs),
    )
    exact.check(manifest, "here")
    for name in ("disk_bytes", "state_bytes", "tensors"):
        less = dataclasses.replace(exact, **{name: getattr(exact, name) - 1})
        assert code_of(less.check, manifest, "here") == "package-limits"
    huge = dataclasses.replace(manifest.inputs[0], shape=(2**20, 2**10))
    hostile = dataclasses.replace(manifest, inputs=(huge, *manifest.inputs[1:]))
    assert code_of(Limits().check, hostile, "here") == "package-limits"
    operators = dataclasses.replace(
        manifest.operators, eval_model={**manifest.operators.eval_model, "evil": {"Shell": 1}}
    )
    hostile = dataclasses.replace(manifest, operators=operators)
    assert code_of(Limits().check, hostile, "here") == "package-limits"
    Limits(domains=("ai.onnx", "evil")).check(hostile, "here")


def test_verify_prints_what_it_checked(package, keys, run):
    run("sign", package, "--key", keys / "old.pem", "--release", "7", code=0)
    both = (word for name in ("new", "old") for word in ("--public-key", keys / f"{name}.pub"))
    words = "verify", package, "--stranger", "--minimum-release", "7"
    text = " ".join(run(*words, *both, code=0).out.split())
    for phrase in (
        "release 7", "signature, with old.pub", "the release, 7 or later", "operator domains",
        "SHA-256 of", "losses of the self-check",
    ):  # fmt: skip
        assert phrase in text


# What reports carry of samples and people: nothing that is not said.


@pytest.mark.parametrize(
    ("size", "held_out", "words"),
    [(32, 50, []), (1, 50, ["single samples"]), (8, 1, ["Only one sample"]), (2, 2, [])],
)
def test_figures_of_single_samples(size, held_out, words):
    result: Any = SimpleNamespace(data=SimpleNamespace(batch_size=size, held_out_samples=held_out))
    found = list(of_simulation(result))
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


@pytest.mark.parametrize(("clients", "said"), [(0, 0), (5, 1), (19, 1), (20, 0), (500, 0)])
def test_figures_of_single_clients(clients, said):
    fairness = SimpleNamespace(clients=clients) if clients else None
    result: Any = SimpleNamespace(fairness=fairness, disturbed=None)
    assert len(list(of_fleet(result))) == said


def test_properties_of_an_app():
    assert list(of_properties(["odtpack.schedule", "odtpack.epochs"])) == []
    (found,) = of_properties(["odtpack.schedule", "owner", *(f"p{i}" for i in range(9))])
    assert "'owner'" in found
    assert "and 5 more" in found


def test_paths_do_not_name_a_home(tmp_path, monkeypatch):
    home = tmp_path / "ada" / "work"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    assert shown_path(Path("models/package")) == "models/package"
    assert shown_path(home / "models" / "package") == "models/package"
    assert shown_path(tmp_path / "ada" / "package") == "package"
    assert shown_path(Path("/")) == "/"


def test_a_report_holds_no_sample(run, tmp_path, monkeypatch):
    """One that could be told by its numbers, in no form in which they might be written."""
    home = tmp_path / "ada-lovelace"
    build_package(zoo.mlp((4, 3, 2)), home / "package", loss="cross_entropy")
    data = np.random.default_rng(0).random((12, 4), np.float32) + np.float32(0.31415927)
    np.savez(home / "data.npz", input=data, labels=np.arange(12) % 2)
    monkeypatch.chdir(home)
    reports = [f"{kind}:{tmp_path / f'r.{kind}'}" for kind in ("json", "html", "junit")]
    outcome = run(
        "simulate", home / "package", "--data", home / "data.npz", "--device", "pi-5", "--epochs",
        1, "--batch-size", 1, *(word for each in reports for word in ("--report", each)),
    )  # fmt: skip
    assert outcome.code in (0, 1), outcome.err
    assert "the result contains losses of single samples" in outcome.err
    for kind in ("json", "html", "junit"):
        text = (tmp_path / f"r.{kind}").read_text()
        assert "ada-lovelace" not in text
        for value in data.ravel():
            assert str(value)[:8] not in text
    assert json.loads((tmp_path / "r.json").read_text())["package"]["path"] == "package"


# Nothing is sent by a training: the telemetry of ONNX Runtime is off unless an app turns it on.

VARIABLE = "ORT_DISABLE_TELEMETRY"
SESSION = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1])"


def written(home: Path, statements: str, **variables: str) -> list[str]:
    """Files in the home of a user whose process opens a session after these statements."""
    model = home.with_suffix(".onnx")
    model.write_bytes(zoo.mlp((4, 3)).SerializeToString())
    home.mkdir()
    # Without the variables of build servers, at whose sight ONNX Runtime sends nothing.
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], **variables}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-c", f"{statements}\n{SESSION}", str(model)], check=True, env=environment
    )
    return sorted(path.name for path in home.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def _sends(tmp_path_factory: pytest.TempPathFactory) -> None:
    """ONNX Runtime by itself leaves an identifier of the device."""
    library = Path(onnxruntime.__file__).parent / "capi"
    if not any(VARIABLE.encode() in path.read_bytes() for path in library.glob("*.so*")):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} for this system has no telemetry")
    assert "deviceid" in written(tmp_path_factory.mktemp("plain") / "home", "")


@pytest.mark.usefixtures("_sends")
@pytest.mark.parametrize("module", ["odtpack", "odtpack_runtime", "odtpack_simulator"])
def test_off_by_default(module, tmp_path):
    assert written(tmp_path / "home", f"import {module}") == []


@pytest.mark.usefixtures("_sends")
def test_an_app_may_turn_it_on(tmp_path):
    assert "deviceid" in written(tmp_path / "home", "import odtpack_runtime", **{VARIABLE: "0"})


@pytest.mark.parametrize(("chosen", "calls"), [(None, 1), ("0", 0), ("1", 0)])
def test_of_a_library_that_is_loaded_events_stop(chosen, calls, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    called: list[bool] = []
    library = types.SimpleNamespace(disable_telemetry_events=lambda: called.append(True))
    monkeypatch.setitem(sys.modules, "onnxruntime", library)  # type: ignore[arg-type]
    runpy.run_path(telemetry.__file__)
    assert len(called) == calls
    assert os.environ[VARIABLE] == (chosen or "1")
