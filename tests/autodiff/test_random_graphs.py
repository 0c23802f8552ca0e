"""Gradients of random graphs against central differences of the ONNX reference in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, note, settings
from onnx.reference import ReferenceEvaluator

from odtpack.autodiff.expand import expand
from tests.autodiff.oracle import LEVELS, Array, add_gradients, cotangents, session
from tests.autodiff.random_graphs import RandomGraph, random_graphs

STEP = 1e-6
DIRECTIONS = 2


def in_single(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model in float32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.DOUBLE:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return copy


def slopes(proto: onnx.ModelProto, graph: RandomGraph, seeds: dict[str, Array],
           directions: dict[str, list[Array]]) -> dict[str, Array]:  # fmt: skip
    """Central differences of the sum of seeds times outputs, along each direction."""
    evaluator, names = ReferenceEvaluator(proto), list(seeds)

    def loss(feeds: dict[str, Array]) -> float:
        outputs = evaluator.run(names, feeds)
        return float(sum((seeds[n] * y).sum() for n, y in zip(names, outputs, strict=True)))

    return {
        name: np.array([
            loss({**graph.feeds, name: graph.feeds[name] + STEP * d})
            - loss({**graph.feeds, name: graph.feeds[name] - STEP * d})
            for d in along
        ]) / (2 * STEP)
        for name, along in directions.items()
    }  # fmt: skip


SETTINGS = settings(
    max_examples=200, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


@settings(SETTINGS, max_examples=25)
@given(random_graphs())
def test_gradients_are_those_of_finite_differences(graph: RandomGraph) -> None:
    check(graph)


@pytest.mark.sweep
@SETTINGS
@given(random_graphs())
def test_gradients_of_many_graphs_are_those_of_finite_differences(graph: RandomGraph) -> None:
    check(graph)


def check(graph: RandomGraph) -> None:
    note(f"{graph.steps} {'float32' if graph.single else 'float64'}")
    proto = ir.to_proto(graph.model)
    note(onnx.printer.to_text(proto))
    names = [value.name for value in proto.graph.output]
    outputs = ReferenceEvaluator(proto).run(names, graph.feeds)
    seeds = cotangents({n: y.shape for n, y in zip(names, outputs, strict=True)})
    random = np.random.default_rng(3)
    directions = {
        name: [random.standard_normal(x.shape) for _ in range(DIRECTIONS)]
        for name, x in graph.feeds.items()
    }
    expected = slopes(proto, graph, seeds, directions)

    model = ir.from_proto(in_single(proto) if graph.single else proto)
    model, gradients = add_gradients(expand(model, list(graph.feeds)), list(graph.feeds))
    floats = np.float32 if graph.single else np.float64
    feeds = graph.feeds | {f"seed_{name}": seed for name, seed in seeds.items()}
    for level in LEVELS:
        running = session(ir.to_proto(model), level)
        found = running.run(
            list(gradients.values()), {n: np.asarray(a, floats) for n, a in feeds.items()}
        )
        for name, gradient in zip(gradients, found, strict=True):
            assert gradient.shape == graph.feeds[name].shape
            along = np.array([(gradient * d).sum() for d in directions[name]])
            scale = 1 + np.abs(gradient).sum()
            tolerance = 1e-5 if graph.single else 1e-7
            np.testing.assert_allclose(
                along, expected[name], rtol=1e-5, atol=tolerance * scale,
                err_msg=f"{name} ({level})",
            )  # fmt: skip
    unreached = set(graph.feeds) - set(gradients)
    for name in unreached:
        np.testing.assert_allclose(expected[name], 0, atol=1e-12)
