"""The kits over the C interface, for Swift and C#, against Python: the same bits and files."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.optimizers import make_optimizer
from odtpack_runtime import (
    CheckpointState,
    OdtpackError,
    load_adapter,
    save_adapter,
)
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.state import carry_over
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import PackageFile
from tests import zoo
from tests.kits import harness
from tests.kits.cpp_stress import TRIED, calls, program_of, write_job
from tests.kits.harness import OPTIONS, STEPS, Batch, contents, passes, save_batch, train
from tests.kits.kills import kill_saves
from tests.packages import mutations
from tests.packages.samples import build
from tests.peer import client
from tests.runtime import test_checkpoint_hostile
from tests.runtime.checkpoint_samples import Foreign

pytestmark = pytest.mark.kits
batches, job, packages = harness.batches, harness.job, harness.packages


def test_the_conformance_suite_passes_to_the_bit(layer: Any, suite: Path) -> None:
    passes(suite, layer.run("conformance", suite))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_training_gives_the_bits_of_python(
    layer: Any,
    name: str,
    packages: dict[str, Path],
    batches: list[Batch],
    job: dict[str, Any],
    tmp_path: Path,
) -> None:
    found = layer.measure({**job, "package": packages[name], "save": "kit.ckpt"}, tmp_path)
    losses, loss = train(packages[name], batches, STEPS, tmp_path / "python.ckpt")
    assert found["losses"] == losses
    assert found["evaluation"] == [loss]
    assert losses[-3] < losses[0]
    assert contents(tmp_path / "kit.ckpt") == contents(tmp_path / "python.ckpt")


def test_an_app_may_ask_for_gradients_after_steps_of_the_step_model(
    layer: Any, packages: dict[str, Path], batches: list[Batch], job: dict[str, Any], tmp_path: Path
) -> None:
    """The first call that asks for them closes the step model; nothing else changes."""
    task = {**job, "package": packages["step model"], "save": "kit.ckpt"}
    losses, _ = train(packages["step model"], batches, STEPS, tmp_path / "python.ckpt")
    for whole in (STEPS, 3):
        found = layer.measure({**task, "whole_steps": whole}, tmp_path)
        assert found["losses"] == losses
        assert found["step_model"] is (whole == STEPS)
        assert contents(tmp_path / "kit.ckpt") == contents(tmp_path / "python.ckpt")


def test_gradients_take_no_memory_with_a_step_model(layer: Any, tmp_path: Path) -> None:
    widths = (512, 4096, 4)
    package = tmp_path / "package"
    build_package(zoo.mlp(widths), package, loss="cross_entropy")
    rng = np.random.default_rng(3)
    batch = save_batch(tmp_path / "batch", {
        "input": rng.standard_normal((8, widths[0]), dtype=np.float32),
        "labels": rng.integers(0, widths[-1], 8),
    })  # fmt: skip
    job = {"package": package, "steps": [batch], "evaluation": batch, "count": 20, "threads": 1}
    whole, apart = (
        layer.measure({**job, "whole_steps": n}, tmp_path)["anonymous_bytes_by_tenth"][-1]
        for n in (20, 0)
    )
    assert apart - whole > 0.7 * 4 * widths[0] * widths[1]


@pytest.mark.parametrize(
    "other", [{"optimizer": make_optimizer("sgd", {})}, OPTIONS["sgd"], OPTIONS["groups"]]
)
def test_a_step_model_of_another_optimizer_is_refused(
    layer: Any,
    other: dict[str, Any],
    packages: dict[str, Path],
    job: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "package"
    shutil.copytree(packages["step model"], folder)
    model = zoo.cnn(size=8, width=(4, 8), classes=3)
    wrong = Package.open(build(tmp_path / "other", model, step_model="always", **other))
    package = Package.open(folder)
    assert package.step_model is not None
    assert wrong.step_model is not None
    shutil.copyfile(wrong.step_model, package.step_model)
    files = dataclasses.replace(
        package.manifest.files, step_model=PackageFile.describe(package.step_model)
    )
    changed = dataclasses.replace(package.manifest, files=files).to_json()
    (folder / "manifest.json").write_text(changed)
    (tmp_path / "job.json").write_text(json.dumps({**job, "package": folder}, default=str))
    done = layer.run("measure", tmp_path / "job.json")
    assert done.returncode == 2
    assert "code: model-mismatch" in done.stderr


@pytest.mark.parametrize("name", ["adamw", "adafactor", "groups", "step model"])
def test_a_training_begun_in_one_goes_on_in_the_other(
    layer: Any,
    name: str,
    packages: dict[str, Path],
    batches: list[Batch],
    job: dict[str, Any],
    tmp_path: Path,
) -> None:
    package, half = packages[name], STEPS // 2
    assert half % len(batches) == 0
    whole, _ = train(package, batches, STEPS, tmp_path / "whole")
    first, _ = train(package, batches, half, tmp_path / "half")
    task = {**job, "package": package, "count": half}
    rest = layer.measure({**task, "save": "end", "checkpoint": "half"}, tmp_path)["losses"]
    assert first + rest == whole
    assert contents(tmp_path / "end") == contents(tmp_path / "whole")
    first = layer.measure({**task, "save": "half"}, tmp_path)["losses"]
    rest, _ = train(package, batches, half, tmp_path / "end", tmp_path / "half")
    assert first + rest == whole
    assert contents(tmp_path / "end") == contents(tmp_path / "whole")


@pytest.mark.peer
@pytest.mark.skipif(client.peer_available() is not None, reason=str(client.peer_available()))
def test_a_checkpoint_loads_in_the_reference(
    layer: Any, packages: dict[str, Path], job: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "kit.ckpt"
    layer.measure({**job, "package": packages["adamw"], "save": saved.name}, tmp_path)
    read = client.load(checkpoint=saved, parameters=tmp_path / "read.npz")
    data = read_checkpoint(saved)
    with np.load(tmp_path / "read.npz") as values:
        for name, array in {**data.trainable, **data.frozen}.items():
            np.testing.assert_array_equal(values[name], array)
    assert {n for n, p in read["parameters"].items() if p["requires_grad"]} == set(data.trainable)


def test_memory_does_not_grow_over_10_000_steps(
    layer: Any, packages: dict[str, Path], job: dict[str, Any], tmp_path: Path
) -> None:
    found = layer.measure({**job, "package": packages["adamw"], "count": 10_000}, tmp_path)
    after = found["anonymous_bytes_by_tenth"]
    assert len(after) == 10
    assert max(after) - after[0] <= 64 * 2**10, after


@pytest.mark.parametrize("external_above", [2**30, 1000])
def test_100_kills_in_saves_lose_nothing(layer: Any, external_above: int, tmp_path: Path) -> None:
    """Above the limit the tensors lie in a data file of their own."""
    found = kill_saves(layer.saving, tmp_path / "state", external_above, 100)
    assert (found.kills, found.lost) == (100, 0)
    if external_above > 1000:
        assert found.torn > 5  # it was the saves that were hit
    # The next save removes what a killed one left.
    assert len(list(tmp_path.glob(".*.tmp"))) <= 1


def test_a_full_disk_leaves_the_checkpoint_as_it_was(
    layer: Any, packages: dict[str, Path], job: dict[str, Any], tmp_path: Path
) -> None:
    saved = tmp_path / "state"
    shutil.copy(packages["adamw"] / "checkpoint", saved)
    before = saved.read_bytes()
    task = {**job, "package": packages["adamw"], "save": saved.name}
    (tmp_path / "job.json").write_text(json.dumps(task, default=str))

    def no_more_than_a_little() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = layer.run(
        "measure", tmp_path / "job.json", preexec_fn=no_more_than_a_little, restore_signals=False
    )
    assert done.returncode == 2
    assert "code: file-not-written" in done.stderr
    assert saved.read_bytes() == before
    assert not list(tmp_path.glob(".state*"))


def test_an_adapter_is_written_and_read(layer: Any, tmp_path: Path) -> None:
    adapter = AdapterSpec("lora", ("fc1*",), (), 2, 4.0)
    build_package(zoo.mlp((8, 6, 3)), tmp_path / "package", loss="cross_entropy", adapter=adapter)
    package, trained, read = Package.open(tmp_path / "package"), tmp_path / "1", tmp_path / "2"
    state, again = (CheckpointState.load_checkpoint(package.checkpoint) for _ in range(2))
    for array in state.arrays(trainable=True).values():
        array[...] += 1
    CheckpointState.save_checkpoint(state, trained)
    for form in ("it.onnx_adapter", "peft"):
        python, kit = tmp_path / f"python-{form}", tmp_path / f"kit-{form}"
        save_adapter(package, state, python)
        done = layer.run("adapters", package.path, trained, kit, python, read)
        assert done.returncode == 0, done.stderr
        assert contents(read)["arrays"] == contents(trained)["arrays"]
        load_adapter(package, again, kit)
        for name, value in state.arrays(trainable=True).items():
            np.testing.assert_array_equal(again.arrays(trainable=True)[name], value)
            again.arrays(trainable=True)[name][...] = 0
    done = layer.run("adapters", package.path, trained, kit, tmp_path / "none", read)
    assert done.returncode == 2
    assert "code: peft-not-found" in done.stderr


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
    layer: Any, packages: dict[str, Path], batches: list[Batch], tmp_path: Path
) -> None:
    train(packages["adamw"], batches, 2, tmp_path / "good")
    checkpoints = hostile_checkpoints(tmp_path, (tmp_path / "good").read_bytes())
    folders = hostile_packages(tmp_path, packages["adamw"])
    lines = [f"checkpoint {path}" for path in checkpoints] + [f"package {path}" for path in folders]
    assert len(lines) >= 500
    done = layer.run("hostile", input="\n".join([*lines, f"package {packages['adamw']}"]))
    answers = done.stdout.splitlines()
    assert done.returncode == 0, lines[len(answers)] + "\n" + done.stderr[-4000:]
    assert answers.pop() == "accepted"
    assert len(answers) == len(lines)
    assert all(re.fullmatch(r"accepted|refused [a-z-]+", answer) for answer in answers)
    stricter = 0  # the reader asks for alignment, and Python's does not
    for path, answer in zip(checkpoints, answers, strict=False):
        if answer == "accepted":  # what was read is what is there: it was saved again
            assert contents(path.with_name(f"{path.name}.again")) == contents(path), path.name
        else:
            stricter += readable(path)
    assert stricter <= 5
    assert sum(answer.startswith("refused") for answer in answers) > 0.6 * len(answers)


def test_code_for_the_former_api_compiles_and_trains(
    layer: Any, packages: dict[str, Path], batches: list[Batch], tmp_path: Path
) -> None:
    save_batch(tmp_path / "batch", batches[0])
    image = next(iter(batches[0]))
    files = [tmp_path / "batch" / f"{name}.bin" for name in (image, "labels")]
    package = packages["adamw"]
    done = layer.run("former", package, *files, tmp_path, *batches[0][image].shape)
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert losses == train(package, batches[:1], 12, tmp_path / "python.ckpt")[0]
    state = CheckpointState.load_checkpoint(tmp_path / "former.ckpt")
    assert dict(state.properties) == {"epoch": 3, "note": "one training", "share": 0.25}
    fresh = CheckpointState.load_checkpoint(package / "checkpoint")
    carry_over(state, fresh)
    CheckpointState.save_checkpoint(fresh, tmp_path / "wanted.ckpt", include_optimizer_state=True)
    assert contents(tmp_path / "carried.ckpt") == contents(tmp_path / "wanted.ckpt")


@pytest.mark.parametrize("name", TRIED)
def test_what_an_app_may_rely_on(layer: Any, name: str, tmp_path: Path) -> None:
    command, case = TRIED[name]
    calls(program_of(layer), command, write_job(case, tmp_path), 20)
