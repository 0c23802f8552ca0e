"""Names of nodes and values in reports are those of the layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from odtpack.build import build_package
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.runtime_graph import (
    Labels,
    Node,
    RuntimeGraph,
    Value,
    load_runtime_graph,
)
from tests import zoo


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("labels")
    build_package(zoo.cnn(), folder, loss="cross_entropy")
    return Package.open(folder)


def shapes(package: Package) -> dict[str, tuple[int, ...]]:
    return {
        spec.name: tuple(size if isinstance(size, int) else 4 for size in spec.shape)
        for spec in package.manifest.input_specs()
    }


def test_every_node_belongs_to_a_layer(package: Package) -> None:
    """Whoever reads a weight is called after it, whatever the node's name is."""
    graph = load_runtime_graph(package.training_model, shapes(package))
    parameters = {p.name for p in package.manifest.parameters}
    labels = Labels(graph, parameters, later="grad/")
    layers = {name.rpartition(".")[0] for name in parameters}
    seen = set()
    for index, node in enumerate(graph.nodes):
        label = labels.node(index)
        layer, _, operator = label.removeprefix("grad/").rpartition("/")
        assert operator == node.op_type
        assert layer in layers
        read = [name for name in node.inputs if name in parameters]
        if read:
            assert layer == read[0].rpartition(".")[0]
        seen.add((label.startswith("grad/"), layer))
    assert seen == {(later, layer) for later in (False, True) for layer in layers}


def test_contract_names_stay(package: Package) -> None:
    graph = load_runtime_graph(package.training_model, shapes(package))
    labels = Labels(graph, {p.name for p in package.manifest.parameters}, later="grad/")
    for name in (*graph.inputs, *graph.outputs):
        assert labels.value(name) == name


def test_reports_show_no_short_names(package: Package) -> None:
    plan = plan_memory(package, shapes(package))
    for tensor in plan.tensors_at_peak():
        assert len(tensor.name) > 4
    for point in plan.timeline:
        assert point.node.endswith(point.op_type)


def test_without_parameters_the_operator_is_the_name() -> None:
    node = Node("a", "Mul", "", ("x", "x"), ("y",), {})
    values = {name: Value(name, 4, (1,), (1,)) for name in ("x", "y")}
    labels = Labels(RuntimeGraph(("x",), ("y",), (node,), values, {}))
    assert labels.node(0) == "Mul"
    assert labels.value("unknown") == "unknown"


def test_values_in_branches_have_the_layer_of_the_branch(tmp_path: Path) -> None:
    inner = Node("b", "Neg", "", ("x",), ("z",), {})
    branch = RuntimeGraph((), ("z",), (inner,), {}, {})
    outer = Node("a", "If", "", ("c",), ("y",), {}, {"then_branch": branch}, ("fc.weight",))
    graph = RuntimeGraph(("c", "fc.weight"), ("y",), (outer,), {}, {})
    labels = Labels(graph, {"fc.weight"}, later="grad/")
    assert labels.node(0) == "fc/If"
    assert labels.value("z") == "fc/Neg"
