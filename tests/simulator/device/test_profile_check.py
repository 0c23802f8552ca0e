"""What a profile judges, what it does not, and what looks odd in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odtpack_simulator.device.profile import (
    DeviceProfile,
    list_profiles,
    load_profile,
    profile_toml,
)
from odtpack_simulator.device.profile import parse_profile as parse_bytes
from odtpack_simulator.device.profile_check import check_profile

DOCUMENT = Path(__file__).parents[3] / "docs/formats/device-profile.md"
EXAMPLE = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)[0]


def parse(text: str) -> DeviceProfile:
    return parse_bytes(text.encode(), "example.toml")


def changed(change: tuple[str, str]) -> DeviceProfile:
    assert EXAMPLE.count(change[0]) == 1, change[0]
    return parse(EXAMPLE.replace(*change))


def without(key: str) -> DeviceProfile:
    text, count = re.subn(rf"^{key} = .*\n", "", EXAMPLE, flags=re.M)
    assert count == 1, key
    return parse(text)


def test_the_documented_example_lacks_three_figures_and_warns_of_nothing() -> None:
    report = check_profile(parse(EXAMPLE))
    assert report.warnings == []
    assert {item.subject: item.lacking for item in report.not_judged} == {
        "memory in the background": ["memory.app_limit_background"],
        "low memory warning": ["memory.low_memory_warning"],
        "background windows": ["background_window"],
    }
    assert {item.subject: item.why for item in report.not_judged} == {
        "memory in the background": [],
        "low memory warning": ["the system warns by pressure"],
        "background windows": ["not tried"],
    }
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
def test_a_figure_that_is_gone_is_named(key: str, subject: str, lacking: str) -> None:
    before = check_profile(parse(EXAMPLE))
    after = check_profile(without(key))
    assert subject in before.judged
    assert subject not in after.judged
    found = {item.subject: item.lacking for item in after.not_judged}
    assert any(lacking in text for text in found[subject])


def test_a_device_without_a_peak_has_no_matrix_rate() -> None:
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
def test_what_looks_odd_is_a_warning(words: str, change: tuple[str, str]) -> None:
    warnings = check_profile(changed(change)).warnings
    assert any(words in warning for warning in warnings), warnings


def test_mostly_assumed() -> None:
    text = EXAMPLE.replace('"measured"', '"assumed"')
    warnings = check_profile(parse(text)).warnings
    assert warnings == [
        "13 of 19 known figures are assumed: verdicts rest on assumptions more than on facts"
    ]


def test_a_board_that_does_not_throttle_needs_no_time() -> None:
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
def test_shipped_profiles_pass(name: str) -> None:
    report = check_profile(load_profile(name))
    for warning in report.warnings:
        assert any(words in warning for words in EXPECTED), warning
    for item in report.not_judged:
        assert item.lacking
        assert item.why, f"{item.subject} is not judged, and the profile does not say why"


@pytest.mark.parametrize("name", list_profiles())
def test_written_profiles_read_the_same(name: str) -> None:
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
def test_hostile_text_is_written_as_text(title: str) -> None:
    device = parse(EXAMPLE).model_copy(update={"title": title})
    assert parse(profile_toml(device)).title == title
