"""Measurements of a device by a training kit: read with suspicion, and made into a profile."""

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import load_profile, parse_profile, profile_toml
from odtpack_simulator.measure.measured_profile import imported_profile, load_measurements
from tests.refused import refused

SCHEMA = Path(__file__).parents[3] / "docs/schemas/measurements.schema.json"


def content(**changes: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "format": 1, "kit": "kotlin", "onnxruntime": "1.31.1", "threads": 4,
        "gemm_flops": [80e9, 90e9, 85e9], "gemm_single_flops": [24e9, 25e9, 26e9],
        "convolution_flops": [60e9], "copy_bytes_per_second": [9e9, 8e9, 10e9], "file_bytes": 2**26,
        "write_bytes_per_second": [2e8, 3e8], "read_bytes_per_second": [],
        "sync_seconds": [0.002, 0.004, 0.003], "memory_bytes": 6 * 2**30,
        "memory_limit_bytes": 2**30,
    }  # fmt: skip
    return whole | changes


def write(folder: Path, whole: Any) -> Path:
    path = folder / "measured.json"
    path.write_text(whole if isinstance(whole, str) else json.dumps(whole))
    return path


def profile_of(folder: Path, *, like: str | None = None, **changes: Any) -> Any:
    measured = load_measurements(write(folder, content(**changes)))
    base = None if like is None else load_profile(like)
    return imported_profile(measured, name="acme/phone", title="Phone", like=base)


def test_rates_of_a_gpu_are_those_that_were_measured(tmp_path):
    assert profile_of(tmp_path).gpu is None
    found = profile_of(tmp_path, gpu_gemm_flops=[3e12, 2e12, 1e12], gpu_operator_seconds=[2e-5])
    (rate, time), copy = (found.gpu.fp32_gemm, found.gpu.operator), found.gpu.bandwidth
    assert (rate.low, rate.value, rate.high) == (1000, 2000, 3000)
    assert time.value == 20
    assert copy.unknown == "not measured"


def test_figures_are_medians_between_the_extremes(tmp_path):
    profile = profile_of(tmp_path)
    assert (profile.validated, profile.os) == (True, "android")
    rate, single, copy = profile.gemm_flops(), profile.gemm_flops(1), profile.copy_bandwidth()
    assert (rate.low, rate.typical, rate.high) == (80e9, 85e9, 90e9)
    assert (single.low, single.typical, single.high) == (24e9, 25e9, 26e9)
    assert (copy.low, copy.typical, copy.high) == (8e9, 9e9, 10e9)
    assert profile.gemm_threads() == profile.training_threads() == 4
    assert profile.memory_limit_bytes() == 2**30
    assert profile.storage_bandwidth("read") is None
    assert profile.storage_bandwidth("write").typical == 2.5e8
    assert parse_profile(profile_toml(profile).encode(), "phone.toml") == profile
    sources = {f.source for f in profile.figures() if f.kind == "measured"}
    assert all("benchmark of the kotlin kit, ONNX Runtime 1.31.1" in text for text in sources)


def test_throttling_is_read_off_ten_minutes_of_load(tmp_path):
    """Full rate for three minutes, then half of it."""
    seconds = [float(second) for second in range(0, 601, 10)]
    rates = [80e9 if second <= 180 else 40e9 for second in seconds]
    profile = profile_of(tmp_path, sustained={"seconds": seconds, "gemm_flops": rates})
    sustained, begins = profile.sustained(), profile.throttle_seconds()
    assert (sustained.low, sustained.typical, sustained.high) == (0.5, 0.5, 0.5)
    assert begins.low <= 185 <= begins.high
    assert begins.high - begins.low <= 10


def test_a_device_that_does_not_throttle(tmp_path):
    seconds = [float(second) for second in range(0, 601, 10)]
    rates = [80e9 + 1e8 * (index % 2) for index in range(len(seconds))]
    profile = profile_of(tmp_path, sustained={"seconds": seconds, "gemm_flops": rates})
    assert profile.sustained().typical > 0.99
    assert profile.throttle_seconds().typical >= 590


def test_two_minutes_of_load_say_nothing(tmp_path):
    seconds = [float(second) for second in range(0, 121, 10)]
    load = {"seconds": seconds, "gemm_flops": [8e10] * len(seconds)}
    profile = profile_of(tmp_path, sustained=load)
    assert profile.sustained() is None
    assert profile.throttle_seconds() is None


def test_what_was_not_measured_comes_from_a_profile_of_the_same_device(tmp_path):
    base = load_profile("pixel-8a")
    profile = profile_of(tmp_path, like="pixel-8a", memory_bytes=7_800_000_000)
    assert profile.gemm_flops().typical == 85e9
    assert profile.copy_bandwidth().typical == 9e9
    assert profile.training_threads() == 4
    assert profile.cpu.clusters == base.cpu.clusters
    assert profile.power == base.power
    assert profile.background_window == base.background_window
    assert (profile.os, profile.vendor, profile.soc) == (base.os, base.vendor, base.soc)


@pytest.mark.parametrize(("whole", "words"), [
    ("", "not JSON"), ("[" * 100_000, "not JSON"), ('{"format": ' + "9" * 5000 + "}", "format"),
    ("[]", "wrong at"), (content(format=2), "format"), (content(extra=1), "extra"),
    (content(gemm_flops="8e10"), "gemm_flops"), (content(gemm_flops=[8e10, -1.0]), "gemm_flops[1]"),
    (content(gemm_flops=[True]), "gemm_flops[0]"), (content(gemm_flops=[math.inf]), "gemm_flops"),
    (content(gemm_flops=[math.nan]), "gemm_flops"), (content(gemm_flops=[1e300]), "gemm_flops[0]"),
    (content(threads=0), "threads"), (content(threads=2.5), "threads"),
    (content(kit="\x1b[31m"), "kit"), (content(system="plan9"), "system"),
    (content(memory_limit_bytes=7 * 2**30), "grants the app"),
    (content(memory_bytes="6 GiB"), "memory_bytes"),
    (content(sync_seconds=[0.0]), "sync_seconds[0]"),
    (content(sustained={"seconds": [1.0], "gemm_flops": []}), "1 times and 0 rates"),
    (content(sustained={"seconds": [2.0, 1.0], "gemm_flops": [1e9, 1e9]}), "rising order"),
])  # fmt: skip
def test_a_hostile_file_is_refused(tmp_path, whole, words):
    path = write(tmp_path, whole)
    with refused("measurements-invalid", where=path, what=words) as caught:
        load_measurements(path)
    assert "\x1b" not in caught.value.what


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "measured.json"
    with path.open("wb") as stream:
        stream.truncate(2**21)
    with refused("measurements-too-large", "larger than 1048576 bytes"):
        load_measurements(path)


def test_rates_that_are_missing_and_limits_that_do_not_fit(tmp_path):
    with refused("measurements-incomplete", "no copy_bytes_per_second"):
        profile_of(tmp_path, copy_bytes_per_second=[])
    with pytest.raises(OdtpackError, match="app_limit_foreground is more than ram"):
        profile_of(tmp_path, like="pixel-8a", memory_bytes=2**40, memory_limit_bytes=2**39)
    with refused("measurements-system", "do not name the operating system"):
        profile_of(tmp_path, kit="another")


def test_the_schema_says_the_same():
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(content(), schema)
    for wrong in (content(format=2), content(extra=1), content(threads=0)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
