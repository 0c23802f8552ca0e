"""The memory plan of a package: its phases, its parts, and what makes it larger."""

import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.optimizers import SGD, Adafactor, AdamW, Lion
from odtpack_runtime import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.device.app import memory_fit
from odtpack_simulator.memory.arena import Arenas, SessionUse, session_use
from odtpack_simulator.memory.memory_plan import plan_arenas, plan_memory
from odtpack_simulator.memory.planning import MEASURED_AS, Item, MemoryPlan, Phase
from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import run_training_child, with_sessions
from tests import zoo
from tests.model.test_inputs import speech
from tests.packaging_tools import batch
from tests.simulator.packages import MODELS, job_on

SMALL_MODELS = [name for name in MODELS if name != "batchnorm"]  # it has thousands of nodes


def test_inputs_whose_first_axis_is_not_that_of_samples(tmp_path):
    """A smaller last batch is cut along the axes that count samples."""
    build_package(speech(), tmp_path / "p", loss="mse", self_check=False)
    shapes = {"x": (8, 4), "rate": (), "state": (2, 8, 4), "target": (8, 3)}
    plan = plan_memory(Package.open(tmp_path / "p"), shapes, evaluated=8)
    assert plan.peak.nbytes > 0


def test_one_step_of_several_batches(case):
    """The last of them may be smaller: no second step is planned for it."""
    this = case("cnn")
    manifest = dataclasses.replace(this.package.manifest, accumulation_steps=4)
    package = dataclasses.replace(this.package, manifest=manifest)
    for samples in (4 * this.batch_size, 3 * this.batch_size + 1):
        plan = plan_memory(package, this.shapes, samples=[samples], steps=1)
        assert "training step" not in [phase.name for phase in plan.phases]


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_parts_sum_to_the_peak(name, case):
    this = case(name)
    plan = plan_memory(this.package, this.shapes)
    predicted = plan.predicted()
    assert predicted.peak_bytes == predicted.breakdown.total  # the model checks it as well
    assert sum(tensor.bytes for tensor in plan.tensors_at_peak()) == predicted.peak_bytes
    # What the arena holds and does not use is part of a phase, but not alive at a node.
    steps = ("training step", "optimizer step")
    without = plan_memory(this.package, this.shapes, SessionUse("none", False))
    alive, exactly = (max(point.live_bytes for point in p.timeline) for p in (plan, without))
    taken, needed = (max(phase.nbytes for phase in p.phases if phase.name in steps)
                     for p in (plan, without))  # fmt: skip
    assert alive <= taken
    assert exactly == needed
    assert [point.index for point in plan.timeline] == list(range(len(plan.timeline)))
    state = sum(
        4 * int(np.prod(p.shape)) for p in this.package.manifest.parameters
        if p.role == "trainable"
    )  # fmt: skip
    adam = this.package.manifest.optimizer.kind == "adamw"
    breakdown = next(p for p in plan.phases if p.name == "training step")
    parts = {kind: sum(i.nbytes for i in breakdown.items if i.kind == kind)
             for kind in ("gradients", "optimizer_state")}  # fmt: skip
    gaps = 64 * len(this.package.manifest.parameters)
    assert state <= parts["gradients"] <= state + gaps
    assert parts["optimizer_state"] == (2 * parts["gradients"] if adam else 0)


def test_plan_is_deterministic(case):
    """Even where ONNX Runtime names its nodes differently in every session."""
    this = case("cnn")
    first, second = (plan_memory(this.package, this.shapes) for _ in range(2))
    assert first.predicted() == second.predicted()
    assert first.tensors_at_peak() == second.tensors_at_peak()
    assert first.timeline == second.timeline


@pytest.mark.parametrize("sharing", ["none", "shared"])
def test_larger_batch_needs_more(case, sharing):
    this = case("cnn")
    twice = {name: (2 * shape[0], *shape[1:]) for name, shape in this.shapes.items()}
    one, two = (
        plan_memory(this.package, sizes, SessionUse(sharing, False)).predicted().breakdown
        for sizes in (this.shapes, twice)
    )
    assert 1.8 * one.activations < two.activations
    # The chunks of an arena do not double: what takes more of two ways to use it counts.
    assert sharing == "shared" or two.activations < 2.2 * one.activations
    assert one.parameters == two.parameters


def test_shape_that_does_not_fit(case):
    this = case("cnn")
    shapes = {**this.shapes, "input": (8, 3, 28, 28)}
    with pytest.raises(OdtpackError, match=r"input.*cannot have the shape \[8, 3, 28, 28\]"):
        plan_memory(this.package, shapes)


def test_phase_peaks(case):
    this = case("mlp")
    plan = plan_memory(this.package, this.shapes)
    peaks = plan.phase_peaks()
    assert [peak.phase for peak in peaks] == [
        *("loading", "evaluation", "step", "saving", "exporting", "resuming")
    ]
    assert all(peak.measured_bytes is None for peak in peaks)
    assert max(peak.predicted_bytes for peak in peaks) == plan.predicted().peak_bytes
    assert plan.phase_peaks({"step": 7})[2].measured_bytes == 7
    by_name = {phase.name: phase.nbytes for phase in plan.phases}
    assert {*by_name} <= {name for names in MEASURED_AS.values() for name in names}
    # Gradients come one by one, and moments after the first step.
    assert by_name["first step"] < by_name["training step"]
    largest = max(4 * int(np.prod(p.shape)) for p in this.package.manifest.parameters)
    placing = next(phase for phase in plan.phases if phase.name == "placing the parameters")
    moved = [item.nbytes for item in placing.items if item.name.endswith("as it was read")]
    assert largest <= sum(moved) <= largest + 2 * 4096


def test_a_later_phase_is_not_the_reason(case):
    """Saving stands on what an arena kept of a step, whose tensors are shown."""
    this = case("cnn")
    plan = plan_memory(this.package, this.shapes)
    assert (plan.peak.name, plan.highest_phase) == ("saving", "step")
    assert plan.explained.nbytes == plan.peak.nbytes
    assert any("conv" in tensor.name for tensor in plan.tensors_at_peak()[:5])


@pytest.mark.parametrize(
    ("evaluation", "reason"),
    [((50, 0), "step"), ((99.5, 30), "step"), ((99.5, 0), "evaluation"), ((98, 0), "step")],
)
def test_the_reason_uses_most_of_what_an_arena_holds(evaluation, reason):
    def phase(name: str, total: float, kept: int) -> Phase:
        held = Item("kept by the arena", 10 * kept, "activations")
        return Phase(name, (Item("x", int(10 * total) - held.nbytes, "activations"), held))

    step, saving = phase("training step", 99.6, 20), phase("saving", 100, 90)
    plan = MemoryPlan((phase("evaluation", *evaluation), step, saving), (), ())
    assert plan.highest_phase == reason
    assert plan.predicted().peak_bytes == 1000


def test_more_threads_take_more(case):
    this = case("mlp")
    one, two, four = (plan_memory(this.package, this.shapes, threads=n) for n in (1, 2, 4))
    more = two.peak.nbytes - one.peak.nbytes
    assert more > 0
    assert four.peak.nbytes - one.peak.nbytes == 3 * more


@pytest.mark.parametrize(
    ("peak", "needed"),
    [(3_000_001, 3_240_002), (6_000_000, 6_400_000), (20_000_000, 20_600_000),
     (33_333_333, 34_333_333)],
)  # fmt: skip
def test_fits_only_with_the_margin(peak, needed):
    """3 %, rounded up; of small ones 8 %, or 0.4 MB where that is less."""
    assert memory_fit(peak, needed) == "fits"
    assert memory_fit(peak, needed - 1) == "close"


# The plan of a package that trains with its step model, against a replay.


def _replayed(
    model: onnx.ModelProto, folder: Path, size: int
) -> tuple[Package, Job, dict[str, tuple[int, ...]]]:
    """The package ``p`` of a folder, its replay over five batches, and the shapes of one."""
    package = Package.open(folder / "p")
    data = dict(zip(("input", "labels"), batch(model, 5 * size), strict=True))
    options = {"seed": 0, "full_batches": True, "learning_rate": 1e-3}
    return package, *job_on(package, folder, data, size, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_mobilenet(tmp_path):
    """Its updates are many: some in parts, and each with an output that only orders nodes."""
    model, size = zoo.mobilenet_v2(), 8
    build_package(model, tmp_path / "p", loss="cross_entropy", step_model="always")
    package, job, shapes = _replayed(model, tmp_path, size)
    use = session_use(package.manifest)
    assert use.step_model
    plans = plan_arenas(package, shapes, use)
    # The process that begins; another may keep results, and hold a twelfth more once it resumed.
    first = plans.phases(Arenas(plans.sharing, package.manifest.session))
    measured = run_training_child(with_sessions(job, package, use))
    assert measured.outcome == "completed"
    assert max(each.nbytes for each in first) == pytest.approx(measured.peak_bytes, rel=0.025)
    plan = plan_memory(package, shapes, use)
    assert measured.peak_bytes < plan.peak.nbytes < 1.08 * measured.peak_bytes


# The plan knows what every optimizer keeps, and a real run agrees.


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize("base", ["int8", "int4", "nf4"])
def test_a_base_of_few_bits(base, tmp_path):
    """Two codes of 4 bits lie in a byte, in each session that has them as constants."""
    model, size = zoo.mlp((768, 1024, 1024, 1024, 1024, 10)), 16
    build_package(
        model, tmp_path / "p", loss="cross_entropy", base=base,
        adapter=AdapterSpec("lora", ("*",), (), 2, 4.0),
    )  # fmt: skip
    package, job, shapes = _replayed(model, tmp_path, size)
    plan = plan_memory(package, shapes)
    measured = run_training_child(job)
    assert measured.outcome == "completed"
    for phase in plan.phase_peaks():
        if phase.phase in ("loading", "evaluation", "step", "saving"):
            taken = measured.phase_peaks[phase.phase]
            near = 0.25 if phase.phase == "loading" else 0.04
            assert phase.predicted_bytes == pytest.approx(taken, rel=near), phase.phase


SIZES = (784, 512, 512, 10)
VECTOR = 4 * sum(a * b + -(-b // 16) * 16 for a, b in itertools.pairwise(SIZES))
"""Bytes of all parameters, gaps included."""
# One float a row and a column of every matrix; for a bias one, and as many as it has elements.
FACTORS = sum(
    4 * (-(-n // 16) * 16)
    for a, b in itertools.pairwise(SIZES)
    for n in (b, a, 1, b)
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize(("optimizer", "update", "accumulate", "state"), [
    (SGD(momentum=0.9), {"clip_norm": 1.0}, 1, VECTOR),
    (Lion(), {}, 1, VECTOR),
    (AdamW(weight_decay=0.1), {"clip_norm": 1.0, "decay_vectors": False}, 3, 2 * VECTOR),
    (Adafactor(), {}, 1, FACTORS),
], ids=["momentum", "lion", "adamw", "adafactor"])  # fmt: skip
def test_predicted_and_measured(optimizer, update, accumulate, state, tmp_path):
    model = zoo.mlp(SIZES)
    build_package(
        model, tmp_path / "p", loss="cross_entropy", optimizer=optimizer, **update,
        accumulation_steps=accumulate,
    )  # fmt: skip
    package = Package.open(tmp_path / "p")
    data = dict(zip(("input", "labels"), batch(model, 200), strict=True))
    options = {"accumulation_steps": accumulate, "learning_rate": 0.001}
    job, shapes = job_on(package, tmp_path, data, 32, **options)
    assert shapes == {"input": (32, 784), "labels": (32,)}
    plan = plan_memory(package, shapes)
    phase = next(phase for phase in plan.phases if phase.name == "optimizer step")
    assert sum(item.nbytes for item in phase.items if item.kind == "optimizer_state") == state
    measured = run_training_child(job).peak_bytes
    assert abs(plan.peak.nbytes - measured) <= 0.15 * measured
