"""The buffers of a run against ONNX Runtime's own books, and against an independent verifier."""

import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_runtime import CheckpointState, Module
from odtpack_runtime.package.records import SessionInfo
from odtpack_simulator.memory import allocation
from odtpack_simulator.memory.allocation import Allocation, allocate, allocated_size
from odtpack_simulator.memory.arena import (
    FIRST_REGION_BYTES,
    UNIT,
    Arena,
    Arenas,
    SessionUse,
    sharing_of,
)
from odtpack_simulator.memory.kernel_memory import ALIASES, in_place_input
from odtpack_simulator.memory.memory_plan import plan_arenas, plan_memory
from odtpack_simulator.memory.planning import stable_name
from odtpack_simulator.memory.process_memory import PAGE
from odtpack_simulator.memory.runtime_graph import RuntimeGraph, load_runtime_graph
from odtpack_simulator.memory.session_memory import run_bytes
from odtpack_simulator.replay.replay import hold
from odtpack_simulator.simulation import _with_default_options
from tests.simulator.graphs import load_model, weighted
from tests.simulator.packages import MODELS, make_case

SMALL_MODELS = [name for name in MODELS if name != "batchnorm"]  # it has thousands of nodes

IN_USE = "mem_bytes_requested_in_use"

Events = list[dict[str, Any]]


def profiling_options(folder: Path) -> onnxruntime.SessionOptions:
    """With the arena on, which keeps books, and patterns off, so that it allocates one by one."""
    options = onnxruntime.SessionOptions()
    options.enable_mem_pattern = False
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    return options


def node_events(folder: Path, graph: RuntimeGraph) -> Events:
    """Arguments of the profile's events of one run, without those of nodes in subgraphs."""
    (file,) = folder.glob("profile*.json")
    events = json.loads(file.read_text())
    file.unlink()
    outer = {stable_name(node.name) for node in graph.nodes}
    rows = [
        e["args"] | {"name": stable_name(e["name"].removesuffix("_kernel_time"))}
        for e in events
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")
    ]
    rows = [row for row in rows if row["name"] in outer]
    if IN_USE not in rows[0]:
        pytest.fail("this ONNX Runtime does not write memory to its profiles")
    return rows[-len(graph.nodes) :]


def planned_bytes(plan: Allocation) -> list[int]:
    """Bytes of tensors, without what the system's allocator adds, during each node."""
    total = np.zeros(len(plan.uses) + 1, np.int64)
    for buffer in plan.buffers:
        total[buffer.first] += buffer.nbytes
        total[buffer.last + 1] -= buffer.nbytes
    return [int(value) for value in np.cumsum(total)[:-1]]


@pytest.mark.parametrize("name", MODELS)
def test_every_node_of_a_training_step(name, case, tmp_path):
    """Order, shapes and bytes in use at every node are those of a real step, to the byte."""
    this = case(name)
    package = this.package
    graph = load_runtime_graph(package.training_model, this.shapes)
    plan = allocate(graph, fresh_outputs=["output"], conditions={"lazy_reset_grad": True})
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, session_options=profiling_options(tmp_path))
    for _ in range(2):
        module(this.inputs[: this.batch_size], this.labels[: this.batch_size])
        module.lazy_reset_grad()
    del module
    events = node_events(tmp_path, graph)
    assert [event["name"] for event in events] == [stable_name(n.name) for n in graph.nodes]
    planned = planned_bytes(plan)
    constants = int(events[0][IN_USE]) - planned[0]
    for node, event, nbytes in zip(graph.nodes, events, planned, strict=True):
        shapes = [next(iter(shape.values())) for shape in event["output_type_shape"]]
        assert shapes == [list(graph.values[o].shape or ()) for o in node.outputs if o], node.name
        assert int(event[IN_USE]) - constants == nbytes, node.name
    assert plan.unknown == ()


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed, tmp_path):
    """Reuse of buffers, in place and of freed ones, on graphs that exercise all of it."""
    model = random_model(seed)
    onnx.save(model, tmp_path / "model.onnx")
    graph = load_runtime_graph(tmp_path / "model.onnx", {"x": (48, 16), "y": (48, 16)})
    session = onnxruntime.InferenceSession(
        str(tmp_path / "model.onnx"), profiling_options(tmp_path)
    )
    binding = session.io_binding()
    values = np.random.default_rng(seed).standard_normal((48, 16), np.float32)
    result = np.empty((48, 16), np.float32)
    for name in ("x", "y"):
        binding.bind_input(name, "cpu", 0, np.float32, values.shape, values.ctypes.data)
    binding.bind_output("out", "cpu", 0, np.float32, result.shape, result.ctypes.data)
    for _ in range(2):
        session.run_with_iobinding(binding)
    del session, binding
    events = node_events(tmp_path, graph)
    plan = allocate(graph)
    planned = planned_bytes(plan)
    in_use = [int(event[IN_USE]) for event in events]
    assert [nbytes - in_use[0] + planned[0] for nbytes in in_use] == planned
    verify(graph, plan)


def random_model(seed: int) -> onnx.ModelProto:
    """Forty operators on [batch, 16], its transpose and its flat form; one output."""
    draw = random.Random(seed)
    pools: dict[str, list[str]] = {"rows": ["x", "y"], "columns": [], "flat": []}
    nodes: list[str] = []
    used: set[str] = set()

    def add(op_type: str, inputs: list[str], pool: str) -> None:
        name, attributes = f"v{len(nodes)}", "<perm = [1, 0]>" * (op_type == "Transpose")
        nodes.append(f"[{name}] {name} = {op_type} {attributes} ({', '.join(inputs)})")
        used.update(inputs)
        pools[pool].append(name)

    for _ in range(40):
        pool = draw.choice([key for key in pools if pools[key]])
        operand = draw.choice(pools[pool][-4:])
        kind = draw.randrange(5)
        if kind == 0:
            add(draw.choice(["Relu", "Sigmoid", "Softmax", "Elu"]), [operand], pool)
        elif kind == 1:
            add(draw.choice(["Sin", "Neg", "Abs"]), [operand], pool)
        elif kind == 2:
            add(draw.choice(["Mul", "Sub", "Max"]), [operand, draw.choice(pools[pool])], pool)
        elif kind == 3 and pool != "flat":
            other = "columns" if pool == "rows" else "rows"
            add("Transpose", [operand], other)
        else:
            target = {"rows": "flat", "flat": "rows", "columns": "columns"}[pool]
            if target == "columns":
                add("Identity", [operand], pool)
            else:
                add("Reshape", [operand, f"to_{target}"], target)
    loose = [n for n in pools["rows"] if n not in used] or pools["rows"][-1:]
    for name in [n for pool in ("flat", "columns") for n in pools[pool] if n not in used]:
        if name in pools["flat"]:
            add("Reshape", [name, "to_rows"], "rows")
        else:
            add("Transpose", [name], "rows")
        loose.append(pools["rows"][-1])
    while len(loose) > 1:
        add("Add", [loose.pop(), loose.pop()], "rows")
        loose.append(pools["rows"][-1])
    body = " ".join([*nodes, f"[last] out = Exp ({loose[0]})"])
    head = "random (float[batch, 16] x, float[batch, 16] y) => (float[batch, 16] out)"
    shapes = {"to_flat": np.array([-1]), "to_rows": np.array([-1, 16])}
    return weighted(f"{head} {{ {body} }}", shapes)


def verify(graph: RuntimeGraph, plan: Allocation) -> None:
    """Replay a plan: every tensor has memory while it lives, and no two live ones share it.

    Knows the graph and the list of buffers, nothing of how they were chosen.
    """
    home = {tensor: b for b in plan.buffers for tensor in b.tensors}
    written: dict[str, int] = {}
    read: dict[str, int] = {}
    source: dict[str, str] = {}
    for index, node in enumerate(graph.nodes):
        read.update(dict.fromkeys((*node.inputs, *node.implicit), index))
        written.update(dict.fromkeys(filter(None, node.outputs), index))
        shared = 0 if node.op_type in ALIASES else in_place_input(node.op_type, node.domain)
        if shared is not None and shared < len(node.inputs):
            source[node.outputs[0]] = node.inputs[shared]
    callers = {*graph.inputs, *graph.initializers, *graph.outputs}
    for name, index in written.items():
        if name not in home:
            assert callers & set(ancestors(name, source)), f"{name} has no memory"
            continue
        buffer = home[name]
        assert buffer.first <= index <= buffer.last
        assert read.get(name, index) <= buffer.last, f"{name} is read after it was freed"
        nbytes = graph.values[name].nbytes
        assert nbytes <= buffer.nbytes
    for buffer in plan.buffers:
        tensors = sorted(buffer.tensors, key=lambda name: written[name])
        for earlier, later in itertools.combinations(tensors, 2):
            last_read = read.get(earlier, written[earlier])
            if last_read < written[later]:
                continue
            # A view of it, or written over it by the node that reads it last.
            assert earlier in ancestors(later, source), f"{earlier} and {later} overlap"
    live = [
        sum(b.size for b in plan.buffers if b.first <= i <= b.last) for i in range(len(graph.nodes))
    ]
    assert [use.live for use in plan.uses] == live


def ancestors(name: str, source: dict[str, str]) -> list[str]:
    """The tensor, and those whose memory it was made in, one after the other."""
    names = [name]
    while names[-1] in source:
        names.append(source[names[-1]])
    return names


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_plan_is_consistent(name, case):
    this = case(name)
    for model in (this.package.training_model, this.package.eval_model):
        graph = load_runtime_graph(model, this.shapes)
        verify(graph, allocate(graph))


def test_verifier_sees_a_shared_buffer(case):
    """The verifier itself is worth something: a plan that shares too much does not pass."""
    graph = load_runtime_graph(case("mlp").package.eval_model, case("mlp").shapes)
    plan = allocate(graph)
    merged = allocation.Buffer("all", 10**9, 0, len(graph.nodes) - 1, {})
    for buffer in plan.buffers:
        merged.tensors |= buffer.tensors
    size = merged.size
    uses = tuple(allocation.NodeUse(size, 0) for _ in graph.nodes)
    with pytest.raises(AssertionError, match="overlap"):
        verify(graph, Allocation((merged,), uses, ()))


@pytest.mark.parametrize(
    ("nbytes", "size"), [(0, 0), (1, 160), (16383, 16480), (16384, 20480), (10**6, 1003520)]
)
def test_allocated_size(nbytes, size):
    assert allocated_size(nbytes) == size


def test_where_asks_for_its_selections_before_its_output():
    """The chunk of a few bytes that is free decides where those after it lie."""
    text = """g (bool[8] c, float[8] x, float[8] y) => (float[8] out) {
        kept = Where (c, x, y)
        out = Neg (kept)
    }"""
    where, neg = allocate(load_model(text)).uses
    assert where.scratch == (32, 32)
    assert where.scratch_first
    assert not neg.scratch_first


def test_a_view_that_nothing_reads_takes_nothing():
    text = """g (float[8] x) => (float[8] out) {
        shape = Constant <value_ints = [2, 4]> ()
        y = Exp (x)
        unread = Reshape (y, shape)
        out = Neg (y)
    }"""
    (buffer,) = allocate(load_model(text)).buffers
    assert set(buffer.tensors) == {"y", "unread"}


@pytest.mark.parametrize(("fresh", "tensors", "ends"), [([], 3, 2), (["out"], 3, 1)])
def test_what_a_run_takes_besides_tensors(fresh, tensors, ends):
    """Views are described until the run ends, and other tensors until they are freed."""
    text = """g (float[8] x) => (float[2, 4] out) <int64[2] shape = {2, 4}> {
        a = Exp (x)
        view = Reshape (a, shape)
        b = Exp (view)
        c = Exp (b)
        out = Exp (c)
    }"""
    graph = load_model(text)
    taken = run_bytes(graph, allocate(graph, fresh_outputs=fresh))
    assert taken == 24 * len(graph.values) + 224 * tensors + 120 * ends


def test_results_that_the_caller_gets():
    """They are kept by a binding, or not: the arenas are planned both ways."""
    text = """g (float[1000] x) => (float[1000] out, float[1000] bound) {
        out = Exp (x)
        bound = Neg (out)
    }"""
    plan = allocate(load_model(text), fresh_outputs=["out"])
    assert plan.results == {"out"}
    arenas = Arenas("shared", None)
    held = []
    for session in ("a", "a", "b"):
        arenas.run(session, plan)
        held.append(arenas.resident)
    assert held[0] == held[1] < held[2]  # of each session one, and not one of each run


def test_branch_of_a_known_condition():
    """Of an ``If`` on a graph input whose value is known only that branch counts."""
    then, other = (
        f"""wide{width} () => (float sum{width}) <int64[1] shape{width} = {{{width}}}> {{
            wide{width} = Expand (x, shape{width})
            sum{width} = ReduceSum <keepdims = 0> (wide{width})
        }}"""
        for width in (1000, 2000)
    )
    runtime_graph = load_model(f"""g (bool[1] flag, float[1] x) => (float out) {{
        condition = Squeeze (flag)
        out = If (condition) <then_branch = {then}, else_branch = {other}>
    }}""")
    peaks = [
        allocate(runtime_graph, conditions=conditions).peak
        for conditions in ({"flag": True}, {"flag": False}, {})
    ]
    index = allocated_size(8)  # Expand's own, while it runs
    assert peaks == [allocated_size(nbytes) + index for nbytes in (4000, 8000, 8000)]


def test_heap_keeps_small_buffers():
    """What is freed of small tensors counts on; a large one is gone."""

    def chain(width: int) -> Allocation:
        text = f"""g (float[4, {width}] x) => (float out) {{
            a = Transpose <perm = [1, 0]> (x)
            b = Sin (a)
            c = ReduceSum <keepdims = 0> (b)
            out = Cos (c)
        }}"""
        return allocate(load_model(text))

    small, large = chain(64), chain(64 * 1024)
    assert small.heap == 2 * allocated_size(4 * 4 * 64)
    assert small.uses[-1].small < small.heap
    assert large.heap == allocated_size(4)  # the sum alone
    assert large.peak > 2 * 4 * 4 * 64 * 1024


# The arena against ONNX Runtime's own, and what must hold of any.

TRAINING = """
import sys
import numpy as np
import onnxruntime
onnxruntime.set_default_logger_severity(1)
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.package.package import Package
package = Package.open(sys.argv[1])
options = default_session_options(package.training_model, 1)
options.log_severity_level = 1
state = CheckpointState.load_checkpoint(package.checkpoint)
module = Module(package.training_model, state, package.eval_model, session_options=options)
optimizer = Optimizer(package.optimizer_model, module)
batch = [np.load(path) for path in sys.argv[2:]]
for _ in range(2):
    module.eval()(*batch)
    module.train()(*batch)
    optimizer.step()
    module.lazy_reset_grad()
"""


@pytest.mark.parametrize(
    "name", ["mlp", "cnn", "mobilenet", "transformer", "recurrent", "tables", "volumes"]
)
def test_regions_are_onnx_runtimes(name, case, monkeypatch, tmp_path):
    """Size by size, in their order, of a whole training with its evaluations.

    In one of both ways that are planned of what becomes of results.
    """
    this = case(name)
    planned: dict[int, list[int]] = {}
    open_region = Arena._open_region

    def noted(arena: Arena, size: int) -> tuple[int, int]:
        before = arena.reserved
        chunk = open_region(arena, size)
        planned.setdefault(id(arena), []).append(arena.reserved - before)
        return chunk

    monkeypatch.setattr(Arena, "_open_region", noted)
    session = this.package.manifest.session
    plans = plan_arenas(this.package, this.shapes, SessionUse(sharing_of(session), False))
    list(plans.phases(Arenas(plans.sharing, session)))
    files = []
    for key, array in (("input", this.inputs), ("labels", this.labels)):
        files.append(f"{tmp_path}/{key}.npy")
        np.save(files[-1], array[: this.batch_size])
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(this.folder / "package"), *files],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": _path()},
    )  # fmt: skip
    real = re.findall(r"Extended allocation by (\d+) bytes", done.stderr)
    assert len(planned) == 2
    assert [int(size) for size in real] in planned.values()


def _path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * FIRST_REGION_BYTES), st.integers(0, 7)), max_size=60))
def test_chunks_do_not_overlap_and_all_come_back(requests):
    arena = Arena()
    held: list[tuple[int, int | None]] = []
    for nbytes, release in requests:
        resident = arena.resident
        held.append((nbytes, arena.allocate(nbytes)))
        assert arena.resident >= resident
        used = sorted((start, start + size) for start, size in arena.chunks.items())
        for one, two in itertools.pairwise(used):
            assert one[1] <= two[0]
        for asked, chunk in held:
            assert (chunk is None) == (asked == 0)
            if chunk is not None:
                assert asked <= arena.chunks[chunk] < 2 * max(asked, UNIT) + UNIT
        if release < len(held):
            arena.release(held.pop(release)[1])
    for _, chunk in held:
        arena.release(chunk)
    assert not arena.chunks
    assert sum(size for size, _ in arena.free) == arena.reserved
    assert arena.touched <= arena.reserved
    reserved = arena.reserved
    if reserved:  # every region is one free chunk again
        arena.allocate(FIRST_REGION_BYTES)
        assert arena.reserved == reserved


def test_pages_count_once():
    """Of ranges that touch, meet or lie in each other."""
    arena, pages = Arena(), set[int]()
    random = np.random.default_rng(0)
    for _ in range(300):
        first = int(random.integers(200))
        last = first + int(random.integers(1, 12))
        arena._touch(first, last)
        pages.update(range(first, last))
        assert arena.touched == len(pages) * PAGE


def test_of_chunks_of_one_size_the_newest_regions_is_taken():
    """It lies at the lowest address: Linux maps from the top down."""
    arena = Arena()
    first, second, _ = (arena.allocate(FIRST_REGION_BYTES) for _ in range(3))
    assert arena.reserved == 3 * FIRST_REGION_BYTES  # in two regions
    arena.release(first)
    arena.release(second)
    assert arena.allocate(FIRST_REGION_BYTES) == second


def test_who_shares():
    def options(**changes: bool) -> SessionInfo:
        return SessionInfo(optimization_level="all", **changes)

    assert sharing_of(None) == "own"
    assert sharing_of(options()) == "own"
    assert sharing_of(options(shared_allocator=True)) == "shared"
    assert sharing_of(options(shared_allocator=True, arena=False)) == "none"


def test_one_arena_takes_no_more_than_several(case):
    this = case("cnn")
    shared, own = (
        plan_memory(this.package, this.shapes, SessionUse(sharing, False)).peak.nbytes
        for sharing in ("shared", "own")
    )
    assert shared <= own


# A kit that cannot share an arena: the plan against a replay whose sessions have one each.


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_plan_and_replay_agree(name, tmp_path):
    """Over both lives: the one that begins, and the one that goes on from what that saved."""
    this = make_case(name, tmp_path, steps=4)  # so that a whole batch is evaluated, as is planned
    planned = plan_memory(this.package, this.shapes, SessionUse("own", False))
    shared = plan_memory(this.package, this.shapes)
    assert planned.peak.nbytes >= shared.peak.nbytes
    measured = hold(this.job(tmp_path, sharing="own"))
    assert measured.outcome == "completed"
    assert measured.peak_bytes is not None
    assert planned.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.05, abs=4e5)
    resuming = {peak.phase: peak for peak in planned.phase_peaks(measured.phase_peaks)}["resuming"]
    assert resuming.measured_bytes == pytest.approx(resuming.predicted_bytes, rel=0.1, abs=4e5)


def test_options_of_onnx_runtime(case, tmp_path):
    """With memory patterns a session keeps a block for a whole run, beside its arena."""
    this = case("transformer")  # its data are too few to evaluate
    package = _with_default_options(this.package, tmp_path / "package")
    use = SessionUse(sharing_of(package.manifest.session), step_model=False)
    plan = plan_arenas(package, this.shapes, use).plan(package.manifest.session, evaluates=False)
    assert plan.peak.nbytes > 1.05 * plan_memory(this.package, this.shapes).peak.nbytes
    job = dataclasses.replace(
        this.job(tmp_path, sharing="own"), training_model=str(package.training_model),
        eval_model=str(package.eval_model), optimizer_model=str(package.optimizer_model),
    )  # fmt: skip
    measured = hold(job)
    assert measured.outcome == "completed"
    assert "evaluation" not in measured.phase_peaks
    assert plan.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.02)


def test_a_limit_between_the_two_is_refused_to_own_arenas_only(case, tmp_path):
    this = case("cnn")
    limits = {False: None, True: "own"}
    peaks = {}
    for own, sharing in limits.items():
        (tmp_path / str(own)).mkdir()
        peaks[own] = hold(this.job(tmp_path / str(own), sharing=sharing)).peak_bytes
    low, high = peaks[False], peaks[True]
    assert None not in (low, high)
    limit = (low + high) // 2
    assert high - low > 600_000  # more than a limit can be off by
    for own, outcome in ((False, "completed"), (True, "killed")):
        job = this.job(tmp_path / str(own), sharing=limits[own], limit_bytes=limit)
        assert hold(job).outcome == outcome
