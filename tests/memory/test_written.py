"""What is written takes what was planned, whatever the model's inputs and however deep it is."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper
import pytest

from odtpack import losses
from odtpack.memory import compile as memory_compile
from odtpack.memory.compile import weights_late
from odtpack.memory.recompute import Choice
from odtpack.memory.spec import MemorySpec
from odtpack.memory.timeline import Step
from odtpack.model.loading import load_model
from odtpack.package.task import Graphs, Task
from odtpack.package.training import build_graphs
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value

WIDTH = 128


def gated(layers: int, *, masked: bool = False) -> onnx.ModelProto:
    """Layers of x + tanh(a sigmoid(a)), a = W x; maybe with a mask for the last one."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(0, 0.06, (WIDTH, WIDTH)) for i in range(layers)}
    weights |= {"head": rng.normal(0, 0.06, (WIDTH, 10)), "zero": np.zeros(())}
    nodes, h = [], "x"
    for i in range(layers):
        nodes += [
            oh.make_node("MatMul", [h, f"w{i}"], [f"a{i}"]),
            oh.make_node("Sigmoid", [f"a{i}"], [f"s{i}"]),
            oh.make_node("Mul", [f"a{i}", f"s{i}"], [f"g{i}"]),
            oh.make_node("Tanh", [f"g{i}"], [f"t{i}"]),
            oh.make_node("Add", [h, f"t{i}"], [f"h{i}"]),
        ]
        h = f"h{i}"
    if masked:
        nodes.append(oh.make_node("Where", ["mask", h, "zero"], ["m"]))
        h = "m"
    nodes += [
        oh.make_node("ReduceMean", [h], ["pooled"], axes=[1], keepdims=0),
        oh.make_node("MatMul", ["pooled", "head"], ["logits"]),
    ]
    inputs = [oh.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 64, WIDTH])]
    if masked:
        inputs.append(oh.make_tensor_value_info("mask", onnx.TensorProto.BOOL, ["N", 64, 1]))
    outputs = [oh.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["N", 10])]
    tensors = [
        onnx.numpy_helper.from_array(value.astype(np.float32), name)
        for name, value in weights.items()
    ]
    graph = oh.make_graph(nodes, "gated", inputs, outputs, tensors)
    return onnx.ModelProto(ir_version=8, graph=graph, opset_import=[oh.make_opsetid("", 17)])


def build(model: onnx.ModelProto, memory: MemorySpec) -> Graphs:
    names = tuple(t.name for t in model.graph.initializer if t.name != "zero")
    loss = losses.make_loss("cross_entropy")
    return build_graphs(Task(load_model(model), names, (), loss, memory=memory))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("share", [None, 0.6])
def test_takes_what_was_planned(
    masked: bool, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask is a Boolean input, as the flag is that resets gradients."""
    model = gated(6, masked=masked)
    kept = build(model, MemorySpec(batch=16, limit=1 << 40)).memory
    assert kept is not None
    chosen: list[Choice] = []
    choose = memory_compile.choose

    def noted(*arguments: Any, **options: Any) -> Choice:
        chosen.append(choose(*arguments, **options))
        return chosen[-1]

    monkeypatch.setattr(memory_compile, "choose", noted)
    spec = MemorySpec(batch=16)
    if share is not None:
        spec = MemorySpec(batch=16, limit=int(share * kept.before), slowdown=1.0)
    report = build(model, spec).memory
    assert report is not None
    assert report.decisions
    assert report.after <= 1.01 * chosen[-1].peak
    assert report.after <= (share or 0.9) * report.before


def test_depth_is_no_limit() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 130)
    try:
        report = build(gated(140), MemorySpec(batch=8)).memory
    finally:
        sys.setrecursionlimit(before)
    assert report is not None
    assert report.decisions


def test_a_long_chain_from_a_weight_waits_until_it_is_read() -> None:
    values = {"x": Value("x", 4, ("n",), (4,)), "w": Value("w", 4, (4,), (4,))}
    names = [f"v{i}" for i in range(5000)]
    nodes = [Node("first", "Neg", "", ("x",), ("h",), {})]
    for before, name in zip(["w", *names], names, strict=False):
        nodes.append(Node(name, "Sin", "", (before,), (name,), {}))
    nodes.append(Node("last", "Add", "", ("h", names[-1]), ("loss",), {}))
    graph = RuntimeGraph(("x", "w"), ("loss",), (*nodes[1:-1], nodes[0], nodes[-1]), values, {})
    assert [node.name for node in weights_late(graph, ["w"]).nodes] == [n.name for n in nodes]


def test_a_decision_counts_all_outputs_of_a_node() -> None:
    sizes = {"x": 8192, "a": 65536, "b": 128, "c": 16384, "loss": 1, "g": 8}
    values = {name: Value(name, 4, (name,), (size,)) for name, size in sizes.items()}
    parts = ("a", "b", "c")
    nodes = (
        Node("split", "Split", "", ("x",), parts, {}),
        Node("read", "Sum", "", parts, ("loss",), {}),
        Node("again", "Sum", "", parts, ("g",), {}),
    )
    step = Step(RuntimeGraph(("x",), ("loss", "g"), nodes, values, {}))
    choice = Choice(frozenset(parts), step.timeline(parts), step.time(parts))
    (decision,) = memory_compile._decisions(step, choice, {})
    assert decision.nbytes == 4 * (65536 + 128 + 16384)
    assert decision.seconds == step.seconds[0]
