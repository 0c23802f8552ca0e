"""The gradient of one case of each rule in the forms for WebGPU, there and on the processor."""

from __future__ import annotations

import numpy as np
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
    "case", split(FIRST, lambda case: case.op in webgpu._ALSO, name=lambda case: case.id)
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
