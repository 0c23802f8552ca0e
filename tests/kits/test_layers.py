"""The kits on the native core, for C++, Swift and C#, against Python: the same bits and files."""

import dataclasses
import shutil

import numpy as np
import pytest

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.optimizers import make_optimizer
from odtpack_runtime import CheckpointState, load_adapter, save_adapter
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.kits import harness
from tests.kits.cases import CASES
from tests.kits.cpp_stress import TRIED, calls, program_of, write_job
from tests.kits.harness import OPTIONS, contents, train
from tests.packages.samples import build
from tests.packaging_tools import built_package
from tests.runtime.checkpoint_samples import Foreign
from tests.runtime.test_checkpoint_hostile import CORRUPT

pytestmark = pytest.mark.kits
batches, job, packages = harness.batches, harness.job, harness.packages


def test_the_conformance_suite_passes_to_the_bit(native, suite):
    harness.passes(suite, native.run("conformance", suite))


@pytest.mark.parametrize(
    "other", [{"optimizer": make_optimizer("sgd", {})}, OPTIONS["sgd"], OPTIONS["groups"]]
)
def test_a_step_model_of_another_optimizer_is_refused(layer, other, packages, job, tmp_path):
    folder = tmp_path / "package"
    shutil.copytree(packages["step model"], folder)
    model = zoo.cnn(size=8, width=(4, 8), classes=3)
    wrong = Package.open(build(tmp_path / "other", model, step_model="always", **other))
    harness.with_step_model_of(wrong, folder)
    said = harness.refusal(layer.run, {**job, "package": folder}, tmp_path)
    assert "code: model-mismatch" in said


def test_memory_does_not_grow_over_10_000_steps(native, packages, job, tmp_path):
    found = native.measure({**job, "package": packages["adamw"], "count": 10_000}, tmp_path)
    after = found["anonymous_bytes_by_tenth"]
    assert len(after) == 10
    # One list entry for each step is the program's own: it is allocated before the first.
    assert max(after) - after[0] <= 64 * 2**10, after


def test_a_full_disk_leaves_the_checkpoint_as_it_was(native, packages, job, tmp_path):
    saved = tmp_path / "state"
    shutil.copy(packages["adamw"] / "checkpoint", saved)
    before = saved.read_bytes()
    task = {**job, "package": packages["adamw"], "save": saved.name}
    said = harness.refusal(native.run, task, tmp_path, **harness.full_disk(1000))
    assert "code: file-not-written" in said
    assert saved.read_bytes() == before
    assert not list(tmp_path.glob(".state*"))


def test_an_adapter_is_written_and_read(layer, tmp_path):
    adapter = AdapterSpec("lora", ("fc1*",), (), 2, 4.0)
    package = built_package(zoo.mlp((8, 6, 3)), tmp_path / "package", adapter=adapter)
    trained, read = tmp_path / "1", tmp_path / "2"
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
    wider = dataclasses.replace(adapter, rank=3)
    build_package(zoo.mlp((8, 6, 3)), tmp_path / "other", loss="cross_entropy", adapter=wider)
    for state_of, source, code in (
        (trained, tmp_path / "none", "peft-not-found"),
        (tmp_path / "other" / "checkpoint", tmp_path / "python-peft", "adapter-mismatch"),
    ):
        done = layer.run("adapters", package.path, state_of, kit, source, read)
        assert done.returncode == 2
        assert f"code: {code}" in done.stderr


def test_500_hostile_files_are_refused_and_crash_nothing(layer, packages, batches, tmp_path):
    train(packages["adamw"], batches, 2, tmp_path / "good")
    harmful = (make(Foreign()) for make in CORRUPT.values())
    checkpoints = harness.damaged_checkpoints(tmp_path, (tmp_path / "good").read_bytes(), harmful)
    folders = harness.damaged_packages(tmp_path, packages["adamw"], 160, 160)
    answers = harness.answers_to_hostile(layer.run, packages["adamw"], checkpoints, folders)
    stricter = 0  # the reader asks for alignment, and Python's does not
    for path, answer in zip(checkpoints, answers, strict=False):
        if answer == "accepted":  # what was read is what is there: it was saved again
            assert contents(path.with_name(f"{path.name}.again")) == contents(path), path.name
        else:
            stricter += harness.readable(path)
    assert stricter <= 5
    assert sum(answer.startswith("refused") for answer in answers) > 0.6 * len(answers)


def test_code_for_the_former_api_compiles_and_trains(layer, packages, batches, tmp_path):
    harness.save_batch(tmp_path / "batch", batches[0])
    image = next(iter(batches[0]))
    files = [tmp_path / "batch" / f"{name}.bin" for name in (image, "labels")]
    package = packages["adamw"]
    done = layer.run("former", package, *files, tmp_path, *batches[0][image].shape)
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert losses == train(package, batches[:1], 12, tmp_path / "python.ckpt")[0]
    harness.carried_over(package, tmp_path)


def test_what_is_wrong_is_refused_and_changes_nothing(layer, tmp_path):
    calls(program_of(layer), "misuse", write_job(CASES["adam"], tmp_path), 1)


@pytest.mark.parametrize("name", TRIED)
def test_what_an_app_may_rely_on(layer, name, tmp_path):
    command, case = TRIED[name]
    calls(program_of(layer), command, write_job(case, tmp_path), 20)
