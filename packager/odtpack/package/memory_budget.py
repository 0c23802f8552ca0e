"""Builds a training model whose training stays within a number of bytes.

The whole training is planned, as a replay would plan it: parameters, moments, sessions, and every
phase from loading to saving. What that is over the budget, the memory compiler
(:mod:`odtpack.memory`) takes off a step's activations, and the plan is made again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from odtpack.errors import OdtpackError
from odtpack.memory.compile import input_shapes
from odtpack.memory.spec import MemoryReport, MemorySpec
from odtpack.package.emit import Made, write_package
from odtpack.package.training import Graphs, Task, build_graphs
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.memory_phases import MARGIN, MemoryPlan, Phase
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.values.units import format_bytes, format_duration, format_percent

_ANY_TIME: Final = 2.0
_ATTEMPTS: Final = 8
_REACHED: Final = 1.05
"""Times the limit: what is further above it cannot be brought down."""
_FINEST: Final = 1.02
"""Times a limit that was not reached: a limit nearer to it is not tried."""
_SHOWN: Final = 8


def build_within(
    spec: MemorySpec, task: Task, make: Callable[[Task, Graphs], Made | None]
) -> Graphs:
    """Build graphs whose training is planned within the budget.

    Args:
        spec: With a budget.
        task: What is built.
        make: Makes the optimizer of graphs, for a package to be planned.

    Raises:
        OdtpackError: No choice is enough (code ``memory-budget-too-small``).
    """
    # Scratch packages are planned, not run.
    scratch = dataclasses.replace(
        task, prefix="", spec=dataclasses.replace(task.spec, self_check=False, nominal=False)
    )
    budget = int((spec.budget or 0) / (1 + MARGIN))

    def planned(graphs: Graphs) -> MemoryPlan:
        with scratch_folder("budget") as folder:
            write_package(graphs, make(scratch, graphs), Path(folder))
            package = Package.open(Path(folder))
            shapes = input_shapes(graphs.training.graph, spec)
            sizes = {i.name: shapes.get(i.name, i.shape) for i in package.manifest.inputs}
            return plan_memory(package, sizes)  # type: ignore[arg-type]

    asked, haste, reached, out_of_reach = spec, 1, 0, 0
    for _ in range(_ATTEMPTS):
        graphs = build_graphs(dataclasses.replace(scratch, memory=asked))
        plan = planned(graphs)
        if plan.peak.nbytes <= budget:
            return dataclasses.replace(graphs, task=task)
        kept, excess = _kept(graphs, plan), plan.peak.nbytes - budget
        if asked.limit is not None and kept > _REACHED * asked.limit:
            out_of_reach = asked.limit
        else:
            if kept <= excess:
                break
            if asked.limit is not None:
                haste *= 2  # an arena's peak does not fall by all that a step keeps less
            reached = kept
            limit = max(kept - haste * excess, (kept - excess) // 2)
        if out_of_reach:
            limit = max(limit, (out_of_reach + reached) // 2)
            if limit <= _FINEST * out_of_reach:
                break
        asked = dataclasses.replace(spec, limit=limit, slowdown=_ANY_TIME)
    raise _too_small(spec, plan.peak)


def _kept(graphs: Graphs, plan: MemoryPlan) -> int:
    """Bytes of activations at the peak of a training step."""
    if graphs.memory is not None:
        return graphs.memory.after
    steps = (phase for phase in plan.phases if phase.name == "training step")
    return sum(i.nbytes for phase in steps for i in phase.items if i.kind == "activations")


def _too_small(spec: MemorySpec, phase: Phase) -> OdtpackError:
    least = format_bytes(phase.nbytes * (1 + MARGIN))
    return OdtpackError(
        "memory-budget-too-small",
        f"the phase '{phase.name}' takes {least}, the plan's error of {format_percent(MARGIN)} "
        "included, with all computed again that helps; "
        f"{format_bytes(spec.budget or 0)} are allowed",
        hint=f"allow more, fewer than {spec.batch} samples at once (--memory-batch), an optimizer "
        "that keeps less, or freeze layers",
    )


def sentences(report: MemoryReport) -> Iterator[str]:
    """What was done, for people: the sum, then the largest decisions."""
    yield (
        f"activations of a step: {format_bytes(report.after)} instead of "
        f"{format_bytes(report.before)}, for about {format_percent(report.slowdown)} more time in "
        "the training model"
    )
    shown = report.decisions[:_SHOWN]
    for each in shown:
        yield (
            f"{each.name}: {format_bytes(each.nbytes)} computed again, "
            f"+{format_duration(each.seconds)}"
        )
    rest = report.decisions[_SHOWN:]
    if rest:
        nbytes, seconds = sum(r.nbytes for r in rest), sum(r.seconds for r in rest)
        yield (
            f"{len(rest)} more: {format_bytes(nbytes)} computed again, +{format_duration(seconds)}"
        )
