"""The memory plan of a package: its phases, its parts, and what makes it larger."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from odtpack_runtime import OdtpackError
from odtpack_simulator.device.kits import Sharing
from odtpack_simulator.memory.memory_phases import MEASURED_AS
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.values.memory_fit import MARGIN, memory_fit
from tests.simulator.packages import MODELS, Case

SMALL_MODELS = [name for name in MODELS if name != "batchnorm"]  # it has thousands of nodes


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_parts_sum_to_the_peak(name: str, case: Callable[[str], Case]) -> None:
    this = case(name)
    plan = plan_memory(this.package, this.shapes)
    predicted = plan.predicted()
    assert predicted.peak_bytes == predicted.breakdown.total  # the model checks it as well
    assert sum(tensor.bytes for tensor in plan.tensors_at_peak()) == predicted.peak_bytes
    # What the arena holds and does not use is part of a phase, but not alive at a node.
    assert max(point.live_bytes for point in plan.timeline) <= max(
        phase.nbytes for phase in plan.phases if phase.name in ("training step", "optimizer step")
    )
    without = plan_memory(this.package, this.shapes, sharing="none")
    assert max(point.live_bytes for point in without.timeline) == max(
        phase.nbytes
        for phase in without.phases
        if phase.name in ("training step", "optimizer step")
    )
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


def test_plan_is_deterministic(case: Callable[[str], Case]) -> None:
    """Even where ONNX Runtime names its nodes differently in every session."""
    this = case("cnn")
    first, second = (plan_memory(this.package, this.shapes) for _ in range(2))
    assert first.predicted() == second.predicted()
    assert first.tensors_at_peak() == second.tensors_at_peak()
    assert first.timeline == second.timeline


@pytest.mark.parametrize("sharing", ["none", "shared"])
def test_larger_batch_needs_more(case: Callable[[str], Case], sharing: Sharing) -> None:
    this = case("cnn")
    twice = {name: (2 * shape[0], *shape[1:]) for name, shape in this.shapes.items()}
    one, two = (
        plan_memory(this.package, sizes, sharing=sharing).predicted().breakdown
        for sizes in (this.shapes, twice)
    )
    assert 1.8 * one.activations < two.activations
    # The chunks of an arena do not double: what takes more of two ways to use it counts.
    assert sharing == "shared" or two.activations < 2.2 * one.activations
    assert one.parameters == two.parameters


def test_shape_that_does_not_fit(case: Callable[[str], Case]) -> None:
    this = case("cnn")
    shapes = {**this.shapes, "input": (8, 3, 28, 28)}
    with pytest.raises(OdtpackError, match=r"input.*cannot have the shape \[8, 3, 28, 28\]"):
        plan_memory(this.package, shapes)


def test_phase_peaks(case: Callable[[str], Case]) -> None:
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


def test_more_threads_take_more(case: Callable[[str], Case]) -> None:
    this = case("mlp")
    one, two, four = (plan_memory(this.package, this.shapes, threads=n) for n in (1, 2, 4))
    more = two.peak.nbytes - one.peak.nbytes
    assert more > 0
    assert four.peak.nbytes - one.peak.nbytes == 3 * more


def test_fits_only_with_the_margin(case: Callable[[str], Case]) -> None:
    this = case("mlp")
    plan = plan_memory(this.package, this.shapes)
    needed = math.ceil(plan.peak.nbytes * (1 + MARGIN))
    assert memory_fit(plan.peak.nbytes, needed) == "fits"
    assert memory_fit(plan.peak.nbytes, needed - 1) != "fits"
    assert MARGIN > 0
