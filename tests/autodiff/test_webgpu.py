"""The gradient of one case of each rule in the forms for WebGPU, there and on the processor."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack.ort import webgpu
from odtpack_runtime.session.device import Device
from tests.autodiff.oracle import Array, Case, ask_torch, gradient_model
from tests.autodiff.representatives import rule_of
from tests.autodiff.test_rules import CASES
from tests.software_gpu import reason_without
from tests.sweep import split

WITHOUT = reason_without()
FIRST = [case for rule, case in {rule_of(case): case for case in reversed(CASES)}.items()]
DEVICES = [
    "CPUExecutionProvider",
    pytest.param("webgpu", marks=pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    split(FIRST, lambda case: case.op in {*webgpu._ALSO, "MaxPool"}, name=lambda case: case.id),
)
def test_gradient_is_that_of_the_processor(case: Case, device: str) -> None:
    expected, seeds = ask_torch(case)
    with np.errstate(over="ignore"):  # bounds of a Clip may be the largest float32
        model, names = gradient_model(case)
    known = {value.name: value.dtype for value in model.graph.inputs}
    given = case.present | {f"seed_{key}": seed for key, seed in seeds.items()}
    feeds = {n: np.asarray(a, known[n].numpy()) for n, a in given.items() if n in known}
    plain = ir.to_proto(model).SerializeToString()
    forms = ir.to_proto(webgpu.lower(model)).SerializeToString()
    running = [
        onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"]),
        Device(device).session(forms, onnxruntime.SessionOptions()),
    ]
    wanted = [names[name] for name in case.differentiated]
    right, found = (each.run(wanted, feeds) for each in running)
    for name, processor, other in zip(case.differentiated, right, found, strict=True):
        exact = expected.gradients[name]
        allowed = 1e-5 * np.abs(processor).max(initial=0)
        assert off(other, processor) <= allowed or off(other, exact) <= 2 * off(processor, exact)


def off(one: Array, other: Array) -> float:
    return float(np.abs(np.subtract(one, other, dtype=np.float64)).max(initial=0))


@pytest.mark.parametrize(
    "settings",
    [
        "kernel_shape = [5, 5], strides = [2, 2], pads = [2, 2, 2, 2]",
        "kernel_shape = [5, 3], dilations = [2, 1], storage_order = 1",
        "kernel_shape = [5, 5], strides = [3, 3], ceil_mode = 1",
        'kernel_shape = [2, 2], strides = [2, 2], auto_pad = "SAME_UPPER"',
    ],
)
def test_positions_of_maxima_are_those_of_the_kernel(settings: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N, 3, 13, 11] x)
        => (float[N, 3, a, b] y, int64[N, 3, a, b] i) {{ y, i = MaxPool <{settings}> (x) }}"""
    )
    forms = ir.to_proto(webgpu.lower(ir.from_proto(model)))
    x = np.random.default_rng(0).integers(-3, 3, (2, 3, 13, 11)).astype(np.float32)  # many equal
    wanted, found = (
        onnxruntime.InferenceSession(each.SerializeToString()).run(None, {"x": x})
        for each in (model, forms)
    )
    assert [node.op_type for node in forms.graph.node if len(node.output) > 1] == []
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one, other)
