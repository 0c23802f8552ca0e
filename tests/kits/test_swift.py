"""The Swift kit on Linux against Python: the same bits, the same files."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from odtpack.optimizers import Clip, GroupRule, make_optimizer
from odtpack.package.optimizer_update import Update
from odtpack_runtime import (
    CheckpointState,
    Module,
    OdtpackError,
    Optimizer,
    default_session_options,
)
from odtpack_runtime.checkpoint.carry_over import carry_over
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.package.self_check import loss_of
from tests import zoo
from tests.kits import swift_kit
from tests.kits.swift_kit import KIT, ROOT, command, in_toolchain, measure, run, save_batch
from tests.packages import mutations
from tests.packages.samples import build
from tests.peer import client
from tests.runtime import test_checkpoint_hostile
from tests.runtime.checkpoint_samples import Foreign

pytestmark = pytest.mark.skipif(
    swift_kit.unavailable() is not None, reason=str(swift_kit.unavailable())
)
STEPS = 18
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"nominal": True},
    "sgd": {"optimizer": make_optimizer("sgd", {"momentum": 0.9})},
    "plain sgd": {"optimizer": make_optimizer("sgd", {})},
    "adafactor": {"optimizer": make_optimizer("adafactor", {})},
    "clipped": {"update": Update(clip=Clip(norm=0.5))},
    "groups": {"update": Update(groups=(GroupRule("*bias", 0.1, 0.0),))},
}
Batch = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packages of a small CNN for several optimizers."""
    folder = tmp_path_factory.mktemp("packages")
    model = zoo.cnn(size=8, width=(4, 8), classes=3)
    return {name: build(folder / name, model, **each) for name, each in OPTIONS.items()}


@pytest.fixture(scope="module")
def batches(packages: dict[str, Path]) -> list[Batch]:
    """Three batches of noise with labels, the last one smaller."""
    image = json.loads((packages["adamw"] / "manifest.json").read_text())["inputs"][0]
    rng = np.random.default_rng(3)
    return [
        {
            image["name"]: rng.standard_normal((size, *image["shape"][1:]), dtype=np.float32),
            "labels": rng.integers(0, 3, size),
        }
        for size in (8, 8, 5)
    ]


@pytest.fixture
def job(batches: list[Batch], tmp_path: Path) -> dict[str, Any]:
    """Steps on the batches in turn, and an evaluation, on one thread."""
    steps = [save_batch(tmp_path / f"{i}", batch) for i, batch in enumerate(batches)]
    return {"steps": steps, "evaluation": steps[0], "count": STEPS, "threads": 1,
            "learning_rate": 0.01}  # fmt: skip


def train(
    package: Path, batches: list[Batch], count: int, save: Path, checkpoint: Path | None = None
) -> tuple[list[float], float]:
    """What a job does, in Python; returns the losses of the steps and of the evaluation."""
    state = CheckpointState.load_checkpoint(checkpoint or package / "checkpoint")
    model = package / "training_model.onnx"
    options = default_session_options(model, threads=1)
    module = Module(model, state, package / "eval_model.onnx", session_options=options)
    optimizer = Optimizer(package / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.01)
    losses = []
    for step in range(count):
        losses.append(float(module(*batches[step % len(batches)].values())))
        optimizer.step()
        module.lazy_reset_grad()
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


def test_the_conformance_suite_passes_to_the_bit(suite: Path) -> None:
    cases = [case["name"] for case in json.loads((suite / "index.json").read_text())["cases"]]
    done = run("conformance", suite)
    failed = [line for line in done.stdout.splitlines() if not line.startswith("passed")]
    assert not failed, failed[0] + done.stderr[-4000:]
    assert done.stdout.splitlines() == [f"passed {name}" for name in cases]
    assert len(cases) > 80


@pytest.mark.parametrize("name", OPTIONS)
def test_a_training_gives_the_bits_of_python(
    name: str, packages: dict[str, Path], batches: list[Batch], job: dict[str, Any], tmp_path: Path
) -> None:
    found = measure({**job, "package": packages[name], "save": "swift.ckpt"}, tmp_path)
    losses, loss = train(packages[name], batches, STEPS, tmp_path / "python.ckpt")
    assert found["losses"] == losses
    assert found["evaluation"] == loss
    assert losses[-3] < losses[0]
    assert contents(tmp_path / "swift.ckpt") == contents(tmp_path / "python.ckpt")


@pytest.mark.parametrize("name", ["adamw", "adafactor", "groups"])
def test_a_training_begun_in_one_goes_on_in_the_other(
    name: str, packages: dict[str, Path], batches: list[Batch], job: dict[str, Any], tmp_path: Path
) -> None:
    package, half = packages[name], STEPS // 2
    assert half % len(batches) == 0
    whole, _ = train(package, batches, STEPS, tmp_path / "whole")
    first, _ = train(package, batches, half, tmp_path / "half")
    task = {**job, "package": package, "count": half}
    rest = measure({**task, "save": "end", "checkpoint": "half"}, tmp_path)["losses"]
    assert first + rest == whole
    assert contents(tmp_path / "end") == contents(tmp_path / "whole")
    first = measure({**task, "save": "half"}, tmp_path)["losses"]
    rest, _ = train(package, batches, half, tmp_path / "end", tmp_path / "half")
    assert first + rest == whole
    assert contents(tmp_path / "end") == contents(tmp_path / "whole")


@pytest.mark.peer
@pytest.mark.skipif(client.peer_available() is not None, reason=str(client.peer_available()))
def test_a_checkpoint_loads_in_the_reference(
    packages: dict[str, Path], job: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "swift.ckpt"
    measure({**job, "package": packages["adamw"], "save": saved.name}, tmp_path)
    read = client.load(checkpoint=saved, parameters=tmp_path / "read.npz")
    data = read_checkpoint(saved)
    with np.load(tmp_path / "read.npz") as values:
        for name, array in {**data.trainable, **data.frozen}.items():
            np.testing.assert_array_equal(values[name], array)
    assert {n for n, p in read["parameters"].items() if p["requires_grad"]} == set(data.trainable)


def test_memory_does_not_grow_over_10_000_steps(
    packages: dict[str, Path], job: dict[str, Any], tmp_path: Path
) -> None:
    found = measure({**job, "package": packages["adamw"], "count": 10_000}, tmp_path)
    after = found["anonymous_bytes_by_tenth"]
    assert len(after) == 10
    assert max(after) - after[0] <= 64 * 2**10, after


@pytest.mark.parametrize("external_above", [2**30, 1000])
def test_100_kills_in_saves_lose_nothing(external_above: int, tmp_path: Path) -> None:
    """Above the limit the tensors lie in a data file of their own."""
    rng = random.Random(5)
    start, path = tmp_path / "start", tmp_path / "state"
    arrays = {f"p{i}": np.zeros(40_000, np.float32) for i in range(4)}
    write_checkpoint(start, CheckpointData(arrays, {}))
    last = torn = 0
    for _ in range(100):
        words = command(swift_kit.built(), "save", start, path, last + 1, external_above)
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{last + 1}\n"
            time.sleep(rng.uniform(0, 0.01))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read()
        data = read_checkpoint(path)
        number = data.properties["number"]
        assert isinstance(number, int)
        assert number >= max(map(int, rest.split("\n")[:-1]), default=last + 1)
        assert all((array == number).all() for array in data.trainable.values())
        last = number
        torn += len(list(tmp_path.glob(".*.tmp")))
    assert run("read", path).stdout == f"{last}\n"
    if external_above > 1000:
        assert torn > 5  # it was the saves that were hit
    # The next save removes what a killed one left.
    assert len(list(tmp_path.glob(".*.tmp"))) <= 1


def test_a_full_disk_leaves_the_checkpoint_as_it_was(
    packages: dict[str, Path], job: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "state"
    shutil.copy(packages["adamw"] / "checkpoint", saved)
    before = saved.read_bytes()
    task = {**job, "package": packages["adamw"], "save": saved.name}
    (tmp_path / "job.json").write_text(json.dumps(task, default=str))

    def no_more_than_a_little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = run(
        "measure", tmp_path / "job.json", preexec_fn=no_more_than_a_little, restore_signals=False
    )
    assert done.returncode == 2
    assert "code: file-not-written" in done.stderr
    assert saved.read_bytes() == before
    assert not list(tmp_path.glob(".state*"))


def hostile_checkpoints(folder: Path, good: bytes) -> list[Path]:
    """Damaged files, half of them in their tables, and files that are made to do harm."""
    made = [f(Foreign()) for f in test_checkpoint_hostile.CORRUPT.values()]
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


def hostile_packages(folder: Path, package: Path) -> list[Path]:
    """Packages that were damaged or tampered with, and manifests forged with right digests."""
    names = sorted(path.name for path in package.iterdir())
    content = json.loads((package / "manifest.json").read_text())
    changes = [change for _, change in mutations.damage(names, 160, seed=7)]
    changes += [
        lambda target, data=forged: (target / "manifest.json").write_bytes(data)
        for forged in mutations.forged_manifests(content, 160, seed=9)
    ]
    paths = [folder / f"package-{index:03}" for index in range(len(changes))]
    for path, change in zip(paths, changes, strict=True):
        shutil.copytree(package, path)
        change(path)
    return paths


def readable(path: Path) -> bool:
    """Whether Python reads a checkpoint."""
    try:
        read_checkpoint(path)
    except OdtpackError:
        return False
    return True


def test_500_hostile_files_are_refused_and_crash_nothing(
    packages: dict[str, Path], batches: list[Batch], tmp_path: Path
) -> None:
    train(packages["adamw"], batches, 2, tmp_path / "good")
    checkpoints = hostile_checkpoints(tmp_path, (tmp_path / "good").read_bytes())
    folders = hostile_packages(tmp_path, packages["adamw"])
    lines = [f"checkpoint {path}" for path in checkpoints] + [f"package {path}" for path in folders]
    assert len(lines) >= 500
    done = run("hostile", input="\n".join([*lines, f"package {packages['adamw']}"]))
    answers = done.stdout.splitlines()
    assert done.returncode == 0, lines[len(answers)] + "\n" + done.stderr[-4000:]
    assert answers.pop() == "accepted"
    assert len(answers) == len(lines)
    assert all(re.fullmatch(r"accepted|refused [a-z-]+", answer) for answer in answers)
    for path, answer in zip(checkpoints, answers, strict=False):
        assert readable(path) == (answer == "accepted"), path.name
        if answer == "accepted":  # what was read is what is there: it was saved again
            assert contents(path.with_name(f"{path.name}.again")) == contents(path), path.name
    assert sum(answer.startswith("refused") for answer in answers) > 0.6 * len(answers)


def test_code_for_the_former_api_compiles_and_trains(
    packages: dict[str, Path], batches: list[Batch], tmp_path: Path
) -> None:
    save_batch(tmp_path / "batch", batches[0])
    image = next(iter(batches[0]))
    files = [tmp_path / "batch" / f"{name}.bin" for name in (image, "labels")]
    package = packages["adamw"]
    done = run("former", package, *files, tmp_path, *batches[0][image].shape)
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert losses == train(package, batches[:1], 12, tmp_path / "python.ckpt")[0]
    state = CheckpointState.load_checkpoint(tmp_path / "former.ckpt")
    assert dict(state.properties) == {"epoch": 3, "note": "one training", "share": 0.25}
    fresh = CheckpointState.load_checkpoint(package / "checkpoint")
    carry_over(state, fresh)
    CheckpointState.save_checkpoint(fresh, tmp_path / "wanted.ckpt", include_optimizer_state=True)
    assert contents(tmp_path / "carried.ckpt") == contents(tmp_path / "wanted.ckpt")


def test_a_signature_cannot_be_checked_without_cryptokit(
    packages: dict[str, Path], tmp_path: Path
) -> None:
    package = tmp_path / "package"
    shutil.copytree(packages["adamw"], package)
    assert "code: not-signed" in run("signature", package).stderr
    (package / "manifest.sig").write_bytes(bytes(64))
    assert "code: cryptography-missing" in run("signature", package).stderr


def test_the_guide_builds_and_trains(
    packages: dict[str, Path], batches: list[Batch], tmp_path: Path
) -> None:
    """What the guide shows, as it stands there, with Swift's own package manager."""
    text = (ROOT / "docs" / "guides" / "swift.md").read_text()
    blocks = re.findall(r"^`([\w/]+\.swift)`[^\n]*:\n\n```swift\n(.*?)```", text, re.M | re.S)
    assert [name for name, _ in blocks] == ["Package.swift", "Sources/App/main.swift"]
    (tmp_path / "Sources" / "App").mkdir(parents=True)
    for name, content in blocks:
        (tmp_path / name).write_text(content)
    kit = tmp_path / "odtpack" / "runtime" / "swift"
    kit.parent.mkdir(parents=True)
    shutil.copytree(KIT, kit, ignore=shutil.ignore_patterns(".build"))
    shutil.copytree(packages["adamw"], tmp_path / "assets" / "package")
    rng = np.random.default_rng(1)
    (shape,) = {batch[next(iter(batch))].shape[1:] for batch in batches}
    rng.standard_normal((320, *shape), dtype=np.float32).tofile(tmp_path / "assets" / "images.bin")
    rng.integers(0, 3, 320).tofile(tmp_path / "assets" / "labels.bin")
    in_toolchain(
        "swift", "build", "--disable-sandbox", *swift_kit.RUNTIME,
        "-Xlinker", f"-L{swift_kit.TOOLCHAIN / 'lib'}", cwd=tmp_path,
    )  # fmt: skip
    for _ in range(2):  # the second time it goes on from the end
        done = subprocess.run(
            command(tmp_path / ".build" / "debug" / "App"), cwd=tmp_path, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        optimizer = read_checkpoint(tmp_path / "trained.ckpt").optimizer
        assert optimizer is not None
        assert optimizer.step == 100
    last = re.fullmatch(r"loss ([\d.]+), accuracy ([\d.]+)", done.stdout.splitlines()[-1])
    assert last is not None
    images = np.fromfile(tmp_path / "assets" / "images.bin", np.float32).reshape(320, *shape)[:64]
    labels = np.fromfile(tmp_path / "assets" / "labels.bin", np.int64)[:64]
    personal = onnxruntime.InferenceSession(tmp_path / "personal.onnx")
    (scores,) = personal.run(["output"], {personal.get_inputs()[0].name: images})
    assert float(last[2]) == (np.argmax(scores, 1) == labels).mean()
    exponents = np.exp(scores.astype(np.float64))
    right = exponents[np.arange(64), labels] / exponents.sum(1)
    np.testing.assert_allclose(float(last[1]), -np.log(right).mean(), rtol=1e-5)


TRAIN = """
import Foundation
let words = CommandLine.arguments
var left = Int(words[3])!
let (package, files) = (URL(fileURLWithPath: words[1]), URL(fileURLWithPath: words[2]))
let trainer = Trainer(package: package, files: files)
let isDone = try trainer.run {
  left -= 1
  if words.count > 4 && left == 0 { trainer.stop(words[4]) }
  return words.count > 4 || left > 0
}
print(isDone)
"""


def test_the_trainer_of_the_ios_sample_stops_and_goes_on(
    packages: dict[str, Path], batches: list[Batch], tmp_path: Path
) -> None:
    sample = ROOT / "examples" / "ios"
    in_toolchain("swiftc", "-parse", *sorted(sample.glob("*.swift")))  # the rest needs Apple's
    include = ["-I", KIT / "Sources" / "COnnxRuntime", *swift_kit.RUNTIME]
    in_toolchain(
        "swiftc", "-emit-library", "-static", "-emit-module", "-module-name", "Odtpack", *include,
        *sorted((KIT / "Sources" / "Odtpack").glob("*.swift")), "-o", tmp_path / "libOdtpack.a",
        "-emit-module-path", tmp_path / "Odtpack.swiftmodule",
    )  # fmt: skip
    (tmp_path / "main.swift").write_text(TRAIN)
    in_toolchain(
        "swiftc", *include, "-I", tmp_path, sample / "Trainer.swift", tmp_path / "main.swift",
        "-L", tmp_path, "-lOdtpack", "-L", swift_kit.TOOLCHAIN / "lib", "-o", tmp_path / "train",
    )  # fmt: skip
    rng = np.random.default_rng(1)
    shape = batches[0][next(iter(batches[0]))].shape[1:]

    def run_trainer(files: Path, *arguments: object) -> str:
        words = command(tmp_path / "train", packages["adamw"], files, *arguments)
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    images = rng.standard_normal((160, *shape), dtype=np.float32)
    labels = rng.integers(0, 3, 160)
    for name in ("once", "often"):
        (tmp_path / name).mkdir()
        images.tofile(tmp_path / name / "images.bin")
        labels.tofile(tmp_path / name / "labels.bin")
    assert run_trainer(tmp_path / "once", 10_000) == "true\n"
    assert run_trainer(tmp_path / "often", 71) == "false\n"
    assert run_trainer(tmp_path / "often", 330, "it is hot") == "false\n"
    optimizer = read_checkpoint(tmp_path / "often" / "trained.ckpt").optimizer
    assert optimizer is not None
    assert optimizer.step == 70 + 329
    assert run_trainer(tmp_path / "often", 10_000) == "true\n"
    one, two = (tmp_path / name / "trained.ckpt" for name in ("once", "often"))
    assert contents(one) == contents(two)
    one, two = (tmp_path / name / "personal.onnx" for name in ("once", "often"))
    assert one.read_bytes() == two.read_bytes()


def test_the_benchmark_writes_every_measurement(tmp_path: Path) -> None:
    done = run("benchmark", tmp_path, 1, 5 * 10**8)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found.pop("format"), found.pop("kit")) == (1, "swift")
    assert found.pop("onnxruntime") == onnxruntime.__version__
    assert found.pop("memory_limit_bytes") == 5 * 10**8
    assert found.pop("memory_bytes") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    assert (found.pop("threads"), found.pop("file_bytes")) == (1, 64 * 2**20)
    rates = {"gemm_flops", "gemm_single_flops", "convolution_flops", "copy_bytes_per_second",
             "write_bytes_per_second", "read_bytes_per_second", "sync_seconds"}  # fmt: skip
    assert found.keys() == rates
    for name, values in found.items():
        assert len(values) == (40 if name == "sync_seconds" else 5), name
        assert min(values) > 0, name
    assert not list(tmp_path.iterdir())
