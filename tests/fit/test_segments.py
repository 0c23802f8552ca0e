"""A recipe that trains segment by segment is searched over what that leaves open."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from odtpack.build import build
from odtpack.fit import FitRequest, fit
from odtpack.fit.package_cache import step_work
from odtpack.fit.search_context import make_search_context
from odtpack.fit.space import SearchConstraints
from odtpack.recipe import BuildSpec
from odtpack_runtime import Package
from odtpack_simulator.device.kits import kit_of
from odtpack_simulator.device.profile import load_profile
from tests.adapters import llama
from tests.simulator.packages import make_profile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, and data for them."""
    folder = tmp_path_factory.mktemp("segments")
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        net (float[batch, 40] input) => (float[batch, 40] output) {
            hidden = MatMul (input, v)
            bent = Relu (hidden)
            output = MatMul (bent, w)
        }"""
    )
    random = np.random.default_rng(3)
    for name in "vw":
        value = random.standard_normal((40, 40), np.float32) / 6
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(model, folder / "model.onnx")
    rows = random.standard_normal((40, 40), np.float32)
    np.savez(folder / "data.npz", input=rows, target=rows)
    return folder


def request_of(folder: Path) -> FitRequest:
    return FitRequest(
        BuildSpec(folder / "model.onnx", "mse", segments=True),
        folder / "data.npz",
        (make_profile("any", 10**9),),
        wishes=SearchConstraints(batch_sizes=(8,), optimizers=("sgd",), learning_rates=(0.01,)),
        folder=folder,
        epochs=1,
        trials=2,
        finalists=1,
    )


def test_a_search(folder: Path) -> None:
    result = fit(request_of(folder))
    assert result.found
    assert all("segments = true" in each.recipe for each in result.pareto)
    assert {each.choice.frozen_dtype for each in result.pareto} == {"float32"}
    assert {each.choice.memory_budget for each in result.pareto} == {None}
    assert all(each.peak_bytes > 0 for each in result.pareto)


def test_work_counts_every_segment_as_often_as_it_runs(folder: Path, tmp_path: Path) -> None:
    """The first of the two products is computed twice, and so a little more than in one model."""
    found = {}
    for segments in (False, True):
        build(BuildSpec(folder / "model.onnx", "mse", segments=segments), tmp_path / str(segments))
        package = Package.open(tmp_path / str(segments))
        found[segments] = step_work(package, {"input": (8, 40), "target": (8, 40)})
    product = 2 * 8 * 40 * 40 / 8 + 4 * (8 * 40 + 40 * 40 + 8 * 40)
    assert found[False] < found[True] < found[False] + 2 * product


def test_an_adapter_leaves_nothing_else_to_freeze(
    folder: Path, llama_model: Path, tmp_path: Path
) -> None:
    ids = np.random.default_rng(0).integers(0, llama.VOCABULARY, (20, 10))
    np.savez(tmp_path / "data.npz", input_ids=ids, labels=ids)
    settings = BuildSpec(
        llama_model, "next_token", adapter="lora", adapter_on=("*.q_proj",), segments=True
    )
    context = make_search_context(settings, tmp_path / "data.npz", tmp_path, 0)
    assert [each.patterns for each in context.freezes] == [()]


@pytest.fixture(scope="module")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.exported(llama.llama(), tmp_path_factory.mktemp("llama") / "model.onnx")


@pytest.mark.parametrize(("device", "kit"), [("pixel-8a", "kotlin"), ("web/phone", "js")])
def test_devices_whose_apps_train_with_other_kits(device: str, kit: str, folder: Path) -> None:
    asked = dataclasses.replace(request_of(folder), profiles=(load_profile(device),))
    assert kit_of(load_profile(device).os) == kit
    assert fit(asked).found
