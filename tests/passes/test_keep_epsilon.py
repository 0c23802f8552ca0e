"""ONNX Runtime with all optimizations computes what the nodes of a normalization say."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from odtpack.artifacts import LossType, OptimType, generate_artifacts
from odtpack.passes.patterns import keep_epsilon
from tests.autodiff.oracle import session
from tests.packaging_tools import open_training
from tests.passes.tools import assert_unchanged, changed, parse, run

CENTERED = "mean = ReduceMean <axes = [-1]> (x) d = Sub(x, mean) "
ROOT = "square = Pow(d, two) var = ReduceMean <axes = [-1]> (square) plus = Add(var, eps) "
LAYER_NORM = (
    CENTERED + ROOT + "root = Sqrt(plus) normal = Div(d, root) "
    "scaled = Mul(normal, scale) y = Add(scaled, bias)"
)
RMS_NORM = (
    "square = Pow(x, two) var = ReduceMean <axes = [-1]> (square) plus = Add(var, eps) "
    "root = Sqrt(plus) normal = Div(x, root) scaled = Mul(normal, scale) y = Add(scaled, bias)"
)
HEAD = "net (float[N, 4] x, float[4] scale, float[4] bias{more}) => (float[N, 4] y)"
FIXED = "two = Constant <value = float {2}> () eps = Constant <value = float {0.5}> () "
VECTOR = "eps = Constant <value = float[3, 1] {0.5, 1.5, 2.5}> () "
# What is unusual, further inputs, constants, the nodes.
MISREAD = {
    "an input": (", float eps", FIXED.partition("eps")[0], LAYER_NORM),
    "an input in front": (
        ", float eps", FIXED.partition("eps")[0], LAYER_NORM.replace("(var, eps)", "(eps, var)")
    ),
    "an input of an RMS norm": (", float eps", FIXED.partition("eps")[0], RMS_NORM),
    "computed": (
        ", float e", FIXED.partition("eps")[0] + "eps = Exp(e) ", LAYER_NORM
    ),
    "a constant in front": ("", FIXED, LAYER_NORM.replace("(var, eps)", "(eps, var)")),
    "a vector": ("", FIXED.partition("eps")[0] + VECTOR, LAYER_NORM),
    "another power": ("", FIXED.replace("{2}", "{4}"), LAYER_NORM),
    "a power that is an input": (", float two", FIXED.partition("() ")[2], LAYER_NORM),
}  # fmt: skip

RIGHT_SINCE_1_32 = MISREAD.keys() - {"another power", "a power that is an input"}


def right_here() -> Collection[str]:
    """What the installed release reads as it is written."""
    release = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    return RIGHT_SINCE_1_32 if release >= (1, 32) else ()


def arrays(model: ir.Model) -> dict[str, np.ndarray]:
    """Values for every input, by name."""
    random = np.random.default_rng(0)
    shapes = {str(v.name): [d if isinstance(d, int) else 3 for d in v.shape or ()]
              for v in model.graph.inputs}  # fmt: skip
    found = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    found |= {"eps": np.array(0.5)} if "eps" in found else {}
    found |= {"two": np.array(2.0 if "eps" in found else 4.0)} if "two" in found else {}
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


@pytest.mark.parametrize("kind", MISREAD)
def test_a_fused_kernel_does_not_take_another_epsilon(kind: str) -> None:
    more, constants, body = MISREAD[kind]
    model = parse(f"{HEAD.format(more=more)} {{ {constants} {body} }}")
    feeds = arrays(model)
    expected = run(model, feeds)["y"]  # as the graph is written
    (unchanged,) = session(ir.to_proto(model), "all").run(None, feeds)
    # Once no release that misreads it is supported, the pass can go.
    read_right = np.allclose(unchanged, expected, rtol=1e-3)
    assert read_right == (kind in right_here()), onnxruntime.__version__
    after = changed(keep_epsilon, model)
    (found,) = session(ir.to_proto(after), "all").run(None, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "body", [LAYER_NORM, RMS_NORM, LAYER_NORM.replace("Pow(d, two)", "Mul(d, d)")]
)
def test_what_is_read_right_is_still_fused(body: str) -> None:
    assert_unchanged(keep_epsilon, parse(f"{HEAD.format(more='')} {{ {FIXED} {body} }}"))


def test_another_sum_is_left_alone() -> None:
    body = "plus = Add(x, bias) root = Sqrt(plus) y = Mul(root, scale)"
    assert_unchanged(keep_epsilon, parse(f"{HEAD.format(more='')} {{ {body} }}"))


@pytest.mark.parametrize("role", ["requires_grad", "frozen_params"])
@pytest.mark.parametrize("body", [LAYER_NORM, RMS_NORM], ids=["layer norm", "RMS norm"])
def test_evaluation_agrees_with_training_where_epsilon_is_a_parameter(
    body: str, role: str, tmp_path: Path
) -> None:
    head = "net (float[N, 4] x) => (float[N, 4] y)"
    two = FIXED.partition("eps")[0]
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> {head} {{ {two} {body} }}'
    )
    random = np.random.default_rng(0)
    values = {"scale": random.standard_normal(4), "bias": random.standard_normal(4), "eps": 0.5}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array, np.float32), name)
        for name, array in values.items()
    )
    named = {"requires_grad": ["scale", "bias"], "frozen_params": []}
    named[role] = [*named[role], "eps"]
    generate_artifacts(
        proto, **named, loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=tmp_path
    )
    _, module, _ = open_training(tmp_path)
    x, target = (random.standard_normal((5, 4), dtype=np.float32) for _ in range(2))
    d = x - x.mean(-1, keepdims=True) if body is LAYER_NORM else x
    y = d / np.sqrt((d**2).mean(-1, keepdims=True) + 0.5) * values["scale"] + values["bias"]
    expected = ((y - target) ** 2).mean()
    np.testing.assert_allclose(float(module(x, target)), expected, rtol=1e-5)
    module.eval()
    np.testing.assert_allclose(float(module(x, target)), expected, rtol=1e-5)
