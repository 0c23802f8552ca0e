"""Frozen weights in float16 and int8: sizes, exact results, and what stays float32."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from odtpack import choices
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.package import parameters as storage
from odtpack_runtime import CheckpointState
from odtpack_runtime import OdtpackError as RuntimeOdtpackError
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.model_text import computed, parsed, with_arrays
from tests.packages.mutations import edit
from tests.packaging_tools import batch, losses_of_steps, open_module, open_training
from tests.refused import refused

HEADS = {"mobilenet": "classifier.*", "transformer": "classifier.*"}


def model_of(name: str) -> onnx.ModelProto:
    if name == "mobilenet":
        return zoo.mobilenet_v2(batch_norm="fold", size=64, width_mult=0.35)
    return zoo.transformer_encoder(layers=2, d=64, ff=128, T=16, opset=14)


def expanded(checkpoint: Path) -> dict[str, np.ndarray]:
    """Oracle: parameters as float32, by numpy from what the checkpoint holds."""
    state = CheckpointState.load_checkpoint(checkpoint)
    values = {name: parameter.data for name, parameter in state.parameters}
    return {
        name: value.astype(np.float32) * values.get(f"{name}.int8_scale", np.float32(1))
        for name, value in values.items()
        if not name.endswith(".int8_scale")
    }


@pytest.mark.parametrize("kind", choices.STORAGES)
@pytest.mark.parametrize("name", HEADS)
def test_results_are_those_of_the_expanded_weights(name, kind, tmp_path):
    """Bit for bit, without optimizations, the float32 package of the weights that numpy expands."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = model_of(name)
    x, labels = batch(model, 4)
    build_package(
        model, tmp_path / "small", loss="cross_entropy", train=[HEADS[name]], frozen_storage=kind
    )
    twin = with_arrays(model, expanded(tmp_path / "small" / "checkpoint"))
    build_package(twin, tmp_path / "float32", loss="cross_entropy", train=[HEADS[name]])
    results, exports = [], []
    for folder in (tmp_path / "small", tmp_path / "float32"):
        state, module, optimizer = open_training(folder, options)
        losses = losses_of_steps(module, optimizer, [(x, labels)] * 3)
        module.eval()
        losses.append(float(module(x, labels)[0]))
        trained = {key: p.data.copy() for key, p in state.parameters if p.requires_grad}
        results.append((losses, trained))
        module.export_model_for_inferencing(folder / "inference.onnx", ["output"])
        exports.append(onnx.load(folder / "inference.onnx"))
    assert results[0][0] == results[1][0]
    for key, value in results[1][1].items():
        np.testing.assert_array_equal(results[0][1][key], value, err_msg=key)
    # An export holds float32 weights, and no trace of how they were stored.
    assert [n.op_type for n in exports[0].graph.node] == [n.op_type for n in exports[1].graph.node]
    assert [i.name for i in exports[0].graph.input] == [i.name for i in exports[1].graph.input]
    one, other = ({t.name: t for t in e.graph.initializer} for e in exports)
    assert set(one) == set(other)
    for key, tensor in other.items():
        np.testing.assert_array_equal(
            numpy_helper.to_array(one[key]), numpy_helper.to_array(tensor), strict=True
        )


# Largest change of a logit, as a share of the largest logit, and bytes of the checkpoint.
BOUNDS = {"float16": (2e-3, 0.62), "int8": (6e-2, 0.45)}


@pytest.mark.parametrize("kind", choices.STORAGES)
@pytest.mark.parametrize("name", HEADS)
def test_accuracy_and_size(name, kind, tmp_path):
    model = model_of(name)
    x, labels = batch(model, 8)
    outputs, sizes, exact = [], [], []
    for folder, chosen in ((tmp_path / "float32", None), (tmp_path / kind, kind)):
        manifest = build_package(
            model, folder, loss="cross_entropy", train=[HEADS[name]], outputs=["output"],
            frozen_storage=chosen,
        )  # fmt: skip
        outputs.append(open_module(folder)(x, labels)[1])
        sizes.append(manifest.files.checkpoint.size_bytes)
        exact += computed(with_arrays(model, expanded(folder / "checkpoint")), input=x)
    change, share = BOUNDS[kind]
    for output, other in zip(outputs, exact, strict=True):  # optimized: the same up to rounding
        np.testing.assert_allclose(output, other, rtol=1e-4, atol=1e-5)
    assert 0 < np.abs(outputs[1] - outputs[0]).max() < change * np.abs(outputs[0]).max()
    assert sizes[1] < share * sizes[0]


def test_int8_is_within_half_a_step_of_its_channel():
    random = np.random.default_rng(0)
    magnitudes = np.geomspace(1e-6, 1e3, 24).reshape(-1, 1, 1, 1)
    array = (random.standard_normal((24, 16, 3, 3)) * magnitudes).astype(np.float32)
    array[3] = 0
    stored = storage.store("w", ir.tensor(array, name="w"), "int8")
    values, scale = stored.values.numpy(), stored.scale.numpy()
    assert values.dtype == np.int8
    assert scale.shape == (24, 1, 1, 1)  # the axis along which magnitudes differ
    assert np.abs(values).max(axis=(1, 2, 3)).tolist() == [0 if i == 3 else 127 for i in range(24)]
    error = np.abs(values * scale.astype(np.float64) - array)
    assert (error <= scale.astype(np.float64) * (0.5 + 1e-5)).all()


def test_int8_rounds_ties_to_even():
    array = np.zeros((4, 256), np.float32)
    array[:, 0] = 127  # a step of one
    array[:, 1:7] = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    stored = storage.store("w", ir.tensor(array, name="w"), "int8")
    assert stored.values.numpy()[0, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_only_large_weights_are_stored_so(tmp_path):
    """Norms, biases, embeddings of positions that are added, and small weights stay float32."""
    manifest = build_package(
        model_of("transformer"), tmp_path / "p", loss="cross_entropy", train=["classifier.*"],
        frozen_storage="int8",
    )  # fmt: skip
    parameters = {p.name: p for p in manifest.parameters}
    for name, parameter in parameters.items():
        if parameter.dtype == "int8":
            assert name.endswith("weight")
            assert "norm" not in name
            assert parameter.role == "frozen"
            assert parameter.model_dtype == "float32"
            assert parameters[parameter.scale].dtype == "float32"
        else:
            assert parameter.dtype == "float32"
            assert parameter.scale is None
    assert parameters["token_embedding.weight"].dtype == "int8"
    assert parameters["layers.0.linear1.weight"].dtype == "int8"
    assert parameters["position_embedding.weight"].dtype == "float32"
    assert Package.open(tmp_path / "p").manifest == manifest


ONES, RANDOM = np.ones((40, 40)), np.random.default_rng(1).standard_normal((40, 40))


def linear(folder: Path, weight: np.ndarray, kind: str, opset: int = 17, **options: Any) -> Path:
    """A package of two layers: weight [40, 40] frozen, head [40, 3] trained."""
    model = parsed(
        "(float[batch, 40] x) => (float[batch, 3] y) { h = MatMul(x, weight) y = MatMul(h, head) }",
        opset, ir_version=7, weight=weight.astype(np.float32),
        head=np.full((40, 3), 0.1, np.float32),
    )  # fmt: skip
    options = {"train": ["head"], "frozen_storage": kind} | options
    build_package(model, folder / "p", loss="cross_entropy", **options)
    return folder / "p"


def with_one(value: float) -> np.ndarray:
    weight = ONES.copy()
    weight[3, 4] = value
    return weight


def test_values_beyond_float16_are_refused(tmp_path):
    said = "'weight' holds 70000, and float16 ends at"
    with refused("value-out-of-range", said, hint="int8"):
        linear(tmp_path, with_one(-70000), "float16")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_beyond_int8_are_refused(tmp_path, bad):
    with pytest.raises(OdtpackError, match="infinity or NaN"):
        linear(tmp_path, with_one(bad), "int8", freeze=["weight"])


def test_nothing_to_store_is_an_error(tmp_path):
    with refused("storage-not-used"):
        linear(tmp_path, ONES, "float16", train=())


def test_what_a_base_stores_is_stored_already(tmp_path):
    with refused("storage-not-used", "--base int8 stores them already") as caught:
        linear(tmp_path, ONES, "int8", base="int8")
    assert caught.value.hint == "leave --frozen-dtype out"


@pytest.mark.parametrize("kind", choices.STORAGES)
def test_lowest_opset(kind, tmp_path):
    folder = linear(tmp_path, RANDOM, kind, 12, outputs=["y"])
    x = np.random.default_rng(2).standard_normal((2, 40)).astype(np.float32)
    output = open_module(folder)(x, np.array([0, 2]))[1]
    values = expanded(folder / "checkpoint")
    exact = x.astype(np.float64) @ values["weight"] @ values["head"]
    np.testing.assert_allclose(output, exact, rtol=1e-4, atol=1e-5)


def test_one_vector_of_all_parameters(tmp_path):
    """Float16 widens exactly, and comes back; int8 is refused by name."""
    for kind in choices.STORAGES:
        module = open_module(linear(tmp_path / kind, RANDOM, kind))
        assert module.get_contiguous_parameters(trainable_only=True).numpy().size == 120
        if kind == "int8":
            with pytest.raises(RuntimeOdtpackError, match="int8"):
                module.get_contiguous_parameters(trainable_only=False)
            continue
        half = RANDOM.astype(np.float16)
        vector = module.get_contiguous_parameters(trainable_only=False).numpy()
        np.testing.assert_array_equal(vector[:1600], half.astype(np.float32).ravel())
        twice = onnxruntime.OrtValue.ortvalue_from_numpy(2 * vector)
        module.copy_buffer_to_parameters(twice, trainable_only=False)
        np.testing.assert_array_equal(module.state.parameters["weight"].data, 2 * half)


def test_nominal_packages_load_values_later(tmp_path):
    folder = linear(tmp_path, RANDOM, "int8", nominal=True)
    x, labels = np.ones((2, 40), np.float32), np.array([0, 1])
    whole, nominal = (open_module(folder, name) for name in ("checkpoint", "nominal_checkpoint"))
    nominal.state.load_parameters(folder / "checkpoint")
    assert whole(x, labels) == nominal(x, labels)


def test_manifest_names_a_scale_that_exists(tmp_path):
    folder = linear(tmp_path, ONES, "int8")

    def rename(content: dict[str, Any]) -> None:
        (stored,) = (each for each in content["parameters"] if each["name"] == "weight")
        stored["scale"] = "nothing"

    edit(folder, rename)
    with pytest.raises(RuntimeOdtpackError, match="scale must be one of the parameters"):
        Package.open(folder)
