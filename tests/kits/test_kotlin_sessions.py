"""Sessions of the Kotlin kit: two threads, close, and losses and gradients that are not finite."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack.build import build_package
from odtpack.optimizers import GroupRule, make_optimizer
from odtpack_runtime import Package
from odtpack_runtime.checkpoint.format import read_checkpoint
from tests import zoo
from tests.kits import kotlin_kit
from tests.kits.harness import Packages, contents, needs
from tests.kits.kotlin_kit import run, save_batch
from tests.kits.models import looked_up, roots, scores
from tests.kits.stress import TIMES
from tests.packaging_tools import open_training
from tests.simulator.graphs import weighted

pytestmark = needs(kotlin_kit.unavailable())
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"step_model": "never"}, "step model": {"step_model": "always"},
    "accumulating": {"accumulation_steps": 4},
}  # fmt: skip
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
        found["roots"].append(save_batch(folder / "roots", input=values, labels=labels))
    return found


def act(package: Path, data: list[Any], *actions: dict[str, Any], **more: Any) -> dict[str, Any]:
    task = {"package": package, "batches": data, "actions": actions, **more}
    return dict(json.loads(run("actions", json.dumps(task, default=str))))


@dataclasses.dataclass(frozen=True)
class App:
    """Packages and batches of a Kotlin app, and a folder that it may write to."""

    packages: Packages
    batches: dict[str, list[Any]]
    folder: Path

    def act(self, package: str, *actions: dict[str, Any], **more: Any) -> dict[str, Any]:
        """What the kit answers to actions on the package of a name, with the batches for it."""
        data = self.batches["roots" if "roots" in package else "pictures"]
        return act(self.packages[package], data, *actions, **more)

    def save(self, name: str, **more: Any) -> dict[str, Any]:
        return {"do": "save", "path": self.folder / name, **more}

    def same(self, one: str = "with", other: str = "without") -> bool:
        return contents(self.folder / one) == contents(self.folder / other)


@pytest.fixture
def app(packages: Packages, batches: dict[str, list[Any]], tmp_path: Path) -> App:
    return App(packages, batches, tmp_path)


def calls(*names: str, **more: Any) -> list[dict[str, Any]]:
    """Actions of these names, ``name number`` with that batch."""
    parts = [name.split() for name in names]
    return [{"do": name, "batch": int(rest[0]) if rest else 0, **more} for name, *rest in parts]


ROUNDS = {"close": "closed true", "busy": "busy true", "nan": "NaN,loss-not-finite true",
          "closed": "closed true"}  # fmt: skip
"""What an app does, and what each round must print: codes, and that the state is as it should."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ROUNDS)
def test_again_and_again(kind, name, app):
    """Close during a step, two threads at once, a NaN in a batch, use after close."""
    task = {"package": app.packages[name], "batches": app.batches["pictures"],
            "calls": [*CALLS, "save", "rate", "linear"]}  # fmt: skip
    words = kotlin_kit.command("race", kind, TIMES, json.dumps(task, default=str))
    lines = kotlin_kit.finish(words, timeout=45 * max(TIMES, 20)).splitlines()
    assert lines == [ROUNDS[kind]] * TIMES


def test_every_call_after_close_is_closed_and_the_state_remains(app):
    actions = [{"do": "batch"}, app.save("before")]
    actions += calls("close", *CALLS, "close", path=app.folder / "no")
    actions += [app.save("no"), {"do": "rate", "rate": "0.1"},
                {"do": "linear", "warmup": 1, "total": 2, "rate": "0.1"}]  # fmt: skip
    actions += [app.save("after", do="state")]
    found = app.act("plain", *actions)
    assert found["results"][2:] == [None, *["closed"] * len(CALLS), None, *["closed"] * 3, None]
    assert found["step"] == 1
    assert not (app.folder / "no").exists()
    assert app.same("after", "before")


def test_a_thread_that_is_interrupted_saves_and_loads(app):
    """An executor that is shut down interrupts its threads, which then save what they trained."""
    save, interrupt = app.save("it"), {"do": "interrupt"}
    files = (save, {**save, "do": "load"}, app.save("it.onnx", do="export"), *calls("predict"))
    asked = (each for action in files for each in (interrupt, action, {"do": "interrupted"}))
    found = app.act("plain", {"do": "batch"}, *asked, app.save("again", do="interrupted saves"))
    assert found["results"][1:] == [None, None, "1"] * 4 + [None]
    assert app.same("it", "again")
    assert (app.folder / "it.onnx").is_file()


def test_an_input_that_is_null_is_missing(app):
    found = app.act("plain", *calls("null"), {"do": "evaluate null"})
    assert found["results"] == ["input-count", "input-count"]


def test_a_tensor_that_is_closed_or_in_the_place_of_a_gradient_is_refused(app):
    wrong = [{"do": "closed input", "batch": 1}, {"do": "closed value", "batch": 1},
             {"do": "pin gradient"}, {"do": "pin closed"}]  # fmt: skip
    found = app.act("roots", *wrong, {"do": "batch"})
    codes = ["input-type", "parameter-type", "unknown-output", "output-type"]
    assert found["results"][:4] == codes
    assert (found["step"], found["skipped"]) == (1, 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_second_session_of_a_state_takes_its_moments_over(name, app):
    """It keeps what the first accumulated, which makes no step and no save of moments any more."""
    other = {"on": "second"}
    refused = [*calls("batch", "step", "optimizer"), app.save("no")]
    save = app.save("with", **other)
    found = app.act(name, *calls("train"), {"do": "rate", "rate": "0.001", **other}, *refused,
                    *calls("eval"), *calls("optimizer", **other), save)  # fmt: skip
    first, _, *codes, evaluated, stepped, saved = found["results"]
    assert codes == ["optimizer-mismatch"] * len(refused)
    assert (float(first) > 0, float(evaluated) > 0, stepped, saved) == (True, True, None, None)
    assert (found["step"], found["skipped"]) == (0, 0)
    app.act(name, *calls("train", "optimizer"), app.save("without"))
    assert app.same()


def test_samples_are_counted_along_the_first_input_that_has_an_axis(tmp_path):
    text = """scaled (float scale, float[batch, 4] input) => (float[batch, 3] output) {
        scaled = Mul(input, scale)
        output = Gemm<transB = 1>(scaled, weight, bias)
    }"""
    rng = np.random.default_rng(5)
    model = weighted(text, {"weight": (3, 4), "bias": (3,)})
    build_package(model, tmp_path / "package", loss="cross_entropy")
    data = []
    for size in (6, 2):
        values = {"input": rng.uniform(0.5, 1.5, (size, 4)).astype(np.float32)}
        values |= {"labels": rng.integers(0, 3, size), "scale": np.float32(2)}
        data.append(save_batch(tmp_path / str(size), **values))
    found = act(tmp_path / "package", data, *calls("eval 0", "eval 1"), {"do": "evaluate all"})
    first, second, mean = map(float, found["results"])
    assert mean == pytest.approx((6 * first + 2 * second) / 8)


def test_unpacking_leaves_a_session_that_is_open_alone(app):
    """What lacks a file changes nothing; a whole package takes the place of the one before."""
    folder = app.folder / "app"
    shutil.copytree(app.packages["roots"], folder)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    other = {"do": "unpack", "from": app.packages["roots step model"], "path": folder}
    lacking, data = {**other, "missing": "step_model.onnx"}, app.batches["roots"]
    found = act(folder, data, *calls("batch 0"), lacking, *calls("batch 1"))
    assert found["results"][1] == "package-incomplete"
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    again = act(folder, data, *calls("batch 0"), other, *calls("batch 1"))
    assert again["results"] == [found["results"][0], None, found["results"][2]]
    assert all((folder / name).stat().st_ino != number for name, number in before.items())
    Package.open(folder)


@pytest.mark.parametrize("kind", ["plain", "step model"])
def test_a_batch_whose_loss_is_nan_changes_nothing(kind, app):
    """Against a training that never saw it; the schedule stays where it is as well."""
    linear = {"do": "linear", "warmup": 2, "total": 10, "rate": "0.01"}
    ends = []
    for name, numbers in {"with": (0, 2, 1, 2, 3), "without": (0, 1, 3)}.items():
        steps = calls(*(f"batch {number}" for number in numbers))
        ends.append(app.act(kind, linear, *steps, app.save(name)))
    found, wanted = ends
    assert [found["results"][i] for i in (2, 4)] == ["NaN"] * 2
    assert [found["results"][i] for i in (1, 3, 5)] == wanted["results"][1:4]
    assert (found["skipped"], wanted["skipped"]) == (2, 0)
    assert found["last"] == {"code": "loss-not-finite", "step": 3, "parameters": []}
    assert (found["step"], found["rate"]) == (3, wanted["rate"])
    assert app.same()


@pytest.mark.parametrize("first", [0, 2])
def test_one_nan_micro_batch_of_four_costs_its_own_share(first, app):
    """The other three make the step, whether the bad one comes first or third."""
    order = [2, 0, 1, 3] if first == 2 else [0, 1, 2, 3]
    steps = calls(*(f"batch {number}" for number in order))
    found = app.act("accumulating", *steps, app.save("with"))
    three = calls("train 0", "train 1", "train 3", "optimizer", "reset")
    app.act("accumulating", *three, app.save("without"))
    assert (found["skipped"], found["step"]) == (1, 1)
    assert app.same()


def test_four_nan_micro_batches_make_no_step(app):
    linear = {"do": "linear", "warmup": 2, "total": 10, "rate": "0.01"}
    good = [linear, *calls(*["batch 0", "batch 1"] * 2)]
    bad = calls(*["batch 2"] * 4, "optimizer", "reset", "optimizer")
    found = app.act("accumulating", *good, *bad, app.save("with"))
    wanted = app.act("accumulating", *good, app.save("without"))
    assert (found["skipped"], found["step"], found["rate"]) == (4, 1, wanted["rate"])
    assert app.same()


def test_a_gradient_that_is_nan_changes_nothing_and_is_named(app):
    found = app.act("roots", *calls("batch 0", "batch 2", "batch 1"), app.save("with"))
    app.act("roots", *calls("batch 0", "batch 1"), app.save("without"))
    assert np.isfinite(float(found["results"][1]))
    assert (found["skipped"], found["step"]) == (1, 2)
    assert found["last"] == {"code": "gradient-not-finite", "step": 2, "parameters": ["scale"]}
    assert app.same()


def test_a_step_model_keeps_what_has_a_nan_and_counts_it_as_python_does(app):
    package, data = app.packages["roots step model"], app.batches["roots"]
    before, after = app.save("before"), app.save("after")
    found = act(package, data, *calls("batch 0"), before, *calls("batch 2"), after)
    before, after = (contents(app.folder / name) for name in ("before", "after"))
    for kind in ("arrays", "moments"):
        changed = {name for name in before[kind] if before[kind][name] != after[kind][name]}
        assert changed == {"weight", "bias"}
    step_model = package / "step_model.onnx"
    _, module, optimizer = open_training(package, step_model_uri=step_model)
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
        arrays = {"words": np.array([1, 2, 3, last]), "labels": np.array([0, 1, 2, 0])}
        data.append(save_batch(folder / name, **arrays))
    return folder / "package", data


@pytest.mark.parametrize("way", [("optimizer",), ("reset", "optimizer", "reset", "optimizer")])
@pytest.mark.parametrize("kind", ["plain", "words"])
def test_gradients_of_a_step_that_is_void_are_never_used(kind, way, app, words):
    """One that was skipped or failed; after the next good one all is as if it had never been."""
    package, data = words if kind == "words" else (app.packages[kind], app.batches["pictures"])
    bad, code = ("train 1", "run-failed") if kind == "words" else ("train 2", "NaN")
    good = [*calls("train 0", "optimizer"), app.save("after")]
    found = act(package, data, *calls("batch 0", bad, *way), app.save("with"), *good)
    shutil.move(app.folder / "after", app.folder / "with after")
    assert found["results"][1] == code
    act(package, data, *calls("batch 0"), app.save("without"), *good)
    assert app.same()
    assert app.same("with after", "after")


def test_a_batch_that_is_refused_leaves_the_gradients_alone(app):
    asked = [{"do": "ask", "name": "no"}, *calls("null")]
    for name, wrong in {"with": asked, "without": []}.items():
        steps = [*calls("train 0", "reset"), *wrong, *calls("optimizer")]
        app.act("roots", *steps, app.save(name))
    assert app.same()


def test_gradients_that_another_session_spoiled_are_not_used(app):
    """Sessions of one state share its gradients, which are numbers after a step that is void."""
    other = {"on": "second"}
    save, end = (app.save(name, **other) for name in ("with", "after"))
    rate = {"do": "rate", "rate": "0.001", **other}  # which makes the second
    found = app.act("plain", rate, *calls("batch 0", "train 0", **other), *calls("train 2"),
                    *calls("optimizer", **other), save, *calls("train 1", "optimizer", **other),
                    end)  # fmt: skip
    assert (found["results"][3], found["skipped"]) == ("NaN", 1)
    plain = [*calls("batch 0", "eval 0"), app.save("without"), *calls("train 0", "train 1")]
    app.act("plain", *plain)
    ends = [contents(app.folder / name) for name in ("with", "without")]
    for key in ("optimizer", "moments"):  # a good step moved the running statistics
        assert ends[0][key] == ends[1][key]
    assert contents(app.folder / "after")["optimizer"][0] == 2


def test_a_reset_begins_the_count_of_batches_again(app):
    batch = ["batch 0"] * 3
    found = app.act("accumulating", *calls(*batch, "reset", *batch))
    assert found["step"] == 0
    whole = calls(*batch, "reset", *batch, "batch 1")
    assert app.act("accumulating", *whole)["step"] == 1


def test_one_batch_is_no_step_of_several(app):
    found = app.act("accumulating", *calls("step"))
    assert (found["results"], found["step"]) == (["step-of-several"], 0)


def test_a_state_goes_with_packages_that_lay_it_out_alike(app):
    """Or to none: and a session that cannot be made leaves it as it was."""
    sgd, groups, roots_package = app.folder / "sgd", app.folder / "groups", app.packages["roots"]
    for folder, options in (
        (sgd, {"optimizer": make_optimizer("sgd", {"momentum": 0.9})}),
        (groups, {"groups": (GroupRule("weight", 0.1, 0.0),)}),
    ):
        build_package(roots(), folder, loss="cross_entropy", step_model="never", **options)
    create = {"do": "create", "batch": 1, "checkpoint": app.folder / "trained"}
    found = app.act("roots", *calls("batch 0", "batch 1"), app.save("trained"),
                    {"do": "create", "packages": [groups]},
                    {**create, "packages": [groups]},
                    {**create, "packages": [sgd]},
                    {**create, "packages": [sgd, groups]},
                    {**create, "packages": [roots_package],
                     "optimizer": sgd / "optimizer_model.onnx"},
                    {"do": "create", "packages": [sgd]}, *calls("batch 1"))  # fmt: skip
    placed, loss, wrong, again, other, later, goes_on = found["results"][3:]
    assert (placed, wrong, other) == ("model-mismatch", "optimizer-mismatch", "model-mismatch")
    assert float(again) == float(loss) == float(goes_on)
    assert later == "optimizer-mismatch"


def test_a_name_that_no_output_has_is_refused(app):
    asked = [{"do": name, "name": "no"} for name in ("ask", "ask evaluation")]
    reserved = {"do": "property", "name": "odtpack.optimizer"}
    found = app.act("roots step model", *asked, reserved)
    assert found["results"] == ["unknown-output", "unknown-output", "property-type"]


def test_a_template_that_went_is_an_error_of_the_kit(app):
    folder = app.folder / "package"
    shutil.copytree(app.packages["roots"], folder)
    asked = [{"do": "lose", "name": "inference_template"}, *calls("export", "predict", path="no")]
    found = act(folder, app.batches["roots"], *asked)
    assert found["results"][1:] == ["package-incomplete"] * 2


def test_the_class_of_the_highest_score_is_that_of_numpy(tmp_path):
    """Of equal scores the first counts, 0 and -0 are equal, and NaN is above all numbers."""
    build_package(scores(), tmp_path / "package", loss="cross_entropy")
    rows = np.array([[-0.0, 0, -1], [0, np.nan, 2], [np.nan, 1, np.nan], [1, 2, 2]], np.float32)
    data = [save_batch(tmp_path / str(label), input=rows, labels=np.full(4, label))
            for label in range(3)]  # fmt: skip
    found = act(tmp_path / "package", data, *({"do": "accuracy", "batch": i} for i in range(3)))
    right = rows.argmax(axis=1)
    assert [float(each) for each in found["results"]] == [(right == i).mean() for i in range(3)]


def test_the_policy_stop_throws_once_all_is_put_back(app):
    for kind, code in (
        ("plain", "loss-not-finite"), ("step model", "loss-not-finite"),
        ("roots", "gradient-not-finite"),
    ):  # fmt: skip
        steps = calls("batch 0", "batch 2", "train 2")
        found = app.act(kind, *steps, app.save("with"), policy="stop")
        app.act(kind, *calls("batch 0"), app.save("without"))
        assert found["results"][1:3] == [code] * 2
        assert found["skipped"] == 2
        assert app.same()


@pytest.mark.parametrize("rate", ["-1.0", "NaN", "Infinity", "-0.001"])
def test_a_rate_that_is_negative_or_not_finite_is_refused(rate, app):
    linear = {"do": "linear", "warmup": 1, "total": 4, "rate": rate}
    good = {"do": "rate", "rate": "0.0"}
    asked = [{"do": "rate", "rate": rate}, linear, *calls("scheduler"), good]
    found = app.act("roots", *asked)
    assert found["results"] == ["bad-learning-rate", "bad-learning-rate", "bad-schedule", None]


def test_a_schedule_that_no_file_can_hold_is_refused(app):
    linear = {"do": "linear", "warmup": 0, "rate": "0.1"}
    found = app.act("roots", *({**linear, "total": total} for total in (2**53, 2**53 - 1)))
    assert found["results"] == ["bad-schedule", None]


def test_a_saved_schedule_of_another_version_is_refused(app):
    saved = {"initial_lr": 0.5, "kind": "linear", "total_steps": 100, "warmup_steps": 0}
    texts = [json.dumps({**saved, **more}) for more in
             ({}, {"power": 2}, {"floor": 0.1}, {"warmup_steps": None})]  # fmt: skip
    found = app.act("plain", *({"do": "restore", "text": text} for text in texts))
    assert found["results"] == ["0.5", *["bad-schedule"] * 3]
    assert found["rate"] == "0.5"


def test_nothing_is_evaluated_and_nothing_carried_onto_a_session(app):
    asked = ({"do": name} for name in ("evaluate none", "carry", "batch"))
    found = app.act("plain", *asked)
    assert found["results"][:2] == ["empty-batch", "busy"]
    assert float(found["results"][2]) > 0


def test_the_schedule_of_the_guide_is_that_of_python(app):
    """``registerLinearLRScheduler(10, 100, 0.001f)``: rates, losses and the state, to the bit."""
    guide = (kotlin_kit.ROOT / "docs" / "guides" / "kotlin.md").read_text()
    assert "session.registerLinearLRScheduler(10, STEPS.toLong(), 0.001f)" in guide
    assert "const val STEPS = 100" in guide
    package, data = app.packages["plain"], [app.batches["pictures"][0]]
    linear = {"do": "linear", "warmup": 10, "total": 100, "rate": "0.001"}
    found = act(package, data, linear, *calls(*["batch"] * 60), app.save("kotlin"))
    task = {"package": package, "batches": data, "steps": 60, "linear": (10, 100, 0.001),
            "save": app.folder / "python"}  # fmt: skip
    text = json.dumps(task, default=str)
    wanted = json.loads(kotlin_kit.python("tests.kits.python_training", text))["losses"]
    assert [float(loss) for loss in found["results"][1:-1]] == wanted
    ends = [contents(app.folder / name) for name in ("kotlin", "python")]
    assert read_checkpoint(app.folder / "kotlin").properties["odtpack.schedule"]
    for each in ends:
        each["properties"].pop("odtpack.schedule", None)
    assert ends[0] == ends[1]
