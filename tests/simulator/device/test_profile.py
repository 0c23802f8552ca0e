import re
import tomllib
from pathlib import Path

import pytest

from odtpack_runtime.errors import OdtpackError, UnknownNameError
from odtpack_simulator.device import profile as profile_module
from odtpack_simulator.device.profile import (
    DeviceProfile,
    list_profiles,
    load_profile,
    parse_profile,
)
from odtpack_simulator.values.units import bounds
from tests.refused import refused

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs/formats/device-profile.md"
EXAMPLE = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)[0]


def parse(text: str) -> DeviceProfile:
    return parse_profile(text.encode(), "example.toml")


def changed(old: str, new: str) -> str:
    assert EXAMPLE.count(old) == 1, old
    return EXAMPLE.replace(old, new)


CLASSES = {
    "entry Android": "samsung/galaxy-a12", "Helio G99": "samsung/galaxy-a15",
    "older middle class": "google/pixel-4a", "middle class": "google/pixel-9a",
    "Snapdragon 8 Gen 2": "samsung/galaxy-s23", "flagship": "google/pixel-10-pro",
    "oldest iPhone": "apple/iphone-xr", "newest iPhone": "apple/iphone-17-pro",
    "tablet": "apple/ipad-pro-11-m1", "watch": "apple/watch-series-6", "headset": "meta/quest-3",
    "Jetson": "nvidia/jetson-orin-nano", "smallest board": "raspberrypi/zero-2-w",
    "browser on a desktop": "web/desktop", "browser on a phone": "web/phone",
}  # fmt: skip


def test_shipped_names():
    names = list_profiles()
    files = Path(__file__).parents[3].glob("device_profiles/*/*.toml")
    assert names == sorted(f"{path.parent.name}/{path.stem}" for path in files)
    assert set(CLASSES.values()) <= set(names)
    assert {load_profile(name).os for name in names} == {"android", "ios", "linux", "web"}
    titles = [load_profile(name).title for name in names]
    assert len(set(titles)) == len(titles)
    assert len({load_profile(name).digest for name in names}) == len(names)


@pytest.mark.parametrize("name", list_profiles())
def test_every_shipped_figure_has_kind_and_source(name):
    device = load_profile(name)
    assert device.name == name
    assert device.validated is False
    for figure in device.figures():
        if figure.value is None:
            assert figure.kind == "unknown"
        else:
            assert figure.kind in {"measured", "published", "assumed"}
            assert figure.unit
        # Long enough to be followed, short enough to be read, and never only "unknown".
        if not figure.key.startswith(NOT_GIVEN):
            assert 10 < len(figure.source) < 400, figure
            assert len(set(re.findall(r"[a-z]{3,}", figure.source.lower()))) > 1, figure
            assert not re.search(r"/(home|work|tmp|Users)/", figure.source), figure
        if figure.kind == "published":
            assert "memory" not in figure.source.partition("from ")[2], "not looked up: assumed"


NOT_GIVEN = ("memory.arena", "memory.heap", "cpu.fp32_conv", "cpu.fp32_gemm")
"""Figures that only a measurement of one's own gives."""


@pytest.mark.parametrize("name", list_profiles())
def test_limits_of_shipped_profiles_are_in_order(name):
    device = load_profile(name)
    ram = bounds(device.memory.ram, "bytes")
    foreground = bounds(device.memory.app_limit_foreground, "bytes")
    background = bounds(device.memory.app_limit_background, "bytes")
    entitled = bounds(device.memory.app_limit_entitled, "bytes")
    known = [limit.typical for limit in (background, foreground, entitled, ram) if limit]
    assert known == sorted(known)
    burst, load = device.sustained(), device.load_watts()
    idle = device.idle_watts()
    assert burst is None or 0 < burst.low <= burst.high <= 1
    assert load is None or idle is None or idle.high < load.low
    assert device.training_threads() is not None


@pytest.mark.parametrize("name", list_profiles())
def test_training_uses_no_more_threads_than_cores(name):
    device = load_profile(name)
    cores = [bounds(cluster.cores, "count") for cluster in device.cpu.clusters]
    threads = device.training_threads()
    assert threads is not None
    assert device.os == "web" or threads <= sum(count.typical for count in cores if count)
    rate, scaled = device.gemm_flops(), device.gemm_flops(threads)
    assert (rate is None) == (scaled is None)
    assert rate is None or scaled is None or scaled.typical <= rate.typical


@pytest.mark.parametrize("name", list_profiles())
def test_figures_lists_every_table_in_the_file(name):
    content = tomllib.loads((ROOT / "device_profiles" / f"{name}.toml").read_text("utf-8"))

    def figures(node: object) -> int:
        if isinstance(node, list):
            return sum(figures(item) for item in node)
        if not isinstance(node, dict):
            return 0
        if "value" in node or "unknown" in node:
            return 1
        return sum(figures(item) for item in node.values())

    shown = load_profile(name).figures()
    given = [figure for figure in shown if figure.source != "the profile does not give it"]
    assert len(given) == figures(content)


def test_android_limits_follow_their_formula():
    for name in list_profiles():
        device = load_profile(name)
        if device.os == "android":
            ram = device.memory.ram.interval("bytes").typical  # type: ignore[union-attr]
            expected = ram - max(ram / 2, 1.5 * 2**30)
            assert device.memory_limit_bytes() == expected
            assert device.memory_limit().kind == "assumed"  # type: ignore[union-attr]


def test_matrix_rate_is_peak_times_efficiency_unless_measured():
    device = parse(EXAMPLE)
    rate = device.gemm_flops()
    assert (rate.low, rate.typical, rate.high) == pytest.approx((37.5e9, 60e9, 75e9))
    assert device.gemm_threads() == 8
    gemm = 'value = 70, threads = 4, unit = "GFLOPS", kind = "measured", source = "lab"'
    measured = parse(changed("[cpu]\n", f"[cpu]\nfp32_gemm = {{ {gemm} }}\n"))
    assert measured.gemm_flops().typical == 70e9  # type: ignore[union-attr]
    assert measured.gemm_threads() == 4


def test_matrix_rate_follows_the_threads():
    """66 GFLOPS on two fast cores, 84 on six slow ones, 150 together; 40 % of it in a product."""
    device = parse(EXAMPLE)
    for threads, peak in ((1, 33), (2, 66), (3, 80), (8, 150), (9, 150)):
        rate = device.gemm_flops(threads)
        expected = tuple(share * peak * 1e9 for share in (0.25, 0.4, 0.5))
        assert (rate.low, rate.typical, rate.high) == pytest.approx(expected), threads
    assert device.gemm_flops() == device.gemm_flops(8)
    gap = parse(changed("fp32_peak = { value = 84", "# fp32_peak = { value = 84"))
    assert gap.gemm_flops(2) == gap.gemm_flops()  # nobody knows how the clusters compare
    gemm = 'unit = "GFLOPS", kind = "measured", source = "lab"'
    both = f"fp32_gemm = {{ value = 70, threads = 8, {gemm} }}\n"
    both += f"fp32_gemm_single = {{ value = 20, threads = 1, {gemm} }}\n"
    measured = parse(changed("[cpu]\n", f"[cpu]\n{both}"))
    rates = [measured.gemm_flops(threads) for threads in (1, 2, 8)]
    assert [rate.typical for rate in rates if rate] == pytest.approx([20e9, 70e9 * 66 / 150, 70e9])
    with pytest.raises(OdtpackError, match="one thread, found threads = 2"):
        parse(changed("[cpu]\n", f"[cpu]\n{both}".replace("threads = 1,", "threads = 2,")))


def test_a_wrong_line_is_named():
    with pytest.raises(OdtpackError) as caught:
        parse(changed("value = 2.2,", "value = -2.2,"))
    line = EXAMPLE.splitlines().index(next(x for x in EXAMPLE.splitlines() if "value = 2.2," in x))
    assert caught.value.where == f"example.toml:{line + 1}"
    assert "cpu.clusters[0].clock" in caught.value.what


MINIMAL = """
schema_version = 1
name = "acme/phone-1"
title = "Acme Phone 1"
vendor = "Acme"
os = "android"
validated = false
sustained_fraction = { unknown = "nobody ran it for long" }
[memory]
app_limit_foreground = { value = 2, unit = "GiB", kind = "assumed", source = "half of it" }
bandwidth = { value = 5.1, unit = "GB/s", kind = "measured", source = "our lab" }
"""


def test_unknown_and_absent_figures_read_as_null():
    device = parse(MINIMAL)
    assert device.gemm_flops() is device.gemm_flops(2) is device.gemm_threads() is None
    assert device.throttle_seconds() is device.battery_joules() is device.idle_watts() is None
    assert device.training_threads() is device.warning_bytes() is None
    assert device.sustained() is None
    assert device.background_seconds() is None
    assert device.memory_limit_bytes("background") is None
    assert device.storage_bandwidth("write") is None
    assert device.load_watts() is None
    assert device.memory_limit_bytes() == 2 * 2**30
    assert device.copy_bandwidth().typical == 5.1e9  # type: ignore[union-attr]


def test_digest_ignores_layout_but_not_figures():
    digest = parse(EXAMPLE).digest
    assert parse("# a comment\n" + EXAMPLE.replace(" = ", "=")).digest == digest
    assert parse(changed("value = 5.1", "value = 5.2")).digest != digest


HOSTILE = [
    ("value = 5.1", 'value = "5.1"', "memory.bandwidth.value", "must be a number"),
    ("value = 5.1", "value = -5.1", "memory.bandwidth.value", "greater than 0"),
    ("value = 5.1", "value = 0", "memory.bandwidth.value", "greater than 0"),
    ("value = 5.1", "value = nan", "memory.bandwidth.value", "finite"),
    ("value = 5.1", "value = inf", "memory.bandwidth.value", ""),
    ("value = 5.1", "value = true", "memory.bandwidth.value", "must be a number"),
    ("value = 5.1", "value = 1e300", "memory.bandwidth.value", "must be at most"),
    ("value = 5.1", "value = 1e-300", "memory.bandwidth", "is too small, found 1e-300 GB/s"),
    ('value = 2, unit = "GiB"', 'value = 1e-10, unit = "GiB"', "memory",
     "too small, found 1e-10 GiB"),
    ("value = 5.1, ", "", "memory.bandwidth.value", "is missing"),
    ('unit = "GB/s"', 'unit = "GBps"', "memory.bandwidth", "did you mean"),
    ('unit = "GB/s"', 'unit = "GHz"', "memory.bandwidth", "not a unit of bandwidth"),
    ('unit = "GB/s"', "unit = 1", "memory.bandwidth.unit", "must be a string"),
    ('kind = "measured", source = "tiny', 'kind = "guessed", source = "tiny', "kind", "not one of"),
    ('kind = "measured", source = "tiny', 'source = "tiny', "memory.bandwidth.kind", "is missing"),
    (', source = "tinymembench memcpy, our lab"', "", "memory.bandwidth.source", "is missing"),
    ("bandwidth = {", "bandwith = {", "memory.bandwith", "did you mean 'bandwidth'"),
    ("value = 5.1", "value = 5.1, low = 1", "memory.bandwidth", "together"),
    ("value = 5.1", "value = 5.1, low = 6, high = 7", "memory.bandwidth", "low <= value <= high"),
    ("value = 5.1", 'value = 5.1, unknown = "why"', "memory.bandwidth",
     "unknown key; allowed here: unknown"),
    ("low = 0.25, high = 0.5, ", "", "cpu", "gemm_efficiency needs low and high"),
    ("high = 0.5, unit", "high = 1.5, unit", "cpu.gemm_efficiency", "more than 1"),
    ("threads = 8, ", "", "cpu.fp32_peak.threads", "is missing"),
    ('value = 2, unit = "GiB"', 'value = 5, unit = "GiB"', "memory", "is more than ram"),
    ('value = 6, unit = "cores"', 'value = 2.5, unit = "cores"', "cores", "whole number"),
    ('value = 6, unit = "cores"', 'value = 1e9, unit = "cores"', "cores", "more than 1024"),
    ('value = 6, unit = "cores"', 'value = 6, unit = "GHz"', "clusters[1].cores", "not a unit of"),
    ('core = "Cortex-A76"', 'core = ""', "cpu.clusters[0].core", "at least 1 character"),
    ('value = 4, unit = "min"', 'value = 4, unit = "W"', "time_to_throttle", "unit of duration"),
    ('unit = "Wh"', 'unit = "mAh"', "power.battery", "not a unit of energy"),
    ("[storage]", "[storege]", "storege", "did you mean 'storage'"),
    ('os = "android"', 'os = "andriod"', "os", "did you mean 'android'"),
    ("schema_version = 1", "schema_version = 2", "schema_version", "not one of 1"),
    ("schema_version = 1", "schema_version = true", "schema_version", "number, found true"),
    ('name = "acme/phone-1"', 'name = "../../etc/passwd"', "name", "pattern"),
    ("validated = false", 'validated = "no"', "validated", "true or false"),
    ("[memory]", "[[memory]]", "memory", "must be a table"),
    ("bandwidth = { value = 5.1", "bandwidth = 5.1 # {", "memory.bandwidth", "must be a table"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "key", "message"), HOSTILE)
def test_wrong_profile_is_named_in_one_line(old, new, key, message):
    with refused("profile-invalid") as caught:
        parse(changed(old, new))
    error = caught.value
    assert error.where.startswith("example.toml")
    assert key in error.what
    assert message in error.what
    assert "\n" not in error.what
    assert "variant:" not in error.what


@pytest.mark.parametrize("data", [
    b"\xff\xfe", b"name = ", b"a = 1\na = 2", b"a = " + b"[" * 30_000, b"a = " + b"9" * 10_000,
    b"\x00",
])  # fmt: skip
def test_malformed_text(data):
    with refused("profile-malformed"):
        parse_profile(data, "example.toml")


def test_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(EXAMPLE, "utf-8")
    assert load_profile(path).name == "acme/phone-1"
    assert load_profile(str(path)).title == "Acme Phone 1"
    for bad, code in ((tmp_path / "absent.toml", "profile-missing"), (tmp_path, "device-unknown")):
        with refused(code):
            load_profile(bad)
    path.write_bytes(b"#" * (profile_module.MAX_PROFILE_BYTES + 1))
    with pytest.raises(OdtpackError, match="larger than"):
        load_profile(path)
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(OdtpackError, match="not a regular file"):
        load_profile(folder)


def test_names():
    assert load_profile("pixel-8a").name == "google/pixel-8a"
    with pytest.raises(UnknownNameError, match="did you mean 'google/pixel-8a'") as caught:
        load_profile("google/pixel-8")
    assert "odtpack devices list" in str(caught.value)
    for hostile in ("", "../google/pixel-8a", "google/../google/pixel-8a", "/etc/passwd", "\x00"):
        with pytest.raises(UnknownNameError):
            load_profile(hostile)


def test_profiles_of_a_wheel_come_first(tmp_path, monkeypatch):
    package = tmp_path / "site-packages/odtpack_runtime"
    shipped = package / "device_profiles/acme"
    shipped.mkdir(parents=True)
    (shipped / "phone-1.toml").write_text(EXAMPLE, "utf-8")
    (shipped / "phone-2.toml").write_text(EXAMPLE, "utf-8")
    monkeypatch.setattr(profile_module, "__file__", str(package / "device/profile.py"))
    assert list_profiles() == ["acme/phone-1", "acme/phone-2"]
    assert load_profile("acme/phone-1").vendor == "Acme"
    with pytest.raises(OdtpackError, match="calls itself 'acme/phone-1'"):
        load_profile("acme/phone-2")
    monkeypatch.setattr(profile_module, "__file__", str(tmp_path / "a/b/c/profile.py"))
    with pytest.raises(OdtpackError, match="carries no device profiles"):
        list_profiles()


def test_a_limit_with_a_fraction_is_not_a_byte_too_small():
    profile = load_profile("google/pixel-8a")
    figure = {"value": 2.01, "unit": "GB", "kind": "assumed", "source": "a test"}
    content = profile.model_dump(exclude_none=True)
    content["memory"]["app_limit_foreground"] = figure
    assert DeviceProfile.model_validate(content).memory_limit_bytes() == 2_010_000_000
