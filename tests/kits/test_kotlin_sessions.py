"""Sessions of the Kotlin kit: two threads, close, and losses and gradients that are not finite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from odtpack.build import build_package
from odtpack.optimizers import GroupRule, make_optimizer
from odtpack_runtime import CheckpointState, Module, Optimizer, Package
from odtpack_runtime.checkpoint.format import read_checkpoint
from tests import zoo
from tests.kits import kotlin_kit
from tests.kits.harness import contents, needs
from tests.kits.kotlin_kit import run, save_batch
from tests.kits.models import looked_up, roots, scores
from tests.kits.stress import TIMES

pytestmark = needs(kotlin_kit.unavailable())
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"step_model": "never"},
    "step model": {"step_model": "always"},
    "accumulating": {"accumulation_steps": 4},
}
CALLS = ("batch", "step", "train", "eval", "evaluate", "fit", "optimizer", "reset", "scheduler",
         "export", "predict", "read", "write", "property")  # fmt: skip


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packages with running statistics; those of ``roots`` have none."""
    folder = tmp_path_factory.mktemp("packages")
    for name, options in KINDS.items():
        model = zoo.mobilenet_v2(size=16, classes=3, width_mult=0.25, batch_norm="train", stages=1)
        build_package(model, folder / name, loss="cross_entropy", **options)
    for name, step_model in {"roots": "never", "roots step model": "always"}.items():
        build_package(roots(), folder / name, loss="cross_entropy", step_model=step_model)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Four batches for each network; the third makes its loss or a gradient NaN."""
    rng = np.random.default_rng(3)
    found: dict[str, list[Any]] = {"pictures": [], "roots": []}
    for number in range(4):
        folder = tmp_path_factory.mktemp("batch")
        image = rng.standard_normal((4, 3, 16, 16), dtype=np.float32)
        values = rng.uniform(0.5, 1.5, (4, 4)).astype(np.float32)
        if number == 2:
            image[1, 0, 3, 4], values[2, 1] = np.nan, 0
        labels = rng.integers(0, 3, 4)
        found["pictures"].append(save_batch(folder, input=image, labels=labels))
        (folder / "roots").mkdir()
        found["roots"].append(save_batch(folder / "roots", input=values, labels=labels))
    return found


def act(package: Path, data: list[Any], *actions: dict[str, Any], **more: Any) -> dict[str, Any]:
    task = {"package": package, "batches": data, "actions": actions, **more}
    return dict(json.loads(run("actions", json.dumps(task, default=str))))


def calls(*names: str, **more: Any) -> list[dict[str, Any]]:
    """Actions of these names, ``name number`` with that batch."""
    parts = [name.split() for name in names]
    return [{"do": name, "batch": int(rest[0]) if rest else 0, **more} for name, *rest in parts]


ROUNDS = {
    "close": "closed true",
    "busy": "busy true",
    "nan": "NaN,loss-not-finite true",
    "closed": "closed true",
}
"""What an app does, and what each round must print: codes, and that the state is as it should."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ROUNDS)
def test_again_and_again(
    kind: str, name: str, packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    """Close during a step, two threads at once, a NaN in a batch, use after close."""
    task = {"package": packages[name], "batches": batches["pictures"],
            "calls": [*CALLS, "save", "rate", "linear"]}  # fmt: skip
    words = kotlin_kit.command("race", kind, TIMES, json.dumps(task, default=str))
    lines = kotlin_kit.finish(words, timeout=45 * max(TIMES, 20)).splitlines()
    assert lines == [ROUNDS[kind]] * TIMES


def test_every_call_after_close_is_closed_and_the_state_remains(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    actions = [{"do": "batch"}, {"do": "save", "path": tmp_path / "before"}]
    actions += calls("close", *CALLS, "close", path=tmp_path / "no")
    actions += [{"do": "save", "path": tmp_path / "no"}, {"do": "rate", "rate": "0.1"},
                {"do": "linear", "warmup": 1, "total": 2, "rate": "0.1"}]  # fmt: skip
    actions += [{"do": "state", "path": tmp_path / "after"}]
    found = act(packages["plain"], batches["pictures"], *actions)
    assert found["results"][2:] == [None, *["closed"] * len(CALLS), None, *["closed"] * 3, None]
    assert found["step"] == 1
    assert not (tmp_path / "no").exists()
    assert contents(tmp_path / "after") == contents(tmp_path / "before")


def test_an_input_that_is_null_is_missing(
    packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    found = act(packages["plain"], batches["pictures"], *calls("null"), {"do": "evaluate null"})
    assert found["results"] == ["input-count", "input-count"]


def test_a_tensor_that_is_closed_or_in_the_place_of_a_gradient_is_refused(
    packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    wrong = [{"do": "closed input", "batch": 1}, {"do": "closed value", "batch": 1},
             {"do": "pin gradient"}, {"do": "pin closed"}]  # fmt: skip
    found = act(packages["roots"], batches["roots"], *wrong, {"do": "batch"})
    codes = ["input-type", "parameter-type", "unknown-output", "output-type"]
    assert found["results"][:4] == codes
    assert (found["step"], found["skipped"]) == (1, 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_second_session_of_a_state_takes_its_moments_over(
    name: str, packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    """It keeps what the first accumulated, which makes no step and no save of moments any more."""
    package, data, other = packages[name], batches["pictures"], {"on": "second"}
    refused = [*calls("batch", "step", "optimizer"), {"do": "save", "path": tmp_path / "no"}]
    save = {"do": "save", "path": tmp_path / "with", **other}
    found = act(package, data, *calls("train"), {"do": "rate", "rate": "0.001", **other}, *refused,
                *calls("eval"), *calls("optimizer", **other), save)  # fmt: skip
    first, _, *codes, evaluated, stepped, saved = found["results"]
    assert codes == ["optimizer-mismatch"] * len(refused)
    assert (float(first) > 0, float(evaluated) > 0, stepped, saved) == (True, True, None, None)
    assert (found["step"], found["skipped"]) == (0, 0)
    act(package, data, *calls("train", "optimizer"), {"do": "save", "path": tmp_path / "without"})
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_samples_are_counted_along_the_first_input_that_has_an_axis(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    scaled (float scale, float[batch, 4] input) => (float[batch, 3] output)
    {
        scaled = Mul(input, scale)
        output = Gemm<transB = 1>(scaled, weight, bias)
    }""")
    rng = np.random.default_rng(5)
    for name, shape in {"weight": (3, 4), "bias": (3,)}.items():
        value = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    build_package(model, tmp_path / "package", loss="cross_entropy")
    data = []
    for size in (6, 2):
        (folder := tmp_path / str(size)).mkdir()
        values = rng.uniform(0.5, 1.5, (size, 4)).astype(np.float32)
        data.append(save_batch(folder, labels=rng.integers(0, 3, size), input=values,
                               scale=np.float32(2)))  # fmt: skip
    found = act(tmp_path / "package", data, *calls("eval 0", "eval 1"), {"do": "evaluate all"})
    first, second, mean = map(float, found["results"])
    assert mean == pytest.approx((6 * first + 2 * second) / 8)


def test_unpacking_leaves_a_session_that_is_open_alone(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    """What lacks a file changes nothing; a whole package takes the place of the one before."""
    folder = tmp_path / "app"
    shutil.copytree(packages["roots"], folder)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    other = {"do": "unpack", "from": packages["roots step model"], "path": folder}
    found = act(folder, batches["roots"], *calls("batch 0"),
                {**other, "missing": "step_model.onnx"}, *calls("batch 1"))  # fmt: skip
    assert found["results"][1] == "package-incomplete"
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    again = act(folder, batches["roots"], *calls("batch 0"), other, *calls("batch 1"))
    assert again["results"] == [found["results"][0], None, found["results"][2]]
    assert all((folder / name).stat().st_ino != number for name, number in before.items())
    Package.open(folder)


@pytest.mark.parametrize("kind", ["plain", "step model"])
def test_a_batch_whose_loss_is_nan_changes_nothing(
    kind: str, packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Against a training that never saw it; the schedule stays where it is as well."""
    linear = {"do": "linear", "warmup": 2, "total": 10, "rate": "0.01"}
    ends = []
    for name, numbers in {"with": (0, 2, 1, 2, 3), "without": (0, 1, 3)}.items():
        save = {"do": "save", "path": tmp_path / name}
        steps = calls(*(f"batch {number}" for number in numbers))
        ends.append(act(packages[kind], batches["pictures"], linear, *steps, save))
    found, wanted = ends
    assert [found["results"][i] for i in (2, 4)] == ["NaN"] * 2
    assert [found["results"][i] for i in (1, 3, 5)] == wanted["results"][1:4]
    assert (found["skipped"], wanted["skipped"]) == (2, 0)
    assert found["last"] == {"code": "loss-not-finite", "step": 3, "parameters": []}
    assert (found["step"], found["rate"]) == (3, wanted["rate"])
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


@pytest.mark.parametrize("first", [0, 2])
def test_one_nan_micro_batch_of_four_costs_its_own_share(
    first: int, packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    """The other three make the step, whether the bad one comes first or third."""
    order = [2, 0, 1, 3] if first == 2 else [0, 1, 2, 3]
    package, data = packages["accumulating"], batches["pictures"]
    found = act(package, data, *calls(*(f"batch {number}" for number in order)),
                {"do": "save", "path": tmp_path / "with"})  # fmt: skip
    act(package, data, *calls("train 0", "train 1", "train 3", "optimizer", "reset"),
        {"do": "save", "path": tmp_path / "without"})  # fmt: skip
    assert (found["skipped"], found["step"]) == (1, 1)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_four_nan_micro_batches_make_no_step(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    package, data = packages["accumulating"], batches["pictures"]
    linear = {"do": "linear", "warmup": 2, "total": 10, "rate": "0.01"}
    good = calls(*["batch 0", "batch 1"] * 2)
    found = act(package, data, linear, *good, *calls(*["batch 2"] * 4, "optimizer", "reset",
                "optimizer"), {"do": "save", "path": tmp_path / "with"})  # fmt: skip
    wanted = act(package, data, linear, *good, {"do": "save", "path": tmp_path / "without"})
    assert (found["skipped"], found["step"], found["rate"]) == (4, 1, wanted["rate"])
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_a_gradient_that_is_nan_changes_nothing_and_is_named(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    package, data = packages["roots"], batches["roots"]
    found = act(package, data, *calls("batch 0", "batch 2", "batch 1"),
                {"do": "save", "path": tmp_path / "with"})  # fmt: skip
    act(package, data, *calls("batch 0", "batch 1"), {"do": "save", "path": tmp_path / "without"})
    assert np.isfinite(float(found["results"][1]))
    assert (found["skipped"], found["step"]) == (1, 2)
    assert found["last"] == {"code": "gradient-not-finite", "step": 2, "parameters": ["scale"]}
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_a_step_model_keeps_what_has_a_nan_and_counts_it_as_python_does(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    package, data = packages["roots step model"], batches["roots"]
    found = act(package, data, *calls("batch 0"), {"do": "save", "path": tmp_path / "before"},
                *calls("batch 2"), {"do": "save", "path": tmp_path / "after"})  # fmt: skip
    before, after = (contents(tmp_path / name) for name in ("before", "after"))
    for kind in ("arrays", "moments"):
        changed = {name for name in before[kind] if before[kind][name] != after[kind][name]}
        assert changed == {"weight", "bias"}
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    module = Module(package / "training_model.onnx", state,
                    step_model_uri=package / "step_model.onnx")  # fmt: skip
    optimizer = Optimizer(package / "optimizer_model.onnx", module)
    for batch in (data[0], data[2]):
        arrays = {name: np.fromfile(each["file"], each["dtype"]).reshape(each["shape"])
                  for name, each in batch.items()}  # fmt: skip
        optimizer.step_on(*(arrays[name] for name in module.input_names()))
    last = module.last_not_finite
    assert found["skipped"] == module.skipped_steps == 1
    assert found["step"] == optimizer.step_count == 2
    assert found["last"] == {
        "code": last.code, "step": last.step, "parameters": list(last.parameters)
    }  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A package that looks words up in a table, and two batches, of which one asks beyond it."""
    folder = tmp_path_factory.mktemp("words")
    build_package(looked_up(), folder / "package", loss="cross_entropy", step_model="never")
    data = []
    for name, last in {"good": 4, "bad": 50}.items():
        (folder / name).mkdir()
        data.append(save_batch(folder / name, words=np.array([1, 2, 3, last]),
                               labels=np.array([0, 1, 2, 0])))  # fmt: skip
    return folder / "package", data


@pytest.mark.parametrize("way", [("optimizer",), ("reset", "optimizer", "reset", "optimizer")])
@pytest.mark.parametrize("kind", ["plain", "words"])
def test_gradients_of_a_step_that_is_void_are_never_used(
    kind: str, way: tuple[str, ...], packages: dict[str, Path], batches: dict[str, list[Any]],
    words: tuple[Path, list[Any]], tmp_path: Path,
) -> None:  # fmt: skip
    """One that was skipped or failed; after the next good one all is as if it had never been."""
    package, data = words if kind == "words" else (packages[kind], batches["pictures"])
    bad, code = ("train 1", "run-failed") if kind == "words" else ("train 2", "NaN")
    good = [*calls("train 0", "optimizer"), {"do": "save", "path": tmp_path / "after"}]
    save = {"do": "save", "path": tmp_path / "with"}
    found = act(package, data, *calls("batch 0", bad, *way), save, *good)
    shutil.move(tmp_path / "after", tmp_path / "with after")
    assert found["results"][1] == code
    act(package, data, *calls("batch 0"), {"do": "save", "path": tmp_path / "without"}, *good)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")
    assert contents(tmp_path / "with after") == contents(tmp_path / "after")


def test_a_batch_that_is_refused_leaves_the_gradients_alone(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    package, data = packages["roots"], batches["roots"]
    asked = [{"do": "ask", "name": "no"}, *calls("null")]
    for name, wrong in {"with": asked, "without": []}.items():
        save = {"do": "save", "path": tmp_path / name}
        act(package, data, *calls("train 0", "reset"), *wrong, *calls("optimizer"), save)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_gradients_that_another_session_spoiled_are_not_used(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Sessions of one state share its gradients, which are numbers after a step that is void."""
    package, data, other = packages["plain"], batches["pictures"], {"on": "second"}
    save, end = ({"do": "save", "path": tmp_path / name, **other} for name in ("with", "after"))
    rate = {"do": "rate", "rate": "0.001", **other}  # which makes the second
    found = act(package, data, rate, *calls("batch 0", "train 0", **other), *calls("train 2"),
                *calls("optimizer", **other), save, *calls("train 1", "optimizer", **other),
                end)  # fmt: skip
    assert (found["results"][3], found["skipped"]) == ("NaN", 1)
    act(package, data, *calls("batch 0", "eval 0"), {"do": "save", "path": tmp_path / "without"},
        *calls("train 0", "train 1"))  # fmt: skip
    ends = [contents(tmp_path / name) for name in ("with", "without")]
    for key in ("optimizer", "moments"):  # a good step moved the running statistics
        assert ends[0][key] == ends[1][key]
    assert contents(tmp_path / "after")["optimizer"][0] == 2


def test_a_reset_begins_the_count_of_batches_again(
    packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    batch = ["batch 0"] * 3
    found = act(packages["accumulating"], batches["pictures"], *calls(*batch, "reset", *batch))
    assert found["step"] == 0
    whole = calls(*batch, "reset", *batch, "batch 1")
    assert act(packages["accumulating"], batches["pictures"], *whole)["step"] == 1


def test_one_batch_is_no_step_of_several(
    packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    found = act(packages["accumulating"], batches["pictures"], *calls("step"))
    assert (found["results"], found["step"]) == (["step-of-several"], 0)


def test_a_state_goes_with_packages_that_lay_it_out_alike(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Or to none: and a session that cannot be made leaves it as it was."""
    for name, options in {
        "sgd": {"optimizer": make_optimizer("sgd", {"momentum": 0.9})},
        "groups": {"groups": (GroupRule("weight", 0.1, 0.0),)},
    }.items():
        build_package(roots(), tmp_path / name, loss="cross_entropy", step_model="never", **options)
    data, trained = batches["roots"], tmp_path / "trained"
    create = {"do": "create", "batch": 1, "checkpoint": trained}
    sgd, groups = tmp_path / "sgd", tmp_path / "groups"
    found = act(packages["roots"], data, *calls("batch 0", "batch 1"),
                {"do": "save", "path": trained},
                {"do": "create", "packages": [groups]},
                {**create, "packages": [groups]},
                {**create, "packages": [sgd]},
                {**create, "packages": [sgd, groups]},
                {**create, "packages": [packages["roots"]],
                 "optimizer": sgd / "optimizer_model.onnx"},
                {"do": "create", "packages": [sgd]}, *calls("batch 1"))  # fmt: skip
    placed, loss, wrong, again, other, later, goes_on = found["results"][3:]
    assert (placed, wrong, other) == ("model-mismatch", "optimizer-mismatch", "model-mismatch")
    assert float(again) == float(loss) == float(goes_on)
    assert later == "optimizer-mismatch"


def test_a_name_that_no_output_has_is_refused(
    packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    asked = [{"do": name, "name": "no"} for name in ("ask", "ask evaluation")]
    reserved = {"do": "property", "name": "odtpack.optimizer"}
    found = act(packages["roots step model"], batches["roots"], *asked, reserved)
    assert found["results"] == ["unknown-output", "unknown-output", "property-type"]


def test_the_class_of_the_highest_score_is_that_of_numpy(tmp_path: Path) -> None:
    """Of equal scores the first counts, 0 and -0 are equal, and NaN is above all numbers."""
    build_package(scores(), tmp_path / "package", loss="cross_entropy")
    rows = np.array([[-0.0, 0, -1], [0, np.nan, 2], [np.nan, 1, np.nan], [1, 2, 2]], np.float32)
    data = []
    for label in range(3):
        (folder := tmp_path / str(label)).mkdir()
        data.append(save_batch(folder, input=rows, labels=np.full(4, label)))
    found = act(tmp_path / "package", data, *({"do": "accuracy", "batch": i} for i in range(3)))
    right = rows.argmax(axis=1)
    assert [float(each) for each in found["results"]] == [(right == i).mean() for i in range(3)]


def test_the_policy_stop_throws_once_all_is_put_back(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    for kind, data, code in (
        ("plain", "pictures", "loss-not-finite"),
        ("step model", "pictures", "loss-not-finite"),
        ("roots", "roots", "gradient-not-finite"),
    ):
        found = act(packages[kind], batches[data], *calls("batch 0", "batch 2", "train 2"),
                    {"do": "save", "path": tmp_path / "with"}, policy="stop")  # fmt: skip
        act(packages[kind], batches[data], *calls("batch 0"),
            {"do": "save", "path": tmp_path / "without"})  # fmt: skip
        assert found["results"][1:3] == [code] * 2
        assert found["skipped"] == 2
        assert contents(tmp_path / "with") == contents(tmp_path / "without")


@pytest.mark.parametrize("rate", ["-1.0", "NaN", "Infinity", "-0.001"])
def test_a_rate_that_is_negative_or_not_finite_is_refused(
    rate: str, packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    linear = {"do": "linear", "warmup": 1, "total": 4, "rate": rate}
    found = act(packages["roots"], batches["roots"], {"do": "rate", "rate": rate}, linear,
                *calls("scheduler"), {"do": "rate", "rate": "0.0"})  # fmt: skip
    assert found["results"] == ["bad-learning-rate", "bad-learning-rate", "bad-schedule", None]


def test_a_saved_schedule_of_another_version_is_refused(
    packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    saved = {"initial_lr": 0.5, "kind": "linear", "total_steps": 100, "warmup_steps": 0}
    texts = [json.dumps({**saved, **more}) for more in
             ({}, {"power": 2}, {"floor": 0.1}, {"warmup_steps": None})]  # fmt: skip
    found = act(packages["plain"], batches["pictures"],
                *({"do": "restore", "text": text} for text in texts))  # fmt: skip
    assert found["results"] == ["0.5", *["bad-schedule"] * 3]
    assert found["rate"] == "0.5"


def test_nothing_is_evaluated_and_nothing_carried_onto_a_session(
    packages: dict[str, Path], batches: dict[str, list[Any]]
) -> None:
    asked = ({"do": name} for name in ("evaluate none", "carry", "batch"))
    found = act(packages["plain"], batches["pictures"], *asked)
    assert found["results"][:2] == ["empty-batch", "busy"]
    assert float(found["results"][2]) > 0


def test_the_schedule_of_the_guide_is_that_of_python(
    packages: dict[str, Path], batches: dict[str, list[Any]], tmp_path: Path
) -> None:
    """``registerLinearLRScheduler(10, 100, 0.001f)``: rates, losses and the state, to the bit."""
    guide = (kotlin_kit.ROOT / "docs" / "guides" / "kotlin.md").read_text()
    assert "session.registerLinearLRScheduler(10, STEPS.toLong(), 0.001f)" in guide
    assert "const val STEPS = 100" in guide
    package, data = packages["plain"], [batches["pictures"][0]]
    save = {"do": "save", "path": tmp_path / "kotlin"}
    linear = {"do": "linear", "warmup": 10, "total": 100, "rate": "0.001"}
    found = act(package, data, linear, *calls(*["batch"] * 60), save)
    task = {"package": package, "batches": data, "steps": 60, "linear": (10, 100, 0.001),
            "save": tmp_path / "python"}  # fmt: skip
    text = json.dumps(task, default=str)
    wanted = json.loads(kotlin_kit.python("tests.kits.python_training", text))["losses"]
    assert [float(loss) for loss in found["results"][1:-1]] == wanted
    ends = [contents(tmp_path / name) for name in ("kotlin", "python")]
    assert read_checkpoint(tmp_path / "kotlin").properties["odtpack.schedule"]
    for each in ends:
        each["properties"].pop("odtpack.schedule", None)
    assert ends[0] == ends[1]
