"""What varies, in which order it is tried, and that each candidate is a recipe that builds."""

import dataclasses
import math
from pathlib import Path

import pytest

from odtpack.build import build, build_package
from odtpack.choices import OrtFormat, Platform, Style
from odtpack.fit.finalists import Surroundings, recipe_text
from odtpack.fit.package_cache import (
    Ceiling,
    _flops,
    _graph_work,
    memory_ceiling,
    size_ceiling,
    step_work,
)
from odtpack.fit.search_context import SearchContext
from odtpack.fit.space import Candidate, SearchConstraints, Space, open_space
from odtpack.fit.study import Study
from odtpack.recipe import BuildSpec, Recipe, read_recipe
from odtpack.spec import TextSpec
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.schedules import ScheduleSpec
from odtpack_simulator.device.app import MARGIN, runtime_bytes, with_margin
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.figures.limits import parse_budgets
from tests import zoo
from tests.fit.conftest import Files
from tests.refused import refused
from tests.simulator.factory import make_result
from tests.simulator.graphs import load_model, weighted


def space_of(ground: SearchContext, recipe: Recipe | None = None, **wishes: object) -> Space:
    base = ground.base if recipe is None else BuildSpec.of(recipe)
    wanted = SearchConstraints(**wishes)  # type: ignore[arg-type]
    more = {"train_samples": 256, "fixed_batch": None}
    return open_space(base, recipe, wanted, ground.freezes, **more)


def recipe_of(files: Files, folder: Path, more: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(f'model = "{files.model}"\n[loss]\nkind = "cross_entropy"\n{more}')
    return read_recipe(path)


class TestSpace:
    def test_everything_is_open_without_a_recipe(self, ground):
        space = space_of(ground)
        assert space.batch_sizes == (32, 64, 16)
        assert space.micro_batches[16] == (16, 8, 4, 2, 1)
        titles = ["nothing", "first 1 of 3 layers", "all but the head"]
        assert [freeze.title for freeze in space.freezes] == titles
        assert [kind for kind, _, _ in space.optimizers] == ["adamw", "sgd", "lion", "adafactor"]
        assert dict(space.optimizers[1][1]) == {"momentum": 0.9}
        assert space.storages == (None, "float16", "int8")
        candidates = space.candidates()
        assert [each.number for each in candidates] == list(range(1, len(candidates) + 1))
        first = candidates[0]
        assert (first.batch_size, first.micro_batch, first.freeze.patterns) == (32, 32, ())
        assert (first.optimizer, first.learning_rate, first.storage) == ("adamw", 0.001, None)
        # 15 ways to batch, 12 optimizers and rates; the second convolution's weight alone is
        # large enough to be stored otherwise.
        assert [freeze.storable for freeze in space.freezes] == [False, False, True]
        assert len(candidates) == 15 * 12 * (1 + 1 + 3)

    def test_what_stands_in_the_recipe_is_fixed(self, files, ground, tmp_path):
        more = (
            '[optimizer]\nkind = "adam"\nbeta1 = 0.8\n[batch]\nsize = 24\nmicro_batch = 8\n'
            '[formats]\nfrozen_dtype = "int8"\n[schedule]\nkind = "cosine"\nlearning_rate = 0.01\n'
        )
        space = space_of(ground, recipe_of(files, tmp_path, more))
        assert space.optimizers == (("adam", (("beta1", 0.8),), (0.01,)),)
        assert space.micro_batches == {24: (8,)}
        assert space.storages == ("int8",)
        assert {each.freeze.title for each in space.candidates()} == {"all but the head"}

    def test_a_recipe_that_leaves_keys_out_leaves_them_open(self, files, ground, tmp_path):
        space = space_of(ground, recipe_of(files, tmp_path, "[batch]\nsize = 12\n[formats]\n"))
        assert space.micro_batches == {12: (12, 6, 3)}
        assert space.storages == (None, "float16", "int8")
        assert len(space.optimizers) == 4

    def test_options_narrow(self, ground):
        space = space_of(
            ground, batch_sizes=(8,), optimizers=("sgd", "adam"), learning_rates=(0.5, 0.5, 0.1)
        )
        assert space.micro_batches == {8: (8, 4, 2, 1)}
        assert space.optimizers == (
            ("sgd", (("momentum", 0.9),), (0.5, 0.1)),
            ("adam", (), (0.5, 0.1)),
        )

    def test_a_model_that_fixes_its_batch(self, ground):
        def open_for(fixed: int, **wishes: object) -> Space:
            wanted = SearchConstraints(**wishes)  # type: ignore[arg-type]
            more = {"train_samples": 40, "fixed_batch": fixed}
            return open_space(ground.base, None, wanted, ground.freezes, **more)

        assert open_for(16).micro_batches == {16: (16,), 32: (16,)}
        assert open_for(40).micro_batches == {40: (40,)}
        with refused("bad-batch-size", "a step of 24 samples cannot be split into"):
            open_for(16, batch_sizes=(24,))

    @pytest.mark.parametrize(("wishes", "code"), [
        ({"learning_rates": (0.0,)}, "bad-learning-rate"),
        ({"learning_rates": (float("nan"),)}, "bad-learning-rate"),
        ({"learning_rates": (float("inf"),)}, "bad-learning-rate"),
        ({"batch_sizes": (0,)}, "bad-batch-size"),
    ])  # fmt: skip
    def test_bad_wishes(self, wishes, code):
        with refused(code):
            SearchConstraints(**wishes)  # type: ignore[arg-type]

    def test_too_many_and_none(self, ground):
        rates = tuple(0.001 * n for n in range(1, 400))
        with refused("space-too-large"):
            space_of(ground, learning_rates=rates).candidates()
        open_now = space_of(ground)
        space = dataclasses.replace(open_now, storages=("int8",), freezes=ground.freezes[:1])
        with refused("nothing-to-vary"):
            space.candidates()


class TestRecipes:
    def test_every_candidate_is_read_back(self, ground, tmp_path):
        path = tmp_path / "recipe.toml"
        for candidate in space_of(ground).candidates()[::7]:
            check(candidate, ground.base, path)

    def test_everything_that_a_recipe_can_say_is_kept(self, files, ground, tmp_path):
        """Loss options, groups, clipping, schedules, formats, limits, and odd names."""
        base = dataclasses.replace(
            ground.base,
            loss_options={"weight": (0.5,) * 10, "ignore_index": -1, "label_smoothing": 1e-07},
            loss_inputs=("output",), freeze=('conv1.b\\"ias', "umlaut ü\x7f\u2028"),
            decay_vectors=False, clip_norm=1.5, groups=(("fc.*", 10.0, None), ("conv*", 1.0, 0.25)),
            schedule=ScheduleSpec("multistep", {"milestones": (3, 5), "gamma": 0.5}),
            ort_format=OrtFormat((Style.RUNTIME,), (Platform.ARM, Platform.AMD64)), nominal=True,
            onnxruntime="1.20",
        )  # fmt: skip
        (tmp_path / "budgets.toml").write_text("[budgets]\nfinal_loss = 1\n")
        limits = {"peak_memory": "1 MB", "class": {"ios": {"final_loss": 2}}}
        for budgets in (None, tmp_path / "budgets.toml", limits):
            texts = TextSpec(str(tmp_path / "t.json"), 9, str(tmp_path / "a.jinja"), end="")
            around = Surroundings(
                tmp_path, "p/q", ("pixel-8a", "./my phone.toml"), budgets, ("one\ntwo",), texts
            )
            for candidate in space_of(ground).candidates()[::101]:
                read = check(candidate, base, tmp_path / "recipe.toml", around)
                assert read.package == tmp_path / "p/q"
                assert read.texts() == texts
                assert read.table.target.devices[0] == "pixel-8a"
                given = read.budgets()
                assert (given is None) == (budgets is None)
                if isinstance(budgets, dict):
                    assert "peak_memory" in given.overall()
                    assert "final_loss" in given.narrowed("any", "ios")

    def test_a_group_goes_with_the_last_of_its_parameters(self, ground, tmp_path):
        """``conv1.*`` is the first pattern that matches conv1, and has nothing else."""
        groups = (("conv1.*", 2.0, None), ("conv*", 3.0, None), ("fc.*", 4.0, None))
        base = dataclasses.replace(ground.base, groups=groups)
        scales = {}
        for freeze in ground.freezes:
            candidate = next(c for c in space_of(ground).candidates() if c.freeze == freeze)
            settings = candidate.settings(base)
            build(settings, tmp_path / f"{len(scales)}")
            scales[freeze.title] = [scale for _, scale, _ in settings.groups]
        assert scales == {
            "nothing": [2.0, 3.0, 4.0], "first 1 of 3 layers": [3.0, 4.0],
            "all but the head": [4.0],
        }  # fmt: skip

    def test_a_spread_of_them_builds(self, ground, tmp_path):
        candidates = space_of(ground).candidates()
        for candidate in Study(candidates, 1, 5).ask(10):
            read = check(candidate, ground.base, tmp_path / "recipe.toml")
            manifest = build(BuildSpec.of(read), tmp_path / f"package-{candidate.number}")
            assert manifest.accumulation_steps == candidate.accumulation_steps
            assert manifest.optimizer.kind == candidate.optimizer
            assert manifest.schedule.learning_rate == candidate.learning_rate
            trained = [math.prod(p.shape) for p in manifest.parameters if p.role == "trainable"]
            assert sum(trained) == candidate.freeze.trained
            stored = {p.dtype for p in manifest.parameters if p.role == "frozen"}
            assert (candidate.storage in stored) == (candidate.storage is not None)


def check(
    candidate: Candidate, base: BuildSpec, path: Path, around: Surroundings | None = None
) -> Recipe:
    """Write a recipe, read it, and compare what it says."""
    wanted = candidate.settings(base)
    around = around or Surroundings(path.parent, "package")
    path.write_text(recipe_text(wanted, candidate.batch_size, around), encoding="utf-8")
    read = read_recipe(path)
    found = BuildSpec.of(read)
    assert found.model.resolve() == wanted.model.resolve()
    assert found.canonical_json() == wanted.canonical_json()
    assert read.table.batch.size == candidate.batch_size
    assert read.table.batch.at_once == candidate.micro_batch
    return read


# What is dropped before training is what the judge would refuse.

NAMES = ["google/pixel-8a", "apple/iphone-16-pro"]
BUDGETS = """
[budgets]
package_size = "6 MB"
memory_headroom = "20 %"
peak_memory = { limit = "1 MB", level = "warn" }
[class.android]
peak_memory = "200 MB"
[device."apple/iphone-16-pro"]
package_size = "5 MB"
"""


def profiles() -> list:  # type: ignore[type-arg]
    return [load_profile(name) for name in NAMES]


@pytest.mark.parametrize("scale", [0.2, 0.8, 0.95, 1.0, 1.05, 1.3, 5.0, 30.0])
@pytest.mark.parametrize("text", ["", BUDGETS])
def test_excess_agrees_with_the_judge(scale, text):
    budgets = parse_budgets(text.encode())
    result = judge(make_result(NAMES, scale=scale), budgets)
    checks = [check for _, check in result.all_checks() if check.level == "error"]
    memory = ("memory_limit", "peak_memory", "memory_headroom")
    failed = any(check.metric in memory and check.status == "fail" for check in checks)
    ceiling = memory_ceiling(profiles(), budgets)
    peak = with_margin(max(device.memory.peak_bytes for device in result.devices))
    assert (ceiling.excess(peak) > 0) == failed


def test_size():
    budgets = parse_budgets(BUDGETS.encode())
    ceiling = size_ceiling(profiles(), budgets)
    assert ceiling.limit == 5e6
    result = judge(make_result(NAMES), budgets)
    assert 5e6 in [check.limit for _, check in result.all_checks() if check.status == "fail"]
    assert ceiling.excess(result.package.package_bytes) > 0
    assert "budgets.toml" in ceiling.describe("the package", 6e6)


def test_no_limit():
    assert size_ceiling(profiles(), parse_budgets(b"")) is None
    assert memory_ceiling([], parse_budgets(b"")) is None


def test_a_limit_of_nothing_is_exceeded_by_anything():
    assert Ceiling(0, "a budget").excess(1) == float("inf")


def test_headroom_leaves_the_rest_of_what_is_granted():
    """At a share other than half, and where no other limit is lower; the app is in it, too."""
    profile = load_profile("google/pixel-8a")
    budgets = parse_budgets(b'[budgets]\nmemory_headroom = "20 %"\napp_footprint = "50 MB"')
    ceiling = memory_ceiling([profile], budgets)
    left = 0.8 * (profile.memory_limit_bytes() or 0) - 50e6
    # What may be taken and what a process of that kit takes besides is what is left.
    planned = int(ceiling.limit / (1 + MARGIN))
    assert ceiling.limit + runtime_bytes("kotlin", "android", planned) == pytest.approx(left)


# The counted work of operators against figures by hand, and of packages against each other.


@pytest.mark.parametrize(("text", "shapes", "flops", "moved"), [
    ("f (float[b, 3, 4] x) => (float[b, 3, 5] y) { y = MatMul (x, w) }",
     {"x": (2, 3, 4), "w": (4, 5)}, 2 * (2 * 3 * 5) * 4, 4 * (24 + 20 + 30)),
    ("f (float[4, b] x) => (float[b, 5] y) { y = Gemm <transA = 1> (x, w) }",
     {"x": (4, 3), "w": (4, 5)}, 2 * (3 * 5) * 4, 4 * (12 + 20 + 15)),
    ("f (float[b, 4, 6, 6] x) => (float[b, 8, 4, 4] y) { y = Conv <group = 2> (x, w) }",
     {"x": (2, 4, 6, 6), "w": (8, 2, 3, 3)},
     2 * (2 * 8 * 4 * 4) * (2 * 3 * 3), 4 * (288 + 144 + 256)),
    ("f (float[b, 4, 5, 5] x) => (float[b, 3, 7, 7] y) { y = ConvTranspose (x, w) }",
     {"x": (2, 4, 5, 5), "w": (4, 3, 3, 3)},
     2 * (2 * 4 * 5 * 5) * (3 * 3 * 3), 4 * (200 + 108 + 294)),
    ("f (float[b, 5] x) => (float[b, 5] y) { y = Neg (x) }", {"x": (3, 5)}, 0, 4 * (15 + 15)),
])  # fmt: skip
def test_operators(text, shapes, flops, moved):
    weights = {name: shape for name, shape in shapes.items() if name != "x"}
    graph = load_model(weighted(text, weights), {"x": shapes["x"]})
    known = {v.name: (v.shape, v.itemsize) for v in graph.values.values() if v.shape is not None}
    (node,) = [each for each in graph.nodes if each.op_type not in ("Reshape", "Squeeze")][-1:]
    assert _flops(node, known) == flops
    if len(graph.nodes) == 1:
        assert _graph_work(graph, {}) == moved + flops / 8


def test_freezing_saves_work_and_accumulation_repeats_it(tmp_path):
    model = zoo.cnn(size=8, width=(8, 16))
    works = {}
    kinds = {
        "all": {},
        "head": {"freeze": ["conv1.*", "conv2.*"]},
        "parts": {"accumulation_steps": 4},
    }
    for name, options in kinds.items():
        build_package(model, tmp_path / name, loss="cross_entropy", **options)  # type: ignore[arg-type]
        package = Package.open(tmp_path / name)
        batch = 8 if name == "parts" else 32
        shapes = {"input": (batch, 1, 8, 8), "labels": (batch,)}
        works[name] = step_work(package, shapes)
        assert works[name] == step_work(package, shapes)
    assert works["head"] < 0.6 * works["all"]
    # The same samples, and the gradients and weights four times.
    assert works["all"] < works["parts"] < 1.5 * works["all"]
