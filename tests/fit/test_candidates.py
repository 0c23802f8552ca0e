"""What varies, in which order it is tried, and that each candidate is a recipe that builds."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from odtpack.build import build
from odtpack.choices import OrtFormat, Platform, Style
from odtpack.errors import OdtpackError
from odtpack.fit.finalists import Surroundings, recipe_text
from odtpack.fit.search_context import SearchContext
from odtpack.fit.space import Candidate, SearchConstraints, Space, open_space
from odtpack.fit.study import Study
from odtpack.recipe import BuildSpec, Recipe, read_recipe
from odtpack_runtime.training.schedules import ScheduleSpec
from tests.fit.conftest import Files


def space_of(ground: SearchContext, recipe: Recipe | None = None, **wishes: object) -> Space:
    base = ground.base
    if recipe is not None:
        base = BuildSpec.of(recipe)
    return open_space(
        base,
        recipe,
        SearchConstraints(**wishes),  # type: ignore[arg-type]
        ground.freezes,
        train_samples=256,
        fixed_batch=None,
    )


def recipe_of(files: Files, folder: Path, more: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(f'model = "{files.model}"\n[loss]\nkind = "cross_entropy"\n{more}')
    return read_recipe(path)


class TestSpace:
    def test_everything_is_open_without_a_recipe(self, ground: SearchContext) -> None:
        space = space_of(ground)
        assert space.batch_sizes == (32, 64, 16)
        assert space.micro_batches[16] == (16, 8, 4, 2, 1)
        assert [freeze.title for freeze in space.freezes] == [
            "nothing",
            "first 1 of 3 layers",
            "all but the head",
        ]
        assert [kind for kind, _, _ in space.optimizers] == ["adamw", "sgd", "lion", "adafactor"]
        assert dict(space.optimizers[1][1]) == {"momentum": 0.9}
        assert space.storages == (None, "float16", "int8")
        candidates = space.candidates()
        assert [each.number for each in candidates] == list(range(1, len(candidates) + 1))
        first = candidates[0]
        assert (first.batch_size, first.micro_batch, first.freeze.patterns) == (32, 32, ())
        assert (first.optimizer, first.learning_rate, first.storage) == (
            "adamw",
            0.001,
            None,
        )
        # 15 ways to batch, 12 optimizers and rates; the second convolution's weight alone is
        # large enough to be stored otherwise.
        assert [freeze.storable for freeze in space.freezes] == [False, False, True]
        assert len(candidates) == 15 * 12 * (1 + 1 + 3)

    def test_what_stands_in_the_recipe_is_fixed(
        self, files: Files, ground: SearchContext, tmp_path: Path
    ) -> None:
        more = (
            '[optimizer]\nkind = "adam"\nbeta1 = 0.8\n[batch]\nsize = 24\nmicro_batch = 8\n'
            '[formats]\nfrozen_dtype = "int8"\n[schedule]\nkind = "cosine"\nlearning_rate = 0.01\n'
        )
        space = space_of(ground, recipe_of(files, tmp_path, more))
        assert space.optimizers == (("adam", (("beta1", 0.8),), (0.01,)),)
        assert space.micro_batches == {24: (8,)}
        assert space.storages == ("int8",)
        assert {each.freeze.title for each in space.candidates()} == {"all but the head"}

    def test_a_recipe_that_leaves_keys_out_leaves_them_open(
        self, files: Files, ground: SearchContext, tmp_path: Path
    ) -> None:
        space = space_of(ground, recipe_of(files, tmp_path, "[batch]\nsize = 12\n[formats]\n"))
        assert space.micro_batches == {12: (12, 6, 3)}
        assert space.storages == (None, "float16", "int8")
        assert len(space.optimizers) == 4

    def test_options_narrow(self, ground: SearchContext) -> None:
        space = space_of(
            ground, batch_sizes=(8,), optimizers=("sgd", "adam"), learning_rates=(0.5, 0.5, 0.1)
        )
        assert space.micro_batches == {8: (8, 4, 2, 1)}
        assert space.optimizers == (
            ("sgd", (("momentum", 0.9),), (0.5, 0.1)),
            ("adam", (), (0.5, 0.1)),
        )

    def test_a_model_that_fixes_its_batch(self, ground: SearchContext) -> None:
        def open_for(fixed: int, **wishes: object) -> Space:
            return open_space(
                ground.base,
                None,
                SearchConstraints(**wishes),  # type: ignore[arg-type]
                ground.freezes,
                train_samples=40,
                fixed_batch=fixed,
            )

        assert open_for(16).micro_batches == {16: (16,), 32: (16,)}
        assert open_for(40).micro_batches == {40: (40,)}
        with pytest.raises(
            OdtpackError, match="a step of 24 samples cannot be split into"
        ) as caught:
            open_for(16, batch_sizes=(24,))
        assert caught.value.code == "bad-batch-size"

    @pytest.mark.parametrize(
        ("wishes", "code"),
        [
            ({"learning_rates": (0.0,)}, "bad-learning-rate"),
            ({"learning_rates": (float("nan"),)}, "bad-learning-rate"),
            ({"learning_rates": (float("inf"),)}, "bad-learning-rate"),
            ({"batch_sizes": (0,)}, "bad-batch-size"),
        ],
    )
    def test_bad_wishes(self, wishes: dict[str, object], code: str) -> None:
        with pytest.raises(OdtpackError) as caught:
            SearchConstraints(**wishes)  # type: ignore[arg-type]
        assert caught.value.code == code

    def test_too_many_and_none(self, ground: SearchContext) -> None:
        rates = tuple(0.001 * n for n in range(1, 400))
        with pytest.raises(OdtpackError) as caught:
            space_of(ground, learning_rates=rates).candidates()
        assert caught.value.code == "space-too-large"
        space = dataclasses.replace(
            space_of(ground), storages=("int8",), freezes=ground.freezes[:1]
        )
        with pytest.raises(OdtpackError) as caught:
            space.candidates()
        assert caught.value.code == "nothing-to-vary"


class TestRecipes:
    def test_every_candidate_is_read_back(self, ground: SearchContext, tmp_path: Path) -> None:
        path = tmp_path / "recipe.toml"
        for candidate in space_of(ground).candidates()[::7]:
            check(candidate, ground.base, path)

    def test_everything_that_a_recipe_can_say_is_kept(
        self, files: Files, ground: SearchContext, tmp_path: Path
    ) -> None:
        """Loss options, groups, clipping, schedules, formats, limits, and odd names."""
        base = dataclasses.replace(
            ground.base,
            loss_options={"weight": (0.5,) * 10, "ignore_index": -1, "label_smoothing": 1e-07},
            loss_inputs=("output",),
            freeze=('conv1.b\\"ias', "umlaut ü\x7f\u2028"),
            decay_vectors=False,
            clip_norm=1.5,
            groups=(("fc.*", 10.0, None), ("conv*", 1.0, 0.25)),
            schedule=ScheduleSpec("multistep", {"milestones": (3, 5), "gamma": 0.5}),
            ort_format=OrtFormat((Style.RUNTIME,), (Platform.ARM, Platform.AMD64)),
            nominal=True,
            onnxruntime="1.20",
        )
        (tmp_path / "budgets.toml").write_text("[budgets]\nfinal_loss = 1\n")
        limits = {"peak_memory": "1 MB", "class": {"ios": {"final_loss": 2}}}
        for budgets in (None, tmp_path / "budgets.toml", limits):
            around = Surroundings(
                tmp_path, "p/q", ("pixel-8a", "./my phone.toml"), budgets, ("one\ntwo",)
            )
            for candidate in space_of(ground).candidates()[::101]:
                read = check(candidate, base, tmp_path / "recipe.toml", around)
                assert read.package == tmp_path / "p/q"
                assert read.table.target.devices[0] == "pixel-8a"
                given = read.budgets()
                assert (given is None) == (budgets is None)
                if isinstance(budgets, dict):
                    assert given is not None
                    assert "peak_memory" in given.overall()
                    assert "final_loss" in given.narrowed("any", "ios")

    def test_a_group_goes_with_the_last_of_its_parameters(
        self, ground: SearchContext, tmp_path: Path
    ) -> None:
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
            "nothing": [2.0, 3.0, 4.0],
            "first 1 of 3 layers": [3.0, 4.0],
            "all but the head": [4.0],
        }

    def test_a_spread_of_them_builds(self, ground: SearchContext, tmp_path: Path) -> None:
        candidates = space_of(ground).candidates()
        for candidate in Study(candidates, 1, 5).ask(10):
            path = tmp_path / "recipe.toml"
            read = check(candidate, ground.base, path)
            manifest = build(BuildSpec.of(read), tmp_path / f"package-{candidate.number}")
            assert manifest.accumulation_steps == candidate.accumulation_steps
            assert manifest.optimizer.kind == candidate.optimizer
            assert manifest.schedule is not None
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
    path.write_text(
        recipe_text(wanted, candidate.batch_size, around or Surroundings(path.parent, "package")),
        encoding="utf-8",
    )
    read = read_recipe(path)
    found = BuildSpec.of(read)
    assert found.model.resolve() == wanted.model.resolve()
    assert found.canonical_json() == wanted.canonical_json()
    assert read.table.batch.size == candidate.batch_size
    assert read.table.batch.at_once == candidate.micro_batch
    return read
