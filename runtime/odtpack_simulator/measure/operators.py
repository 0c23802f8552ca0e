"""Times of operators on the host: sessions with a profile, and the events that they record."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array, address, allocate
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.native import DOMAIN
from odtpack_simulator.memory.execution_order import graphs
from odtpack_simulator.memory.operator_work import Tensor, Work, operator_work

CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
"""Operators whose time is that of the nodes inside them, which are listed by themselves."""

_ITEM_SIZES: Final[Mapping[str, float]] = {
    **dict.fromkeys(("double", "float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float", "float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("int4", "uint4"), 0.5),
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of a node."""

    node: str  # Name of the node
    op_type: str  # Its operator
    us: float  # Duration as the profile says, in whole microseconds
    work: Work  # From the shapes of this run


def kernel_names(model: str | os.PathLike[str]) -> dict[str, str]:
    """What to call the native kernels of a model, by their operators."""
    import onnx

    graph = onnx.load(os.fspath(model), load_external_data=False).graph
    return {
        node.op_type: f"native {attribute.s.decode()}"
        for each in graphs(graph)
        for node in each.node
        if node.domain == DOMAIN
        for attribute in node.attribute
        if attribute.name == "kernel"
    }


def model_runs(
    file: Path, kernels: Mapping[str, str] = MappingProxyType({})
) -> list[list[NodeRun]]:
    """The nodes of every run of the model, in order, without those that only run others."""
    try:
        events = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OdtpackError(
            "profile-not-whole",
            f"ONNX Runtime's profile of a step ends after {file.stat().st_size} bytes.",
            where=str(file.parent),
        ) from error
    runs: list[list[NodeRun]] = []
    nodes: list[NodeRun] = []
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "Node" and name.endswith("_kernel_time"):
            if event["args"]["op_name"] not in CONTROL_FLOW:
                nodes.append(_run(event, kernels))
        elif kind == "Session" and name == "model_run":  # written when the run has ended
            runs.append(nodes)
            nodes = []
    return runs


def typical_step(runs: Sequence[Sequence[NodeRun]], made: int) -> list[NodeRun]:
    """The nodes of one step, the first step left out."""
    # Where all steps ran the same nodes on the same shapes, each node takes the mean of the middle
    # half of its durations: a node that was interrupted once does not show, and the mean of whole
    # microseconds is finer than their median. Otherwise it is the step whose sum is the (lower)
    # median.
    # `runs`: As of model_runs; every step made equally many.
    # `made`: Number of steps, at least two.
    per_step = len(runs) // made
    steps = [
        [node for run in runs[index * per_step : (index + 1) * per_step] for node in run]
        for index in range(1, made)
    ]
    if all(_names(step) == _names(steps[0]) for step in steps):
        return [
            dataclasses.replace(same[0], us=middle_mean([node.us for node in same]))
            for same in zip(*steps, strict=True)
        ]
    steps.sort(key=lambda step: sum(node.us for node in step))
    return steps[(len(steps) - 1) // 2]


def middle_mean(values: Sequence[float]) -> float:
    """The interquartile mean: that of the values without the lowest and the highest quarter."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _names(step: Sequence[NodeRun]) -> list[tuple[str, str, Work]]:
    return [(node.node, node.op_type, node.work) for node in step]


def _run(event: Mapping[str, Any], kernels: Mapping[str, str]) -> NodeRun:
    details = event["args"]
    op_type = kernels.get(details["op_name"], details["op_name"])
    work = operator_work(
        op_type,
        _tensors(details.get("input_type_shape", ())),
        _tensors(details.get("output_type_shape", ())),
    )
    return NodeRun(event["name"].removesuffix("_kernel_time"), op_type, event["dur"], work)


def _tensors(entries: Sequence[Mapping[str, Sequence[int]]]) -> list[Tensor]:
    """Tensors of a list such as ``[{"float": [64, 10]}, {"int64": []}]``."""
    return [
        Tensor(tuple(shape), _ITEM_SIZES.get(kind, 0))
        for entry in entries
        for kind, shape in entry.items()
    ]


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
    optimized: bool = False,  # Let ONNX Runtime change the graph; it runs as written otherwise
    profile: Path | None = None,
    int8: bool = False,  # The inputs are unsigned bytes and the result has 32-bit integers
) -> Callable[[], object]:
    """Open a session of float32 operators, bound to memory, and return what runs it."""
    # `operators`: The nodes in order; the value of the last one is the model's result.
    # `profile`: Start of the path of the profile that the session writes when it goes.
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
    model = ModelProto(ir_version=8, graph=graph, opset_import=[helper.make_opsetid("", 13)])
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
