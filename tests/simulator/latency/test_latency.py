"""Carrying times to devices: arithmetic on made-up measurements, and one real measurement."""

import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_simulator.device.profile import DeviceProfile, list_profiles, load_profile
from odtpack_simulator.latency import HostTiming, Steadiness, carry, measure_host, steadiness
from odtpack_simulator.measure.host import WaitingClock, others_seconds
from odtpack_simulator.result import DeviceLatency, HostLatency
from odtpack_simulator.values.units import Interval
from tests.calibrated import as_it_is
from tests.refused import refused
from tests.simulator.packages import Cases
from tests.simulator.profiles import figure, made_profile, make_profile
from tests.simulator.timings import GIGA, row, timing

INTERVALS = (
    *("step_ms", "p90_ms", "first_step_ms", "session_creation_ms"),
    *("checkpoint_load_ms", "checkpoint_save_ms"),
)


def changed(device: DeviceProfile, **sections: dict[str, object]) -> DeviceProfile:
    """The profile with other figures: ``cpu={"fp32_peak": {...}}``."""
    content = device.model_dump(mode="json", exclude_none=True)
    for section, figures in sections.items():
        content[section] = content.get(section, {}) | figures
    return DeviceProfile.model_validate(content)


def cluster(cores: int, clock: float, peak: float | None = None) -> dict[str, object]:
    made = {"core": "X", "cores": figure(cores, "cores"), "clock": figure(clock, "GHz")}
    return made | ({"fp32_peak": figure(peak, "GFLOPS", threads=cores)} if peak else {})


@pytest.fixture
def device() -> DeviceProfile:
    """40 GFLOPS at 25, 50 or 60 % with 4 threads; copies 2, 4 or 8 GB/s; storage as a phone's."""
    return changed(
        make_profile("device", 10**9),
        cpu={"clusters": [cluster(4, 1.0)]},
        storage={"read": figure(400, "MB/s"), "write": figure(100, "MB/s", low=50, high=200)},
    )


def step(latency: DeviceLatency) -> Interval:
    assert latency.step_ms is not None
    return latency.step_ms


class TestCarrying:
    def test_by_hand(self, device):
        """Products at 20 GFLOPS are 5 times slower, copies at 4 GB/s 2.5 times.

        One core makes 5 GFLOPS here: its ratio lies between 2.5 and 20, the copies' ratio
        and that of products by one thread.
        """
        latency = carry(timing(), device)
        core = math.sqrt(2.5 * 20)
        assert step(latency).typical == pytest.approx(5 * 5 + 3 * 2.5 + 2 * core)
        # 80 % of the products' time is explained by their roof, half of the elementwise time.
        assert step(latency).low == pytest.approx(
            5 * (0.8 * 100 / 24 + 0.2 * 2.5) + 3 * (0.5 * 1.25 + 0.5 * 1.25) + 2 * 2.5
        )
        assert step(latency).high == pytest.approx(
            5 * (0.8 * 10 + 0.2 * 20) + 3 * (0.5 * 5 + 0.5 * 20) + 2 * 20
        )
        assert latency.threads == 4
        assert latency.not_judged is None
        assert "100 GFLOPS" in latency.basis
        assert "with 4 threads" in latency.basis

    def test_classes_sum_to_the_step(self, device):
        latency = carry(timing(), device)
        assert [part.operator_class for part in latency.by_class] == ["compute", "memory", "other"]
        assert [part.host_ms for part in latency.by_class] == pytest.approx([5, 3, 2])
        for end in ("low", "typical", "high"):
            total = sum(getattr(part.device_ms, end) for part in latency.by_class)
            assert total == pytest.approx(getattr(latency.step_ms, end))

    def test_an_operator_may_change_sides(self, device):
        """Bound by arithmetic here, by memory there: it takes as long as the slower roof says."""
        host = timing(operators=[row("Conv", 1, 10.0, 400e6, 60e6)])
        assert host.groups[0].operator_class == "compute"
        fast = changed(
            device,
            cpu={"fp32_gemm": figure(1000, "GFLOPS", threads=4)},
            memory={"bandwidth": figure(1, "GB/s")},
        )
        # Here 4 ms of arithmetic, in 10; there 30 ms of traffic.
        assert step(carry(host, fast)).typical == pytest.approx(10 * 30 / 4)

    def test_products_whose_arithmetic_is_unknown(self, device):
        host = timing(operators=[row("Einsum", 1, 10.0, None, 1e9)])
        assert step(carry(host, device)).typical == pytest.approx(10 * 5)

    def test_clocks_bound_the_small_operators(self, device):
        host = timing(operators=[row("Shape", 10, 10.0, None, 0)], calibration={"clock_hz": 3e9})
        found = step(carry(host, device))
        assert found.low == pytest.approx(10 * 3)
        assert found.typical == pytest.approx(10 * math.sqrt(3 * 20))
        assert found.high == pytest.approx(10 * 20)

    def test_quantiles(self, device):
        steady = carry(timing(), device)
        spread = carry(timing(steps_ms=[9.0, *[10.0] * 30, *[16.0] * 9]), device)
        assert steady.p90_ms == steady.step_ms
        assert spread.p90_ms.typical == pytest.approx(1.6 * step(spread).typical)
        assert spread.p90_ms.low >= step(spread).low
        assert step(spread).typical == pytest.approx(step(steady).typical)

    def test_the_90th_percentile_is_nowhere_below_the_median(self, device):
        """Also where, of few steps, its interval reaches below it."""
        latency = carry(timing(steps_ms=[1.0, 10.0, 10.0]), device)
        assert latency.p90_ms.low >= step(carry(timing(steps_ms=[10.0] * 3), device)).low

    def test_the_median_is_an_interval_of_its_own(self, device):
        certain = step(carry(timing(steps_ms=[10.0] * 11), device))
        steps = [8.0] * 5 + [10.0] + [14.0] * 5  # the interval spans all that far
        vague = step(carry(timing(steps_ms=steps), device))
        assert vague.typical == pytest.approx(certain.typical)
        assert vague.low == pytest.approx(0.8 * certain.low)
        assert vague.high == pytest.approx(1.4 * certain.high)

    def test_the_first_step_apart(self, device):
        """Twenty milliseconds more here, which memory and the runtime may have taken."""
        latency = carry(timing(), device)
        extra = 20 * math.sqrt(2.5 * math.sqrt(2.5 * 20))
        assert latency.first_step_ms.typical == pytest.approx(step(latency).typical + extra)
        assert latency.first_step_ms.low == pytest.approx(step(latency).low + 20 * 1.25)
        waited = carry(timing(first_step_ms=530.0, first_waited_ms=500.0), device)
        assert waited.first_step_ms == latency.first_step_ms
        early = carry(timing(first_step_ms=7.0), device)
        assert early.first_step_ms == early.step_ms

    def test_storage(self, device):
        latency = carry(timing(), device)
        core = math.sqrt(2.5 * 20)
        assert latency.session_creation_ms.typical == pytest.approx(40 * core + 1.5)
        both = math.sqrt(2.5 * core)
        assert latency.checkpoint_load_ms.typical == pytest.approx(30 + 2 * both)
        assert latency.checkpoint_save_ms.typical == pytest.approx(120 + 3 * both)
        assert latency.checkpoint_save_ms.low == pytest.approx(60 + 3 * 1.25)
        assert latency.checkpoint_save_ms.high == pytest.approx(240 + 3 * 20)

    def test_unknown_storage(self):
        latency = carry(timing(), make_profile("device", None))
        assert latency.checkpoint_load_ms is None
        assert latency.checkpoint_save_ms is None
        assert latency.session_creation_ms is not None
        assert "storage unknown" in latency.basis

    def test_unknown_rates_are_not_judged(self):
        latency = carry(timing(), make_profile("silent", None, rates=False))
        assert latency.step_ms is None
        assert latency.by_class == []
        assert latency.not_judged == "the profile gives no matrix rate and no memory bandwidth"


class TestThreads:
    def test_as_many_as_the_profile_suggests(self, device):
        """Two of four equal cores make half the rate."""
        host = timing(operators=[row("Gemm", 1, 10.0, 400e6, 4e6)])
        two = changed(device, cpu={"training_threads": figure(2, "cores")})
        latency = carry(host, two)
        assert latency.threads == 2
        assert step(latency).typical == pytest.approx(2 * step(carry(host, device)).typical)

    def test_on_the_fastest_cores(self, device):
        """Two big cores of 15 GFLOPS, two small ones of 5: two threads keep three quarters."""
        host = timing(operators=[row("Gemm", 1, 10.0, 400e6, 4e6)])
        both = changed(device, cpu={"clusters": [cluster(2, 1.8, 10), cluster(2, 2.2, 30)]})
        two = changed(both, cpu={"training_threads": figure(2, "cores")})
        assert step(carry(host, two)).typical == pytest.approx(
            step(carry(host, both)).typical * 4 / 3
        )

    def test_by_the_clock_where_peaks_are_unknown(self, device):
        """The big cores' share is between what their clock says and all."""
        host = timing(operators=[row("Conv", 1, 10.0, 800e6, 4e6)])  # reaches 80 % of the roof
        both = changed(device, cpu={"clusters": [cluster(2, 1.0), cluster(2, 3.0)]})
        two = changed(both, cpu={"training_threads": figure(2, "cores")})
        four, found = (step(carry(host, profile)) for profile in (both, two))
        assert found.typical == pytest.approx(four.typical / math.sqrt(0.75))
        assert found.low == pytest.approx(four.low)
        assert found.high > four.high

    def test_a_rate_that_was_measured_with_one_thread_wins(self, device):
        """4 GFLOPS where the share of four cores would say 5: products, and the core's ratio."""
        host = timing(operators=[row("Gemm", 1, 10.0, 400e6, 4e6)])
        cpu = {
            "training_threads": figure(1, "cores"),
            "fp32_gemm_single": figure(4, "GFLOPS", threads=1),
        }
        assert step(carry(host, changed(device, cpu=cpu))).typical == pytest.approx(250)
        small = timing(operators=[row("Shape", 9, 10.0, None, 0)])
        del cpu["training_threads"]
        assert step(carry(small, changed(device, cpu=cpu))).high == pytest.approx(10 * 25)

    def test_without_clusters(self):
        host = timing(operators=[row("Gemm", 1, 10.0, 400e6, 4e6)])
        plain = make_profile("plain", None)
        one = changed(plain, cpu={"training_threads": figure(1, "cores")})
        four, found = (step(carry(host, profile)) for profile in (plain, one))
        assert found.typical == pytest.approx(four.typical * 2)  # between 1 and 4


class TestProperties:
    def scaled(self, device: DeviceProfile, factor: float, *only: str) -> DeviceProfile:
        """The device with some of its rates (all by default) times a factor."""
        content = device.model_dump(mode="json", exclude_none=True)
        places = {
            "peak": content["cpu"]["fp32_peak"],
            "clock": content["cpu"]["clusters"][0]["clock"],
            "copy": content["memory"]["bandwidth"],
            "read": content["storage"]["read"],
            "write": content["storage"]["write"],
        }
        for name in only or places:
            for end in ("low", "value", "high"):
                if end in places[name]:
                    places[name][end] *= factor
        return DeviceProfile.model_validate(content)

    @pytest.mark.parametrize("clock", [None, 3e9])
    def test_twice_as_fast_in_everything_takes_half(self, device, clock):
        host = timing(calibration={"clock_hz": clock})
        slow, fast = carry(host, device), carry(host, self.scaled(device, 2))
        for name in INTERVALS:
            one, other = getattr(slow, name), getattr(fast, name)
            for end in ("low", "typical", "high"):
                assert getattr(other, end) == pytest.approx(getattr(one, end) / 2), name

    @pytest.mark.parametrize("rate", ["peak", "clock", "copy", "read", "write"])
    @pytest.mark.parametrize("clock", [None, 3e9])
    def test_a_faster_device_is_never_slower(self, device, rate, clock):
        host = timing(calibration={"clock_hz": clock})
        before = carry(host, device)
        for factor in (1.01, 1.5, 4, 50):
            after = carry(host, self.scaled(device, factor, rate))
            for name in INTERVALS:
                one, other = getattr(before, name), getattr(after, name)
                for end in ("low", "typical", "high"):
                    assert getattr(other, end) <= getattr(one, end) * (1 + 1e-12), (name, end)
            before = after

    def test_same_machine_gives_the_same_time(self):
        """A device with one core at the rates of this machine takes as long as this machine."""
        twin = changed(
            make_profile("twin", None),
            cpu={"fp32_gemm": figure(100, "GFLOPS", threads=1), "clusters": [cluster(1, 3.0)]},
            memory={"bandwidth": figure(10, "GB/s")},
        )
        latency = carry(timing(calibration={"clock_hz": 3e9}), twin)
        assert latency.step_ms.model_dump() == pytest.approx({"low": 10, "typical": 10, "high": 10})

    @pytest.mark.parametrize("name", list_profiles())
    def test_shipped_profiles(self, name):
        """Every shipped profile gives intervals with a basis, or the reason why not."""
        latency = carry(timing(calibration={"clock_hz": 3e9}), load_profile(name))
        assert (latency.step_ms is None) == bool(latency.not_judged)
        if latency.step_ms is not None:
            assert latency.step_ms.low < latency.step_ms.typical < latency.step_ms.high
            assert latency.threads is not None

    def test_pure(self, device):
        host = timing()
        again = dataclasses.replace(host)
        assert carry(host, device) == carry(again, device)


@pytest.fixture(scope="module")
def host(case: Cases, tmp_path_factory: pytest.TempPathFactory) -> HostTiming:
    with as_it_is():
        return measure_host(case("mlp").job(tmp_path_factory.mktemp("timing"), task="time"))


class TestMeasuring:
    def test_figures(self, host):
        assert min(host.calibration.gemm_flops, host.calibration.copy_bandwidth) > 0
        assert host.calibration.core_flops == host.calibration.gemm_flops  # one thread
        assert host.first_step_ms > 0
        assert len(host.steady.steps_ms) >= 3
        assert all(ms > 0 for ms in host.steady.steps_ms)
        assert host.profiled_steps >= 1
        assert sum(host.class_ms().values()) == pytest.approx(host.median_ms)
        for spent in (host.session_creation, host.checkpoint_load, host.checkpoint_save):
            assert min(spent.cpu_ms, spent.ms) > 0

    def test_the_checkpoint_holds_parameters_and_moments(self, host):
        parameters = 4 * (784 * 500 + 500 + 500 * 10 + 10)
        assert 3 * parameters < host.checkpoint_bytes < 3 * parameters + 20_000

    def test_both_models_are_profiled_without_the_first_step(self, host):
        calls: dict[str, int] = {}
        for cost in host.operators():
            calls[cost.op_type] = calls.get(cost.op_type, 0) + cost.calls
        assert calls["LogSoftmax"] == host.profiled_steps  # once per step of the training model
        assert calls["Sqrt"] % host.profiled_steps == 0  # AdamW, chunk by chunk
        assert calls["Sqrt"] >= host.profiled_steps
        assert "If" not in calls

    def test_arithmetic_of_the_model(self, host):
        """Two layers forward and their weights' gradients, and the second one's input gradient.

        The gradient of the data is not needed.
        """
        batch = 64
        large, small = 2 * batch * 784 * 500, 2 * batch * 500 * 10
        flops = sum(cost.flops or 0 for cost in host.operators())
        assert flops / host.profiled_steps == 2 * large + 3 * small

    def test_failure_of_the_child(self, case, tmp_path):
        job = case("mlp").job(tmp_path, task="time", checkpoint=str(tmp_path / "gone"))
        with refused("checkpoint-not-found"):
            measure_host(job)


def test_products_of_bytes_go_by_their_own_rates():
    """Here 200 GOPS of bytes for 100 GFLOPS; a phone with SDOT has three times its float rate."""
    rows = [row("MatMulInteger", 1, 8.0, 1.6e9, 1e5)]
    plain, fast = (
        carry(timing(operators=rows), changed(load_profile("pixel-4a"), cpu={"extensions": e}))
        for e in ([], ["dotprod"])
    )
    assert plain.by_class[0].device_ms.typical / fast.by_class[0].device_ms.typical == (
        pytest.approx(3 / 1.2)
    )
    device = load_profile("pixel-4a").int8_ops(2)
    assert fast.by_class[0].device_ms.typical == pytest.approx(8.0 * 200e9 / device.typical)
    unknown = carry(timing(operators=[row("QLinearMatMul", 1, 8.0, None, 1e5)]),
                    load_profile("pixel-4a"))  # fmt: skip
    assert unknown.by_class[0].device_ms.typical == fast.by_class[0].device_ms.typical


def test_rates_lie_between_both_calibrations():
    host = timing(rates_after=(64e9, 10e9))
    assert host.calibration.gemm_flops == pytest.approx(80e9)
    assert host.calibration.core_flops == pytest.approx(80e9)
    assert host.steady.high == pytest.approx(1.25)


def test_rates_are_those_of_the_machine():
    assert timing(calibration={"gemm_flops": 3 * GIGA}).calibration.gemm_flops == 3 * GIGA


# What follows from a timing child's measurements for a step on this machine.


class TestHost:
    def test_operators_by_time(self):
        costs = timing().operators()
        assert [cost.op_type for cost in costs] == ["Gemm", "Mul", "Reshape"]
        assert [cost.operator_class for cost in costs] == ["compute", "memory", "other"]
        assert [cost.calls for cost in costs] == [8, 12, 8]  # of both profiled steps
        assert [cost.total_ms for cost in costs] == pytest.approx([10, 6, 2])
        assert [cost.flops for cost in costs] == [800e6, None, None]
        assert [cost.moved_bytes for cost in costs] == [8e6, 60e6, 0]
        assert sum(cost.share for cost in costs) == pytest.approx(1)

    def test_one_operator_may_be_of_two_classes(self):
        """A Gemm with a single row reads its weights for two operations per element."""
        rows = [row("Gemm", 1, 2.0, 400e6, 4e6), row("Gemm", 1, 1.0, 20e6, 40e6)]
        costs = timing(operators=rows).operators()
        assert [(c.op_type, c.operator_class) for c in costs] == [
            ("Gemm", "compute"),
            ("Gemm", "memory"),
        ]

    def test_classes_sum_to_the_step(self):
        assert timing().class_ms() == pytest.approx({"compute": 5, "memory": 3, "other": 2})
        assert timing().rest_ms == pytest.approx(1)

    def test_what_the_profile_adds_is_taken_away(self):
        rows = [row("Gemm", 2, 4.0, 400e6, 4e6), row("Reshape", 100, 0.4, None, 0)]
        host = timing(operators=rows, calibration={"profile_us": 3.0})
        times = {cost.op_type: cost.total_ms / 2 for cost in host.operators()}
        # Two runs less 3 µs each; a hundred of 4 µs have 1 µs left.
        assert times == pytest.approx({"Gemm": 4 - 0.006, "Reshape": 0.1})

    def test_never_less_than_the_runtime_takes_itself(self):
        rows = [row("Reshape", 100, 0.3, None, 0)]
        host = timing(operators=rows, calibration={"profile_us": 3.0})
        assert host.groups[0].ms == pytest.approx(100 * 0.5 / 1e3)

    def test_a_profile_that_adds_more_than_was_known(self):
        """Operators sum to the step; each run loses the same, so that long ones keep theirs."""
        rows = [row("Gemm", 1, 8.0, 400e6, 4e6), row("Slice", 1000, 6.0, None, 1e6)]
        host = timing(operators=rows, calibration={"profile_us": 2.0})
        times = {cost.op_type: cost.total_ms / 2 for cost in host.operators()}
        added = 4 / 1001
        assert times == pytest.approx({"Gemm": 8 - added, "Slice": 6 - 1000 * added})
        assert host.rest_ms == pytest.approx(0, abs=1e-9)

    def test_a_profile_that_was_slowed_down_as_a_whole(self):
        rows = [row("Gemm", 1, 15.0, 400e6, 4e6), row("Mul", 1, 10.0, None, 1e6)]
        host = timing(operators=rows, calibration={"profile_us": 1.0})
        assert [group.ms for group in host.groups] == pytest.approx([6, 4], rel=1e-3)

    def test_a_step_shorter_than_the_runtime_can_be(self):
        host = timing(operators=[row("Slice", 1000, 6.0, None, 1e6)], steps_ms=[0.1] * 9)
        assert sum(host.class_ms().values()) == pytest.approx(0.1)

    def test_as_a_result_stores_it(self):
        found = timing(steps_ms=list(np.arange(1.0, 41.0))).host_latency()
        assert found.p50_ms == Interval(low=14, typical=20.5, high=27)  # B(40, 1/2): 13 to 27
        assert found.p90_ms.typical == pytest.approx(36.1)
        assert found.session_creation_ms == 50
        assert (found.checkpoint_load_ms, found.checkpoint_save_ms) == (5, 20)
        assert found.checkpoint_bytes == 12_000_000
        assert HostLatency.model_validate_json(found.model_dump_json()) == found

    def test_one_step_only(self):
        host = timing(steps_ms=[])
        assert host.median_ms == 30
        assert host.quantile_ms(0.9) == Interval(low=30, typical=30, high=30)


# Whether other programs disturbed a timing: on made-up times, and beside real ones.

GEMM = figure(20, "GFLOPS", threads=1)
EXACT = made_profile("test/exact", memory__bandwidth=4, cpu__fp32_gemm=GEMM)
RATES = ((1e11, 1e11), (1e10, 1e10))


def judged(
    steps: Sequence[float], waited: Sequence[float], rates: Sequence[tuple[float, float]] = RATES,
    *, threads: int = 1, stolen: float = 0.0, others: float = 0.0,
) -> Steadiness:  # fmt: skip
    single = 1e11 / threads
    return steadiness(
        steps, waited, rates, threads=threads, single=single, stolen=stolen, others=others
    )


STEADY: dict[str, tuple[Steadiness, dict[str, Any]]] = {
    "a quiet machine changes nothing": (
        judged([10.0, 11.0, 10.5], [0.0, 0.1, 0.0]),
        {"steps_ms": (10.0, 11.0, 10.5), "low": 1, "high": 1, "busy": None, "note": ""}),
    # Nothing waits and the calibrations agree, since the neighbour was there all the time.
    "a neighbour on the core may have doubled every step": (
        judged([10.0] * 10, [0.0] * 10, others=1.3),
        {"low": 0.5, "high": 1, "busy": None,
         "said": "other programs had 100.0 % of the other cores"}),
    "a small neighbour": (judged([10.0] * 10, [0.0] * 10, others=0.05), {"note": ""}),
    "disturbed steps are left out where enough others are left": (
        judged([10.0] * 8 + [40.0] * 4, [0.0] * 8 + [30.0] * 4),
        {"steps_ms": (10.0,) * 8, "low": 1, "high": 1, "busy": None, "waited": 120 / 240,
         "said": "50.0 % of their time"}),
    "steps without their waiting widen the interval downwards": (
        judged([14.0] * 10, [4.0] * 10),
        {"steps_ms": (10.0,) * 10, "low": 1 / (1 + 4 / 14), "high": 1, "busy": None}),
    "waiting most of the time is not judged": (
        judged([50.0] * 10, [40.0] * 10),
        {"why": "this machine was busy: steps waited 80.0 % of their time"}),
    # Waiting may begin before the step: it can be all of its time, or more.
    "steps that did little but wait say nothing": (
        judged([10.0] * 6 + [12.0] * 6, [2.0] * 6 + [15.0] * 6), {"least": 8.0, "why": ""}),
    "some steps that did little but wait": (
        judged([10.0] * 9 + [12.0] * 3, [2.0] * 9 + [15.0] * 3),
        {"steps_ms": (8.0,) * 9, "busy": None}),
    "steps that only waited": (judged([10.0] * 5, [10.0] * 5), {"steps_ms": (10.0,) * 5}),
    "a machine that was slower before than after": (
        judged([10.0] * 10, [0.0] * 10, ((1e11, 6.4e10), (1e10, 1e10))),
        {"busy": None, "high": 1.25, "low": 0.8}),
    "a machine that was much slower before than after": (
        judged([10.0] * 10, [0.0] * 10, ((1e11, 3e10), (1e10, 1e10))), {"why": ""}),
    "what the host of a virtual machine took": (
        judged([10.0] * 10, [0.0] * 10, stolen=0.1), {"high": 1.1, "said": "took 10.0 %"}),
    "no step is no machine to blame": (judged([0.0], [0.0]), {"steps_ms": (0.0,)}),
}  # fmt: skip


class TestSteadiness:
    @pytest.mark.parametrize("name", STEADY)
    def test_made_up_times(self, name):
        found, wanted = STEADY[name]
        for key, value in wanted.items():
            if key == "said":
                assert value in found.note
            elif key == "why":
                assert found.busy is not None
                assert found.busy.startswith(value)
            elif key == "least":
                assert min(found.steps_ms) == value
            else:
                number = isinstance(value, float)
                assert getattr(found, key) == (pytest.approx(value) if number else value), key

    @pytest.mark.parametrize(("gain", "known"), [(1.1, False), (1.9, True)])
    def test_two_virtual_cores_that_are_one_are_not_judged(self, gain, known):
        rates = ((gain * 1e11, gain * 1e11), (1e10, 1e10))
        found = steadiness([10.0] * 10, [0.0] * 10, rates, threads=2, single=1e11)
        assert (found.busy is None) == known
        if not known:
            assert "2 threads computed only 1.1 times as fast as one" in str(found.busy)


def test_a_busy_machine_has_no_time_on_a_device():
    quiet = carry(timing(), EXACT)
    busy = carry(timing(steps_ms=[50.0] * 12, waited_ms=[40.0] * 12), EXACT)
    assert busy.step_ms is None
    assert str(busy.not_judged).startswith("this machine was busy: ")
    wider = carry(timing(steps_ms=[14.0] * 12, waited_ms=[4.0] * 12), EXACT)
    assert wider.step_ms.low < quiet.step_ms.low
    assert "which widens the interval" in wider.basis


def test_waiting_is_what_the_kernel_says():
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


def test_others_compute():
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


@as_it_is()
def test_the_same_package_with_and_without_load(mlp, tmp_path):
    """Intervals that overlap, or no verdict: a busy machine must not make a package slower."""

    def timed(folder: str) -> DeviceLatency:
        (tmp_path / folder).mkdir()
        return carry(measure_host(mlp.job(tmp_path / folder, task="time")), EXACT)

    alone = timed("alone")
    with load(5 * (os.cpu_count() or 1)):
        beside = timed("beside")
    if alone.step_ms is None or beside.step_ms is None:
        assert "this machine was busy" in f"{alone.not_judged}{beside.not_judged}"
        return
    assert "this machine was busy" in beside.basis
    assert alone.step_ms.low <= beside.step_ms.high
    assert beside.step_ms.low <= alone.step_ms.high


def test_a_package_for_a_gpu(device):
    """What was measured of the GPU counts, and nothing else does."""
    host = dataclasses.replace(timing(), gpu=True)
    rates = {
        "fp32_gemm": figure(1000, "GFLOPS", kind="measured"),
        "bandwidth": figure(40, "GB/s", kind="measured"),
        "operator": figure(40, "us", kind="measured"),
    }
    published = rates | {"bandwidth": figure(40, "GB/s", kind="published")}
    for given in (None, {}, published):
        latency = carry(host, device if given is None else changed(device, gpu=given))
        assert latency.step_ms is None
        assert "GPU" in str(latency.not_judged)
    measured = changed(device, gpu=rates)
    latency = carry(host, measured)
    # Products at 1000 GFLOPS are 10 times faster, copies at 40 GB/s 4 times.
    ratio = 40 / host.calibration.node_us
    assert step(latency).typical == pytest.approx(5 / 10 + 3 / 4 + 2 * ratio)
    assert "its GPU's matrix rate (measured)" in latency.basis
    assert latency.threads is None
    assert step(carry(timing(), measured)) == step(carry(timing(), device))
