"""Carrying times to devices: arithmetic on made-up measurements, and one real measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.simulator.latency import (
    COMPUTE_BOUND,
    SMALL,
    HostTiming,
    carry,
    measure_host,
    operator_class,
)
from odtpack_runtime.simulator.profile import list_profiles, load_profile
from odtpack_runtime.simulator.units import Interval
from tests.simulator.packages import Case, make_profile

GIGA = 1e9


def timing(**changes: Any) -> HostTiming:
    """Ten milliseconds: 5 of products, 3 of elementwise work, 1 of small operators, 1 outside."""
    message = {
        "first_step_ms": 30.0,
        "steps_ms": [10.0] * 11,
        "profiled_steps": 2,
        "operators": [
            {"op_type": "Reshape", "calls": 4, "total_ms": 2.0},
            {"op_type": "Gemm", "calls": 4, "total_ms": 10.0},
            {"op_type": "Mul", "calls": 6, "total_ms": 6.0},
        ],
        "gemm_flops": 100 * GIGA,
        "copy_bandwidth": 10 * GIGA,
    }
    return HostTiming.from_message(message | changes)


def test_operators_by_time() -> None:
    host = timing()
    assert [cost.op_type for cost in host.operators] == ["Gemm", "Mul", "Reshape"]
    assert [cost.operator_class for cost in host.operators] == ["compute", "memory", "other"]
    assert sum(cost.share for cost in host.operators) == pytest.approx(1)


def test_classes_sum_to_the_step() -> None:
    assert timing().class_ms() == pytest.approx({"compute": 5, "memory": 3, "other": 2})


def test_a_profile_that_slows_down_is_scaled_to_the_step() -> None:
    times = timing(steps_ms=[4.5] * 3).class_ms()
    assert times == pytest.approx({"compute": 2.5, "memory": 1.5, "other": 0.5})


def test_carried_step() -> None:
    """Device: 40 GFLOPS at 25, 50 or 60 %; 2, 4 or 8 GB/s. Here: 100 GFLOPS and 10 GB/s."""
    latency = carry(timing(), make_profile("device", 10**9), steps=101)
    compute = Interval(low=100 / 24, typical=100 / 20, high=100 / 10)
    memory = Interval(low=10 / 8, typical=10 / 4, high=10 / 2)
    assert latency.step_ms is not None
    assert latency.step_ms.typical == pytest.approx(
        5 * compute.typical + 3 * memory.typical + 2 * (compute.typical * memory.typical) ** 0.5
    )
    assert latency.step_ms.low == pytest.approx(5 * compute.low + 3 * memory.low + 2 * memory.low)
    assert latency.step_ms.high == pytest.approx(
        5 * compute.high + 3 * memory.high + 2 * compute.high
    )
    # A hundred steps and a first one of three; 80 % of the burst rate, between 50 and 100.
    assert latency.finish_s is not None
    assert latency.finish_s.typical == pytest.approx(latency.step_ms.typical * 103 / 1e3 / 0.8)
    assert latency.finish_s.low == pytest.approx(latency.step_ms.low * 103 / 1e3)
    assert latency.finish_s.high == pytest.approx(latency.step_ms.high * 103 / 1e3 / 0.5)
    assert latency.not_judged is None
    assert "100 GFLOPS" in latency.basis
    assert "with 4 threads" in latency.basis


def test_spread_of_the_steps_widens_the_interval() -> None:
    device = make_profile("device", None)
    steady = carry(timing(), device, steps=10).step_ms
    spread = carry(timing(steps_ms=list(np.linspace(5, 15, 11))), device, steps=10).step_ms
    assert steady is not None
    assert spread is not None
    assert spread.typical == pytest.approx(steady.typical)
    assert spread.low == pytest.approx(0.6 * steady.low)
    assert spread.high == pytest.approx(1.4 * steady.high)


def test_same_machine_gives_the_same_time() -> None:
    """A device with the rates of this machine takes as long as this machine."""
    host = timing(gemm_flops=20 * GIGA, copy_bandwidth=4 * GIGA)
    latency = carry(host, make_profile("twin", None), steps=1)
    assert latency.step_ms is not None
    assert latency.step_ms.typical == pytest.approx(10)


def test_one_step_only() -> None:
    host = timing(steps_ms=[])
    assert host.median_ms == 30
    assert host.spread() == (1, 1)


def test_unknown_rates_are_not_judged() -> None:
    latency = carry(timing(), make_profile("silent", None, rates=False), steps=10)
    assert latency.step_ms is None
    assert latency.finish_s is None
    assert latency.not_judged == "the profile gives no matrix rate and no memory bandwidth"


@pytest.mark.parametrize("name", list_profiles())
def test_shipped_profiles(name: str) -> None:
    """Every shipped profile gives an interval with a basis, or the reason why not."""
    latency = carry(timing(), load_profile(name), steps=10)
    assert (latency.step_ms is None) == bool(latency.not_judged)
    if latency.step_ms is not None:
        assert latency.step_ms.low < latency.step_ms.typical < latency.step_ms.high
        assert latency.finish_s is not None


def test_classes_do_not_overlap() -> None:
    assert not COMPUTE_BOUND & SMALL
    assert operator_class("Conv") == "compute"
    assert operator_class("ReduceSum") == "memory"
    assert operator_class("Shape") == "other"


@pytest.fixture(scope="module")
def host(case: Callable[[str], Case], tmp_path_factory: pytest.TempPathFactory) -> HostTiming:
    return measure_host(case("mlp").job(tmp_path_factory.mktemp("timing"), task="time"))


class TestMeasuring:
    def test_figures(self, host: HostTiming) -> None:
        assert min(host.gemm_flops, host.copy_bandwidth) > 1e8
        assert host.first_step_ms > 0
        assert all(ms > 0 for ms in host.steps_ms)
        assert 1 <= host.profiled_steps <= 5
        assert sum(host.class_ms().values()) == pytest.approx(host.median_ms)

    def test_both_models_are_profiled_without_the_first_step(self, host: HostTiming) -> None:
        calls = {cost.op_type: cost.calls for cost in host.operators}
        assert calls["LogSoftmax"] == host.profiled_steps  # once per step of the training model
        assert calls["Sqrt"] % host.profiled_steps == 0  # AdamW, chunk by chunk
        assert calls["Sqrt"] >= host.profiled_steps
        assert "If" not in calls

    def test_failure_of_the_child(self, case: Callable[[str], Case], tmp_path: Path) -> None:
        job = case("mlp").job(tmp_path, task="time", checkpoint=str(tmp_path / "gone"))
        with pytest.raises(OdtpackError) as caught:
            measure_host(job)
        assert caught.value.code == "checkpoint-not-found"
