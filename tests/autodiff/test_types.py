"""The table of cases once more, in float64 and in float16.

In float64 operators that ONNX Runtime has no kernel for are written out by ``passes.double``.
In float16 it computes in float32 what it has no kernel for, and rounds in between.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.passes import double
from tests.autodiff.oracle import Case, ask_torch, cast_floats, gradient_model, session
from tests.autodiff.test_rules import CASES

# Relative to a gradient's largest element. Attributes are float32: 1e-6. Values of float16 have
# eleven bits, and some gradients are ill-conditioned: 2e-2.
TOLERANCES = {np.float64: (1e-6, 1e-8), np.float16: (2e-2, 2e-2)}

# ONNX Runtime has no kernel for the operator itself, so that no such model runs at all.
NOT_IN_DOUBLE = {
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "LRN", "Resize", "Sinh", "Tan"),
    "ThresholdedRelu",
}
NOT_IN_HALF = {"ScatterElements-add", "ScatterND-add"}


# ONNX Runtime runs these in float32 only, and the rules say so; passes.half puts casts around.
RECURRENT = {"GRU", "LSTM", "RNN"}


def runs_in(case: Case, floats: type) -> bool:
    if case.op in RECURRENT:
        return False
    if case.op == "CumSum" and case.opset < 14:
        return floats is np.float64  # not in the standard before
    if case.op == "Resize" and "scales" in case.present:
        return False  # scales are float32 whatever the data are, which the table does not say
    if floats is np.float64:
        one_hot = case.op == "GatherElements" and case.opset < 16  # OneHot has no kernel
        return case.op not in NOT_IN_DOUBLE and not one_hot
    return not any(case.id.startswith(name) for name in NOT_IN_HALF)


@pytest.mark.parametrize("floats", TOLERANCES, ids=lambda floats: floats.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradient_is_that_of_pytorch(case: Case, floats: type) -> None:
    if not runs_in(case, floats):
        return
    expected, seeds = ask_torch(case)
    with np.errstate(over="ignore"):  # bounds of a Clip may be the largest float32
        model, names = gradient_model(case, floats)
        feeds = {
            name: cast_floats(array, floats)
            for name, array in case.present.items()
            if name not in case.constants
        }
    model = double.lower(model)
    types = {value.name: value.dtype for value in model.graph.inputs}
    for name, seed in seeds.items():
        dtype = types.get(f"seed_{name}")
        if dtype is not None:
            feeds[f"seed_{name}"] = np.asarray(seed, dtype.numpy())
    running = session(ir.to_proto(model), "off")
    found = dict(
        zip((node.name for node in running.get_outputs()), running.run(None, feeds), strict=True)
    )
    relative, absolute = TOLERANCES[floats]
    pairs = [(name, found[name], expected.outputs[name]) for name in case.output_names]
    pairs += [(n, found[names[n]], expected.gradients[n]) for n in case.differentiated]
    for name, value, wanted in pairs:
        if value.dtype.kind != "f":
            continue
        scale = max(1.0, np.abs(wanted).max(initial=0))
        np.testing.assert_allclose(
            value.astype(np.float64), wanted, rtol=relative, atol=absolute * scale, err_msg=name
        )
