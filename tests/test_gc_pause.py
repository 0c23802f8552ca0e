"""What a build leaves to Python's cyclic garbage collector, and what it leaves alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from odtpack.gc_pause import _Collector, paused_collector


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The collector as most programs know it; the tests' own heap is frozen."""
    monkeypatch.setattr(_Collector, "frozen", False)
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@paused_collector()
def leave_a_knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def is_young(thing: object) -> bool:
    return any(each is thing for each in gc.get_objects(generation=0))


@pytest.mark.usefixtures("nothing_frozen")
def test_the_next_build_frees_what_one_left() -> None:
    left = leave_a_knot()
    knot = left()
    assert knot is not None
    assert not is_young(knot)
    assert gc.get_freeze_count() == 0
    del knot
    leave_a_knot()
    assert left() is None


def test_what_a_program_froze_stays_frozen() -> None:
    before = gc.get_freeze_count()
    assert before > 10_000  # by tests/conftest.py
    left = leave_a_knot()
    assert gc.get_freeze_count() == before
    gc.collect(0)  # which a young object does not survive
    assert left() is None


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(_Collector, "frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1)
    leave_a_knot()
    leave_a_knot()
    assert counted == [1]


def test_a_paused_collector_stays_paused() -> None:
    gc.disable()
    try:
        leave_a_knot()
        assert not gc.isenabled()
    finally:
        gc.enable()
