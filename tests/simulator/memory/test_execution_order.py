"""The order of execution, held against what ONNX Runtime's profile says it did."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from odtpack_simulator.memory.execution_order import (
    execution_order,
    rename_casts,
    sort_saved_model,
)
from tests.simulator.packages import Case

KERNEL = "_kernel_time"


def executed(path: Path, folder: Path, batch: int, *, optimize: bool) -> tuple[list[str], Path]:
    """Names of the nodes in the order in which one run executed them, and the saved model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    options.optimized_model_filepath = str(folder / "saved.onnx")
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    feeds = {
        node.name: np.zeros(
            [dim if isinstance(dim, int) else batch for dim in node.shape], types[node.type]
        )
        for node in session.get_inputs()
    }
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    names = [e["name"].removesuffix(KERNEL) for e in events if e["name"].endswith(KERNEL)]
    return names, folder / "saved.onnx"


def shuffled(path: Path, to: Path, seed: int) -> onnx.ModelProto:
    """A model with its nodes in another order that is also topological, named by position."""
    model = onnx.load(path)
    order = random.Random(seed)
    producers = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    waiting = {
        i: {producers[name] for name in reads(node) if name in producers}
        for i, node in enumerate(model.graph.node)
    }
    nodes = []
    while waiting:
        ready = [i for i, needs in waiting.items() if not needs & waiting.keys()]
        chosen = order.choice(ready)
        del waiting[chosen]
        nodes.append(onnx.NodeProto.FromString(model.graph.node[chosen].SerializeToString()))
    for index, node in enumerate(nodes):
        node.name = f"node {index}"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, to)
    return model


def reads(node: onnx.NodeProto) -> list[str]:
    inner = [n for a in node.attribute if a.HasField("g") for n in a.g.node]
    results = [v.name for a in node.attribute if a.HasField("g") for v in a.g.output]
    return [*node.input, *results, *(name for n in inner for name in reads(n))]


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize("seed", [0, 1])
def test_unoptimized(name: str, seed: int, case: Callable[[str], Case], tmp_path: Path) -> None:
    package = case(name).package
    model = shuffled(package.training_model, tmp_path / "model.onnx", seed)
    ran, _ = executed(tmp_path / "model.onnx", tmp_path, case(name).batch_size, optimize=False)
    names = [f"node {index}" for index in execution_order(model.graph)]
    assert [name for name in ran if name in set(names)] == names


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_saved_optimized_model(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    package = case(name).package
    original = shuffled(package.training_model, tmp_path / "model.onnx", 5)
    ran, saved = executed(tmp_path / "model.onnx", tmp_path, case(name).batch_size, optimize=True)
    graph = onnx.load(saved).graph
    sort_saved_model(graph, original.graph)
    names = [node.name or node.op_type for node in graph.node]
    assert [name for name in ran if name in set(names)] == names


def test_model_that_was_not_changed_is_sorted() -> None:
    """A model without anything to optimize is saved in the order of its file."""
    nodes = [
        onnx.helper.make_node("Neg", ["x"], ["a"]),
        onnx.helper.make_node("Exp", ["a"], ["b"]),
        onnx.helper.make_node("Sqrt", ["a"], ["c"]),
        onnx.helper.make_node("Abs", ["x"], ["d"]),
        onnx.helper.make_node("Add", ["b", "c"], ["e"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [], [])
    saved = onnx.GraphProto.FromString(graph.SerializeToString())
    sort_saved_model(saved, graph)
    # Add is the last that nobody reads; of its operands' producers Sqrt stands later.
    assert [node.op_type for node in saved.node] == ["Neg", "Sqrt", "Exp", "Add", "Abs"]


def test_values_of_bodies_that_are_called_like_outer_ones_are_renamed() -> None:
    """At every depth, wherever the name stands; what only a body has keeps its name."""
    graph = onnx.parser.parse_graph(
        """g (bool c, float[2] x) => (float[2] y) {
            a = Neg (x)
            y = If (c) <
                then_branch = t () => (float[2] a) <float[2] a> {
                    a = Exp (x)
                },
                else_branch = e () => (float[2] out) {
                    a = Sqrt (x)
                    own = Neg (a)
                    out = If (c) <
                        then_branch = tt () => (float[2] z) { own = Abs (a) z = Exp (own) },
                        else_branch = ee () => (float[2] z) { a = Abs (own) z = Exp (a) }
                    >
                }
            >
        }"""
    )
    rename_casts(graph)
    neg, branches = graph.node
    assert (list(neg.output), list(branches.output)) == (["a"], ["y"])
    then, other = (attribute.g for attribute in branches.attribute)
    assert then.node[0].output == ["a/inner"]
    assert [value.name for value in (*then.output, *then.value_info)] == ["a/inner"] * 2
    assert [list(node.output) for node in other.node] == [["a/inner"], ["own"], ["out"]]
    assert other.node[1].input == ["a/inner"]
    inner = [attribute.g.node for attribute in other.node[2].attribute]
    assert [(list(node.input), list(node.output)) for nodes in inner for node in nodes] == [
        (["a/inner"], ["own/inner"]),
        (["own/inner"], ["z"]),
        (["own"], ["a/inner/inner"]),
        (["a/inner/inner"], ["z"]),
    ]


def test_what_is_computed_in_float32_has_the_name_of_the_model_where_that_is_gone() -> None:
    graph = onnx.parser.parse_graph(
        """g (float16[2] x) => (float16[2] y) <float16[2] a, float[2] InsertedPrecisionFreeCast_a> {
            InsertedPrecisionFreeCast_x = Cast <to = 1> (x)
            InsertedPrecisionFreeCast_a = Exp (InsertedPrecisionFreeCast_x)
            InsertedPrecisionFreeCast_y = Log (InsertedPrecisionFreeCast_a)
            y = Cast <to = 10> (InsertedPrecisionFreeCast_y)
        }"""
    )
    rename_casts(graph)
    cast = "InsertedPrecisionFreeCast_"
    assert [list(node.output) for node in graph.node] == [[f"{cast}x"], ["a"], [f"{cast}y"], ["y"]]
    assert [list(node.input) for node in graph.node[1:3]] == [[f"{cast}x"], ["a"]]
    assert [(v.name, v.type.tensor_type.elem_type) for v in graph.value_info] == [("a", 1)]
