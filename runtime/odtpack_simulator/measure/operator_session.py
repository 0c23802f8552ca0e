"""Sessions of a few operators on memory that is already there, for what is to be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.layout import Array, address, allocate


class Operator(NamedTuple):
    """A node of the model: operator, names of its inputs and of its output, attributes."""

    op_type: str
    inputs: Sequence[str]
    output: str
    attributes: Mapping[str, Any] = {}


def bound_operators(
    operators: Sequence[Operator],
    inputs: Mapping[str, tuple[int, ...]],
    result: tuple[int, ...],
    threads: int,
    *,
    optimized: bool = False,
    profile: Path | None = None,
    int8: bool = False,
) -> Callable[[], object]:
    """Open a session of float32 operators, bound to memory, and return what runs it.

    Args:
        operators: The nodes in order; the value of the last one is the model's result.
        inputs: Shapes of the model's inputs, which get random values.
        result: Shape of the result.
        threads: Intra-operator threads.
        optimized: Let ONNX Runtime change the graph; it runs as written otherwise.
        profile: Start of the path of the profile that the session writes when it goes.
        int8: The inputs are unsigned bytes and the result has 32-bit integers.
    """
    from onnx import ModelProto, TensorProto, helper

    given, made = (np.uint8, np.int32) if int8 else (np.float32, np.float32)
    types = (TensorProto.UINT8, TensorProto.INT32) if int8 else (TensorProto.FLOAT,) * 2

    graph = helper.make_graph(
        [
            helper.make_node(each.op_type, each.inputs, [each.output], **each.attributes)
            for each in operators
        ],
        "calibration",
        [helper.make_tensor_value_info(name, types[0], shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(operators[-1].output, types[1], result)],
    )
    model = ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 13))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    random = np.random.default_rng(0)
    feeds: dict[str, Array] = {
        name: (16 * random.random(shape, dtype=np.float32)).astype(given)
        if int8
        else random.standard_normal(shape, dtype=np.float32)
        for name, shape in inputs.items()
    }
    output = allocate(4 * int(np.prod(result))).view(made).reshape(result)
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_input(name, "cpu", 0, given, value.shape, address(value))
    binding.bind_output(operators[-1].output, "cpu", 0, made, result, address(output))

    def run(_: object = (feeds, output)) -> None:  # ONNX Runtime holds bare addresses
        session.run_with_iobinding(binding)

    return run
