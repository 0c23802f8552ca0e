"""Constants that rules write grow no faster than what they are about."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from odtpack.adapters import AdapterSpec
from odtpack.autodiff.rules import resampling
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack_runtime.session.options import default_session_options
from tests.autodiff.oracle import Case, check, gradient_model, torch_outputs
from tests.autodiff.test_rules import CASES
from tests.model_text import parsed
from tests.packaging_tools import open_training

GROWN = 128  # times as long
BOUND = 1 << 18  # bytes that a constant may have in any case: a small matrix is a quick one
MOST = 1 << 19  # bytes of a case that is worth growing


def first_cases() -> list[Case]:
    """The last case of each operator with static sizes, which is one of its newest rule."""
    found = {case.op: case for case in CASES if not (case.batch or case.symbols)}
    known = {(case.op, case.attrs.get("mode")): case for case in CASES if case.op in MODES}
    return [*found.values(), *(c for c in known.values() if not (c.batch or c.symbols))]


MODES = ("Pad", "Resize")
KEY = "coordinate_transformation_mode"


def grown(case: Case) -> Iterator[tuple[str, Case, int]]:
    """A case with one axis that is longer, alone or with those of its length; bytes of values."""
    fed = {n: a for n, a in case.present.items() if n not in case.constants}
    for name, array in fed.items():
        for axis in range(array.ndim):
            for alone in (True, False):
                inputs = dict(case.inputs)
                for other, each in fed.items():
                    same = [
                        i for i, size in enumerate(each.shape)
                        if (other, i) == (name, axis) or (size == array.shape[axis] and not alone)
                    ]  # fmt: skip
                    shape = [s * GROWN if i in same else s for i, s in enumerate(each.shape)]
                    if np.prod(shape) > MOST:
                        break
                    inputs[other] = np.resize(each, shape)
                longer = dataclasses.replace(case, inputs=inputs)
                try:
                    given = [torch.tensor(a) for a in longer.present.values()]
                    results = torch_outputs(longer, given).values()
                except (RuntimeError, ValueError, IndexError, KeyError, AssertionError, TypeError):
                    continue  # not sizes of this operator
                size = sum(t.numel() * t.element_size() for t in (*given, *results))
                if size <= MOST:
                    yield f"{name}[{axis}]", longer, size
                break


@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.id)
def test_constants_are_linear(case):
    for where, longer, size in grown(case):
        try:
            model, _ = gradient_model(longer)
        except (OdtpackError, IndexError):
            continue  # nor of this one
        graphs = (model.graph, *model.graph.subgraphs())
        made = [
            v for graph in graphs for n, v in graph.initializers.items() if n not in case.inputs
        ]
        held = sum(value.const_value.nbytes for value in made if value.const_value is not None)
        assert held <= BOUND + 16 * size, f"{where}: {held} bytes for {size}"


# Of each mode, coordinate mode and filter the first case with known sizes.
RESIZED = {
    tuple(str(case.attrs.get(name)) for name in ("mode", "antialias", KEY)): case
    for case in reversed(CASES)
    if case.op == "Resize" and not (case.batch or case.symbols)
}


@pytest.mark.parametrize("case", RESIZED.values(), ids=lambda case: case.id)
def test_resize_of_long_axes(case, monkeypatch):
    """The weights that are not zero do for the matrix, a few rows at a time."""
    monkeypatch.setattr(resampling, "_LARGEST", 0)
    monkeypatch.setattr(resampling, "_ROWS", 3)
    check(case)


# A weight of few bits is unpacked by each node that reads it, and no earlier.

WIDTH, DEPTH = 64, 3


def chain() -> onnx.ModelProto:
    """Products one after the other."""
    text = " ".join(f'h{i + 1} = MatMul(h{i}, "w{i}.weight")' for i in range(DEPTH))
    head = f"chain (float[N, {WIDTH}] h0) => (float[N, {WIDTH}] h{DEPTH})"
    return parsed(f"{head} {{ {text} }}", 21, ir_version=10, **weights())


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    made = (random.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(DEPTH))
    return {f"w{i}.weight": value for i, value in enumerate(made)}


def optimized(path: Path, folder: Path) -> onnx.ModelProto:
    """What ONNX Runtime runs."""
    options = default_session_options(path)
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(str(path), options)
    return onnx.load(folder / "optimized.onnx")


@pytest.mark.parametrize("base", ["int8", "int4", "nf4"])
def test_every_reader_has_a_chain_of_its_own(base, tmp_path):
    spec = AdapterSpec("lora", ("w*",), rank=2)
    build_package(chain(), tmp_path / "package", loss="mse", adapter=spec, base=base)
    # Forward each weight is read once, and backward all but the first.
    for name, count in (("training", 2 * DEPTH - 1), ("eval", DEPTH)):
        model = optimized(tmp_path / "package" / f"{name}_model.onnx", tmp_path)
        unpacking = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
        assert len(unpacking) == count
        readers = Counter(name for node in model.graph.node for name in node.input)
        assert all(readers[node.output[0]] == 1 for node in unpacking)
        assert "MatMulNBits" not in {node.op_type for node in model.graph.node}
        computed = {name for node in model.graph.node for name in node.output}
        assert all(node.input[1] in computed for node in unpacking if base != "nf4")


def test_products_of_integers_stay(tmp_path):
    """A model that was quantized as a whole is left to ONNX Runtime's integer kernels."""
    text = " ".join(
        f"q{i} = QuantizeLinear(h{i}, step, zero) d{i} = DequantizeLinear(q{i}, step, zero) "
        f'v{i} = DequantizeLinear("w{i}.weight", step, zero) h{i + 1} = MatMul(d{i}, v{i})'
        for i in range(DEPTH)
    )
    codes = {n: np.clip(np.rint(w / 0.05), -127, 127).astype(np.int8) for n, w in weights().items()}
    model = parsed(
        f"chain (float[N, {WIDTH}] h0) => (float[N, {WIDTH}] h{DEPTH}) {{ {text} }}", 21,
        ir_version=10, step=np.float32(0.05), zero=np.int8(0), **codes,
    )  # fmt: skip
    spec = AdapterSpec("lora", ("w*",), rank=2)
    build_package(model, tmp_path / "package", loss="mse", adapter=spec)
    found = onnx.load(tmp_path / "package" / "eval_model.onnx").graph
    stored = {each.name for each in found.initializer}
    unpacked = [n for n in found.node if n.op_type == "DequantizeLinear" and n.input[0] in stored]
    assert len(unpacked) == DEPTH
    assert all(node.input[1] in stored for node in unpacked)
    _state, module, _optimizer = open_training(tmp_path / "package")
    x = np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)
    assert np.isfinite(float(module(x, x)))
