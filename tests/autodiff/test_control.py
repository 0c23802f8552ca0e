"""If, Loop and Scan against finite differences of the ONNX reference, and PyTorch.

A case is a whole model in ONNX text. Its gradients run in ONNX Runtime with optimizations
off and on, in float32, and once in float64.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from odtpack import targets
from odtpack.autodiff.expand import expand
from odtpack.loading import infer_shapes
from tests.autodiff.oracle import (
    LEVELS,
    STEP,
    Array,
    add_gradients,
    cast_floats,
    cotangents,
    ints,
    normal,
    session,
    spread,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with control flow.

    Attributes:
        label: Name of the case.
        text: Inputs, outputs and nodes in ONNX text.
        feeds: Inputs by name; floats are differentiated unless in ``fixed``.
        torch: The same function of the same inputs, by name.
        opset: Opset of the model.
        fixed: Float inputs whose gradients are not wanted.
        differences: Whether the reference implementation runs the model rightly.
    """

    label: str
    text: str
    feeds: Mapping[str, Array]
    torch: Callable[..., Any]
    opset: int = 17
    fixed: Sequence[str] = ()
    differences: bool = True

    @property
    def wrt(self) -> list[str]:
        return [n for n, a in self.feeds.items() if a.dtype.kind == "f" and n not in self.fixed]

    def model(self, floats: type = np.float32) -> ir.Model:
        text = self.text if floats is np.float32 else re.sub(r"\bfloat\b", "double", self.text)
        header = f'<ir_version: 8, opset_import: ["" : {self.opset}]>\n'
        model = ir.from_proto(onnx.parser.parse_model(header + text))
        targets.stamp(model)
        return infer_shapes(model)


def cases(label: str, text: str, feeds: Mapping[str, Array], function: Callable[..., Any],
          opsets: Sequence[int] = (17,), **options: Any) -> list[Case]:  # fmt: skip
    return [
        Case(f"{label}-opset{opset}", text, feeds, function, opset, **options) for opset in opsets
    ]


EVERY = (12, 13, 16, 19, 21, 24, 26)
W, X, H = normal(3, 3, seed=1, scale=0.5), normal(5, 2, 3, seed=2), normal(2, 3, seed=3)
B = normal(3, seed=4)


def rnn(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    outputs = []
    for part in x:
        h = torch.tanh(part @ w + h @ w + b)
        outputs.append(h * part)
    return h, torch.stack(outputs)


RNN = """
net (float[5, 2, 3] x, float[2, 3] h, float[3, 3] w, float[3] b)
    => (float[2, 3] last, float[5, 2, 3] ys) {
  last, ys = Scan <num_scan_inputs = 1, body = turn (float[2, 3] s, float[2, 3] part)
      => (float[2, 3] t, float[2, 3] y) {
    xw = MatMul(part, w) sw = MatMul(s, w) sum = Add(xw, sw) biased = Add(sum, b)
    t = Tanh(biased) y = Mul(t, part)
  }> (h, x)
}"""

CASES = [
    *cases("scan", RNN, {"x": X, "h": H, "w": W, "b": B}, rnn, EVERY),
]


def run_torch(case: Case) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Outputs, cotangents and gradients."""
    tensors = {n: torch.tensor(cast_floats(a, np.float64)) for n, a in case.feeds.items()}
    for name in case.wrt:
        tensors[name].requires_grad_()
    given = case.torch(**tensors)
    names = [str(value.name) for value in case.model().graph.outputs]
    listed = [given] if isinstance(given, torch.Tensor) else list(given)
    outputs = dict(zip(names, listed, strict=True))
    floats = {n: y for n, y in outputs.items() if y.dtype.is_floating_point}
    seeds = cotangents({name: tuple(y.shape) for name, y in floats.items()})
    loss = sum((y * torch.tensor(seeds[name])).sum() for name, y in floats.items())
    assert isinstance(loss, torch.Tensor)
    found = torch.autograd.grad(
        loss, [tensors[n] for n in case.wrt], allow_unused=True, materialize_grads=True
    )
    gradients = {n: g.numpy() for n, g in zip(case.wrt, found, strict=True)}
    return {n: y.detach().numpy() for n, y in outputs.items()}, seeds, gradients


def slopes(case: Case, seeds: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Random directions, and central differences along them, by input."""
    evaluator = ReferenceEvaluator(ir.to_proto(case.model(np.float64)))
    feeds = {name: cast_floats(array, np.float64) for name, array in case.feeds.items()}
    generator = np.random.default_rng(11)

    def loss(**moved: Array) -> float:
        results = evaluator.run(list(seeds), {**feeds, **moved})
        return float(sum((y * s).sum() for y, s in zip(results, seeds.values(), strict=True)))

    result = {}
    for name in case.wrt:
        x = feeds[name]
        ways = generator.standard_normal((3, *x.shape))
        steps = [loss(**{name: x + STEP * d}) - loss(**{name: x - STEP * d}) for d in ways]
        result[name] = ways, np.array(steps) / (2 * STEP)
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_gradient_is_that_of_both_oracles(case: Case) -> None:
    outputs, seeds, expected = run_torch(case)
    if case.differences:
        for name, (ways, found) in slopes(case, seeds).items():
            along = (ways * expected[name]).reshape(len(found), -1).sum(1)
            np.testing.assert_allclose(along, found, rtol=1e-5, atol=1e-6, err_msg=name)
    for floats, level, rtol in (
        (np.float32, "off", 1e-4),
        (np.float32, "all", 1e-4),
        (np.float64, "off", 1e-9),
    ):
        model = expand(case.model(floats), case.wrt)
        model, names = add_gradients(model, case.wrt)
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto)
        running = session(proto, level)
        given = {**case.feeds, **{f"seed_{name}": seed for name, seed in seeds.items()}}
        feeds = {n: cast_floats(a, floats) if n in case.feeds else a.astype(floats)
                 for n, a in given.items()}  # fmt: skip
        results = running.run(None, feeds)
        by_name = dict(zip((y.name for y in running.get_outputs()), results, strict=True))
        for name, y in outputs.items():
            np.testing.assert_allclose(by_name[name], y, rtol=rtol, atol=1e-5, err_msg=name)
        assert sorted(names) == sorted(case.wrt)
        for name, gradient in names.items():
            assert by_name[gradient].shape == case.feeds[name].shape
            np.testing.assert_allclose(
                by_name[gradient], expected[name], rtol=rtol, atol=rtol / 10,
                err_msg=f"{name} ({level})",
            )  # fmt: skip
