"""The table of cases once more, in float64 and in float16.

In float64 operators that ONNX Runtime has no kernel for are written out by ``passes.double``.
In float16 it computes in float32 what it has no kernel for, and rounds in between; some
operators are run in float32 by ``passes.half``.

Rules are held to their oracles at every opset by ``test_rules``. What a type adds is whether
constants, casts and kernels are of that type, and that does not depend on the numbers in
the attributes. So of the cases that are told apart only by their opset or by which sizes are
unknown one is taken, and of tables that cross every attribute with every other (``CROSSED``)
a subset in which each value of each attribute occurs with each rule and rank, see
:func:`representatives`. Every operator and every version of a rule stays.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir
import pytest

from odtpack.autodiff import REGISTRY
from odtpack.errors import OdtpackError
from odtpack.passes import double
from tests.autodiff.oracle import Case, ask_torch, cast_floats, gradient_model, session
from tests.autodiff.test_rules import CASES

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

OPEN_WINDOWS = "windows on planes of unknown size are not written out in float64"
NO_DOUBLE_KERNEL = "ONNX Runtime has no float64 kernel for the operator"
NO_GRID_KERNEL = "ONNX Runtime samples grids in float64 from opset 20 on"
NOT_THE_STANDARDS = "the standard does not allow the operator this type at this opset"
FLOAT32_RULE = "ONNX Runtime runs recurrent layers in float32 only, and the rules refuse float64"
FLOAT32_SCALES = "its scales are float32 whatever the data are, which the table does not say"
ROUNDED_REGION = "the region's float16 bounds mean another nearest element than the table's"


def unknown_plane(case: Case) -> bool:
    """Whether sizes that windows depend on are known only when the model runs."""
    return case.op in WINDOWED and any(axis > 0 for axes in case.symbols.values() for axis in axes)


def limit(case: Case, name: str) -> str | None:
    """Why a case does not run in a type; None if it does."""
    if case.op == "CumSum" and case.opset < 14 and name == "float16":
        return NOT_THE_STANDARDS
    if case.op == "DequantizeLinear" and (name == "float64" or case.opset < 19):
        return NOT_THE_STANDARDS
    if case.op == "Resize" and "scales" in case.present:
        return FLOAT32_SCALES
    if name == "float16":
        nearest = case.attrs.get("mode", "nearest") == "nearest"
        region = case.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
        return ROUNDED_REGION if case.op == "Resize" and nearest and region else None
    if case.op in RECURRENT:
        return FLOAT32_RULE
    if case.op in NOT_IN_DOUBLE:
        return NO_DOUBLE_KERNEL
    if case.op == "GridSample" and case.opset < 20:
        return NO_GRID_KERNEL
    return OPEN_WINDOWS if unknown_plane(case) else None


# Tables that cross every attribute with every other.
CROSSED = {
    *("AveragePool", "Conv", "ConvTranspose", "GlobalLpPool", "GridSample", "LpPool", "MaxPool"),
    *("MaxUnpool", "Resize", "RoiAlign", "GRU", "LSTM", "RNN", "Pow", "DFT", "Col2Im"),
}


def representatives(table: Iterable[Case], name: str) -> list[Case]:
    """The cases to run in a type.

    Of cases that differ only by opset within one version of the rule, or by which axes are
    unknown, the first. Of an operator in ``CROSSED``, a case is taken if it has a property that
    none taken before has, for the same version of the rule: an attribute's value with the rank
    of the data, a set of present inputs, or a set of differentiated ones.
    """
    seen: set[object] = set()
    found = []
    for case in table:
        rule = REGISTRY.lookup(case.domain, case.op, case.opset if not case.domain else 1)
        assert rule is not None
        whole = (case.domain, case.op, rule.since)
        new: set[object] = {(*whole, case.label, bool(case.batch), bool(case.symbols))}
        if case.op in CROSSED:
            rank = next(iter(case.present.values())).ndim
            open_ = bool(case.symbols)
            new = {(*whole, rank, open_, key, str(value)) for key, value in case.attrs.items()}
            new |= {(*whole, rank, open_), (*whole, tuple(case.present))}
            new |= {(*whole, tuple(case.differentiated)), (*whole, tuple(case.output_names))}
        if limit(case, name) is None and not new <= seen:
            seen |= new
            found.append(case)
    return found


RUN = [(case, name) for name in TYPES for case in representatives(CASES, name)]


@pytest.mark.parametrize(("case", "name"), RUN, ids=[f"{case.id}-{name}" for case, name in RUN])
def test_gradient_is_that_of_pytorch(case: Case, name: str) -> None:
    floats = TYPES[name]
    expected, seeds = ask_torch(case)
    with np.errstate(over="ignore"):  # bounds of a Clip may be the largest float32
        model, names = gradient_model(case, floats)
        feeds = {
            key: cast_floats(array, floats)
            for key, array in case.present.items()
            if key not in case.constants
        }
    model = double.lower(model)
    types = {value.name: value.dtype for value in model.graph.inputs}
    for key, seed in seeds.items():
        dtype = types.get(f"seed_{key}")
        if dtype is not None:
            feeds[f"seed_{key}"] = np.asarray(seed, dtype.numpy())
    running = session(ir.to_proto(model), "off")
    found = dict(
        zip((node.name for node in running.get_outputs()), running.run(None, feeds), strict=True)
    )
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
