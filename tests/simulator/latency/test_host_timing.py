"""What follows from a timing child's measurements for a step on this machine."""

from __future__ import annotations

import numpy as np
import pytest

from odtpack_simulator.result.result import HostLatency
from odtpack_simulator.values.units import Interval
from tests.simulator.timings import row, timing


class TestHost:
    def test_operators_by_time(self) -> None:
        costs = timing().operators()
        assert [cost.op_type for cost in costs] == ["Gemm", "Mul", "Reshape"]
        assert [cost.operator_class for cost in costs] == ["compute", "memory", "other"]
        assert [cost.calls for cost in costs] == [8, 12, 8]  # of both profiled steps
        assert [cost.total_ms for cost in costs] == pytest.approx([10, 6, 2])
        assert [cost.flops for cost in costs] == [800e6, None, None]
        assert [cost.moved_bytes for cost in costs] == [8e6, 60e6, 0]
        assert sum(cost.share for cost in costs) == pytest.approx(1)

    def test_one_operator_may_be_of_two_classes(self) -> None:
        """A Gemm with a single row reads its weights for two operations per element."""
        rows = [row("Gemm", 1, 2.0, 400e6, 4e6), row("Gemm", 1, 1.0, 20e6, 40e6)]
        costs = timing(operators=rows).operators()
        assert [(c.op_type, c.operator_class) for c in costs] == [
            ("Gemm", "compute"),
            ("Gemm", "memory"),
        ]

    def test_classes_sum_to_the_step(self) -> None:
        assert timing().class_ms() == pytest.approx({"compute": 5, "memory": 3, "other": 2})
        assert timing().rest_ms == pytest.approx(1)

    def test_what_the_profile_adds_is_taken_away(self) -> None:
        rows = [row("Gemm", 2, 4.0, 400e6, 4e6), row("Reshape", 100, 0.4, None, 0)]
        host = timing(operators=rows, calibration={"profile_us": 3.0})
        times = {cost.op_type: cost.total_ms / 2 for cost in host.operators()}
        # Two runs less 3 µs each; a hundred of 4 µs have 1 µs left.
        assert times == pytest.approx({"Gemm": 4 - 0.006, "Reshape": 0.1})

    def test_never_less_than_the_runtime_takes_itself(self) -> None:
        rows = [row("Reshape", 100, 0.3, None, 0)]
        host = timing(operators=rows, calibration={"profile_us": 3.0})
        assert host.groups[0].ms == pytest.approx(100 * 0.5 / 1e3)

    def test_a_profile_that_adds_more_than_was_known(self) -> None:
        """Operators sum to the step; each run loses the same, so that long ones keep theirs."""
        rows = [row("Gemm", 1, 8.0, 400e6, 4e6), row("Slice", 1000, 6.0, None, 1e6)]
        host = timing(operators=rows, calibration={"profile_us": 2.0})
        times = {cost.op_type: cost.total_ms / 2 for cost in host.operators()}
        added = 4 / 1001
        assert times == pytest.approx({"Gemm": 8 - added, "Slice": 6 - 1000 * added})
        assert host.rest_ms == pytest.approx(0, abs=1e-9)

    def test_a_profile_that_was_slowed_down_as_a_whole(self) -> None:
        rows = [row("Gemm", 1, 15.0, 400e6, 4e6), row("Mul", 1, 10.0, None, 1e6)]
        host = timing(operators=rows, calibration={"profile_us": 1.0})
        assert [group.ms for group in host.groups] == pytest.approx([6, 4], rel=1e-3)

    def test_a_step_shorter_than_the_runtime_can_be(self) -> None:
        host = timing(operators=[row("Slice", 1000, 6.0, None, 1e6)], steps_ms=[0.1] * 9)
        assert sum(host.class_ms().values()) == pytest.approx(0.1)

    def test_as_a_result_stores_it(self) -> None:
        found = timing(steps_ms=list(np.arange(1.0, 41.0))).host_latency()
        assert found.p50_ms == Interval(low=14, typical=20.5, high=27)  # B(40, 1/2): 13 to 27
        assert found.p90_ms is not None
        assert found.p90_ms.typical == pytest.approx(36.1)
        assert found.session_creation_ms == 50
        assert (found.checkpoint_load_ms, found.checkpoint_save_ms) == (5, 20)
        assert found.checkpoint_bytes == 12_000_000
        assert HostLatency.model_validate_json(found.model_dump_json()) == found

    def test_one_step_only(self) -> None:
        host = timing(steps_ms=[])
        assert host.median_ms == 30
        assert host.quantile_ms(0.9) == Interval(low=30, typical=30, high=30)
