"""What only the C++ kit has: ARM64, sanitizers, libFuzzer, its guide; the rest: test_layers.py."""

import json
import re
import shutil
import subprocess

import numpy as np
import onnxruntime
import pytest

from odtpack.build import build_package
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_simulator.measure.measured_profile import imported_profile, load_measurements
from tests.kits import cpp_kit, fuzz_cpp, harness, models
from tests.kits.cpp_kit import KIT, ROOT, make, measure, run
from tests.kits.harness import ARM64_CASES, STEPS, Task, contents, needs, train
from tests.kits.measured import check_measurements
from tests.packages.mutations import edit
from tests.programs import ran
from tests.runtime.checkpoint_samples import Foreign
from tests.runtime.test_checkpoint_hostile import CORRUPT

pytestmark = needs(cpp_kit.unavailable())
batches, job, packages = harness.batches, harness.job, harness.packages


def test_a_session_that_resumes_continues_bit_for_bit(packages, batches, job, tmp_path):
    task = {**job, "package": packages["adamw"], "count": 9, "save": "half", "resume": 9}
    found = measure(task, tmp_path)
    assert found["losses"] == train(packages["adamw"], batches, 18, tmp_path / "whole")[0]
    phases = found["phases"]
    assert list(phases) == ["load", "train", "evaluate", "save", "resume"]
    for phase in phases.values():
        assert phase["peak_anonymous_bytes"] >= phase["end_anonymous_bytes"] > 2**20


def test_arm64_trains_as_python_does(packages, batches, job, tmp_path):
    found = measure({**job, "package": packages["adamw"], "save": "cpp.ckpt"}, tmp_path, "arm64")
    losses, loss = train(packages["adamw"], batches, STEPS, tmp_path / "python.ckpt")
    np.testing.assert_allclose(found["losses"], losses, rtol=2e-6)
    np.testing.assert_allclose(found["evaluation"], [loss], rtol=2e-6)
    assert read_checkpoint(tmp_path / "cpp.ckpt").optimizer.step == STEPS  # type: ignore[union-attr]


def test_hundreds_of_hostile_files_are_refused_and_crash_nothing(packages, batches, tmp_path):
    saved = tmp_path / "good"
    train(packages["adamw"], batches, 2, saved)
    harmful = (make(Foreign()) for make in CORRUPT.values())
    checkpoints = harness.damaged_checkpoints(tmp_path, saved.read_bytes(), harmful)
    folders = harness.damaged_packages(tmp_path, packages["adamw"], 320, 120)
    package = packages["adamw"]
    answers = harness.answers_to_hostile(run, package, checkpoints, folders, variant="sanitized")
    for path, answer in zip(checkpoints, answers, strict=False):
        if answer == "accepted":  # what was read is what is there: it was saved again
            again = contents(path.with_name(f"{path.name}.again"))
            assert not harness.readable(path) or again == contents(path), path.name
    # The verifier of flatbuffers does not look at a table's own size, and Python does; Python
    # does not ask for alignment. Else they agree.
    both = zip(checkpoints, answers, strict=False)
    agree = sum(harness.readable(path) == (answer == "accepted") for path, answer in both)
    assert agree >= len(checkpoints) - 5
    assert sum(answer.startswith("refused") for answer in answers) > 0.7 * len(answers)


@pytest.mark.parametrize("reader", fuzz_cpp.READERS)
def test_kept_inputs_of_libfuzzer(reader, tmp_path, monkeypatch):
    package = fuzz_cpp.prepare(tmp_path)
    for name, value in fuzz_cpp.settings(reader, package).items():
        monkeypatch.setenv(name, value)
    folders = [tmp_path / reader, *fuzz_cpp.kept(reader)]
    paths = sorted(path for folder in folders for path in folder.iterdir())
    done = run("fuzz", *paths, variant="sanitized")
    assert (done.returncode, done.stdout) == (0, f"{len(paths)} inputs\n"), done.stderr[-4000:]


@pytest.mark.skipif(cpp_kit.without_libfuzzer() is not None, reason="clang is not installed")
def test_libfuzzer_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_cpp, "FINDINGS", tmp_path / "findings")
    assert fuzz_cpp.fuzz("schedule", tmp_path, fuzz_cpp.prepare(tmp_path), 1, keep=False) == []


def test_the_conformance_suite_passes_under_sanitizers(suite):
    harness.passes(suite, run("conformance", suite, variant="sanitized"))


def test_the_conformance_suite_passes_on_arm64(suite):
    done = run("conformance", suite, "--tolerance", *ARM64_CASES, variant="arm64")
    assert sorted(done.stdout.split("\n")) == sorted(["", *(f"passed {c}" for c in ARM64_CASES)])


@pytest.mark.parametrize("steps", [1, 3])
def test_the_self_check_passes_and_notices_a_wrong_figure(steps, packages, tmp_path):
    built = packages["adamw"]
    if steps > 1:
        built = tmp_path / "accumulating"
        build_package(models.mlp(), built, loss="cross_entropy", accumulation_steps=steps)

    def spoil(content: Task) -> None:
        content["self_check"]["losses"][2] += 0.01

    for name, code in (("right", None), ("wrong", "self-check-failed")):
        folder = tmp_path / name
        shutil.copytree(built, folder / "package")
        if code:
            edit(folder / "package", spoil, sealed=False)
        case = {"name": name, "kind": "self_check", "package": "package"}
        (folder / "case.json").write_text(json.dumps(case | ({"code": code} if code else {})))
    cases = [{"name": name, "kind": "self_check"} for name in ("right", "wrong")]
    (tmp_path / "index.json").write_text(json.dumps({"cases": cases}))
    assert run("conformance", tmp_path).stdout.splitlines() == ["passed right", "passed wrong"]


def test_code_for_the_former_api_compiles_and_trains(packages, batches, tmp_path):
    for name, array in batches[0].items():
        array.tofile(tmp_path / f"{name}.bin")
    package = packages["adamw"]
    done = run("former", package, package, *batches[0], tmp_path, variant="plain")
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    assert losses == train(packages["adamw"], batches[:1], len(losses), tmp_path / "python.ckpt")[0]
    harness.carried_over(packages["adamw"], tmp_path)


def test_the_guide_builds_and_trains(packages, batches, tmp_path):
    """What the guide shows, as it stands there."""
    text = (ROOT / "docs" / "guides" / "cpp.md").read_text()
    blocks = dict(re.findall(r"`(CMakeLists\.txt|main\.cpp)`:\n\n```\w+\n(.*?)```", text, re.S))
    for name, content in blocks.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "odtpack").symlink_to(ROOT)
    (shape,) = {batch[next(iter(batch))].shape[1:] for batch in batches}
    harness.write_assets(tmp_path, packages["adamw"], shape)
    make(tmp_path, tmp_path / "build", cpp_kit.cmake_options("plain"), "app")
    for _ in range(2):  # the second time it goes on from the end
        ran(tmp_path / "build" / "app", cwd=tmp_path)
        assert read_checkpoint(tmp_path / "trained.ckpt").properties["app.step"] == 100
    personal = onnxruntime.InferenceSession(tmp_path / "personal.onnx")
    image = np.fromfile(tmp_path / "assets" / "images.bin", np.float32).reshape(320, *shape)[:4]
    (output,) = personal.run(None, {personal.get_inputs()[0].name: image})
    assert output.shape == (4, 3)


def test_the_benchmark_writes_every_measurement(tmp_path):
    done = run("benchmark", tmp_path, 1, 5 * 10**8, 0.01)
    assert done.returncode == 0, done.stderr
    measured = tmp_path / "measured.json"
    measured.write_text(done.stdout)
    profile = imported_profile(load_measurements(measured), name="local/here", title="Here")
    assert (profile.os, profile.validated) == ("linux", True)
    assert profile.memory_limit_bytes() == 5 * 10**8 // 2**20 * 2**20
    measured.unlink()
    load = json.loads(done.stdout)["sustained"]
    assert len(load["seconds"]) == len(load["gemm_flops"]) >= 1
    check_measurements(done.stdout, "cpp", onnxruntime.__version__)
    assert not list(tmp_path.iterdir())


def test_the_generated_header_is_that_of_the_schema(tmp_path):
    if shutil.which("flatc") is None:
        pytest.skip("there is no flatc on this machine")
    subprocess.run([KIT / "generate.sh", tmp_path], check=True)
    name = "checkpoint_generated.h"
    assert (tmp_path / name).read_text() == (KIT / "include" / "odtpack" / name).read_text()
