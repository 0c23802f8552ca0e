"""Masks in place of activations: less memory where weights are frozen, and the same gradients."""

import hashlib
import os
import sys

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from odtpack.memory import early_masks
from odtpack.memory.schedule import Step
from odtpack.spec import MemorySpec
from odtpack_simulator.memory.runtime_graph import RuntimeGraph
from tests import zoo
from tests.memory.test_compile import BATCH, ROOT, build, feeds, run, written
from tests.model_text import LEVELS, parsed
from tests.packaging_tools import trainable_names
from tests.programs import ran

LAYERS = 10
SIZE = BATCH * 10 * 32 * 32
"""Elements of an activation."""

ACTIVATIONS = {
    "Relu": "Relu(c{i})",
    "ReLU6": "Clip(c{i}, zero, six)",
    "two-sided Clip": "Clip(c{i}, one, six)",
    "one-sided Clip": "Clip(c{i}, , six)",
    "LeakyRelu": "LeakyRelu<alpha = 0.1>(c{i})",
    "HardSigmoid": "HardSigmoid(c{i})",
    "ThresholdedRelu": "ThresholdedRelu<alpha = 0.5>(c{i})",
}


def network(activation: str) -> onnx.ModelProto:
    """Convolutions with biases, each with an activation, and the mean of each channel."""
    layers = " ".join(
        f"p{i} = Conv<pads = [1, 1, 1, 1]>(h{i}, w{i}) c{i} = Add(p{i}, b{i}) "
        f"h{i + 1} = {ACTIVATIONS[activation].format(i=i)}"
        for i in range(LAYERS)
    )
    random, shapes = np.random.default_rng(0), dict[str, tuple[int, ...]]()
    for i in range(LAYERS):
        shapes |= {f"w{i}": (10, 10, 3, 3), f"b{i}": (10, 1, 1)}
    return parsed(
        "chain (float[N, 10, 32, 32] h0) => (float[N, 10] y) "
        "<float zero = {0.0}, float one = {1.0}, float six = {6.0}> "
        f"{{ {layers} m = GlobalAveragePool(h{LAYERS}) y = Flatten(m) }}",
        **{n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()},
    )


BIASES = tuple(f"b{i}" for i in range(LAYERS))
ORDER = MemorySpec(batch=BATCH, limit=0, slowdown=0.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_the_activation(activation):
    model = network(activation)
    plain, compiled = (build(model, memory, BIASES) for memory in (None, ORDER))
    assert compiled.memory.after < compiled.memory.before
    given = feeds(model, plain)
    for level in LEVELS:
        wanted, found = run(plain, level, given), run(compiled, level, given)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{level} {name}")
    assert any(np.abs(value).max() > 1e-6 for name, value in wanted.items() if "grad" in name)


def kept(graph: RuntimeGraph) -> list[int]:
    """Sizes of the larger of the values that the forward pass leaves to the backward pass."""
    step = Step(graph)
    last = max(step.forward)
    alive = step.timeline().allocation.alive(last)
    return sorted(b.nbytes for b in alive if b.nbytes >= SIZE and b.first <= last < b.last)


@pytest.mark.parametrize("activation", ["Relu", "ReLU6", "LeakyRelu"])
def test_a_byte_is_kept_of_each_element(activation, tmp_path):
    graph = written(build(network(activation), ORDER, BIASES), tmp_path)
    assert kept(graph) == [SIZE] * LAYERS
    made = {"And", "Cast", "Greater", "Less"}
    masks = [
        index
        for index, node in enumerate(graph.nodes)
        if node.op_type in made and graph.values[node.outputs[0]].itemsize == 1
    ]
    assert len(masks) >= LAYERS
    assert max(masks) < max(Step(graph).forward)


def test_what_a_weight_gradient_reads_is_kept_once(tmp_path):
    """The weight of the third convolution is trained, and reads the second activation."""
    graph = written(build(network("ReLU6"), ORDER, (*BIASES, "w2")), tmp_path)
    assert kept(graph) == [SIZE] * (LAYERS - 1) + [4 * SIZE]


def test_nothing_changes_where_weight_gradients_read_the_activations(monkeypatch):
    """But for the last, and one mask of ten is not worth an order of its own."""
    names = (*BIASES, *(f"w{i}" for i in range(LAYERS)))
    found = build(network("ReLU6"), ORDER, names)
    monkeypatch.setattr(early_masks, "compute_early", lambda *_: frozenset())
    plain = build(network("ReLU6"), ORDER, names)
    assert ir.to_proto(found.training) == ir.to_proto(plain.training)


def test_what_is_computed_again_goes_with_masks():
    """Biases of a MobileNetV2 with training-mode batch normalization, and half of the memory."""
    model = zoo.mobilenet_v2(32, width_mult=0.35, stages=3, batch_norm="train")
    biases = tuple(name for name in trainable_names(model) if name.endswith("bias"))
    plain, ordered = build(model, None, biases), build(model, ORDER, biases)
    limit = ordered.memory.after * 3 // 4
    halved = build(model, MemorySpec(batch=BATCH, limit=limit, slowdown=1.0), biases)
    assert halved.memory.decisions
    assert halved.memory.after < ordered.memory.after < 0.8 * ordered.memory.before
    given = feeds(model, plain)
    for level in LEVELS:
        wanted, *found = (run(each, level, given) for each in (plain, ordered, halved))
        for name, value in wanted.items():
            scale = max(1e-3, float(np.abs(value).max()))
            for each in found:
                np.testing.assert_allclose(each[name], value, rtol=0, atol=2e-5 * scale)


DIGEST = """
from tests.memory.test_early_masks import digest
print(digest())
"""


def digest() -> str:
    """Of a training model with masks in place of activations."""
    training = build(network("Relu"), ORDER, BIASES).training
    return hashlib.sha256(ir.to_proto(training).SerializeToString()).hexdigest()


def test_two_builds_give_the_same_bytes():
    """Once more in a process that puts sets into another order."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    assert ran(sys.executable, "-c", DIGEST, env=environment).stdout.split()[-1] == digest()
