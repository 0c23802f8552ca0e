"""Less memory and the same gradients: on every optimization level, in steps, against the plan."""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from benchmarks.memory_prediction import make_job
from odtpack import losses
from odtpack.artifacts import OptimType
from odtpack.errors import OdtpackError
from odtpack.memory import compile as memory_compile
from odtpack.memory.compile import input_shapes
from odtpack.memory.schedule import Step, Timeline
from odtpack.model.loading import load_model
from odtpack.package.task import Graphs, Task
from odtpack.package.training import build_graphs
from odtpack.spec import MemorySpec
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import RESET_NAME
from odtpack_simulator.memory.allocation import allocate
from odtpack_simulator.memory.kernel_memory import ALIASES, IN_PLACE
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, load_runtime_graph
from odtpack_simulator.replay.replay import run_training_child
from tests import model_text, zoo
from tests.model_text import LEVELS, parsed, session
from tests.packaging_tools import batch, generate, trainable_names
from tests.refused import refused
from tests.sweep import split

BATCH = 4
ROOT = Path(__file__).parents[2]
MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "cnn": lambda: zoo.cnn(hidden=32),
    "mobilenet": lambda: zoo.mobilenet_v2(32, width_mult=0.35, stages=2),
    "mobilenet-bn": lambda: zoo.mobilenet_v2(32, width_mult=0.35, stages=3, batch_norm="train"),
    "mobilenet-whole": lambda: zoo.mobilenet_v2(32, width_mult=0.35),
    "mobilenet-bn-whole": lambda: zoo.mobilenet_v2(32, width_mult=0.35, batch_norm="train"),
    "transformer": lambda: zoo.transformer_encoder(d=64, layers=3, ff=256, opset=14),
}


@pytest.fixture(params=split(MODELS, lambda name: "whole" not in name))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def build(model: onnx.ModelProto, memory: MemorySpec | None, names: Any = ()) -> Graphs:
    names = tuple(names or trainable_names(model))
    loss = losses.make_loss("cross_entropy")
    return build_graphs(Task(load_model(model), names, (), loss, memory=memory))


def least(share: float, graphs: Graphs) -> MemorySpec:
    """What comes to a share of the activations, whatever the time."""
    return MemorySpec(batch=BATCH, limit=int(share * graphs.memory.before), slowdown=1.0)


def feeds(model: onnx.ModelProto, graphs: Graphs) -> dict[str, np.ndarray]:
    data, labels = batch(model, BATCH)
    given = {p.name: p.value() for p in graphs.parameters}
    for value in graphs.training.graph.inputs:
        name = str(value.name)
        if name in given:
            continue
        if name == "lazy_reset_grad":
            given[name] = np.ones(1, np.bool_)
        elif name.endswith("accumulation.buffer"):
            given[name] = np.zeros(value.shape.numpy(), np.float32)
        else:
            given[name] = labels if name == "labels" else data
    return given


def run(graphs: Graphs, level: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return model_text.run(graphs.training, given, level)


@functools.cache
def kept(name: str) -> Graphs:
    """What is computed at the best time, nothing of it again; no test changes it."""
    return build(MODELS[name](), MemorySpec(batch=BATCH, slowdown=0.0, limit=0))


@functools.cache
def halved(name: str) -> Graphs:
    """With so much computed again that half of the activations are left, or what comes next."""
    return build(MODELS[name](), least(0.5, kept(name)))


def test_gradients_are_the_same_on_every_level(name):
    model = MODELS[name]()
    plain, *compiled = build(model, None), kept(name), halved(name)
    given = feeds(model, plain)
    for level in LEVELS:
        wanted = run(plain, level, given)
        for each in compiled:
            found = run(each, level, given)
            assert found.keys() == wanted.keys()
            for output, value in wanted.items():
                scale = max(1e-3, float(np.abs(value).max()))
                np.testing.assert_allclose(
                    found[output], value, rtol=0, atol=2e-5 * scale, err_msg=f"{level} {output}"
                )


def test_what_is_computed_again_survives_on_every_level(name, tmp_path):
    """ONNX Runtime merges none of it with the first time: no level has fewer operators of a kind
    than the plain model and what was added."""
    plain, compiled = kept(name), halved(name)
    if not compiled.memory.decisions:
        pytest.skip("nothing of it can be computed again for less")
    for level in LEVELS:
        heavy = []
        for graphs in (plain, compiled):
            path = tmp_path / "optimized.onnx"
            session(graphs.training, level, optimized_model_filepath=str(path))
            heavy.append(sum(1 for _ in onnx.load(path).graph.node))
        assert heavy[1] > heavy[0]


def test_memory_of_a_real_training_falls_as_planned(tmp_path, monkeypatch):
    """Resident memory of a child process, beside the plan: the product's own error is 3 %."""
    model = zoo.transformer_encoder(d=128, layers=3, ff=512, opset=14)
    found = []
    for folder in (tmp_path / "plain", tmp_path / "compiled"):
        folder.mkdir()
        with monkeypatch.context() as patch:
            if folder.name == "plain":
                patch.setattr(memory_compile, "compile_memory", lambda *_: None)
            job = make_job(model, 8, OptimType.SGD, folder)
        package = Package.open(folder / "package")
        shapes = {n: (8, *np.load(f, "r").shape[1:]) for n, f in job.data.items()}
        predicted = plan_memory(package, shapes).peak.nbytes
        measured = run_training_child(job).peak_bytes
        if measured is None:
            pytest.skip("memory is measured on Linux only")
        assert abs(predicted / measured - 1) < 0.05
        found.append((predicted, measured))
    (plain_plan, plain_peak), (plan, peak) = found
    assert plan < 0.95 * plain_plan
    assert peak < 0.95 * plain_peak


BUILD = """
import sys
from pathlib import Path
from tests import zoo
from tests.packaging_tools import generate
generate(zoo.transformer_encoder(d=128, layers=3, ff=512, opset=14), Path(sys.argv[1]))
"""


def test_same_recipe_same_bytes(tmp_path):
    """Built once more in another process, where ONNX Runtime optimizes the planned graph anew."""
    model = zoo.transformer_encoder(d=128, layers=3, ff=512, opset=14)
    here = generate(model, tmp_path / "here") / "training_model.onnx"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", BUILD, tmp_path / "there"], check=True, env=environment)
    assert here.read_bytes() == (tmp_path / "there" / "training_model.onnx").read_bytes()


def test_ten_steps_as_without():
    """Whole trainings: the same losses, step by step."""
    model = MODELS["transformer"]()
    plain, *compiled = build(model, None), kept("transformer"), halved("transformer")
    rows = []
    for graphs in (plain, *compiled):
        given = feeds(model, graphs)
        losses_found = []
        for _ in range(10):
            outputs = run(graphs, "extended", given)
            names = list(outputs)
            losses_found.append(float(outputs[names[0]]))
            for name in names[1:]:
                parameter = name.removesuffix("_grad.accumulation.out")
                given[parameter] = given[parameter] - 0.05 * outputs[name]
        rows.append(losses_found)
    assert rows[0][-1] < rows[0][0]
    for each in rows[1:]:
        np.testing.assert_allclose(each, rows[0], rtol=1e-4)


def test_reports_what_is_computed_again():
    report = halved("transformer").memory
    assert report.after < 0.7 * report.before
    assert any("Gelu" in each.name for each in report.decisions)
    assert 0 < report.slowdown < 1
    sizes = [each.nbytes for each in report.decisions]
    assert sizes == sorted(sizes, reverse=True)


def test_small_models_are_left_alone():
    model = zoo.mlp((20, 10, 5))
    plain, usual = build(model, None), build(model, MemorySpec())
    assert usual.memory is None
    assert ir.to_proto(plain.training) == ir.to_proto(usual.training)


def test_planned_peak_is_that_of_the_written_model(tmp_path):
    """What is promised holds for the file: it is read again as ONNX Runtime executes it."""
    model = MODELS["transformer"]()
    compiled = halved("transformer")
    path = tmp_path / "training.onnx"
    ir.save(compiled.training, path)
    data, labels = batch(model, BATCH)
    shapes = {
        str(v.name): (labels if v.name == "labels" else data).shape
        for v in compiled.training.graph.inputs
        if v.shape is not None and not all(isinstance(dim, int) for dim in v.shape)
    }
    peak = Step(load_runtime_graph(path, shapes)).timeline().peak
    assert abs(peak / compiled.memory.after - 1) < 0.03
    assert dataclasses.asdict(compiled.memory)["before"] > peak


def test_gradients_of_one_layer_hold_no_memory_for_the_next(tmp_path):
    graph = written(kept("transformer"), tmp_path)
    forward = Step(graph).forward
    shared = 0
    for buffer in allocate(graph).buffers:
        for name, index in buffer.tensors.items():
            node, size = graph.nodes[index], (graph.values[name].dims or (1,))[0]
            if index not in forward and name != buffer.name and not isinstance(size, int):
                assert node.op_type in ALIASES | IN_PLACE, (name, buffer)
                shared += node.op_type in IN_PLACE
    assert shared  # what an operator may overwrite, it does


def test_no_form_of_a_weight_is_held_for_the_backward_pass(tmp_path):
    """Convolutions of small planes are products with forms of the same size, forth and back."""
    graph = written(kept("mobilenet"), tmp_path)
    forward = Step(graph).forward
    forms = 0
    for buffer in allocate(graph).buffers:
        made = [i for i in buffer.tensors.values() if graph.nodes[i].op_type == "Gemm"]
        if len(made) > 1 and buffer.nbytes >= 1 << 14:
            assert len({index in forward for index in made}) == 1, buffer
        forms += len(made)
    assert forms > 1


def test_forms_of_weights_wait_until_they_are_read(tmp_path):
    graphs = halved("mobilenet")
    graph = written(graphs, tmp_path)
    # Views that keep sizes apart read the flag.
    known = {p.name for p in graphs.parameters} | set(graph.initializers) | {"", RESET_NAME}
    waiting: set[str] = set()
    forms = 0
    for node in graph.nodes:
        if not node.subgraphs and all(name in known for name in node.reads):
            known.update(node.outputs)
            waiting.update(node.outputs)
            forms += 1
        else:
            assert not waiting - consumed_by(node, graph), node.name
            waiting.clear()
    assert forms > 10


def consumed_by(node: Node, graph: RuntimeGraph) -> set[str]:
    """What a node reads, and what that is computed from."""
    producer = {name: each for each in graph.nodes for name in each.outputs}
    found: set[str] = set()
    stack = [*node.reads]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += producer[name].reads if name in producer else ()
    return found


def written(graphs: Graphs, folder: Path) -> RuntimeGraph:
    """The training model as ONNX Runtime executes it."""
    ir.save(graphs.training, folder / "training.onnx")
    return load_runtime_graph(
        folder / "training.onnx", input_shapes(graphs.training.graph, MemorySpec(batch=BATCH))
    )


def test_backward_pass_reads_the_copy_of_what_a_product_transposes(monkeypatch):
    """ONNX Runtime makes transposes a part of products: forward, in the copy, and in the gradient.

    The gradient reads the transposed value by a name that the runtime's graph does not have. If it
    read the first one, the written model would keep that of all layers, which was not planned.
    """
    text = "k0 = Mul(x, w) q = Mul(x, w) " + " ".join(
        f"e{i} = Exp(k{i}) s{i} = Sin(e{i}) t{i} = Transpose<perm = [0, 2, 1]>(s{i}) "
        f"p{i} = MatMul(q, t{i}) r{i} = MatMul(p{i}, v) c{i} = Mul(r{i}, w{i}) "
        f"k{i + 1} = Tanh(c{i})"
        for i in range(3)
    )
    random = np.random.default_rng(0)
    weights = {n: random.standard_normal(64).astype(np.float32) for n in ("w", "w0", "w1", "w2")}
    head = "attention (float[N, 64, 64] x, float[N, 64, 64] v) => (float[N, 64, 64] k3)"
    model = parsed(f"{head} {{ {text} }}", **weights)
    choices = []

    def choose(*given: Any, **options: Any) -> Timeline:
        choices.append(original(*given, **options))
        return choices[-1]

    original = memory_compile.choose
    monkeypatch.setattr(memory_compile, "choose", choose)
    task = Task(load_model(model), tuple(weights), (), losses.make_loss("mse"))
    memory = MemorySpec(batch=64, limit=1, slowdown=2.0)
    found = build_graphs(dataclasses.replace(task, memory=memory)).memory
    one = 64 * 64 * 64 * 4
    assert found.after < choices[0].peak + one


def test_casts_are_computed_again():
    """Nodes whose type is an attribute."""
    text = " ".join(
        f"a{i} = MatMul(h{i}, w{i}) p{i} = Greater(a{i}, zero) c{i} = Cast<to = 1>(p{i}) "
        f"b{i} = Mul(a{i}, c{i}) h{i + 1} = Mul(b{i}, c{i})"
        for i in range(4)
    )
    random = np.random.default_rng(0)
    weights = {f"w{i}": random.standard_normal((64, 64)).astype(np.float32) for i in range(4)}
    head = "casts (float[N, 64] h0) => (float[N, 64] h4) <float zero = {0.0}>"
    model = parsed(f"{head} {{ {text} }}", **weights)
    task = Task(load_model(model), tuple(weights), (), losses.make_loss("mse"))
    plain = build_graphs(dataclasses.replace(task, memory=None))
    least = MemorySpec(batch=4096, limit=1, slowdown=1.0)
    graphs = build_graphs(dataclasses.replace(task, memory=least))
    counts = [
        sum(node.op_type == "Cast" for node in each.training.graph) for each in (plain, graphs)
    ]
    assert counts[1] > counts[0]


@pytest.mark.parametrize("code", ["models-stall", "models-memory", "models-crash"])
def test_only_operators_that_are_not_here_leave_a_model_as_it_is(code, monkeypatch):
    """What a hostile model does to the process that loads it ends the build."""

    def fail(*_: object) -> None:
        raise OdtpackError(reason, "The model is not loaded.")

    monkeypatch.setattr(memory_compile, "_compile", fail)
    monkeypatch.setattr(memory_compile, "_SMALLEST", 0)
    model = ir.from_proto(zoo.mlp((6, 5, 3)))
    reason = "model-not-loadable"
    assert memory_compile.compile_memory(model, {}, MemorySpec()) is None
    reason = code
    with refused(code, "is not loaded"):
        memory_compile.compile_memory(model, {}, MemorySpec())
