"""Every reader of what comes from outside, with inputs that it takes, to be damaged."""

import atexit
import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.cli import main
from odtpack.optimizers import AdamW
from odtpack.ort.format import convert_model
from odtpack.recipe.schema import read_recipe
from odtpack_runtime.apart import worker
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.folder_update import check_finished, finish_update
from odtpack_runtime.package.adapter import CONFIG, TENSORS, load_adapter, save_adapter
from odtpack_runtime.package.checks import load_model, operators_of, opsets_of, ort_operators
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.trust import Limits, check_signature
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.training.loop import load_dataset
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.figures.limits import read_budgets
from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.fleet_file import read_fleet
from odtpack_simulator.fleet.population import read_trace
from odtpack_simulator.fleet.result import load_fleet_result
from odtpack_simulator.measure.measured_profile import imported_profile, load_measurements
from odtpack_simulator.result import load_result
from tests import zoo
from tests.fleet.test_fleet_file import MESSAGES
from tests.fuzz import costly
from tests.runtime.checkpoint_samples import assert_same, sample
from tests.simulator.measure.test_measurements import content
from tests.trust.test_endless import loop

ROOT = Path(__file__).parents[2]


def _example(page: str) -> list[bytes]:
    """The first TOML block of a page."""
    found = re.search(r"^```toml\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.M | re.S)
    return [found[1].encode()]


@dataclass(frozen=True)
class Reader:
    """A reader.

    Attributes:
        suffix: End of the file's name.
        seeds: Makes inputs that it takes.
        read: Reads a file; an OdtpackError is a refusal, another exception a defect.
        share: How much of a round of inputs it gets, against 1 of the others.
        costly: Makes inputs that are read or refused, and would cost much.
    """

    suffix: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[Path], object]
    share: float = 1.0
    costly: Callable[[], list[bytes]] = list


@cache
def packages() -> Path:
    """A folder with two packages."""
    folder = Path(tempfile.mkdtemp(prefix="odtpack-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, beta1 in (("old", 0.8), ("new", 0.7)):
        options = {"loss": "cross_entropy", "optimizer": AdamW(beta1=beta1)}
        build_package(zoo.mlp((4, 3, 2)), folder / name, **options)
    return folder


@cache
def adapters() -> Path:
    """A folder with a package that trains an adapter, and the adapter's files of PEFT."""
    folder = packages() / "adapters"
    spec = AdapterSpec("lora", ("*",), rank=2)
    build_package(zoo.mlp((4, 3, 2)), folder / "package", loss="cross_entropy", adapter=spec)
    package = Package.open(folder / "package")
    state = CheckpointState.load_checkpoint(package.checkpoint)
    save_adapter(package, state, folder / "peft")
    save_adapter(package, state, folder / "it.onnx_adapter")
    return folder


_FLEET = """
seed = 3
[population]
clients = 4
[population.data]
samples = [4, 8]
[training]
batch_size = 4
[federation]
clients = 2
buffer = 1
rounds = 2
"""


@cache
def federation() -> Federation:
    """A federation; beside its package are a state of it and its result."""
    folder = packages() / "fleet"
    folder.mkdir()
    random = np.random.default_rng(0)
    data, labels = random.random((40, 4), np.float32), random.integers(0, 2, 40)
    np.savez(folder / "data.npz", input=data, labels=labels)
    (folder / "fleet.toml").write_text(_FLEET)
    made = Federation(packages() / "old", folder / "data.npz", read_fleet(folder / "fleet.toml"))
    result, _ = made.simulate(state_path=folder / "state.npz", until=1)  # one is at work then
    (folder / "result.json").write_text(result.to_json())
    return made


def _of_fleet(name: str) -> list[bytes]:
    federation()
    return [(packages() / "fleet" / name).read_bytes()]


def _models() -> list[bytes]:
    small = zoo.cnn(size=6, width=(2, 2), hidden=4, classes=2)
    old = onnx.parser.parse_model("""<ir_version: 4, opset_import: ["" : 9]>
        net (float[N, 6] x, float[6, 2] w) => (float[N, 2] y)
        { a = Clip<min = 0.0>(x) b = Unsqueeze<axes = [1]>(a) c = Squeeze<axes = [1]>(b)
          d = Upsample(c, scales) e = Softmax<axis = 1>(d) y = MatMul(e, w) }""")
    old.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "scales"))
    old.graph.initializer.append(numpy_helper.from_array(np.ones((6, 2), np.float32), "w"))
    return [model.SerializeToString() for model in (zoo.mlp((4, 3, 2)), small, old)]


def _build(path: Path) -> None:
    onnx_file = path.with_suffix(".onnx")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        build_package(onnx_file, Path(folder) / "package", loss="cross_entropy", self_check=False)


def _checkpoints() -> list[bytes]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        for data in (sample(), CheckpointData(sample().trainable, {}, nominal=True)):
            write_checkpoint(path, data)
            found.append(path.read_bytes())
    return found


def _read_checkpoint(path: Path) -> None:
    data = read_checkpoint(path)
    if data.checked and not data.nominal:
        assert_same(data, sample())  # whatever is taken for whole is what was saved


def _npz() -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, input=np.ones((5, 4), np.float32), labels=np.arange(5) % 2)
        found.append(stream.getvalue())
    return found


def _read_npz(path: Path) -> None:
    manifest = Package.open(packages() / "old").manifest
    load_dataset(path, manifest.input_specs(), class_count=2, max_bytes=2**20)


def _read_adapter(changed: str) -> Callable[[Path], None]:
    """Read an adapter of which one file is the input."""

    def read(path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            shutil.copytree(adapters() / "peft", folder, dirs_exist_ok=True)
            shutil.copyfile(path, Path(folder) / changed)
            _load_adapter(Path(folder))

    return read


def _load_adapter(path: Path) -> None:
    package = Package.open(adapters() / "package")
    load_adapter(package, CheckpointState.load_checkpoint(package.checkpoint), path)


def _read_manifest(path: Path) -> None:
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    assert Manifest.from_json(manifest.to_json().encode(), str(path)) == manifest.sealed()


def _manifests() -> list[bytes]:
    return [(packages() / "old" / "manifest.json").read_bytes()]


_EXTRA = "large.bin"
_EXTRA_BYTES = 5 * 2**30


def _large_extras() -> list[bytes]:
    """Manifests of a package with a file of 5 GiB: listed, and not."""
    content = json.loads(_manifests()[0])
    content.pop("digest")
    entry = {"path": _EXTRA, "size_bytes": _EXTRA_BYTES, "sha256": "0" * 64, "role": "recipe"}
    content["files"]["extra"] = [entry]
    return [json.dumps(content).encode(), _manifests()[0] + b" " * len(_EXTRA)]


def _verify(path: Path) -> None:
    """Verify a stranger's package with this manifest."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(shutil.copytree(packages() / "old", Path(name) / "package"))
        data = path.read_bytes()
        (folder / "manifest.json").write_bytes(data)
        if data in _large_extras():
            with (folder / _EXTRA).open("wb") as stream:
                stream.truncate(_EXTRA_BYTES)  # takes no room, and hashing it a minute
        verify_package(folder, limits=Limits())


def _build_and_run(path: Path) -> None:
    """Build a package with its self-check, within limits that a small model does not need."""
    limits = worker.Limits(seconds=4, memory=2**29)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Limits, "of", classmethod(lambda cls, files: limits))
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            build_package(path, Path(folder) / "package", loss="mse")


def _command(*words: object) -> None:
    """Run a command that shows a model; what it refuses is raised again."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = main([str(word) for word in words])
    if code == 2:
        found = re.search(r"error\[([a-z0-9-]+)\]: (.*)", errors.getvalue())
        assert found is not None, errors.getvalue()
        raise OdtpackError(found[1], found[2])
    assert code in (0, 1), errors.getvalue()


def _look_at_model(path: Path) -> None:
    model = load_model(path)
    operators_of(model, opsets_of(model, path))


@cache
def _ort_models() -> list[bytes]:
    found = []
    for index, model in enumerate(_models()):
        path = packages() / f"model{index}.onnx"
        path.write_bytes(model)
        convert_model(path, path.with_suffix(".ort"))
        found.append(path.with_suffix(".ort").read_bytes())
    return found


def _import(path: Path) -> None:
    imported_profile(load_measurements(path), name="acme/phone", title="Phone", like=None)


def _finish(path: Path) -> None:
    """A plan beside a folder: whatever it says, nothing outside of that folder changes."""
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name).resolve()
        inside = folder / "package" / ".odtpack-update-0"
        inside.mkdir(parents=True)
        (folder / "outside").write_bytes(b"outside")
        (inside / "a").write_bytes(b"a")
        plan = path.read_bytes().replace(b"FOLDER", str(folder / "package").encode())
        (folder / ".package.odtpack-plan").write_bytes(plan)
        try:
            with contextlib.suppress(OdtpackError):
                check_finished(folder / "package")
            assert (inside / "a").read_bytes() == b"a"
            finish_update(folder / "package")
        finally:
            assert (folder / "outside").read_bytes() == b"outside"


_PLAN = {"folder": "FOLDER", "stage": ".odtpack-update-0", "last": "manifest.json",
         "remove": ["b"], "move": ["a"]}  # fmt: skip
_KEY = b"""-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=
-----END PUBLIC KEY-----
"""  # of the first test vector of RFC 8032, as is its signature of nothing
_SIGNATURE = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
    "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)


READERS = {
    "model": Reader(".onnx", _models, _build, 0.3, costly.of_models),
    "endless": Reader(".onnx", lambda: [loop(10)], _build_and_run, 0.01, costly.of_run_models),
    "inspect": Reader(".onnx", _models, lambda path: _command("inspect", path), 0.1,
                      costly.of_shown_models),
    "ops-check": Reader(".onnx", _models, lambda path: _command("ops", "check", path), 0.1,
                        costly.of_shown_models),
    "model-file": Reader(".onnx", lambda: [costly.named_so()], _look_at_model, 0.5,
                         costly.of_model_files),
    "ort-model": Reader(".ort", _ort_models, ort_operators),
    "checkpoint": Reader("", _checkpoints, _read_checkpoint, 1.0, costly.of_checkpoints),
    "manifest": Reader(".json", _manifests, _read_manifest, 1.0, costly.of_manifests),
    "stranger": Reader(".json", _manifests, _verify, 0.1, _large_extras),
    "recipe": Reader(".toml", lambda: _example("recipe.md"), read_recipe),
    "budgets": Reader(".toml", lambda: _example("formats/budgets.md"), read_budgets),
    "profile": Reader(
        ".toml",
        lambda: [(ROOT / "device_profiles" / "google" / "pixel-7a.toml").read_bytes()],
        load_profile,
    ),
    "result": Reader(".json", lambda: [(ROOT / "tests" / "reports" / "demo.json").read_bytes()],
                     load_result),
    "data": Reader(".npz", _npz, _read_npz),
    "fleet": Reader(".toml", lambda: _example("guides/federated.md"), read_fleet),
    "trace": Reader(".json", lambda: [json.dumps({"one": {"messages": MESSAGES}}).encode()],
                    lambda path: read_trace(str(path), ["idle", "charging"], 0)),
    "measurements": Reader(".json", lambda: [json.dumps(content()).encode()], _import),
    "plan": Reader(".json", lambda: [json.dumps(_PLAN).encode()], _finish),
    "peft-config": Reader(".json", lambda: [(adapters() / "peft" / CONFIG).read_bytes()],
                          _read_adapter(CONFIG)),
    "peft-tensors": Reader(".safetensors", lambda: [(adapters() / "peft" / TENSORS).read_bytes()],
                           _read_adapter(TENSORS)),
    "onnx-adapter": Reader(".onnx_adapter", lambda: [(adapters() / "it.onnx_adapter").read_bytes()],
                           _load_adapter),
    "fleet-state": Reader(".npz", lambda: _of_fleet("state.npz"),
                          lambda path: federation().simulate(state_path=path, resume=True), 0.2),
    "fleet-result": Reader(".json", lambda: _of_fleet("result.json"), load_fleet_result),
    "key": Reader(".pem", lambda: [_KEY],
                  lambda path: check_signature(b"", _SIGNATURE, path, "manifest.json")),
}  # fmt: skip

onnx.defs.get_all_schemas()  # what onnx makes late is no reader's memory
