"""The solver's choice is the best of all where they can be tried, and beats the greedy search."""

from __future__ import annotations

import itertools
import math

import pytest

from benchmarks.recompute_choice import layered_step
from odtpack.memory import exact, formulation, mixed_integer
from odtpack.memory.buffers import Buffers
from odtpack.memory.recompute import Choice, choose
from odtpack.memory.timeline import Step
from odtpack.package.memory_budget import sentences
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph, Value
from tests.memory.steps import random_step
from tests.memory.test_compile import MODELS, build, least
from tests.memory.test_compile import kept as all_kept

pytest.importorskip("highspy")


def names(step: Step) -> frozenset[str]:
    return frozenset(step.graph.values)


def kept(step: Step) -> Choice:
    return Choice(frozenset(), step.timeline(), 0.0)


def all_choices(step: Step) -> list[tuple[int, float]]:
    """Peak and seconds of every choice."""
    buffers = Buffers(step, names(step))
    indices = [index for index, buffer in enumerate(buffers.all) if buffer.is_open]
    assert 5 <= len(indices) <= 12
    found = []
    for chosen in itertools.product((False, True), repeat=len(indices)):
        again = buffers.names(list(itertools.compress(indices, chosen)))
        timeline = step.timeline(again)
        found.append((timeline.peak, step.time(buffers.made(timeline))))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_is_the_best_of_all_choices(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formulation, "REACH", 100)
    step = random_step(seed, 8 + seed % 4)
    choices = all_choices(step)
    peaks = sorted({peak for peak, _ in choices})
    for limit in (peaks[0], *peaks[1 :: max(1, len(peaks) // 6)]):
        best = min(seconds for peak, seconds in choices if peak <= limit)
        found = exact.improve(step, kept(step), limit, names(step), gap=0.0, nodes=10_000)
        assert found is not None
        assert found.peak <= limit
        assert found.peak == step.timeline(found.again).peak
        assert math.isclose(found.seconds, best, rel_tol=1e-6, abs_tol=1e-9)
    assert exact.improve(step, kept(step), peaks[0] - 1, names(step), gap=0.0) is None


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_is_no_worse_than_the_greedy_search(share: float) -> None:
    step = layered_step(blocks=6)
    limit = int(share * step.timeline().peak)
    greedy = choose(step, limit=limit, seconds=math.inf, nameable=names(step))
    assert greedy.peak <= limit
    found = exact.improve(step, greedy, limit, names(step))
    assert found is not None
    assert found.least is not None
    assert found.peak <= limit
    assert found.least <= found.seconds <= greedy.seconds
    # The bound is one: what is proven is what was asked for.
    assert found.seconds - found.least <= 1.01 * exact.GAP * sum(step.seconds)


def test_the_greedy_search_may_repeat_what_is_no_decision() -> None:
    """A buffer that no control edge can be put on is none; memory while it is copied is no row."""
    step = layered_step(blocks=3)
    peak = step.timeline().peak
    greedy = choose(step, limit=peak // 2, seconds=math.inf, nameable=names(step))
    for name in sorted(greedy.again):
        buffers = Buffers(step, names(step) - {name})
        model = formulation.Formulation(buffers, limit=1)
        places = set[tuple[int, int]]()
        assert model.limit_all(greedy.timeline, places)
        assert all(buffer in model.again for buffer, event in places if event >= 0)


def test_same_program_same_choice() -> None:
    step = layered_step(blocks=4)
    limit = step.timeline().peak // 2
    greedy = choose(step, limit=limit, seconds=math.inf, nameable=names(step))
    first, second = (exact.improve(step, greedy, limit, names(step)) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.again == second.again


@pytest.mark.parametrize("name", ["transformer", "mobilenet-bn"])
def test_report_says_who_chose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole build: the solver's choice stays within the limit and takes no more time."""
    model = MODELS[name]()
    spec = least(0.6, all_kept(name))
    assert spec.limit is not None
    solved = build(model, spec).memory
    monkeypatch.setattr(mixed_integer, "is_installed", lambda: False)
    greedy = build(model, spec).memory
    assert greedy is not None
    assert greedy.after <= spec.limit
    assert greedy.least is None
    assert "the greedy search chose" in next(sentences(greedy))
    assert solved is not None
    assert solved.after <= spec.limit
    assert solved.least is not None
    assert solved.least <= solved.slowdown * solved.seconds
    assert solved.slowdown <= greedy.slowdown
    assert "HiGHS chose, and no choice takes less than" in next(sentences(solved))


def test_views_may_be_shaped_by_what_they_are_views_of() -> None:
    """The shape is no decision: of that value even the rank is unknown."""
    values = {"x": Value("x", 4, ("size of x",), (65536,))}
    nodes: list[Node] = []

    def node(op_type: str, inputs: list[str], name: str, size: int = 65536) -> str:
        nodes.append(Node(name, op_type, "", tuple(inputs), (name,), {}))
        values[name] = Value(name, 4, (f"size of {name}",), (size,))
        return name

    h = node("Exp", ["x"], "h0")
    for i in range(4):
        a = node("Exp", [h], f"a{i}")
        shape = node("Neg", [node("Shape", [a], f"shape{i}", 1)], f"sizes{i}", 1)
        view = node("Reshape", [a, shape], f"r{i}")
        h = node(
            "Sin", [node("Reshape", [node("Sin", [view], f"m{i}"), shape], f"q{i}")], f"h{i + 1}"
        )
    loss, gradient = node("ReduceMean", [h], "loss", 1), node("Neg", [h], "g")
    for i in reversed(range(4)):
        for name in (f"h{i + 1}", f"q{i}", f"r{i}"):
            gradient = node("Mul", [gradient, name], f"g.{name}")
    step = Step(RuntimeGraph(("x",), (loss, gradient), tuple(nodes), values, {}))
    known = {name for name in values if not name.startswith("s")}
    found = exact.improve(step, kept(step), int(0.7 * step.timeline().peak), known)
    assert found is None or found.peak <= 0.7 * step.timeline().peak
