"""Whether other programs disturbed a timing: on made-up times, and beside real ones."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import numpy as np
import pytest

from odtpack_simulator.device.profile import parse_profile
from odtpack_simulator.latency.host_timing import Steadiness, steadiness
from odtpack_simulator.latency.latency import HostTiming, carry, measure_host
from odtpack_simulator.measure.host import WaitingClock, others_seconds
from odtpack_simulator.result.result import DeviceLatency
from tests.simulator.packages import Case
from tests.simulator.timings import timing

_FIGURE = 'kind = "assumed", source = "made up for a test"'
EXACT = parse_profile(
    f"""
schema_version = 1
name = "test/exact"
title = "A device whose rates are known exactly"
vendor = "Test"
os = "linux"
validated = false
memory = {{ bandwidth = {{ value = 4, unit = "GB/s", {_FIGURE} }} }}
cpu = {{ fp32_gemm = {{ value = 20, threads = 1, unit = "GFLOPS", {_FIGURE} }} }}
""".encode(),
    "exact.toml",
)
RATES = ((1e11, 1e11), (1e10, 1e10))


def judged(
    steps: Sequence[float],
    waited: Sequence[float],
    rates: Sequence[tuple[float, float]] = RATES,
    *,
    threads: int = 1,
    stolen: float = 0.0,
    others: float = 0.0,
) -> Steadiness:
    single = 1e11 / threads
    return steadiness(
        steps, waited, rates, threads=threads, single=single, stolen=stolen, others=others
    )


class TestSteadiness:
    def test_a_quiet_machine_changes_nothing(self) -> None:
        found = judged([10.0, 11.0, 10.5], [0.0, 0.1, 0.0])
        assert found.steps_ms == (10.0, 11.0, 10.5)
        assert (found.low, found.high, found.busy, found.note) == (1, 1, None, "")

    def test_a_neighbour_on_the_core_may_have_doubled_every_step(self) -> None:
        """Nothing waits and the calibrations agree, since the neighbour was there all the time."""
        found = judged([10.0] * 10, [0.0] * 10, others=1.3)
        assert (found.low, found.high, found.busy) == (0.5, 1, None)
        assert "other programs had 100% of the other cores" in found.note
        assert judged([10.0] * 10, [0.0] * 10, others=0.05).note == ""

    def test_disturbed_steps_are_left_out_where_enough_others_are_left(self) -> None:
        found = judged([10.0] * 8 + [40.0] * 4, [0.0] * 8 + [30.0] * 4)
        assert found.steps_ms == (10.0,) * 8
        assert (found.low, found.high, found.busy) == (1, 1, None)
        assert found.waited == pytest.approx(120 / 240)
        assert "50% of their time" in found.note

    def test_steps_without_their_waiting_widen_the_interval_downwards(self) -> None:
        found = judged([14.0] * 10, [4.0] * 10)
        assert found.steps_ms == (10.0,) * 10
        assert found.low == pytest.approx(1 / (1 + 4 / 14))
        assert (found.high, found.busy) == (1, None)

    def test_waiting_most_of_the_time_is_not_judged(self) -> None:
        found = judged([50.0] * 10, [40.0] * 10)
        assert found.busy is not None
        assert found.busy.startswith("this machine was busy: steps waited 80% of their time")

    def test_steps_that_did_little_but_wait_say_nothing(self) -> None:
        """Waiting may begin before the step: it can be all of its time, or more."""
        found = judged([10.0] * 6 + [12.0] * 6, [2.0] * 6 + [15.0] * 6)
        assert min(found.steps_ms) == 8.0
        assert found.busy is not None  # most of the time went into waiting
        kept = judged([10.0] * 9 + [12.0] * 3, [2.0] * 9 + [15.0] * 3)
        assert kept.steps_ms == (8.0,) * 9
        assert kept.busy is None
        assert judged([10.0] * 5, [10.0] * 5).steps_ms == (10.0,) * 5

    def test_a_machine_that_was_slower_before_than_after(self) -> None:
        found = judged([10.0] * 10, [0.0] * 10, ((1e11, 6.4e10), (1e10, 1e10)))
        assert found.busy is None
        assert found.high == pytest.approx(1.25)
        assert found.low == pytest.approx(0.8)
        assert judged([10.0] * 10, [0.0] * 10, ((1e11, 3e10), (1e10, 1e10))).busy is not None

    def test_what_the_host_of_a_virtual_machine_took(self) -> None:
        found = judged([10.0] * 10, [0.0] * 10, stolen=0.1)
        assert found.high == pytest.approx(1.1)
        assert "took 10%" in found.note

    @pytest.mark.parametrize(("gain", "known"), [(1.1, False), (1.9, True)])
    def test_two_virtual_cores_that_are_one_are_not_judged(self, gain: float, known: bool) -> None:
        rates = ((gain * 1e11, gain * 1e11), (1e10, 1e10))
        found = steadiness([10.0] * 10, [0.0] * 10, rates, threads=2, single=1e11)
        assert (found.busy is None) == known
        if not known:
            assert "2 threads computed only 1.1 times as fast as one" in str(found.busy)

    def test_no_step_is_no_machine_to_blame(self) -> None:
        assert judged([0.0], [0.0]).steps_ms == (0.0,)


def test_a_busy_machine_has_no_time_on_a_device() -> None:
    device = EXACT
    quiet = carry(timing(), device)
    busy = carry(timing(steps_ms=[50.0] * 12, waited_ms=[40.0] * 12), device)
    assert quiet.step_ms is not None
    assert busy.step_ms is None
    assert str(busy.not_judged).startswith("this machine was busy: ")
    wider = carry(timing(steps_ms=[14.0] * 12, waited_ms=[4.0] * 12), device)
    assert wider.step_ms is not None
    assert wider.step_ms.low < quiet.step_ms.low
    assert "which widens the interval" in wider.basis


def test_waiting_is_what_the_kernel_says() -> None:
    """A process that shares one core with another waits about half of the time."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system pins no process to a core")
    if not Path("/proc/self/schedstat").is_file():
        pytest.skip("this kernel does not count waiting")
    core = {min(os.sched_getaffinity(0))}
    with load(1, cores=core):
        spent, waited = _in_process(_spin, core)
    assert 0.2 * spent < waited < spent


def _in_process(
    work: Callable[[set[int]], tuple[float, float]], core: set[int]
) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(work, (core,)).get(120)


def _spin(core: set[int]) -> tuple[float, float]:
    import time

    os.sched_setaffinity(0, core)
    clock = WaitingClock(1)
    start = time.perf_counter()
    while time.perf_counter() < start + 0.5:
        pass
    spent, waited = time.perf_counter() - start, clock.seconds()
    clock.close()
    return spent, waited


def _burn(parent: int, begun: Semaphore, cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    data = np.ones(2**18, np.float32)
    begun.release()
    while os.getppid() == parent:
        np.multiply(data, 1.0, out=data)


def test_others_compute() -> None:
    before = others_seconds()
    with load(1):
        time.sleep(2.0)
    beside = others_seconds() - before
    assert beside > 0.1  # the other's, while this process slept
    before, start, own = others_seconds(), time.perf_counter(), time.process_time()
    while time.perf_counter() < start + 1.0:
        np.ones(2**20)
    own, wall = time.process_time() - own, time.perf_counter() - start
    assert others_seconds() - before < wall * (os.cpu_count() or 1) - own + 0.2


@contextmanager
def load(processes: int, cores: set[int] | None = None) -> Iterator[None]:
    """So many processes that compute and write memory all the time, from the first moment on."""
    context = multiprocessing.get_context("spawn")
    begun = context.Semaphore(0)
    arguments = (os.getpid(), begun, cores)
    busy = [context.Process(target=_burn, args=arguments, daemon=True) for _ in range(processes)]
    for process in busy:
        process.start()
    try:
        for _ in busy:
            assert begun.acquire(timeout=120)
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.join()


@pytest.mark.parametrize("name", ["mlp"])
def test_the_same_package_with_and_without_load(
    case: Callable[[str], Case], name: str, tmp_path: Path
) -> None:
    """Intervals that overlap, or no verdict: a busy machine must not make a package slower."""
    device = EXACT

    def timed(folder: str) -> tuple[HostTiming, DeviceLatency]:
        (tmp_path / folder).mkdir()
        host = measure_host(case(name).job(tmp_path / folder, task="time"))
        return host, carry(host, device)

    _, alone = timed("alone")
    with load(5 * (os.cpu_count() or 1)):
        _, beside = timed("beside")
    if alone.step_ms is None or beside.step_ms is None:
        assert "this machine was busy" in f"{alone.not_judged}{beside.not_judged}"
        return
    assert "this machine was busy" in beside.basis
    assert alone.step_ms.low <= beside.step_ms.high
    assert beside.step_ms.low <= alone.step_ms.high
