"""What a device profile can judge, what it cannot for lack of a figure, and what looks wrong in it.

Reading a profile already refuses what cannot be true. What is here can be true and
most often is not: it makes a warning, never an error.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Final

from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.units import Interval, Quantity, Unknown, bounds

MOST_GEMM_EFFICIENCY: Final = 0.9
"""Hand-tuned libraries reach about this share of the register-only peak; a figure above it
is most often a peak that somebody took for a measurement."""

CLUSTER_TOLERANCE: Final = 0.1
"""How far the sum of the clusters may lie outside the interval of ``cpu.fp32_peak``."""

MOST_ASSUMED: Final = 0.5
"""Share of assumed figures from which a verdict rests on assumptions more than on facts."""

_RATE: Final = ("cpu.fp32_gemm", "cpu.fp32_peak")
_COPY: Final = ("memory.bandwidth", "memory.dram_bandwidth")
_TIME: Final = ("a matrix rate", "a copy rate")


class Judged(Part):
    """Something that a simulation judges, and the figures that it does it with.

    Attributes:
        subject: What is judged.
        lacking: Figures that the profile does not give; empty where it is judged.
        why: What the profile says of them, one sentence per figure that has one.
    """

    subject: str
    lacking: list[str]
    why: list[str]


class ProfileReport(Part):
    """What :func:`check_profile` finds.

    Attributes:
        name: The profile's name.
        judged: Subjects that are judged.
        not_judged: Subjects that are not, each with the figures it lacks.
        warnings: What can be true and most often is not.
        kinds: Number of figures per kind: measured, published, assumed, unknown.
    """

    name: str
    judged: list[str]
    not_judged: list[Judged]
    warnings: list[str]
    kinds: dict[str, int]


def check_profile(profile: DeviceProfile) -> ProfileReport:
    """Say what a profile judges, what it does not, and what looks wrong in it."""
    subjects = [_subject(profile, subject, keys) for subject, keys in _subjects(profile)]
    figures = profile.figures()
    counts = {
        kind: sum(figure.kind == kind for figure in figures)
        for kind in ("measured", "published", "assumed", "unknown")
    }
    return ProfileReport(
        name=profile.name,
        judged=[item.subject for item in subjects if not item.lacking],
        not_judged=[item for item in subjects if item.lacking],
        warnings=list(_warnings(profile, counts)),
        kinds=counts,
    )


def _subjects(profile: DeviceProfile) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What a simulation judges, and the keys it needs; a matrix rate stands for its variants."""
    yield "memory in the foreground", ("memory.app_limit_foreground",)
    yield "memory in the background", ("memory.app_limit_background",)
    yield "low memory warning", ("memory.app_limit_foreground", "memory.low_memory_warning")
    yield "step time and time to finish", _TIME
    yield "checkpoint load", ("storage.read",)
    yield "checkpoint save", ("storage.write",)
    sustained = profile.sustained()
    if sustained is not None and sustained.low >= 1:
        yield "throttling", ("sustained_fraction",)
    else:
        yield "throttling", ("sustained_fraction", "time_to_throttle")
    yield "energy", (*_TIME, "power.load")
    yield "share of the battery", (*_TIME, "power.load", "power.battery")
    if profile.background_is_open():
        yield "background work without windows", _TIME
    else:
        yield "background windows", (*_TIME, "background_window")


def _subject(profile: DeviceProfile, subject: str, keys: tuple[str, ...]) -> Judged:
    lacking: list[str] = []
    why: list[str] = []
    for key in keys:
        if key in _EITHER:
            found, names = _EITHER[key]
            if found(profile) is None:
                lacking.append(" or ".join(names))
                why += _reasons(profile, *names)
        elif not isinstance(_figure(profile, key), Quantity):
            lacking.append(key)
            why += _reasons(profile, key)
        elif key == "power.load" and profile.costs_no_energy():
            lacking.append("power.load above power.idle")
    return Judged(subject=subject, lacking=lacking, why=why)


_EITHER: Final[dict[str, tuple[Callable[[DeviceProfile], Interval | None], tuple[str, ...]]]] = {
    "a matrix rate": (DeviceProfile.gemm_flops, _RATE),
    "a copy rate": (DeviceProfile.copy_bandwidth, _COPY),
}


def _figure(profile: DeviceProfile, key: str) -> Quantity | Unknown | None:
    figure: Quantity | Unknown | None = attrgetter(key)(profile)
    return figure


def _reasons(profile: DeviceProfile, *keys: str) -> list[str]:
    figures = (_figure(profile, key) for key in keys)
    return [figure.unknown for figure in figures if isinstance(figure, Unknown)]


def _warnings(profile: DeviceProfile, counts: dict[str, int]) -> Iterator[str]:
    yield from _memory_warnings(profile)
    yield from _cpu_warnings(profile)
    sustained, seconds = profile.sustained(), profile.throttle_seconds()
    if sustained is not None and sustained.low < 1 and seconds is None:
        yield (
            "sustained_fraction is given without time_to_throttle: it is unknown when the "
            "device becomes slower"
        )
    if sustained is None and seconds is not None:
        yield "time_to_throttle is given without sustained_fraction: it judges nothing"
    if profile.load_watts() is not None and profile.idle_watts() is None:
        yield "power.load is given without power.idle: what the device draws anyway counts as well"
    if profile.costs_no_energy():
        yield "power.idle is not below power.load: energy is not judged"
    known = sum(count for kind, count in counts.items() if kind != "unknown")
    if known and counts["assumed"] > MOST_ASSUMED * known:
        yield (
            f"{counts['assumed']} of {known} known figures are assumed: verdicts rest on "
            "assumptions more than on facts"
        )


def _memory_warnings(profile: DeviceProfile) -> Iterator[str]:
    limit = profile.memory_limit_bytes()
    background = profile.memory_limit_bytes("background")
    entitled = bounds(profile.memory.app_limit_entitled, "bytes")
    if limit is not None and entitled is not None and entitled.typical < limit:
        yield "memory.app_limit_entitled is below memory.app_limit_foreground"
    if limit is not None and background is not None and background > limit:
        yield "memory.app_limit_background is above memory.app_limit_foreground"
    bandwidth = profile.memory.bandwidth
    if isinstance(bandwidth, Quantity) and bandwidth.kind == "published":
        yield (
            "memory.bandwidth is published: that is most often the peak of the memory chips, "
            "of which one thread copies a fifth to a half: give it as memory.dram_bandwidth"
        )


def _cpu_warnings(profile: DeviceProfile) -> Iterator[str]:
    cpu = profile.cpu
    efficiency = bounds(cpu.gemm_efficiency, "ratio")
    if efficiency is not None and efficiency.typical > MOST_GEMM_EFFICIENCY:
        yield (
            f"cpu.gemm_efficiency is {efficiency.typical:g}: libraries seldom reach more than "
            f"{MOST_GEMM_EFFICIENCY:g} of the peak"
        )
    peak, gemm = bounds(cpu.fp32_peak, "compute"), bounds(cpu.fp32_gemm, "compute")
    if peak is not None and gemm is not None and gemm.typical > peak.high:
        yield "cpu.fp32_gemm is above cpu.fp32_peak: a product cannot beat the peak"
    clusters = [bounds(cluster.fp32_peak, "compute") for cluster in cpu.clusters]
    rates = [rate for rate in clusters if rate is not None]
    if peak is not None and rates and len(rates) == len(clusters):
        total = sum(rate.typical for rate in rates)
        low, high = peak.low * (1 - CLUSTER_TOLERANCE), peak.high * (1 + CLUSTER_TOLERANCE)
        if not low <= total <= high:
            yield (
                f"the peaks of the clusters sum to {total / 1e9:.4g} GFLOPS, cpu.fp32_peak is "
                f"{peak.typical / 1e9:.4g}"
            )
    counts = [bounds(cluster.cores, "count") for cluster in cpu.clusters]
    cores = sum(count.typical for count in counts if count is not None)
    complete = bool(counts) and all(count is not None for count in counts)
    threads, known = profile.training_threads(), profile.gemm_threads()
    if complete and threads is not None and threads > cores:
        yield f"cpu.training_threads is {threads}, and the clusters have {cores:g} cores"
    if complete and known is not None and known > cores:
        yield f"the matrix rate is for {known} threads, and the clusters have {cores:g} cores"
    if (
        threads is not None
        and known is not None
        and threads != known
        and profile.gemm_flops() == profile.gemm_flops(threads)
    ):
        yield (
            f"the matrix rate is for {known} threads and a training uses {threads}: give every "
            "cluster its fp32_peak, so that one follows from the other"
        )
