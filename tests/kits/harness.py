"""What the tests of the kits share: packages, batches, damaged files, and the same in Python."""

import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.optimizers import GroupRule, make_optimizer
from odtpack.passes import precision
from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.state import carry_over
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.manifest import PackageFile
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.loop import loss_of
from tests import zoo
from tests.kits import python_training
from tests.kits.vectors import write_suite
from tests.once import made_once
from tests.packages import mutations
from tests.packaging_tools import losses_of_steps, open_training
from tests.peer import client
from tests.programs import ran

ROOT = Path(__file__).parents[2]
STEPS = 18
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"nominal": True}, "sgd": {"optimizer": make_optimizer("sgd", {"momentum": 0.9})},
    "plain sgd": {"optimizer": make_optimizer("sgd", {})},
    "adafactor": {"optimizer": make_optimizer("adafactor", {})}, "clipped": {"clip_norm": 0.5},
    "groups": {"groups": (GroupRule("*bias", 0.1, 0.0),)}, "step model": {"step_model": "always"},
    "mixed": {"precision": "mixed"}, "mixed step": {"precision": "mixed", "step_model": "always"},
}  # fmt: skip
CNN = zoo.cnn(size=8, width=(4, 8), classes=3)
OVERFLOWS = mock.patch.dict(precision.STATES, {LOSS_SCALE_NAMES[0]: np.inf})
"""The first step of what is built in mixed precision is skipped."""
# The emulator takes long: those that say most about arithmetic.
ARM64_CASES = ["cnn", "transformer", "recommender", "gru", "adafactor", "groups", "clip_norm",
               "frozen_int8", "float16_model", "ort_format", "resume_adam", "nominal"]  # fmt: skip
Batch = dict[str, np.ndarray[Any, Any]]
Packages = dict[str, Path]
Task = dict[str, Any]
"""What a program is asked for."""
Saved = dict[str, Any]
"""The arrays of a batch in files."""


def needs(*missing: str | None) -> list[pytest.MarkDecorator]:
    """Marks of tests of kits that are skipped for each reason that is not None."""
    skipped = [pytest.mark.skipif(True, reason=reason) for reason in missing if reason is not None]
    return [pytest.mark.kits, *skipped]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Packages of a small CNN, by the name of their options."""

    def build(folder: Path) -> None:
        with OVERFLOWS:
            for name, options in OPTIONS.items():
                build_package(CNN, folder / name, loss="cross_entropy", **options)

    folder = made_once(tmp_path_factory, "packages", build)
    return {name: folder / name for name in OPTIONS}


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory, packages: Packages) -> dict[str, Any]:
    """A batch of noise with labels, as the tasks of JavaScript and Kotlin name it."""
    image = json.loads((packages["adamw"] / "manifest.json").read_text())["inputs"][0]
    arrays = noise(image, 8, np.random.default_rng(3))
    return save_arrays(tmp_path_factory.mktemp("batch"), **arrays)


def noise(image: dict[str, Any], size: int, rng: np.random.Generator) -> Batch:
    """So many samples of an input, and labels of three classes."""
    shape = size, *image["shape"][1:]
    data = rng.standard_normal(shape, dtype=np.float32)
    return {image["name"]: data, "labels": rng.integers(0, 3, size)}


@pytest.fixture(scope="module")
def batches(packages: Packages) -> list[Batch]:
    """Three batches of noise with labels, the last one smaller."""
    image = json.loads((packages["adamw"] / "manifest.json").read_text())["inputs"][0]
    rng = np.random.default_rng(3)
    return [noise(image, size, rng) for size in (8, 8, 5)]


@pytest.fixture
def job(batches: list[Batch], tmp_path: Path) -> dict[str, Any]:
    """Steps on the batches in turn, and an evaluation, on one thread."""
    steps = [save_batch(tmp_path / str(index), batch) for index, batch in enumerate(batches)]
    return {"steps": steps, "evaluation": steps[0], "count": STEPS, "threads": 1,
            "learning_rate": 0.01}  # fmt: skip


def save_batch(folder: Path, arrays: Batch) -> dict[str, Any]:
    """Write a batch as jobs of C++ and Swift name it; paths are absolute."""
    return inputs_of(save_arrays(folder, **arrays))


def inputs_of(saved: Saved) -> dict[str, Any]:
    """A batch in files as jobs of C++ and Swift name it."""
    return {"inputs": [{"name": name, **each} for name, each in saved.items()]}


def save_arrays(folder: Path, **arrays: np.ndarray[Any, Any]) -> dict[str, dict[str, Any]]:
    """Write a batch as the tasks of JavaScript and Kotlin name it."""
    folder.mkdir(exist_ok=True)
    data = {}
    for name, array in arrays.items():
        path = folder / f"{name}.bin"
        array.tofile(path)
        data[name] = {"file": str(path), "dtype": str(array.dtype), "shape": list(array.shape)}
    return data


def write_assets(folder: Path, package: Path, shape: tuple[int, ...] = (1, 8, 8)) -> None:
    """What the guides train with, in ``assets``: a package, and 320 images of three classes."""
    assets, rng = folder / "assets", np.random.default_rng(1)
    shutil.copytree(package, assets / "package")
    rng.standard_normal((320, *shape), dtype=np.float32).tofile(assets / "images.bin")
    rng.integers(0, 3, 320).tofile(assets / "labels.bin")


def filled(template: Path, **pieces: str) -> str:
    """A program with pieces of a guide in the place of ``/* NAME */``."""
    text = template.read_text()
    for name, piece in pieces.items():
        assert text.count(f"/* {name} */") == 1
        text = text.replace(f"/* {name} */", piece)
    return text


def train(package, batches, count, save, checkpoint=None):
    """What a job does, in Python; returns the losses of the steps and of the evaluation."""
    options = default_session_options(package / "training_model.onnx", threads=1)
    state, module, optimizer = open_training(package, options, checkpoint)
    optimizer.set_learning_rate(0.01)
    inputs = (batches[step % len(batches)].values() for step in range(count))
    losses = losses_of_steps(module, optimizer, inputs)
    loss = loss_of(module.eval()(*batches[0].values()))
    CheckpointState.save_checkpoint(state, save, include_optimizer_state=True)
    return losses, loss


def contents(path: Path) -> dict[str, Any]:
    """Everything that a checkpoint says, with arrays as bytes."""
    data = read_checkpoint(path)
    optimizer = data.optimizer
    arrays = {**data.trainable, **data.frozen}
    moments = optimizer.moments if optimizer else {}
    return {
        "arrays": {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()},
        "trained": sorted(data.trainable),
        "moments": {name: [m.tobytes() for m in own] for name, own in moments.items()},
        "optimizer": optimizer
        and (optimizer.step, optimizer.learning_rate, optimizer.groups, optimizer.kind),
        "properties": data.properties,
    }


def python_on(version: str, module: str, *arguments: object) -> str:
    """Run a module on a version of ONNX Runtime that ``make kits`` installed; its output."""
    own = ROOT / "build" / "kits" / f"onnxruntime-{version}"
    paths = os.pathsep.join(map(str, (own, ROOT / "packager", ROOT / "runtime", ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths}
    return ran(sys.executable, "-m", module, *arguments, timeout=900, env=environment).stdout


def suite_on(kit: Any) -> Any:
    """A fixture: the conformance suite, written on the version of ONNX Runtime that a kit has."""

    @pytest.fixture(scope="module")
    def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
        version = kit.runtime_version()
        words = ["tests.kits.vectors", "--packages"]
        words += [made_once(tmp_path_factory, "suite", write_suite), "--out"]
        folder = made_once(
            tmp_path_factory, f"suite-{version}", lambda folder: kit.python(*words, folder)
        )
        assert json.loads((folder / "index.json").read_text())["onnxruntime"] == version
        return folder

    return suite


def passes(suite: Path, done: subprocess.CompletedProcess[str]) -> None:
    """Check that each case of the suite passed, and that there were cases."""
    cases = [case["name"] for case in json.loads((suite / "index.json").read_text())["cases"]]
    failed = [line for line in done.stdout.splitlines() if not line.startswith("passed")]
    assert not failed, failed[0] + done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"passed {name}" for name in cases]
    assert len(cases) > 90


def trained(measure: Callable[[Task, Path], Any], task: Task, where: str) -> dict[str, Any]:
    """Train as a task for ``js/training.mjs`` says, by a job of a kit on the native core.

    ``where`` is ``python``, for Python in this process, or anything else.
    """
    if where == "python":
        found = python_training.run(task)
        if "evaluation" in found:  # a job evaluates the first batch only
            found["evaluation"] = found["evaluation"][:1]
        return found
    with tempfile.TemporaryDirectory() as folder:
        job = {key: task[key] for key in ("package", "checkpoint", "whole_steps") if key in task}
        job |= {"steps": [inputs_of(batch) for batch in task.get("batches") or [task["data"]]]}
        job |= {"count": task["steps"], "threads": 1}
        if "rate" in task:
            job["learning_rate"] = task["rate"]
        if "evaluate" in task:
            job["evaluation"] = True
        if "save" in task:
            job["save"] = os.path.relpath(task["save"], folder)
        return dict(measure(job, Path(folder)))


def same_bits(kit: Any, task: Task, folder: Path) -> None:
    """Check that a training gives the same losses and the same file in a kit and in Python."""
    found, wanted = (
        kit.train({**task, "evaluate": True, "save": folder / f"{where}.ckpt"}, where)
        for where in ("kit", "python")
    )
    losses, count = found["losses"], len(task["batches"])
    assert losses == wanted["losses"]
    assert losses[(len(losses) - 1) // count * count] < losses[0]  # of the same batch
    assert found["evaluation"] == wanted["evaluation"]
    assert contents(folder / "kit.ckpt") == contents(folder / "python.ckpt")


def goes_on(kit: Any, task: Task, folder: Path) -> None:
    """Check that a training begun in a kit or in Python, and gone on with in the other, is one."""
    whole = kit.train({**task, "save": folder / "whole"}, "python")["losses"]
    begun = {**task, "steps": task["steps"] // 2, "save": folder / "half"}
    rest = {**begun, "checkpoint": folder / "half", "save": folder / "end"}
    del rest["rate"]  # which the checkpoint has
    for first, second in (("python", "kit"), ("kit", "python")):
        losses = kit.train(begun, first)["losses"] + kit.train(rest, second)["losses"]
        assert losses == whole
        assert contents(folder / "end") == contents(folder / "whole")


def keeps_its_file_on_a_full_disk(words: Sequence[object], path: Path) -> str:
    """Check what a program that saves to a path leaves there; return what it says."""
    arrays = {"p": np.zeros(200_000, np.float32)}
    write_checkpoint(path, CheckpointData(arrays, {}, properties={"number": 0}))
    before = path.read_bytes()
    done = ran(*words, code=None, **full_disk(100_000))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    return done.stderr


def carried_over(package: Path, folder: Path) -> None:
    """Check what a program for the former API saved, and what it carried over to a package."""
    state = CheckpointState.load_checkpoint(folder / "former.ckpt")
    assert dict(state.properties) == {"epoch": 3, "note": "one training", "share": 0.25}
    fresh = CheckpointState.load_checkpoint(package / "checkpoint")
    carry_over(state, fresh)
    CheckpointState.save_checkpoint(fresh, folder / "wanted.ckpt", include_optimizer_state=True)
    assert contents(folder / "carried.ckpt") == contents(folder / "wanted.ckpt")


def with_step_model_of(wrong: Package, folder: Path) -> None:
    """Give a package the step model of another one, and list it in the manifest."""
    package = Package.open(folder)
    shutil.copyfile(wrong.step_model, package.step_model)  # type: ignore[arg-type]
    list_again(package, step_model=package.step_model)


def list_again(package: Package, **files: Path) -> None:
    """List files of a package, by their keys in the manifest, as they are now."""
    described = {key: PackageFile.describe(path) for key, path in files.items()}
    listed = dataclasses.replace(package.manifest.files, **described)
    changed = dataclasses.replace(package.manifest, files=listed).to_json()
    (package.path / "manifest.json").write_text(changed)


def job_file(job: Task, folder: Path) -> Path:
    """Write a job as the programs of kits read it."""
    path = folder / "job.json"
    path.write_text(json.dumps(job, default=str))
    return path


def refusal(run: Callable[..., Any], job: Task, folder: Path, **options: Any) -> str:
    """What a kit's program ``measure`` says of a job that it refuses."""
    done = run("measure", job_file(job, folder), **options)
    assert done.returncode == 2, done.stderr
    return str(done.stderr)


def measured(run: Callable[..., Any], job: Task, folder: Path) -> dict[str, Any]:
    """Run a job of a kit's program ``measure``; return what it prints."""
    done = run("measure", job_file(job, folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


def needs_reference(test: Any) -> Any:
    """Mark a test that needs onnxruntime-training 1.19.2."""
    missing = client.peer_available()
    return pytest.mark.peer(pytest.mark.skipif(missing is not None, reason=str(missing))(test))


def loads_in_the_reference(saved: Path) -> None:
    """Check that the reference reads from a checkpoint what is in it."""
    values_file = saved.parent / "read.npz"
    read = client.load(checkpoint=saved, parameters=values_file)
    data = read_checkpoint(saved)
    with np.load(values_file) as values:
        for name, array in {**data.trainable, **data.frozen}.items():
            np.testing.assert_array_equal(values[name], array)
    assert {n for n, p in read["parameters"].items() if p["requires_grad"]} == set(data.trainable)


def full_disk(most: int) -> dict[str, Any]:
    """Options of a process for which every file ends after so many bytes."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    return {"preexec_fn": limited, "restore_signals": False}


def damaged_checkpoints(folder: Path, good: bytes, more: Iterable[bytes] = ()) -> list[Path]:
    """300 damaged files, half of them in their tables, and what is made to do harm."""
    made = [*more]
    rng = random.Random(11)
    for change in mutations.byte_changes(seed=5, count=150):
        made.append(change(good))
        head = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            head[rng.randrange(2000)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        made.append(bytes(head))
    paths = [folder / f"checkpoint-{index:03}" for index in range(len(made))]
    for path, data in zip(paths, made, strict=True):
        path.write_bytes(data)
    return paths


def damaged_packages(folder: Path, package: Path, damaged: int, forged: int) -> list[Path]:
    """Packages that were tampered with, and manifests forged with right digests."""
    names = sorted(path.name for path in package.iterdir())
    content = json.loads((package / "manifest.json").read_text())
    changes = [change for _, change in mutations.damage(names, damaged, seed=7)]
    changes += [
        lambda target, data=data: (target / "manifest.json").write_bytes(data)
        for data in mutations.forged_manifests(content, forged, seed=9)
    ]
    paths = [folder / f"package-{index:03}" for index in range(len(changes))]
    for path, change in zip(paths, changes, strict=True):
        shutil.copytree(package, path)
        change(path)
    return paths


def flipped_packages(folder: Path, package: Path, count: int) -> list[Path]:
    """Packages in each of which one file, not the manifest, has another bit or is cut."""
    rng, paths = np.random.default_rng(11), list[Path]()
    names = sorted(path.name for path in package.iterdir() if path.name != "manifest.json")
    for number in range(count):
        paths.append(shutil.copytree(package, folder / f"flipped-{number:03}"))
        file = paths[-1] / names[number % len(names)]
        data = bytearray(file.read_bytes())
        at = int(rng.integers(len(data)))
        if number % 7:
            data[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(data if number % 7 else data[:at])
    return paths


def answers_to_hostile(run, package, checkpoints, packages, **options):
    """What a kit's program ``hostile`` says of damaged files: a good one after them is accepted."""
    lines = [f"checkpoint {path}" for path in checkpoints]
    lines += [f"package {path}" for path in packages]
    assert len(lines) >= 500
    done = run("hostile", input="\n".join([*lines, f"package {package}"]), **options)
    answers = list[str](done.stdout.splitlines())
    assert done.returncode == 0, lines[len(answers)] + "\n" + done.stderr[-4000:]
    assert answers.pop() == "accepted"
    assert len(answers) == len(lines)
    assert all(re.fullmatch(r"accepted|refused [a-z-]+", answer) for answer in answers)
    return answers


def outcome(path: Path) -> str:
    """What becomes of a checkpoint in Python: ``loaded``, or a code."""
    try:
        read_checkpoint(path)
    except OdtpackError as error:
        return error.code
    return "loaded"


def readable(path: Path) -> bool:
    """Whether Python reads a checkpoint."""
    return outcome(path) == "loaded"
