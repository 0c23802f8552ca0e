"""The profile of this machine: measured for real, with little effort, and used as any other."""

import re
import socket
import sys
from pathlib import Path

import pytest

from odtpack_simulator.device.profile import DeviceProfile, parse_profile, profile_toml
from odtpack_simulator.device.profile_check import check_profile
from odtpack_simulator.latency import device_rates, gpu_rates
from odtpack_simulator.measure import calibration
from odtpack_simulator.measure import measured_profile as measuring
from odtpack_simulator.measure.host import CoreGroup, Machine, measure_storage, this_machine
from odtpack_simulator.measure.measured_profile import (
    DeviceMeasurements,
    Effort,
    conv_flops,
    measure_device,
    measured_profile,
)
from odtpack_simulator.values.units import Quantity, ThreadedQuantity, Unknown
from tests.refused import refused
from tests.software_gpu import reason_without

QUICK = Effort(repeats=1, convolution_seconds=0.0, file_bytes=2**20, syncs=2)
GIGA = 1e9

linux = pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
Measured = tuple[DeviceProfile, list[str], Path]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("target")
    told: list[str] = []

    def tell(done: int, total: int, what: str) -> None:
        told.append(f"{done} of {total}: {what}")

    device = measure_device(
        folder, name="acme/edge-1", title="Edge 1", threads=1, effort=QUICK, on_progress=tell
    )
    return device, told, folder


def test_a_measured_profile_passes_the_check(measured):
    device, told, folder = measured
    assert list(folder.iterdir()) == []
    assert told[0].startswith("0 of 2")
    assert told[-1] == "2 of 2: done"
    assert (device.name, device.vendor, device.title) == ("acme/edge-1", "acme", "Edge 1")
    assert device.validated is False
    report = check_profile(device)
    judged = {"memory in the foreground", "step time and time to finish", "checkpoint save"}
    assert judged <= set(report.judged)
    assert {"throttling", "energy"} <= {item.subject for item in report.not_judged}
    assert all(item.why for item in report.not_judged)
    assert report.kinds["measured"] >= 8
    assert report.warnings == []
    text = profile_toml(device)
    assert parse_profile(text.encode(), "edge.toml") == device
    assert text == profile_toml(device)


def test_figures_say_how_they_were_measured_and_not_where(measured):
    device, _, folder = measured
    text = profile_toml(device)
    assert socket.gethostname() not in text
    assert str(folder) not in text
    assert not re.search(r"\d\d:\d\d", text)  # the day will do
    for figure in device.figures():
        if figure.kind == "measured":
            assert "odtpack devices measure, ONNX Runtime " in figure.source, figure.key
    for rate in (device.cpu.fp32_gemm, device.cpu.fp32_gemm_single, device.cpu.fp32_conv):
        assert isinstance(rate, ThreadedQuantity)
        assert rate.threads == 1
        assert rate.low <= rate.value <= rate.high
    assert device.training_threads() == 1
    assert device.gemm_flops(1) is not None


@linux
def test_memory_is_what_the_kernel_says(measured):
    device, _, _ = measured
    total = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    ram = device.memory.ram
    assert isinstance(ram, Quantity)
    assert ram.value == int(total[1]) // 1024
    limit = device.memory_limit_bytes()
    assert limit <= ram.interval("bytes").typical


def test_rate_of_a_convolution_counts_the_operations_of_its_definition(monkeypatch):
    """Each shape has 4 x 64 x 64 x 56 x 56 x 9 multiplications and as many additions."""
    times = [lambda: 9, lambda: 2.0, lambda: 2.0, lambda: 2.0]
    monkeypatch.setattr(
        calibration, "_seconds", lambda work, seconds, most: (each() for each in (work, *times))
    )
    assert conv_flops(1, QUICK) == 4 * 64 * 64 * 56 * 56 * 9


def test_storage_in_memory_is_not_taken_for_a_drive():
    folder = Path("/dev/shm")  # noqa: S108
    if not folder.is_dir():
        pytest.skip("no file system in memory")
    before = set(folder.iterdir())
    timing = measure_storage(folder, size=2**20, repeats=2, syncs=1)
    assert timing.read == ()
    assert "memory" in timing.cached
    assert len(timing.write) == 2
    left = {path for path in set(folder.iterdir()) - before if "odtpack-measure" in path.name}
    assert left == set()


def test_unwritable_storage(tmp_path):
    with refused("storage-not-measured", "cannot be measured") as caught:
        measure_storage(tmp_path / "absent", size=2**20, repeats=1, syncs=1)
    assert caught.value.hint is not None


@pytest.mark.parametrize(("arguments", "code"), [
    ({"name": "../../etc"}, "profile-name"), ({"name": "Acme/Phone"}, "profile-name"),
    ({"name": "a/" + "b" * 100}, "profile-name"), ({"title": ""}, "profile-title"),
    ({"title": "x" * 101}, "profile-title"), ({"threads": 0}, "threads-range"),
    ({"threads": 4096}, "threads-range"),
])  # fmt: skip
def test_bad_arguments_are_refused_before_anything_runs(arguments, code, tmp_path):
    with refused(code) as caught:
        measure_device(tmp_path / "absent", effort=QUICK, **arguments)  # type: ignore[arg-type]
    assert caught.value.hint


def machine(*groups: tuple[int, float | None], quota: float | None = None) -> Machine:
    cores = tuple(CoreGroup(*group) for group in groups)
    return Machine(processor=None, ram_bytes=2**30, limit_bytes=None, groups=cores, quota=quota)


@pytest.mark.parametrize(("given", "threads"), [
    (machine((4, None)), 4), (machine((4, 3.0 * GIGA), (4, 1.8 * GIGA)), 4),
    (machine((1, 3.3 * GIGA), (3, 3.2 * GIGA), (2, 3.0 * GIGA), (2, 2.3 * GIGA)), 6),
    (machine((8, 3.0 * GIGA), quota=2.5), 2), (machine((8, 3.0 * GIGA), quota=0.5), 1),
])  # fmt: skip
def test_training_threads_are_the_fast_cores_within_the_quota(given, threads):
    assert given.training_threads() == threads


def test_this_machine():
    here = this_machine()
    assert 1 <= here.training_threads() <= here.cores
    clocks = [group.clock_hz or 0 for group in here.groups]
    assert clocks == sorted(clocks, reverse=True)


def test_what_the_system_does_not_tell_is_unknown(tmp_path, monkeypatch):
    bare = Machine(None, None, None, (CoreGroup(2, None),), None)
    monkeypatch.setattr(measuring, "this_machine", lambda: bare)
    monkeypatch.setattr(measuring, "gemm_flops", lambda threads: 3 * GIGA * threads)
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda threads: GIGA)
    monkeypatch.setattr(measuring, "conv_flops", lambda threads, effort: GIGA)
    device = measure_device(tmp_path, effort=QUICK)
    assert device.soc is None
    assert isinstance(device.memory.ram, Unknown)
    assert isinstance(device.cpu.clusters[0].clock, Unknown)
    assert device.memory_limit_bytes() is None
    rate, single = device.gemm_flops(), device.gemm_flops(1)
    assert (rate.typical, single.typical) == (6 * GIGA, 3 * GIGA)
    boxed = Machine("EPYC", 8 * 2**30, 3 * 2**30, (CoreGroup(2, 2 * GIGA),), None)
    monkeypatch.setattr(measuring, "this_machine", lambda: boxed)
    assert measure_device(tmp_path, effort=QUICK).memory_limit_bytes() == 3 * 2**30


RATES = DeviceMeasurements(
    format=1, kit="python", onnxruntime="1.32.0", threads=1, gemm_flops=[9e10],
    gemm_single_flops=[9e10], convolution_flops=[5e10], copy_bytes_per_second=[1e10],
)  # fmt: skip
EDGE = {"name": "acme/edge-1", "title": "Edge 1"}


def test_rates_that_waited_say_that_the_machine_was_busy():
    machine = Machine(None, 2**33, None, (CoreGroup(2, 3e9),), None)
    for waited, busy in ((0.0, False), (0.3, True)):
        profile = measured_profile(machine, RATES, waited=waited, **EDGE)
        assert isinstance(profile.cpu.fp32_gemm, Quantity)
        assert (
            "this machine was busy, rates waited 30.0 %" in profile.cpu.fp32_gemm.source
        ) == busy


WITHOUT = reason_without()
webgpu = pytest.param("webgpu", marks=pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT))


@pytest.mark.parametrize("name", ["CPUExecutionProvider", webgpu])
def test_a_gpu_is_measured_into_a_profile_that_simulations_read(name, monkeypatch):
    monkeypatch.setattr(calibration, "_SIZES", (128,))
    monkeypatch.setattr(calibration, "_ELEMENTS", 2**18)
    figures = calibration.measure_gpu(name, 2)
    made = measured_profile(this_machine(), RATES, gpu=figures, **EDGE)
    read = parse_profile(profile_toml(made).encode(), "edge.toml")
    assert read == made
    assert read.gpu is not None
    rates = gpu_rates(read, device_rates(read))
    assert not isinstance(rates, str)
    assert rates.gemm.typical > 0 < rates.copy.typical
    assert {figure.key for figure in read.figures()} >= {"gpu.fp16_gemm", "gpu.own_memory"}
