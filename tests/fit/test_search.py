"""Searches with real training."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.build import build
from odtpack.errors import OdtpackError
from odtpack.fit import FitProgress, FitRequest, fit
from odtpack.fit.package_cache import PackageCache, step_work
from odtpack.fit.page import render_fit
from odtpack.fit.search_context import SearchContext, Trained, Trial, make_search_context, train
from odtpack.fit.space import SearchConstraints
from odtpack.recipe import BuildSpec, Recipe, read_recipe
from odtpack_runtime.package.package import Package
from odtpack_simulator.device.kits import kit_of
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.executor import LocalExecutor, RayExecutor
from odtpack_simulator.simulation import simulate
from odtpack_simulator.values.units import parse_quantity
from tests import zoo
from tests.adapters import llama
from tests.fit.conftest import Files, device
from tests.fit.test_candidates import recipe_of, space_of
from tests.refused import refused
from tests.simulator.graphs import weighted
from tests.simulator.profiles import make_profile

FIXED = """
[parameters]
train = ["*"]
[optimizer]
kind = "adamw"
[schedule]
kind = "constant"
learning_rate = 0.01
[batch]
size = 64
"""
"""All is said but the micro-batch."""


@pytest.fixture(scope="module")
def plans(
    files: Files, ground: SearchContext, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, int]:
    """Planned peak by micro-batch of what :data:`FIXED` leaves open."""
    folder = tmp_path_factory.mktemp("plans")
    recipe = recipe_of(files, folder, FIXED)
    candidates = space_of(ground, recipe).candidates()
    base = dataclasses.replace(BuildSpec.of(recipe), outputs=("output",))
    workshop = PackageCache(base, folder / "packages", ground.shapes, 256)
    both = zip(candidates, workshop.plan(candidates, LocalExecutor()), strict=True)
    return {c.micro_batch: p.peak_bytes for c, p in both if not c.freeze.patterns}


def test_a_budget_that_only_smaller_batches_keep(files, plans, tmp_path):
    """The same samples make a step, in smaller batches: less memory, the same training.

    The limit lies between what the whole batch and what a sixteenth of it need.
    """
    recipe = recipe_of(files, tmp_path, FIXED)
    limit = int(0.5 * plans[64] + 0.5 * plans[4])
    assert plans[64] * 0.9 > limit > plans[4]
    budgets = parse_budgets(f'[budgets]\npeak_memory = "{limit} B"\n'.encode())
    told: list[FitProgress] = []
    profiles = device("slow", gflops=1, watts=2), device("hot", gflops=100, watts=30)
    request = FitRequest(
        BuildSpec.of(recipe), files.data, profiles, recipe=recipe, budgets=budgets,
        device_names=("pixel-8a",), folder=tmp_path, epochs=4, finalists=1,
    )  # fmt: skip
    result = fit(request, progress=told.append)

    assert result.candidates == 5
    left = {each.choice.micro_batch: each for each in result.left}
    assert (left[64].stage, left[64].number) == ("plan", 1)
    assert "the planned peak" in left[64].reason
    assert result.found
    assert {each.choice.micro_batch for each in result.pareto} <= {32, 16, 8, 4}
    assert all(each.peak_bytes <= limit for each in result.pareto)
    names = [objective.name for objective in result.objectives]
    assert names == ["accuracy", "peak_bytes", "time_s", "energy_j"]
    assert result.not_judged == []
    assert result.trained == 3
    assert told[0].title == "build the recipe as it is"

    for each in result.pareto:
        if len(names) == 2:
            continue
        slow, hot = each.devices
        assert each.time_s == slow.time_s.typical > hot.time_s.typical
        assert slow.energy_j.typical == pytest.approx(1 * slow.time_s.typical)
        assert hot.energy_j.typical == pytest.approx(29 * hot.time_s.typical)
        assert each.energy_j == max(slow.energy_j.typical, hot.energy_j.typical)

    # The whole batch, trained as it would have been, does as well: a step is the same.
    best = result.pareto[0]
    whole = train_whole(recipe, files, tmp_path)
    assert whole.metric > 0.5  # it learned, so that equality means something
    assert best.loss == pytest.approx(whole.loss, rel=1e-3)
    assert best.metric == pytest.approx(whole.metric, abs=1 / 64)
    assert whole.peak_bytes > limit

    # The recipe builds, and simulating it gives what the search told.
    (tmp_path / "recipe-1.toml").write_text(best.recipe)
    read = read_recipe(tmp_path / "recipe-1.toml")
    assert read.devices() == ["pixel-8a"]
    build(BuildSpec.of(read), read.package)
    options = {"batch_size": read.table.batch.at_once, "epochs": 4, "seed": 0}
    again = judge(simulate(read.package, files.data, profiles, **options), budgets)
    assert not again.over_budget
    assert again.training.metric_after == best.metric
    assert again.training.eval_loss_after == best.loss
    assert again.package.package_bytes == best.package_bytes
    assert again.devices[0].memory.peak_bytes == pytest.approx(best.peak_bytes, rel=0.1)


def test_what_takes_too_much_memory_computes_again(tmp_path):
    """All is fixed, batch and micro-batch too: nothing but a memory budget can help."""
    model = zoo.transformer_encoder(vocab=50, d=64, layers=2, T=64, ff=256)
    onnx.save(model, tmp_path / "model.onnx")
    files = Files(tmp_path, tmp_path / "model.onnx", tmp_path / "data.npz")
    tokens = np.random.default_rng(0).integers(0, 50, (80, 64))
    labels = (tokens[:, 0] % 10).astype(np.int64)
    np.savez(files.data, **{model.graph.input[0].name: tokens, "labels": labels})
    recipe = recipe_of(files, tmp_path, FIXED.replace("size = 64", "size = 16\nmicro_batch = 16"))
    settings = BuildSpec.of(recipe)
    build(settings, tmp_path / "plain")
    package = Package.open(tmp_path / "plain")
    shapes = {spec.name: (16, *spec.shape[1:]) for spec in package.manifest.input_specs()}
    peak = plan_memory(package, shapes).peak.nbytes  # type: ignore[arg-type]
    limit = int(0.85 * peak)
    budgets = parse_budgets(f'[budgets]\npeak_memory = "{limit} B"\n'.encode())
    request = FitRequest(
        settings, files.data, (device("slow", gflops=1, watts=2),), recipe=recipe, budgets=budgets,
        folder=tmp_path, epochs=1,
    )  # fmt: skip
    result = fit(request)
    assert result.found
    (best,) = result.pareto
    assert best.choice.memory_budget is not None
    assert limit - 1e4 < parse_quantity(best.choice.memory_budget, "bytes") <= limit
    assert best.peak_bytes <= limit
    (tmp_path / "recipe-1.toml").write_text(best.recipe)
    read = BuildSpec.of(read_recipe(tmp_path / "recipe-1.toml"))
    assert (read.memory_budget, read.memory_batch) == (best.choice.memory_budget, 16)
    assert "to fit" in render_fit(result).decode()


def test_brute_force_agrees_and_a_search_goes_on(files, tmp_path):
    """Two of four candidates, then all from the journal; each trained by itself as well."""
    recipe = recipe_of(files, tmp_path, FIXED + "micro_batch = 64\n")
    wishes = SearchConstraints(learning_rates=(0.0001, 0.3, 0.01, 0.001))
    one = dataclasses.replace(wishes, learning_rates=(0.0001,))
    request = FitRequest(
        BuildSpec.of(recipe), files.data, (make_profile("phone", None),), recipe=recipe,
        wishes=wishes, budgets=parse_budgets(b"[budgets]\naccuracy_floor = 0.5\n"), folder=tmp_path,
        epochs=3, trials=2, study=tmp_path / "study",
    )  # fmt: skip
    assert fit(request).trained == 2
    request = dataclasses.replace(request, trials=20)
    told: list[FitProgress] = []
    result = fit(request, progress=told.append)
    assert result.trained == result.candidates == 4
    assert [now.done for now in told if now.title == "train"] == [3, 4]
    with refused("study-of-another-search"):
        fit(dataclasses.replace(request, wishes=one))

    ground = make_search_context(BuildSpec.of(recipe), files.data, tmp_path, 0)
    package = str(tmp_path / "recipe")
    metrics = [
        train(Trial(package, ground.files, ground.schedule(64, 1, 3), rate)).metric or 0.0
        for rate in wishes.learning_rates
    ]
    assert result.found == (max(metrics) >= 0.5)
    assert result.found
    assert result.pareto[0].metric == max(metrics)


def train_whole(recipe: Recipe, files: Files, folder: Path) -> Trained:
    """Train what the recipe says as it is."""
    settings = dataclasses.replace(BuildSpec.of(recipe), outputs=("output",))
    (folder / "whole").mkdir()
    ground = make_search_context(settings, files.data, folder / "whole", 0)
    package = folder / "whole" / "recipe"
    return train(Trial(str(package), ground.files, ground.schedule(64, 1, 4), 0.01))


def test_training_repeats_and_runs_side_by_side(ground, tmp_path):
    """The figures that decide who goes on are the same in every run, in whatever process."""
    build(ground.base, tmp_path / "package")
    trial = Trial(str(tmp_path / "package"), ground.files, ground.schedule(16, 1, 1), 0.003)
    first, second = LocalExecutor(2).map(train, [trial, trial])
    assert (first.metric, first.loss) == (second.metric, second.loss)
    assert first.metric is not None
    assert first.problem is None
    long = dataclasses.replace(trial, schedule=ground.schedule(16, 1, 3))
    stopped = train(dataclasses.replace(long, rivals=((0.0,) * 3,) * 2))
    assert (stopped.stopped_after, stopped.metric) == (1, first.metric)


@pytest.mark.sweep  # simulator/replay/test_executor.py has what is particular to Ray
def test_the_search_on_ray_chooses_the_same(files):
    """A cluster that sees none of this machine's files: packages and data are sent there."""
    ray = pytest.importorskip("ray", reason="Ray has no build for this Python")
    request = FitRequest(
        files.settings, files.data, (make_profile("phone", None),), epochs=2, trials=4, finalists=1,
        seed=3,
    )  # fmt: skip
    here = fit(request)
    try:
        there = fit(request, executor=RayExecutor("local", 2))
    finally:
        ray.shutdown()
    assert [s.metric for s in there.pareto] == [s.metric for s in here.pareto]
    # The head of a recipe names the peak that was measured, which is not the same every time.
    recipes = [[s.recipe.partition("\n\n")[2] for s in found.pareto] for found in (here, there)]
    assert recipes[0] == recipes[1]
    assert here.pareto


def test_a_training_that_fails_is_a_result(ground, tmp_path):
    build(ground.base, tmp_path / "package")
    trial = Trial(str(tmp_path / "package"), ground.files, ground.schedule(64, 1, 1), 1e30)
    assert train(trial).problem == "the loss was not finite"
    assert "package" in str(train(dataclasses.replace(trial, package="nowhere")).problem)
    # One step, whose loss came before it, and which left nothing to evaluate.
    once = dataclasses.replace(trial, schedule=ground.schedule(ground.samples, 1, 1))
    assert train(once).problem == "the loss on held-out samples was not finite"


class TestBadInput:
    def request(self, files: Files, **changes: object) -> FitRequest:
        arguments = {"settings": files.settings, "data": files.data}
        phones = {"profiles": (make_profile("phone", None),)}
        return FitRequest(**(arguments | phones | changes))  # type: ignore[arg-type]

    @pytest.mark.parametrize(("changes", "code"), [
        ({"profiles": ()}, "no-device"), ({"epochs": 0}, "bad-epochs"),
        ({"trials": 0}, "bad-trials"), ({"finalists": 0}, "bad-finalists"),
    ])  # fmt: skip
    def test_arguments(self, files, changes, code):
        with refused(code):
            self.request(files, **changes)

    def test_a_recipe_for_another_runtime(self, files):
        settings = dataclasses.replace(files.settings, runtime="ort-training")
        with refused("target-cannot", "cannot replay"):
            self.request(files, settings=settings)

    def test_data_of_another_model(self, files, tmp_path):
        np.savez(tmp_path / "other.npz", input=np.zeros((9, 3, 8, 8), np.float32))
        with pytest.raises(OdtpackError) as caught:
            fit(self.request(files, data=tmp_path / "other.npz"))
        assert caught.value.code in ("data-missing", "data-shape")

    def test_a_schedule_longer_than_the_training(self, files, tmp_path):
        recipe = recipe_of(files, tmp_path, '[schedule]\nkind = "linear"\nwarmup_steps = 1000\n')
        request = self.request(files, settings=BuildSpec.of(recipe), recipe=recipe, trials=1)
        with refused("bad-schedule", hint="pass more --epochs"):
            fit(request)


# A recipe that trains segment by segment is searched over what that leaves open.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and data for them."""
    folder = tmp_path_factory.mktemp("segments")
    random = np.random.default_rng(3)
    weights = {name: random.standard_normal((40, 40), np.float32) / 6 for name in "vw"}
    model = weighted(
        """net (float[batch, 40] input) => (float[batch, 40] output) {
            hidden = MatMul (input, v)
            bent = Relu (hidden)
            output = MatMul (bent, w)
        }""",
        weights,
    )
    onnx.save(model, folder / "model.onnx")
    rows = random.standard_normal((40, 40), np.float32)
    np.savez(folder / "data.npz", input=rows, target=rows)
    return folder


def request_of(folder: Path) -> FitRequest:
    settings = BuildSpec(folder / "model.onnx", "mse", segments=True)
    wishes = SearchConstraints(batch_sizes=(8,), optimizers=("sgd",), learning_rates=(0.01,))
    return FitRequest(
        settings, folder / "data.npz", (make_profile("any", 10**9),), wishes=wishes, folder=folder,
        epochs=1, trials=2, finalists=1,
    )  # fmt: skip


def test_a_search(folder):
    result = fit(request_of(folder))
    assert result.found
    assert all("segments = true" in each.recipe for each in result.pareto)
    assert {each.choice.frozen_dtype for each in result.pareto} == {"float32"}
    assert {each.choice.memory_budget for each in result.pareto} == {None}
    assert all(each.peak_bytes > 0 for each in result.pareto)


def test_work_counts_every_segment_as_often_as_it_runs(folder, tmp_path):
    """The first of the two products is computed twice, and so a little more than in one model."""
    found = {}
    for segments in (False, True):
        build(BuildSpec(folder / "model.onnx", "mse", segments=segments), tmp_path / str(segments))
        package = Package.open(tmp_path / str(segments))
        found[segments] = step_work(package, {"input": (8, 40), "target": (8, 40)})
    product = 2 * 8 * 40 * 40 / 8 + 4 * (8 * 40 + 40 * 40 + 8 * 40)
    assert found[False] < found[True] < found[False] + 2 * product


def test_an_adapter_leaves_nothing_else_to_freeze(folder, llama_model, tmp_path):
    ids = np.random.default_rng(0).integers(0, llama.VOCABULARY, (20, 10))
    np.savez(tmp_path / "data.npz", input_ids=ids, labels=ids)
    options = {"adapter": "lora", "adapter_on": ("*.q_proj",), "segments": True}
    settings = BuildSpec(llama_model, "next_token", **options)
    context = make_search_context(settings, tmp_path / "data.npz", tmp_path, 0)
    assert [each.patterns for each in context.freezes] == [()]


@pytest.fixture(scope="module")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.exported(llama.llama(), tmp_path_factory.mktemp("llama") / "model.onnx")


@pytest.mark.parametrize(("device", "kit"), [("pixel-8a", "kotlin"), ("web/phone", "js")])
def test_devices_whose_apps_train_with_other_kits(device, kit, folder):
    asked = dataclasses.replace(request_of(folder), profiles=(load_profile(device),))
    assert kit_of(load_profile(device).os) == kit
    assert fit(asked).found
