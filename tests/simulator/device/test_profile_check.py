"""What a profile judges, what it does not, and what looks odd in it."""

import re
from functools import partial
from typing import get_args

import pytest

from odtpack_simulator.device.kits import KITS, Kit, kit_of
from odtpack_simulator.device.profile import (
    DeviceProfile,
    OsClass,
    copy_rate,
    core_kind,
    gemm_share,
    int8_factor,
    list_profiles,
    load_profile,
    profile_toml,
)
from odtpack_simulator.device.profile_check import check_profile
from odtpack_simulator.latency import device_rates
from odtpack_simulator.values.units import Quantity
from tests.simulator.device.test_profile import EXAMPLE, changed, parse
from tests.simulator.factory import same
from tests.simulator.profiles import figure, made_profile


def without(key: str) -> DeviceProfile:
    text, count = re.subn(rf"^{key} = .*\n", "", EXAMPLE, flags=re.M)
    assert count == 1, key
    return parse(text)


def test_the_documented_example_lacks_three_figures_and_warns_of_nothing():
    report = check_profile(parse(EXAMPLE))
    assert report.warnings == []
    assert {item.subject: (item.lacking, item.why) for item in report.not_judged} == {
        "memory in the background": (["memory.app_limit_background"], []),
        "low memory warning": (["memory.low_memory_warning"], ["the system warns by pressure"]),
        "background windows": (["background_window"], ["not tried"]),
    }  # fmt: skip
    assert len(report.judged) == 7
    assert report.kinds == {"measured": 10, "published": 6, "assumed": 3, "unknown": 10}


NOT_JUDGED = [
    ("app_limit_foreground", "memory in the foreground", "memory.app_limit_foreground"),
    ("bandwidth", "step time and time to finish", "memory.bandwidth or memory.dram_bandwidth"),
    ("read", "checkpoint load", "storage.read"),
    ("write", "checkpoint save", "storage.write"),
    ("time_to_throttle", "throttling", "time_to_throttle"),
    ("sustained_fraction", "throttling", "sustained_fraction"),
    ("load", "energy", "power.load"),
    ("battery", "share of the battery", "power.battery"),
]


@pytest.mark.parametrize(("key", "subject", "lacking"), NOT_JUDGED)
def test_a_figure_that_is_gone_is_named(key, subject, lacking):
    before = check_profile(parse(EXAMPLE))
    after = check_profile(without(key))
    assert subject in before.judged
    assert subject not in after.judged
    found = {item.subject: item.lacking for item in after.not_judged}
    assert any(lacking in text for text in found[subject])


def test_a_device_without_a_peak_has_no_matrix_rate():
    text, _ = re.subn(r"^fp32_peak = .*\n", "", EXAMPLE, flags=re.M)
    found = {item.subject: item.lacking for item in check_profile(parse(text)).not_judged}
    for subject in ("step time and time to finish", "energy"):
        assert found[subject] == ["cpu.fp32_gemm or cpu.fp32_peak"]


SHARE = "value = 0.4, low = 0.25, high = 0.5"
SLOW = "value = 84, threads = 6"
COPY = 'kind = "measured", source = "tiny'


def added(section: str, key: str, value: str, unit: str) -> tuple[str, str]:
    figure = f'{key} = {{ {value}, unit = "{unit}", kind = "measured", source = "our lab" }}'
    return f"[{section}]\n", f"[{section}]\n{figure}\n"


ODD: list[tuple[str, tuple[str, str]]] = [
    ("without time_to_throttle", ("time_to_throttle = {", "# {")),
    ("without sustained_fraction", ("sustained_fraction = {", "# {")),
    ("gemm_efficiency is 0.95", (SHARE, "value = 0.95, low = 0.9, high = 1")),
    ("sum to 186 GFLOPS, cpu.fp32_peak is 150", (SLOW, "value = 120, threads = 6")),
    ("sum to 100 GFLOPS, cpu.fp32_peak is 150", (SLOW, "value = 34, threads = 6")),
    ("clusters have 3 cores", ('value = 6, unit = "cores"', 'value = 1, unit = "cores"')),
    ("for 8 threads and a training uses 2", ("fp32_peak = { value = 84", "# {")),
    ("training_threads is 9", ("training_threads = { value = 2", "training_threads = { value = 9")),
    ("fp32_gemm is above", added("cpu", "fp32_gemm", "value = 200, threads = 8", "GFLOPS")),
    ("entitled is below", added("memory", "app_limit_entitled", "value = 1", "GiB")),
    ("background is above", added("memory", "app_limit_background", "value = 3", "GiB")),
    ("bandwidth is published", (COPY, COPY.replace("measured", "published"))),
    ("idle is not below", ("idle = { value = 0.3", "idle = { value = 5")),
    ("power.load is given without power.idle", ("idle = {", "# {")),
]


@pytest.mark.parametrize(("words", "change"), ODD, ids=[words for words, _ in ODD])
def test_what_looks_odd_is_a_warning(words, change):
    warnings = check_profile(parse(changed(*change))).warnings
    assert any(words in warning for warning in warnings), warnings


def test_power_that_is_higher_at_rest_judges_no_energy():
    report = check_profile(parse(changed("idle = { value = 0.3", "idle = { value = 5")))
    lacking = {item.subject: item.lacking for item in report.not_judged}
    for subject in ("energy", "share of the battery"):
        assert lacking[subject] == ["power.load above power.idle"]


def test_mostly_assumed():
    warnings = check_profile(parse(EXAMPLE.replace('"measured"', '"assumed"'))).warnings
    assert warnings == [
        "13 of 19 known figures are assumed: verdicts rest on assumptions more than on facts"
    ]


def test_a_board_that_does_not_throttle_needs_no_time():
    report = check_profile(load_profile("pi-5"))
    assert "throttling" in report.judged
    assert not any("time_to_throttle" in warning for warning in report.warnings)


EXPECTED = (
    "known figures are assumed",
    "the matrix rate is for 6 threads and a training uses 2",
    "time_to_throttle is given without sustained_fraction",
    "power.load is given without power.idle",
)
"""What a shipped profile may be warned of: nobody measured more."""


@pytest.mark.parametrize("name", list_profiles())
def test_shipped_profiles_pass(name):
    report = check_profile(load_profile(name))
    for warning in report.warnings:
        assert any(words in warning for words in EXPECTED), warning
    for item in report.not_judged:
        assert item.lacking
        assert item.why, f"{item.subject} is not judged, and the profile does not say why"


@pytest.mark.parametrize("name", list_profiles())
def test_written_profiles_read_the_same(name):
    device = load_profile(name)
    text = profile_toml(device, comment="one\n\ntwo")
    assert text.startswith("# one\n#\n# two\nschema_version = 1\n")
    again = parse(text)
    assert again == device
    assert again.digest == device.digest
    assert profile_toml(again, comment="one\n\ntwo") == text


@pytest.mark.parametrize(
    "title", ['"quoted" \\ back', "tab\tnew\nline", "\x00\x1b[31m\x7f", "é ∞ 🙂", "'''"]
)
def test_hostile_text_is_written_as_text(title):
    device = parse(EXAMPLE).model_copy(update={"title": title})
    assert parse(profile_toml(device)).title == title


# Rates from a data sheet, against machines whose rates were measured.

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


@pytest.mark.parametrize(("core", "rate", "peak"), MEASURED_SHARES)
def test_the_share_of_a_product_holds_what_was_measured(core, rate, peak):
    share = gemm_share(core_kind(core, "somebody", []), [])
    assert share.low <= rate / peak <= share.high
    assert rate / peak == pytest.approx(share.typical, rel=0.15)
    assert share.high / share.low < 3


@pytest.mark.parametrize(("core", "vendor", "rate", "chips", "clock"), MEASURED_COPIES)
def test_one_rule_for_copies_holds_what_was_measured(core, vendor, rate, chips, clock):
    found = copy_rate(core_kind(core, vendor, []), same(chips), same(clock))
    assert found.low <= rate <= found.high
    assert found.high / found.low <= 3
    assert 1 / 1.5 <= found.typical / rate <= 1.5


def test_kernels_are_told_apart():
    plain = gemm_share(core_kind("Cortex-X4", "Google", []), [])
    scalable = gemm_share(core_kind("performance", "Apple", ["sme"]), ["sme"])
    assert scalable.typical > plain.typical
    factors = [int8_factor(e).typical for e in ([], ["dotprod"], ["dotprod", "i8mm"])]
    assert factors == sorted(factors)
    assert len(set(factors)) == 3


def from_data_sheet(**cpu: object) -> DeviceProfile:
    sheet = partial(figure, kind="published", source="data sheet")
    zen = {"core": "Zen 3", "cores": sheet(2, "cores"), "clock": sheet(3.5, "GHz")}
    cpu = {"fp32_peak": sheet(224.0, "GFLOPS", threads=2), "training_threads": sheet(1, "cores"),
           "clusters": [zen], **cpu}  # fmt: skip
    memory = {"dram_bandwidth": sheet(204.8, "GB/s")}
    return made_profile("amd/epyc", memory=memory, cpu=cpu).model_copy(update={"vendor": "AMD"})


def test_a_data_sheet_is_enough_for_times():
    rates = device_rates(from_data_sheet())
    assert not isinstance(rates, str)
    assert rates.gemm.typical == pytest.approx(0.8 * 112e9)
    assert rates.core == rates.gemm  # one of two like cores
    assert rates.copy.typical == pytest.approx(3 * 3.5e9)
    own = {"value": 0.5, "low": 0.4, "high": 0.6, "unit": "1", "kind": "measured", "source": "own"}
    other = device_rates(from_data_sheet(gemm_efficiency=own))
    assert not isinstance(other, str)
    assert other.gemm.typical == pytest.approx(0.5 * 112e9)


def test_phones_follow_one_rule_for_copies():
    """No phone takes the copy of another board: like memory gives like rates."""
    for name in list_profiles():
        profile = load_profile(name)
        if profile.os not in ("android", "ios") or profile.copy_bandwidth() is None:
            continue
        memory = profile.memory
        if not isinstance(memory.dram_bandwidth, Quantity):
            assert isinstance(memory.bandwidth, Quantity)
            assert "with the same chip" in memory.bandwidth.source, name


# Kits: named once, and chosen by the system where nobody says which.


def test_every_place_names_the_same_kits():
    assert list(KITS) == list(get_args(Kit))


def test_every_system_has_a_kit():
    chosen = {system: kit_of(system) for system in get_args(OsClass)}
    assert set(chosen.values()) <= set(KITS)
    assert (chosen["android"], chosen["ios"], chosen["web"]) == ("kotlin", "swift", "js")
    assert not KITS["kotlin"]
    assert not KITS["js"]
