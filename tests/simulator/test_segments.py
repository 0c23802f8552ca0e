"""A package that is trained segment by segment: its plan against a process, and a simulation."""

import collections
import dataclasses
import functools
import re
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.decoder.model import Shape, write_model
from odtpack.adapters import AdapterSpec
from odtpack_runtime import Package
from odtpack_simulator.device.app import APP_FOOTPRINTS, MARGIN
from odtpack_simulator.device.kits import Kit, kit_of
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.latency import measure_host
from odtpack_simulator.memory.arena import SessionUse, session_use
from odtpack_simulator.memory.execution_order import reads, trained_layers
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.planning import whole_graph
from odtpack_simulator.memory.process_memory import anonymous_bytes
from odtpack_simulator.replay.job import Job, Message, run_digest
from odtpack_simulator.replay.replay import run_training_child, with_sessions
from odtpack_simulator.reports import render_report
from odtpack_simulator.reports.simulation import key_figures, mapped_words
from odtpack_simulator.result import Policy, SimulationResult
from odtpack_simulator.simulation import simulate
from tests.packaging_tools import built_package
from tests.simulator.packages import job_on
from tests.simulator.profiles import make_profile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")

SHAPE = Shape("medium", 3, 256, 4, 2, 704, 2000)
LINEARS = AdapterSpec("lora", ("*_proj",), (), 8, 16.0)


WAYS: dict[str, dict[str, Any]] = {
    "int4": {"base": "int4"},
    "float32": {},
    "small": {"base": "int4", "sessions": "small"},
    "kept": {"base": "int4", "keep_products": 9},
}
Built = Callable[[str], Package]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Packages of a decoder of three blocks: int4, float32, without an arena, products kept."""
    folder = tmp_path_factory.mktemp("decoder")
    model = write_model(SHAPE, folder / "model")

    @functools.cache
    def build(name: str) -> Package:
        return built_package(
            model, folder / name, "next_token", segments=True, loss_options={"words": 500},
            adapter=LINEARS, **WAYS[name],
        )  # fmt: skip

    return build


def job_of(package: Package, batch: int, tokens: int, folder: Path) -> Job:
    ids = np.random.default_rng(0).integers(0, SHAPE.words, (12 * batch, tokens))
    data = dict.fromkeys(("input_ids", "labels"), ids)
    return job_on(package, folder, data, batch, max_steps=3)[0]


def shapes(batch: int, tokens: int) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("input_ids", "labels"), (batch, tokens))


def test_predicted_and_measured(built, tmp_path):
    """The peak of every kind of sessions and size; the mapped weights count in neither."""
    errors = {}
    for name in WAYS:
        package = built(name)
        for size in ((1, 128), (1, 512), (4, 96)):
            plan = plan_memory(package, shapes(*size))
            # Without an arena a peak is over in a moment: more steps, to be seen in one.
            steps = 9 if name == "small" else 3
            job = dataclasses.replace(job_of(package, *size, tmp_path), max_steps=steps)
            found = run_training_child(job).peak_bytes
            errors[name, size] = plan.peak.nbytes / found - 1
    assert all(error > -MARGIN for error in errors.values()), errors
    assert max(map(abs, errors.values())) <= 0.05, errors
    assert statistics.median(map(abs, errors.values())) <= 0.03, errors


def test_what_the_child_measures_is_seen_from_outside(built, tmp_path):
    package = built("float32")
    assert sum(w.nbytes for w in package.manifest.segments.tensors) > 10**7
    seen: list[int] = []
    started: list[int] = []
    ended = threading.Event()

    def look(pid: int) -> None:
        while not ended.wait(0.002):
            seen.append(anonymous_bytes(pid) or 0)

    def take(message: Message) -> None:
        if message["event"] == "started":
            threading.Thread(target=look, args=(message["pid"],), daemon=True).start()
        if message["event"] == "phase" and not started:
            started.append(max(seen, default=0))

    found = run_training_child(job_of(package, 1, 256, tmp_path), on_message=take).peak_bytes
    ended.set()
    assert max(seen) - started[0] == pytest.approx(found, rel=0.06)


def test_operators_are_counted_as_often_as_their_piece_runs(built, tmp_path):
    package = built("int4")
    job = dataclasses.replace(job_of(package, 1, 32, tmp_path), task="time")
    timing = measure_host(job)
    calls = collections.Counter[str]()
    for group in timing.groups:
        calls[group.op_type] += group.calls
    plan = plan_memory(package, shapes(1, 32))
    planned = collections.Counter(point.op_type for point in plan.timeline)
    for op_type in ("ReduceMean", "Sqrt", "Gather"):
        assert calls[op_type] == planned[op_type] > 0
    # Attention and feed-forward are loops over blocks of tokens, of which 32 make one. The backward
    # model has the result of attention and the gradients of both.
    activations = calls["Sigmoid"] + calls["QuickGelu"]
    assert (calls["Softmax"], activations) == (3 * SHAPE.blocks, 2 * SHAPE.blocks)
    assert planned["Scan"] == 5 * SHAPE.blocks
    files = {path.name: path.stat().st_size for path in package.path.iterdir()}
    others = files["checkpoint"] + files["manifest.json"]
    assert timing.model_bytes == sum(files.values()) - others


def test_what_it_takes_for_another_run(built, tmp_path):
    """Other frozen weights are another training, though no model differs."""
    package = built("int4")
    before = run_digest(job_of(package, 1, 32, tmp_path))
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in package.path.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == "segments.weights":
            data[100] ^= 1
        (copy / path.name).write_bytes(data)
    changed = dataclasses.replace(package, training_model=copy / "training_model.onnx")
    assert run_digest(job_of(changed, 1, 32, tmp_path)) != before


def test_layers_of_all_segments(built):
    package = built("int4")
    graph = whole_graph(package)
    made = {name for node in graph.node for name in node.output}
    read = {name for node in graph.node for name in reads(node) if name}
    outside = read - made
    weights = {w.name for w in package.manifest.segments.tensors}  # type: ignore[union-attr]
    assert weights - outside == set()
    assert len([name for name in outside if name.endswith("lora_A.weight")]) == 7 * SHAPE.blocks
    layers = trained_layers(graph, package.manifest)
    blocks = [re.findall(r"layers\.(\d)", each.name)[0] for layer in layers for each in layer]
    assert blocks == sorted(blocks)


def simulated(
    package: Path, folder: Path, samples: int, profiles: list[DeviceProfile], **more: Any
) -> SimulationResult:
    """An epoch of random tokens in batches of two, judged."""
    data = folder / "data.npz"
    ids = np.random.default_rng(0).integers(0, SHAPE.words, (samples, 64))
    np.savez(data, input_ids=ids, labels=ids)
    options = {"batch_size": 2, "epochs": 1, "seed": 1} | more
    return judge(simulate(package, data, profiles, **options), None)


JUDGED = {"learning_rate": 0.001, "judge": lambda found: judge(found, None)}


def test_a_simulation(built, tmp_path):
    package = built("int4")
    peak = plan_memory(package, shapes(2, 64)).peak.nbytes
    profiles = [make_profile("enough", int(1.2 * peak)), make_profile("tiny", int(0.7 * peak))]
    result = simulated(package.path, tmp_path, 20, profiles, interruptions=2, **JUDGED)
    enough, tiny = result.devices
    assert enough.verdict == "pass"
    assert enough.memory.outcome == "fits"
    assert enough.memory.held is not None
    assert (tiny.verdict, tiny.memory.outcome) == ("fail", "over")
    assert result.interruption.equal
    assert len(result.training.losses) == result.data.steps
    assert result.package.trained_layers == 2 * 7 * SHAPE.blocks
    weights = package.path / "segments.weights"
    assert result.memory.mapped_bytes == pytest.approx(weights.stat().st_size, rel=0.001)
    assert enough.memory.kit == "python"
    changes = result.memory.changes
    assert {change.freeze for change in changes} == {None}
    assert any(change.micro_batch == 1 for change in changes)
    assert all(change.peak_bytes < peak for change in changes)
    assert result.data.tokens_per_step == 128
    assert "base mapped: " in key_figures(result)[0][2]
    for kind in ("html", "markdown"):
        words = mapped_words(result).removeprefix("base mapped")
        assert words
        assert words in render_report(result, kind).decode().replace("\xa0", " "), kind


@pytest.mark.parametrize("system", ["ios", "macos"])
def test_apps_in_swift_are_held_to_the_limit_as_those_in_cpp(system, built, tmp_path):
    """Apps of these systems train with the Swift kit unless the user names another."""
    package = built("int4")
    peak = plan_memory(package, shapes(2, 64)).peak.nbytes
    more = APP_FOOTPRINTS[system].nbytes - APP_FOOTPRINTS["linux"].nbytes
    profiles = [
        make_profile(name, int(share * peak) + more).model_copy(update={"os": system})
        for name, share in (("enough", 1.2), ("tiny", 0.7))
    ]
    kits: list[Kit | None] = [None, "cpp"]
    swift, cpp = (
        simulated(package.path, tmp_path, 8, profiles, policy=Policy(kit=kit)) for kit in kits
    )
    for one, other in zip(swift.devices, cpp.devices, strict=True):
        assert (one.memory.kit, other.memory.kit) == ("swift", "cpp")
        assert one.memory.sharing == other.memory.sharing == "shared"
        assert one.memory.predicted_peak_bytes == other.memory.predicted_peak_bytes
        assert one.memory.held == other.memory.held
    assert [each.memory.outcome for each in swift.devices] == ["fits", "over"]
    assert [each.memory.outcome for each in cpp.devices] == ["fits", "over"]
    assert swift.memory.mapped_bytes is not None


@pytest.mark.parametrize("size", [(1, 256), (4, 96)])
def test_of_a_kit_that_cannot_share_an_arena(size, built, tmp_path):
    """Its sessions have none: with one each they would hold the peaks of all at once."""
    package = built("int4")
    use = session_use(package.manifest, "kotlin")
    assert use.sharing == "none"
    job = with_sessions(job_of(package, *size, tmp_path), package, use)
    job = dataclasses.replace(job, max_steps=9)
    found = run_training_child(job).peak_bytes
    plan = plan_memory(package, shapes(*size), SessionUse(use.sharing, False))
    assert plan.peak.nbytes / found - 1 == pytest.approx(0, abs=0.05)
    own = run_training_child(dataclasses.replace(job, sharing="own")).peak_bytes
    assert own > 1.3 * found
    assert plan_memory(package, shapes(*size), SessionUse("own", False)).peak.nbytes > 1.3 * found


def test_a_simulation_of_an_app_in_kotlin(built, tmp_path):
    package = built("int4")
    peak = plan_memory(package, shapes(2, 64), SessionUse("none", False)).peak.nbytes
    limit = int(1.3 * peak) + 3 * 10**7  # with what the JVM takes besides
    phones, policy = [make_profile("phone", limit)], Policy(kit=kit_of("android"))
    (phone,) = simulated(package.path, tmp_path, 4, phones, policy=policy, **JUDGED).devices
    assert (phone.memory.kit, phone.memory.sharing) == ("kotlin", "none")
    assert phone.memory.outcome == "fits"
    assert phone.memory.held is not None


@pytest.mark.parametrize("system", ["linux", "web"])
def test_a_simulation_of_an_app_in_javascript(system, built, tmp_path):
    """Its kit reads the weights of a segment into memory; a page has all of them there too."""
    package = built("float32")
    sizes = {each.name: each.nbytes for each in package.manifest.segments.tensors}
    # The segments with the most hold three matrices of an MLP and a norm.
    mlp = [name for name in sizes if ".0.mlp." in name or ".0.post_attention" in name]
    held = sum(sizes[name] for name in mlp) + (sum(sizes.values()) if system == "web" else 0)
    mapped = plan_memory(package, shapes(2, 64), SessionUse("none", False)).peak.nbytes
    limit = 2 * (mapped + held) + 10**8  # with what Node takes besides
    profile = make_profile("any", limit).model_copy(update={"os": system})
    result = simulated(package.path, tmp_path, 4, [profile], policy=Policy(kit="js"), **JUDGED)
    (app,) = result.devices
    assert (app.memory.kit, app.memory.sharing) == ("js", "none")
    assert app.memory.predicted_peak_bytes == mapped + held
    assert app.memory.outcome == "fits"
    found = result.memory.measured_peak_bytes
    assert (mapped + held) / found - 1 == pytest.approx(0, abs=0.05)
