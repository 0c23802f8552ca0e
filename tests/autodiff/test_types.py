"""The table of cases once more, in float64 and in float16.

What a type adds is whether constants, casts and kernels are of that type, and that does not depend
on numbers in attributes: only the representatives of the table are run. Operators without a kernel
are written out by ``passes.double``, or run in float32 by ``passes.half`` or ONNX Runtime itself.
"""

import collections
import math

import numpy as np
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel
from torch.nn import functional

from odtpack.autodiff.rules.pooling import MANY_TAPS
from odtpack.errors import OdtpackError
from odtpack.passes import finishing
from tests.autodiff.oracle import (
    Case,
    ask_torch,
    feeds_of,
    forward_model,
    gradient_model,
    run,
    session,
)
from tests.autodiff.representatives import representatives, rule_of
from tests.autodiff.test_rules import CASES
from tests.sweep import split_rows

# Relative to a gradient's largest element. Attributes are float32: 1e-6. Values of float16 have
# eleven bits, and some gradients are ill-conditioned: 2e-2.
TOLERANCES = {"float64": (1e-6, 1e-8), "float16": (2e-2, 2e-2)}
TYPES = {"float64": np.float64, "float16": np.float16}

# ONNX Runtime has no kernel for the operator itself, so that no such model runs at all.
NOT_IN_DOUBLE = {
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Col2Im", "Cosh", "Det", "LRN"),
    *("MaxRoiPool", "MaxUnpool", "Resize", "Sinh", "Tan", "ThresholdedRelu"),
}
# Written out in float64 by sizes that must be known; or, of MaxPool, its gradient is.
WINDOWED = {"AveragePool", "Conv", "ConvTranspose", "LpPool", "MaxPool"}
RECURRENT = {"GRU", "LSTM", "RNN"}
# Labels of a Resize some of whose samples lie on an element in the float32 region.
ROUNDED = {f"(1,2,7,3)-tf_crop_and_resize-nearest-{end}-2.0" for end in ("ceil", "floor")}

OPEN_WINDOWS = "windows on planes of unknown size are not written out in float64"
NO_DOUBLE_KERNEL = "ONNX Runtime has no float64 kernel for the operator"
NO_GRID_KERNEL = "ONNX Runtime samples grids in float64 from opset 20 on"
NOT_THE_STANDARDS = "the standard does not allow the operator this type at this opset"
FLOAT32_RULE = "ONNX Runtime runs recurrent layers in float32 only, and the rules refuse float64"
FLOAT32_SCALES = "its scales are float32 whatever the data are, which the table does not say"
ROUNDED_REGION = "the region's float16 bounds mean another nearest element than the table's"


def unknown_plane(case: Case) -> bool:
    """Whether sizes that windows depend on are known only when the model runs."""
    if case.op == "MaxPool" and math.prod(case.attrs["kernel_shape"]) > MANY_TAPS:
        return case.opset < 16 and _is_open(case)  # later the kernel's own indices serve
    return case.op in WINDOWED and _is_open(case)


def _is_open(case: Case) -> bool:
    return any(axis > 0 for axes in case.symbols.values() for axis in axes)


def limit(case: Case, name: str) -> str | None:
    """Why a case does not run in a type; None if it does."""
    if case.op == "CumSum" and case.opset < 14 and name == "float16":
        return NOT_THE_STANDARDS
    if case.op == "DequantizeLinear" and (name == "float64" or case.opset < 19):
        return NOT_THE_STANDARDS
    if case.op == "Resize" and "scales" in case.present:
        return FLOAT32_SCALES
    if name == "float16":
        return ROUNDED_REGION if case.op == "Resize" and case.label in ROUNDED else None
    if case.op in RECURRENT:
        return FLOAT32_RULE
    if case.op in NOT_IN_DOUBLE:
        return NO_DOUBLE_KERNEL
    if case.op == "GridSample" and case.opset < 20:
        return NO_GRID_KERNEL
    return OPEN_WINDOWS if unknown_plane(case) else None


# What each reason leaves out of which type, and how that shows; of the last two it does not,
# as they say something about the table.
EXCLUDED = {
    (NO_DOUBLE_KERNEL, "float64"): NOT_IN_DOUBLE,
    (NO_GRID_KERNEL, "float64"): {"GridSample"},
    (OPEN_WINDOWS, "float64"): WINDOWED,
    (FLOAT32_RULE, "float64"): RECURRENT,
    (NOT_THE_STANDARDS, "float64"): {"DequantizeLinear"},
    (NOT_THE_STANDARDS, "float16"): {"CumSum", "DequantizeLinear"},
    (FLOAT32_SCALES, "float64"): {"Resize"},
    (FLOAT32_SCALES, "float16"): {"Resize"},
    (ROUNDED_REGION, "float16"): {"Resize"},
}
REFUSALS = {
    NO_DOUBLE_KERNEL: "Could not find an implementation",
    NO_GRID_KERNEL: "Could not find an implementation",
    OPEN_WINDOWS: "no float64 kernel",
    FLOAT32_RULE: "runs FLOAT only",
    NOT_THE_STANDARDS: "is invalid",
}


def runnable(name: str) -> list[Case]:
    """The cases that run in a type."""
    return [case for case in CASES if limit(case, name) is None]


RUN = [(case, name) for name in TYPES for case in representatives(runnable(name))]
# What a type adds shows in the first case of each version of a rule, and with unknown sizes.
FIRST = {(*rule_of(case), bool(case.symbols), name): case.id for case, name in reversed(RUN)}


def is_first(case: Case, name: str) -> bool:
    return FIRST[*rule_of(case), bool(case.symbols), name] == case.id


@pytest.mark.parametrize(
    ("case", "name"), split_rows(RUN, is_first, ids=[f"{case.id}-{name}" for case, name in RUN])
)
def test_gradient_is_that_of_pytorch(case, name):
    floats = TYPES[name]
    expected, seeds = ask_torch(case)
    with np.errstate(over="ignore"):  # bounds of a Clip may be the largest float32
        model, names = gradient_model(case, floats)
        model = finishing.lower_doubles(model)
        feeds = feeds_of(case, model, seeds, floats)
    found = run(model, feeds, "off")
    relative, absolute = TOLERANCES[name]
    pairs = [(key, found[key], expected.outputs[key]) for key in case.output_names]
    pairs += [(n, found[names[n]], expected.gradients[n]) for n in case.differentiated]
    for key, value, wanted in pairs:
        if value.dtype.kind != "f":
            continue
        scale = max(1.0, np.abs(wanted).max(initial=0))
        np.testing.assert_allclose(
            value.astype(np.float64), wanted, rtol=relative, atol=absolute * scale, err_msg=key
        )


def test_what_is_left_out_and_why(record_property):
    """No other case than of these operators, and for these reasons, is left out of a type."""
    found: dict[tuple[str, str], collections.Counter[str]] = {}
    for name in TYPES:
        for case in CASES:
            reason = limit(case, name)
            if reason is not None:
                found.setdefault((reason, name), collections.Counter())[case.op] += 1
    assert {key: set(counts) for key, counts in found.items()} == EXCLUDED
    for (reason, name), counts in found.items():
        record_property(f"left out of {name}", f"{counts.total()} cases: {reason}")
    # All other operators, at every version of their rules, are run.
    for name in TYPES:
        taken = {rule_of(case) for case, type_ in RUN if type_ == name}
        assert taken == {rule_of(case) for case in CASES if limit(case, name) is None}


LEFT_OUT = {
    (case.op, name, reason): (case, name)
    for name in TYPES
    for case in CASES
    if (reason := limit(case, name)) in REFUSALS
}


@pytest.mark.parametrize(
    ("case", "name"), LEFT_OUT.values(), ids=[f"{op}-{name}" for op, name, _ in LEFT_OUT]
)
def test_what_is_left_out_is_refused(case, name):
    """By the packager with one error, or by ONNX Runtime that has no such forward model."""
    reason = limit(case, name)
    assert reason is not None
    if reason in (OPEN_WINDOWS, FLOAT32_RULE):
        with pytest.raises(OdtpackError, match=REFUSALS[reason]) as error:
            finishing.lower_doubles(gradient_model(case, TYPES[name])[0])
        assert error.value.code in ("unsupported-node", "unsupported-in-double")
        assert error.value.hint
    else:
        model = finishing.lower_doubles(forward_model(case, TYPES[name]))
        with pytest.raises((NoKernel, InvalidGraph), match=REFUSALS[reason]):
            session(model, "off")


def test_float16_positions_on_a_long_plane():
    """Beyond 2048 float16 skips elements; what is read there still gets its own gradient."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1, 2, 1, 4000)).astype(np.float16).astype(np.float32)
    # Of a few bits each, so that the type holds them; the centres of no two elements.
    columns = np.float32([0.125, 0.40625, 0.5625, 0.75, 0.9375])
    grid = np.stack([columns, np.zeros_like(columns)], -1)[None, None]

    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return functional.grid_sample(x, grid, align_corners=True)

    case = Case("GridSample", {"x": x, "grid": grid}, sample, 16, {"align_corners": 1}, wrt=["x"])
    test_gradient_is_that_of_pytorch(case, "float16")
