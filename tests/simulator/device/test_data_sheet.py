"""Rates from a data sheet, against machines whose rates were measured."""

from __future__ import annotations

import pytest

from odtpack_simulator.device.data_sheet import copy_rate, core_kind, gemm_share, int8_factor
from odtpack_simulator.device.profile import DeviceProfile, list_profiles, load_profile
from odtpack_simulator.latency.latency import device_rates
from odtpack_simulator.values.quantities import Quantity
from odtpack_simulator.values.units import Interval

MEASURED_SHARES = [
    # core, measured GFLOPS of a product, peak at the highest clock
    ("AMD EPYC (Zen 3)", 93.0, 3.5 * 32),  # MatMul in ONNX Runtime 1.31
    ("Cortex-A76", 15.3, 2.4 * 8),  # HPL fp64, Raspberry Pi 5: OpenBLAS issue 4581
    ("Cortex-A76", 16.5, 2.3 * 8),  # Rock 5B, the same
    ("Cortex-A72", 5.82, 1.8 * 4),  # Raspberry Pi 4: OpenBLAS issue 4149
    ("Cortex-A55", 9.2, 1.9 * 8),  # Odroid C4, fp32: OpenBLAS issue 3279
    ("Cortex-A53", 6.4, 1.416 * 8),  # RK3399, fp32: OpenBLAS pull request 2643
]
MEASURED_COPIES = [
    # core, vendor, GB/s copied, peak of the chips, clock in GHz; sbc-reviews @968b675
    ("AMD EPYC (Zen 3)", "AMD", 10.0, 204.8, 3.5),
    ("Cortex-A72", "Raspberry Pi", 2.7, 12.8, 1.8),
    ("Cortex-A76", "Raspberry Pi", 4.8, 17.1, 2.4),
    ("Cortex-A78", "Radxa", 8.2, 25.6, 2.7),
    ("Cortex-A78AE", "NVIDIA", 6.73, 68.0, 1.51),
    ("Cortex-A53", "Arduino", 2.2, 14.9, 2.0),
    ("performance", "Apple", 30.6, 60.0, 4.05),
]


def point(value: float) -> Interval:
    return Interval(low=value, typical=value, high=value)


@pytest.mark.parametrize(("core", "rate", "peak"), MEASURED_SHARES)
def test_the_share_of_a_product_holds_what_was_measured(
    core: str, rate: float, peak: float
) -> None:
    share = gemm_share(core_kind(core, "somebody", []), [])
    assert share.low <= rate / peak <= share.high
    assert rate / peak == pytest.approx(share.typical, rel=0.15)
    assert share.high / share.low < 3


@pytest.mark.parametrize(("core", "vendor", "rate", "chips", "clock"), MEASURED_COPIES)
def test_one_rule_for_copies_holds_what_was_measured(
    core: str, vendor: str, rate: float, chips: float, clock: float
) -> None:
    found = copy_rate(core_kind(core, vendor, []), point(chips), point(clock))
    assert found.low <= rate <= found.high
    assert found.high / found.low <= 3
    assert 1 / 1.5 <= found.typical / rate <= 1.5


def test_kernels_are_told_apart() -> None:
    plain = gemm_share(core_kind("Cortex-X4", "Google", []), [])
    scalable = gemm_share(core_kind("performance", "Apple", ["sme"]), ["sme"])
    assert scalable.typical > plain.typical
    factors = [int8_factor(e).typical for e in ([], ["dotprod"], ["dotprod", "i8mm"])]
    assert factors == sorted(factors)
    assert len(set(factors)) == 3


def from_data_sheet(**cpu: object) -> DeviceProfile:
    def figure(value: float, unit: str, **more: object) -> dict[str, object]:
        return {"value": value, "unit": unit, "kind": "published", "source": "data sheet", **more}

    content = {
        "schema_version": 1, "name": "amd/epyc", "title": "EPYC", "vendor": "AMD", "os": "linux",
        "validated": False, "memory": {"dram_bandwidth": figure(204.8, "GB/s")},
        "cpu": {
            "fp32_peak": figure(224.0, "GFLOPS", threads=2),
            "training_threads": figure(1, "cores"),
            "clusters": [
                {"core": "Zen 3", "cores": figure(2, "cores"), "clock": figure(3.5, "GHz")}
            ],
            **cpu,
        },
    }  # fmt: skip
    return DeviceProfile.model_validate(content)


def test_a_data_sheet_is_enough_for_times() -> None:
    rates = device_rates(from_data_sheet())
    assert not isinstance(rates, str)
    assert rates.gemm.typical == pytest.approx(0.8 * 112e9)
    assert rates.core == rates.gemm  # one of two like cores
    assert rates.copy.typical == pytest.approx(3 * 3.5e9)
    own = {"value": 0.5, "low": 0.4, "high": 0.6, "unit": "1", "kind": "measured", "source": "own"}
    other = device_rates(from_data_sheet(gemm_efficiency=own))
    assert not isinstance(other, str)
    assert other.gemm.typical == pytest.approx(0.5 * 112e9)


def test_phones_follow_one_rule_for_copies() -> None:
    """No phone takes the copy of another board: like memory gives like rates."""
    for name in list_profiles():
        profile = load_profile(name)
        if profile.os not in ("android", "ios") or profile.copy_bandwidth() is None:
            continue
        memory = profile.memory
        if not isinstance(memory.dram_bandwidth, Quantity):
            assert isinstance(memory.bandwidth, Quantity)
            assert "with the same chip" in memory.bandwidth.source, name
