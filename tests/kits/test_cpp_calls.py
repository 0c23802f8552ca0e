"""The C++ kit's sessions: one call at a time, closed at any moment, unharmed by a NaN."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.optimizers import Adam, AdamW, GroupRule
from odtpack_runtime.package.package import Package
from tests.kits import cpp_kit, models, swift_kit
from tests.kits.cases import CASES, Case
from tests.kits.cpp_stress import TRIED, calls, cpp_program, longer, program_of, write_job
from tests.kits.harness import list_again, needs
from tests.packaging_tools import open_training

pytestmark = needs(cpp_kit.unavailable())
TIMES = 20
ACCUMULATING = Case(
    models.mlp, CASES["adam"].data, {"accumulation_steps": 4, "outputs": ["output"]}
)
BATCH_NORM_ACCUMULATING = Case(
    CASES["mobilenet_batch_norm"].model, CASES["mobilenet_batch_norm"].data,
    {"accumulation_steps": 4},
)  # fmt: skip


@pytest.mark.parametrize("name", TRIED)
def test_what_an_app_may_rely_on(name, tmp_path):
    command, case = TRIED[name]
    calls(cpp_program, command, write_job(case, tmp_path), TIMES)


@pytest.mark.parametrize(("command", "name"), [
    ("close", "mobilenet_batch_norm"), ("close", "step_batch_norm"),
    ("nan", "mobilenet_batch_norm"), ("nan", "step_batch_norm"), ("nan", "step_sgd_momentum"),
])  # fmt: skip
def test_networks_of_the_suite(command, name, tmp_path):
    calls(cpp_program, command, write_job(CASES[name], tmp_path), TIMES)


@pytest.mark.parametrize("name", ["threads adam", "end adam"])
def test_two_threads_do_nothing_undefined(name, tmp_path):
    command, case = TRIED[name]
    calls(cpp_program, command, write_job(case, tmp_path), TIMES, variant="sanitized")


@pytest.mark.parametrize(
    "case", [ACCUMULATING, BATCH_NORM_ACCUMULATING], ids=["plain", "running statistics"]
)
@pytest.mark.parametrize("command", ["nan", "end"])
def test_accumulated_gradients_are_put_back(command, case, tmp_path):
    if command == "end":
        case = longer(case, 100_000 if case is ACCUMULATING else 64)
    calls(cpp_program, command, write_job(case, tmp_path), TIMES)


def python_says(path: Path) -> str:
    """What Python's session says of the step that ``calls gradient`` makes."""
    job = json.loads(path.read_text())
    package = Package.open(path.parent / job["package"])
    state, module, optimizer = open_training(package.path, step_model_uri=package.step_model)
    batch = []
    for item in job["steps"][0]["inputs"]:
        array = np.fromfile(item["file"], item["dtype"]).reshape(item["shape"])
        batch.append(np.full_like(array, 1e25) if array.dtype == np.float32 else array)
    for name, value in {"fc1.weight": 1e-30, "fc1.bias": 0, "fc2.weight": 1e25}.items():
        data = state.parameters[name].data
        whole = np.arange(data.size).reshape(data.shape) * 7 % 3 == 0
        data[:] = np.where(whole, np.float32(value), np.float32(value) / 2)
    assert np.isfinite(optimizer.step_on(*batch)).all()
    last = module.last_not_finite
    counts = f"{module.skipped_steps} {optimizer.step_count} {last.code} {last.step}"
    return " ".join([counts, *last.parameters])


@pytest.mark.parametrize("name", ["sgd", "step_sgd"])
@pytest.mark.parametrize("kit", ["C++", "Swift"])
def test_a_gradient_that_overflows_is_counted_as_in_python(kit, name, tmp_path):
    if kit == "Swift" and (reason := swift_kit.unavailable()):
        pytest.skip(reason)
    case = CASES[name]
    build = {key: value for key, value in case.build.items() if key != "outputs"}
    job = write_job(dataclasses.replace(case, build=build), tmp_path)
    program = program_of(swift_kit) if kit == "Swift" else cpp_program
    said = calls(program, "gradient", job, 1)
    assert said.split()[:3] == ["1", "1" if name == "step_sgd" else "0", "gradient-not-finite"]
    assert said == python_says(job)


def let_fail(folder: Path) -> None:
    """Let the step model of a package fail once all running statistics are updated."""
    package = Package.open(folder)
    model = onnx.load(package.step_model)
    roles = {p["name"]: p["role"] for p in json.loads(package.manifest.to_json())["parameters"]}
    names = [f"{name}.update.out" for name, role in roles.items() if role == "state"]
    name = next(f"{name}.update.out" for name, role in roles.items() if role == "trainable")
    (last,) = (node for node in model.graph.node if name in node.output)
    last.output[list(last.output).index(name)] = "right"
    node = onnx.helper.make_node
    model.graph.node.extend([
        node("Concat", names, ["statistics"], axis=0),
        node("ReduceMax", ["statistics"], ["most"]),
        node("Cast", ["most"], ["wrong"], to=onnx.TensorProto.INT64),
        node("Reshape", ["right", "wrong"], [name]),
    ])  # fmt: skip
    onnx.save(model, package.step_model)
    list_again(package, step_model=package.step_model)


def test_running_statistics_are_put_back_after_a_step_that_failed(tmp_path):
    job = write_job(CASES["step_batch_norm"], tmp_path)
    let_fail(tmp_path / "package")
    calls(cpp_program, "fails", job, 3)


@pytest.mark.parametrize(
    ("command", "name"),
    [("taken", "adam"), ("reads", "adam"), ("shared", "adam"), ("shared", "step_adamw")],
)
def test_a_state_beside_its_session(command, name, tmp_path):
    """What was taken of it remains valid, what reads it is a call, and one session steps."""
    calls(cpp_program, command, write_job(CASES[name], tmp_path), TIMES, variant="sanitized")


@pytest.mark.parametrize(("command", "name"), [
    ("misuse", "step_adamw"), ("moved", "step_adamw"), ("pending", "accumulation"),
    ("buffer", "frozen_float16"), ("carry", "sgd_momentum"),
])  # fmt: skip
def test_what_is_wrong_is_refused_and_changes_nothing(command, name, tmp_path):
    (tmp_path / "other").mkdir()
    write_job(CASES["lion"], tmp_path / "other")
    calls(cpp_program, command, write_job(CASES[name], tmp_path), 1, variant="sanitized")


@pytest.mark.parametrize(("command", "name"), [
    ("void", "adam"), ("void", "step_adamw"), ("broken_off", "gru"), ("broken_off", "recommender"),
])  # fmt: skip
def test_no_step_is_made_on_gradients_of_no_use(command, name, tmp_path):
    """After a training step that was skipped or that failed, by any session of the state."""
    calls(cpp_program, command, write_job(CASES[name], tmp_path), 1, variant="sanitized")


def test_a_session_that_cannot_be_made_leaves_the_state_alone(tmp_path):
    groups = {"optimizer": Adam(weight_decay=0.01), "groups": (GroupRule("*bias", 10.0, 0.0),)}
    for folder, case in {
        "other": CASES["lion"],
        "third": Case(models.mlp, CASES["adam"].data, groups),
        "": CASES["adam"],
    }.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        job = write_job(case, tmp_path / folder)
    calls(cpp_program, "free", job, 1, variant="sanitized")


def test_a_predictor_that_does_not_load_says_so(tmp_path):
    job = write_job(CASES["adam"], tmp_path)
    package = Package.open(tmp_path / "package")
    template = package.path / package.manifest.files.inference_template.path
    template.write_bytes(template.read_bytes().replace(b"Gemm", b"Gemx"))
    list_again(package, inference_template=template)
    calls(cpp_program, "broken", job, 1)


def test_rates_that_are_negative_or_not_finite_are_refused(tmp_path):
    update = {"groups": (GroupRule("*bias", 10.0, 0.0),)}
    case = Case(models.mlp, CASES["adam"].data, {"optimizer": AdamW(), **update})
    calls(cpp_program, "rates", write_job(case, tmp_path), 1)
