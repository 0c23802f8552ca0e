"""Plans, replays and times of a package with native kernels are those of the nodes that run."""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack.build import build_package
from odtpack.fit.package_cache import Order, build_and_plan
from odtpack.recipe import BuildSpec
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.native import OPERATORS
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.native import DOMAIN, VARIABLE, choose_kernels
from odtpack_runtime.session.options import LEVELS
from odtpack_simulator.device.kits import Kit
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.fleet.devices import measure_devices
from odtpack_simulator.fleet.fleet_file import parse_fleet
from odtpack_simulator.fleet.population import split_data
from odtpack_simulator.memory.allocation import allocate
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.kernel_memory import native_scratch
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.process_memory import memory_options
from odtpack_simulator.memory.runtime_graph import load_runtime_graph
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import hold, with_sessions
from odtpack_simulator.reports.simulation import kit_words
from odtpack_simulator.result import Policy
from odtpack_simulator.simulation import simulate
from tests import native_library, zoo
from tests.model_text import kernels
from tests.packaging_tools import batch
from tests.refused import refused
from tests.simulator.graphs import zeros
from tests.simulator.packages import job_on

NETWORKS: dict[str, tuple[Callable[[], onnx.ModelProto], int]] = {
    "mlp": (lambda: zoo.mlp((784, 1000, 10)), 64),
    "cnn": (lambda: zoo.cnn(hidden=128), 32),
    "mobilenet": (zoo.mobilenet_v2, 8),
    "normalized": (partial(zoo.mobilenet_v2, 64, width_mult=0.5, batch_norm="train"), 8),
    "transformer": (zoo.transformer_encoder, 8),
}

FLEET = b"""[population]
clients = 10
devices = [
    { profile = "apple/iphone-11", share = 0.5 }, { profile = "google/pixel-8a", share = 0.5 },
]
[federation]
clients = 2
"""


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of native kernels, which the environment names."""
    path = native_library.library()
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def packed(name: str, folder: Path) -> tuple[Package, Job, dict[str, tuple[int, ...]]]:
    """A package with native nodes, and a training of it on random data."""
    factory, size = NETWORKS[name]
    model = factory()
    build_package(model, folder / "p", loss="cross_entropy", optimizer="adamw", native=True)
    package = Package.open(folder / "p")
    inputs, labels = batch(model, 8 * size)
    names = (each.name for each in package.manifest.inputs)
    data = dict(zip(names, (inputs, labels), strict=True))
    options = {"epochs": 2, "seed": 0, "full_batches": True, "learning_rate": 1e-3}
    return package, *job_on(package, folder, data, size, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize("name", NETWORKS)
def test_the_plan_is_what_a_process_takes(name, tmp_path):
    package, job, shapes = packed(name, tmp_path)
    use = session_use(package.manifest, "cpp", native=True)._replace(sharing="none")
    assert use.native
    plan = plan_memory(package, shapes, use, threads=1)
    measured = hold(with_sessions(job, package, use))
    assert measured.outcome == "completed"
    assert plan.peak.nbytes == pytest.approx(measured.peak_bytes, rel=0.03)
    # It is another plan than that of the bodies.
    bodies = plan_memory(package, shapes, use._replace(native=False), threads=1)
    assert plan.peak.nbytes != bodies.peak.nbytes


def test_each_thread_packs_operands_of_its_own(tmp_path):
    package, _, shapes = packed("transformer", tmp_path)
    use = session_use(package.manifest, "cpp", native=True)

    def packs(native: bool, threads: int) -> list[int]:
        plan = plan_memory(package, shapes, use._replace(native=native), threads=threads)
        return [each.nbytes for each in plan.peak.items if each.name == "native kernels at work"]

    assert packs(False, 4) == []
    # A part of 192 rows of each operand: 156 columns of the first, and 128 of the second.
    assert packs(True, 1) == [4 * 192 * (156 + 128)]
    assert packs(True, 4) == [4 * packs(True, 1)[0]]


SQUARE_SUMS = [2, 1, 3, OPERATORS.index("Mul"), 0, 1, 0, OPERATORS.index("RowSum"), 2, 0, 0]
DEPTHWISE = [0, 0, 0, 4, *(12, 3, 1, 1, 1, 12) * 2, 0]  # 3x3, of planes of 12x12


@pytest.mark.parametrize(
    ("kernel", "program", "shapes", "one", "four"),
    [
        # One task, which one thread does; and two parts of either matrix.
        ("transposed", [0], [(128, 40), (128, 100)], 128 * (48 + 128), 128 * (48 + 128)),
        ("transposed", [0], [(300, 157), (300, 1030)], 192 * 212, 4 * 192 * 212),
        ("transposed", [0], [(0, 40), (0, 100)], 0, 0),
        ("transposed", [0], [None, (96, 40)], 192 * 156 + 24576, 4 * (192 * 156 + 24576)),
        # A product and a sum for a row, and three registers for what is repeated along rows.
        ("elementwise", SQUARE_SUMS, [(64, 4096)] * 2, 5 * 4176, 4 * 5 * 4176),
        ("elementwise", SQUARE_SUMS, [(64, 8)] * 2, 5 * 592, 5 * 592),
        ("elementwise", SQUARE_SUMS, [(64, 0)] * 2, 0, 0),
        ("elementwise", SQUARE_SUMS, [(64, 8), None], 0, 0),
        # Planes of 14x14, of 15x15 for a gradient, and two results like them; 16 sums of a tap.
        ("depthwise", [0, *DEPTHWISE], [(4, 1, 3, 3), (900, 4, 12, 12)], 588, 4 * 588),
        ("depthwise", [1, *DEPTHWISE], [(4, 1, 3, 3), (2, 4, 12, 12)], 675, 675),
        ("depthwise", [2, *DEPTHWISE], [(2, 4, 12, 12)] * 2, 2 * 196 + 144, 2 * 196 + 144),
        ("normalization", [0, 4, 0, 0], [(8, 64, 7, 7), (64,)], 3 * 64 * 49, 3 * 64 * 49),
        ("normalization", [0, 4, 0, 0], [(8, 64, 8, 8), (64,)], 0, 0),
        ("normalization", [0, 4, 0, 0], [(8, 999, 7, 7), (999,)], 3 * 167 * 49, 12 * 167 * 49),
        ("normalization", [0, 0, 0, 0], [(64, 2, 16), (64,)], 3 * 64 * 32, 3 * 64 * 32),
        ("product", [0] * 8, [None], 14336, 4 * 14336),
    ],
)  # fmt: skip
def test_what_kernels_take_while_they_run(kernel, program, shapes, one, four):
    attributes = {"kernel": kernel.encode(), "program": program}
    assert [native_scratch(attributes, shapes, n) for n in (1, 4)] == [4 * one, 4 * four]


def test_planned_nodes_are_those_that_run(library, tmp_path):
    package, _, shapes = packed("transformer", tmp_path)
    path = package.step_model or package.training_model
    options = memory_options(1, str(library))
    options.graph_optimization_level = LEVELS["extended"]
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = onnxruntime.InferenceSession(str(path), options)
    graph = load_runtime_graph(path, shapes, level="extended", native=True)
    session.run(None, zeros(session, NETWORKS["transformer"][1]))
    ran = [(each["args"]["op_name"], each["name"]) for each in kernels(session)]
    planned = [(node.op_type, node.name) for node in graph.nodes]
    assert [each for each in ran if each in planned] == planned  # others are inside of branches
    assert any(node.domain == DOMAIN for node in graph.nodes)
    assert not any(node.domain == DOMAIN for node in load_runtime_graph(path, shapes).nodes)


def test_a_kernel_writes_over_its_input(tmp_path):
    """Of two in a row, the second result takes the memory of the first; bodies copy."""
    node = onnx.helper.make_node
    model = native_library.kernel_model([node("Sqrt", ["a"], ["b"])], {"a": (4096,)}, ["b"])
    first, *_ = model.graph.node
    for before, after in (("b", "c"), ("c", "d")):
        model.graph.node.append(onnx.NodeProto())
        model.graph.node[-1].CopyFrom(first)
        model.graph.node[-1].input[:] = [before]
        model.graph.node[-1].output[:] = [after]
    number = onnx.TensorProto.FLOAT
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("d", number, [4096]))
    for name in "bc":
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, number, [4096]))
    onnx.save(model, tmp_path / "m.onnx")
    kernels = allocate(load_runtime_graph(tmp_path / "m.onnx", {}, native=True))
    bodies = allocate(load_runtime_graph(tmp_path / "m.onnx", {}))
    assert [sorted(each.tensors) for each in kernels.buffers] == [["b", "c"]]
    assert len(bodies.buffers) == 2


def test_a_gradient_is_written_over_what_only_it_reads(tmp_path):
    """As that of an activation over what the activation read."""
    package, _, shapes = packed("transformer", tmp_path)
    graph = load_runtime_graph(package.step_model or "", shapes, level="extended", native=True)
    held = [{*each.tensors} for each in allocate(graph).buffers]
    over = [
        node for node in graph.nodes
        if node.domain == DOMAIN and any({node.inputs[0], node.outputs[0]} <= each for each in held)
    ]  # fmt: skip
    assert over


def test_whether_kernels_run(monkeypatch, tmp_path):
    package, _, _ = packed("mlp", tmp_path)
    manifest = package.manifest
    kits: tuple[Kit, ...] = ("cpp", "kotlin", "swift", "python")
    assert all(session_use(manifest, kit, native=True).native for kit in kits)
    assert [session_use(manifest, kit).native for kit in kits] == [True, False, True, False]
    assert not session_use(manifest, "js").native
    assert not session_use(manifest, "cpp", native=False).native
    with refused("no-native-kernels", "JavaScript"):
        session_use(manifest, "js", native=True)
    monkeypatch.delenv(VARIABLE)
    for native in (True, None):
        with pytest.raises(OdtpackError, match="library of native kernels"):
            session_use(manifest, "cpp", native=native)
    plain = dataclasses.replace(
        manifest.operators, training_model={}, optimizer_model={}, step_model=None
    )
    plain = dataclasses.replace(manifest, operators=plain)
    assert not session_use(plain, "cpp", native=True).native


def test_fit_and_fleets_follow_the_kit(monkeypatch, tmp_path):
    """An app on Swift runs kernels, and one on Kotlin none, as ``simulate`` has it."""
    package, job, shapes = packed("mlp", tmp_path)
    size = next(iter(shapes.values()))[0]
    one = {name: shape[1:] for name, shape in shapes.items()}
    settings = BuildSpec(package.path / "unused.onnx", "cross_entropy")
    peaks = {
        kit: build_and_plan(Order(settings, str(package.path), size, one, kits=(kit,))).peak_bytes
        for kit in ("swift", "kotlin")
    }
    for kit in ("swift", "kotlin"):
        use = session_use(package.manifest, kit)
        assert use.native == (kit == "swift")
        assert peaks[kit] == plan_memory(package, shapes, use).peak.nbytes
    assert peaks["swift"] != peaks["kotlin"]
    fleet = parse_fleet(FLEET)
    data = split_data({name: np.load(path) for name, path in job.data.items()}, 0)
    found = measure_devices(package, data, fleet, size)
    assert [each.peak_bytes for each in found] == [peaks["swift"], peaks["kotlin"]]
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(OdtpackError, match="library of native kernels"):
        build_and_plan(Order(settings, str(package.path), size, one, kits=("swift",)))
    with pytest.raises(OdtpackError, match="library of native kernels"):
        measure_devices(package, data, fleet, size)


def test_a_file_that_is_no_library_is_one_error(tmp_path):
    (tmp_path / "no.so").write_text("nothing")
    with refused("no-native-kernels", "cannot be registered"):
        choose_kernels(onnxruntime.SessionOptions(), str(tmp_path / "no.so"))


def test_the_report_says_what_was_assumed(tmp_path):
    package, job, _ = packed("mlp", tmp_path)
    np.savez(tmp_path / "data.npz", **{each: np.load(path) for each, path in job.data.items()})
    said = {}
    for native in (None, False):
        result = simulate(
            package.path, tmp_path / "data.npz", [load_profile("google/pixel-8a")],
            batch_size=64, epochs=1, seed=0, policy=Policy(kit="cpp", native=native),
        )  # fmt: skip
        (device,) = result.devices
        said[native] = device.memory.native, kit_words(device.memory, result).rpartition(", ")[2]
        kinds = {each.op_type for each in result.latency_host.by_operator}
        assert ("native elementwise" in kinds) == (native is None)
    assert said == {None: (True, "native kernels"), False: (False, "without native kernels")}
