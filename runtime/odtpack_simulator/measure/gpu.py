"""Rates of a GPU through ONNX Runtime's provider: differences of chains of one operator."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import onnxruntime

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.session import run_failed

_SIZES: Final = (256, 1024, 4096)
_ENOUGH: Final = 0.5  # Seconds of a product after which no larger one is tried
_ELEMENTS: Final = 4 * 2**20
_CHAINS: Final = (2, 6)
_SMALL_CHAINS: Final = (20, 120)

Figures = dict[str, tuple[list[float] | str, float, str, str]]


def measure_gpu(name: str, repeats: int) -> Figures:
    """Values by the profile's key, or why there are none; unit and how it was measured."""
    device = Device(name)
    figures: Figures = {}
    for key, dtype in (("fp32_gemm", np.float32), ("fp16_gemm", np.float16)):
        rates: list[float] | str
        try:
            rates = [_product(device, np.dtype(dtype)) for _ in range(repeats)]
        except OdtpackError as error:
            if dtype == np.float32:
                raise
            rates = error.what.partition(":")[0]
        figures[key] = rates, 1e9, "GFLOPS", f"square matrix product, best of {_SIZES}, {name}"
    seconds = [_seconds(device, "Neg", (_ELEMENTS,), _CHAINS) for _ in range(repeats)]
    text = f"elementwise operator on {4 * _ELEMENTS // 2**20} MiB, bytes written, {name}"
    figures["bandwidth"] = [4 * _ELEMENTS / each for each in seconds], 1e9, "GB/s", text
    small = [_seconds(device, "Neg", (16,), _SMALL_CHAINS) for _ in range(repeats)]
    figures["operator"] = small, 1e-6, "us", f"elementwise operator on 16 numbers, {name}"
    figures["own_memory"] = "the provider does not say whether it has memory of its own", 1, "B", ""
    return figures


def _product(device: Device, dtype: np.dtype[np.floating]) -> float:
    """FLOP/s."""
    found = 0.0
    for size in _SIZES:
        seconds = _seconds(device, "MatMul", (size, size), _CHAINS, dtype)
        found = max(found, 2 * size**3 / seconds)
        if seconds > _ENOUGH / 64:  # the next one takes 64 times as long
            break
    return found


def _seconds(
    device: Device,
    op_type: str,
    shape: tuple[int, ...],
    chains: tuple[int, int],
    dtype: np.dtype[np.floating] | None = None,
) -> float:
    """Seconds of one operator: what a longer chain takes more, whose sum is read at its end."""
    best = [min(_runs(device, op_type, shape, length, dtype)) for length in chains]
    return max(best[1] - best[0], 1e-9) / (chains[1] - chains[0])


def _runs(
    device: Device,
    op_type: str,
    shape: tuple[int, ...],
    length: int,
    dtype: np.dtype[np.floating] | None,
) -> list[float]:
    """Seconds of a chain, again and again, once it has run."""
    from onnx import ModelProto, TensorProto, helper

    half = dtype == np.float16
    nodes = [helper.make_node("Cast", ["x"], ["v0"], to=10 if half else 1)]
    for index in range(length):
        inputs = [f"v{index}", *(["v0"] if op_type == "MatMul" else [])]
        nodes.append(helper.make_node(op_type, inputs, [f"v{index + 1}"]))
    nodes.append(helper.make_node("ReduceMax", [f"v{length}"], ["m"], keepdims=0))
    nodes.append(helper.make_node("Cast", ["m"], ["y"], to=1))
    graph = helper.make_graph(
        nodes, "gpu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ())],
    )  # fmt: skip
    model = ModelProto(ir_version=8, graph=graph, opset_import=[helper.make_opsetid("", 13)])
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = device.session(model.SerializeToString(), options)
    feeds = {"x": np.full(shape, 1 / max(shape), np.float32)}
    found = []
    for _ in range(4):
        start = time.perf_counter()
        try:
            session.run(None, feeds)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise run_failed(error) from error
        found.append(time.perf_counter() - start)
    return found[1:]
