"""Device profiles: one TOML file each, in which every figure names its source.

A figure is a table ``{ value, unit, kind, source }``, with ``low`` and ``high``
where it is only known as an interval. An unknown figure is written
``{ unknown = "why" }`` or left out; both read as null, and whatever it would
have judged is reported as "not judged". ``docs/formats/device-profile.md``
specifies the format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError, model_validator

from odtpack_runtime.errors import OdtpackError, UnknownNameError
from odtpack_simulator.values.part import Part, VersionOne, all_problems, meant
from odtpack_simulator.values.text import (
    counted,
    key_lines,
    nearest_line,
    parse_toml,
    read_bounded,
    toml_value,
)
from odtpack_simulator.values.units import (
    Bandwidth,
    Bytes,
    Compute,
    Count,
    Duration,
    Energy,
    Fraction,
    Frequency,
    Interval,
    Power,
    Quantity,
    Rate,
    SourceKind,
    Strict,
    ThreadedQuantity,
    Unknown,
    bounds,
    format_bytes,
)


class ProfileFigure(Part):
    """One figure of a profile as a report shows it; null values are unknown."""

    key: str
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str | None
    threads: int | None = None
    kind: SourceKind | Literal["unknown"]
    source: str

    @property
    def text(self) -> str:
        """The figure with bounds and threads: ``129 GFLOPS (78.4 to 143.5), 8 threads``."""
        if self.value is None:
            return "unknown"
        text = f"{self.value:g}" + ("" if self.unit in {None, "1"} else f" {self.unit}")
        if self.low is not None and self.high is not None:
            text += f" ({self.low:g} to {self.high:g})"
        if self.threads is not None:
            text += f", {counted(self.threads, 'thread')}"
        return text


def shown(key: str, figure: Quantity | Unknown | None) -> ProfileFigure:
    """A figure with its key; an unknown one with its reason."""
    if isinstance(figure, Quantity):
        threads = figure.threads if isinstance(figure, ThreadedQuantity) else None
        known = figure.model_dump(exclude={"threads"})
        return ProfileFigure(key=key, threads=threads, **known)
    why = figure.unknown if isinstance(figure, Unknown) else "the profile does not give it"
    return ProfileFigure(key=key, value=None, unit=None, kind="unknown", source=why)


class MemoryFigures(Strict):
    """What the device's memory holds, what one app gets of it, and how fast it copies."""

    ram: Bytes | None = None  # Memory of the device as sold
    app_limit_foreground: Bytes | None = None  # Memory at which an app in the foreground is ended
    app_limit_background: Bytes | None = None  # Memory at which an app in the background is ended
    app_limit_entitled: Bytes | None = None
    """Foreground limit with the platform's entitlement for more memory (iOS)."""
    low_memory_warning: Fraction | None = None
    """Share of the limit from which the system warns the app that memory is low."""
    bandwidth: Bandwidth | None = None
    """Rate of a large ``memcpy`` by one thread, in bytes copied (the traffic is twice that)."""
    dram_bandwidth: Bandwidth | None = None
    """Peak of the memory chips, as a data sheet has it; without ``bandwidth`` it stands in."""

    @model_validator(mode="after")
    def _limits_within_ram(self) -> MemoryFigures:
        ram = bounds(self.ram, "bytes")
        for key in ("app_limit_foreground", "app_limit_background", "app_limit_entitled"):
            limit = bounds(getattr(self, key), "bytes")
            if ram and limit and limit.typical > ram.typical:
                raise ValueError(f"{key} is more than ram")
        return self


class Cluster(Strict):
    """Cores of one kind."""

    core: str = Field(min_length=1, max_length=64)
    cores: Count
    clock: Frequency
    fp32_peak: Compute | None = None  # Single-precision rate of the cluster's cores together


class CpuFigures(Strict):
    """What the processor computes.

    ``fp32_gemm`` is the rate of a large single-precision matrix product. Where
    it was not measured, it is ``fp32_peak`` times ``gemm_efficiency``, for which
    :mod:`odtpack_simulator.device.profile` has a share by the kind of core.
    """

    extensions: list[Extension] = Field(default_factory=list, max_length=16)
    """Instructions for which ONNX Runtime has kernels of their own."""
    clusters: list[Cluster] = Field(default_factory=list, max_length=16)
    fp32_peak: Compute | None = None
    gemm_efficiency: Fraction | None = None
    fp32_gemm: Compute | None = None
    fp32_gemm_single: Compute | None = None  # `fp32_gemm` with one thread
    int8_gemm: Compute | None = None
    """Rate of a large int8 matrix product, two operations for each product and sum."""
    fp32_conv: Compute | None = None
    """Rate of a 3 x 3 convolution, in the floating-point operations of its definition."""
    training_threads: Count | None = None
    """Threads that a training should use: more would wait for slower cores."""

    @model_validator(mode="after")
    def _efficiency_is_an_interval(self) -> CpuFigures:
        efficiency = self.gemm_efficiency
        if isinstance(efficiency, Quantity) and efficiency.low is None:
            raise ValueError("gemm_efficiency needs low and high: it is never known as a point")
        return self

    @model_validator(mode="after")
    def _single_is_one_thread(self) -> CpuFigures:
        single = self.fp32_gemm_single
        if isinstance(single, ThreadedQuantity) and single.threads != 1:
            msg = f"fp32_gemm_single is the rate of one thread, found threads = {single.threads}"
            raise ValueError(msg)
        return self


class GpuFigures(Strict):
    """What the graphics processor computes, through ONNX Runtime's provider for it."""

    fp32_gemm: Rate | None = None  # Rate of a large single-precision matrix product
    fp16_gemm: Rate | None = None  # The same in float16
    bandwidth: Bandwidth | None = None
    """Rate of a large elementwise operator, in bytes written (the traffic is twice that)."""
    operator: Duration | None = None  # Time of an operator that has nothing to do
    own_memory: Bytes | None = None
    """Memory that is its own; unknown, with that reason, where it shares the processor's."""


class StorageFigures(Strict):
    """The storage that holds checkpoints: sequential rates, and what a small write costs."""

    read: Bandwidth | None = None
    write: Bandwidth | None = None
    """Rate until the bytes are on the medium (``fsync``), not in a cache."""
    sync_latency: Duration | None = None
    """Time until a small write is on the medium: write of a few kilobytes, then ``fsync``."""


class PowerFigures(Strict):
    """Power of the whole device at the wall or battery, and the battery's energy."""

    idle: Power | None = None
    load: Power | None = None
    battery: Energy | None = None


SCHEMA_VERSION: Final = 1
SECTIONS: Final = ("memory", "cpu", "storage", "power", "gpu")
MAX_PROFILE_BYTES: Final = 64 * 1024
_MOST_SHOWN: Final = 12

OsClass = Literal["android", "ios", "linux", "macos", "windows", "web"]
AppState = Literal["foreground", "background"]

_RUNS_SERVICES: Final[frozenset[OsClass]] = frozenset({"linux", "macos", "windows"})


NAME_PATTERN: Final = r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*"
"""What a profile may be called: ``vendor/device`` in lower case."""


class DeviceProfile(Strict):
    """One device. Times it predicts were never compared with it unless ``validated``."""

    schema_version: VersionOne
    name: str = Field(pattern=f"^{NAME_PATTERN}$", max_length=100)
    title: str = Field(min_length=1, max_length=100)
    vendor: str = Field(min_length=1, max_length=100)
    soc: str | None = Field(default=None, min_length=1, max_length=200)
    os: OsClass
    validated: bool
    held_against: str | None = Field(default=None, min_length=3, max_length=1000)
    """What its predictions were compared with, and what came of it; null for nothing."""
    sustained_fraction: Fraction | None = None
    """Share of the burst rate that is left under continuous load."""
    time_to_throttle: Duration | None = None
    """Time under full load after which the rate falls to ``sustained_fraction``."""
    background_window: Duration | None = None
    """Time the system grants background work before it may end it."""
    memory: MemoryFigures = Field(default_factory=MemoryFigures)
    cpu: CpuFigures = Field(default_factory=CpuFigures)
    storage: StorageFigures = Field(default_factory=StorageFigures)
    power: PowerFigures = Field(default_factory=PowerFigures)
    gpu: GpuFigures | None = None
    """What models that are built for a GPU train on."""

    def __repr__(self) -> str:
        limit = self.memory_limit_bytes()
        memory = "memory limit unknown" if limit is None else f"{format_bytes(limit)} for an app"
        known = "validated" if self.validated else "not validated on hardware"
        return f"DeviceProfile({self.name}, {self.os}, {memory}, {known})"

    __str__ = __repr__

    @property
    def digest(self) -> str:
        """SHA-256 of what the profile says, independent of layout and comments in the file."""
        content = self.model_dump(mode="json", exclude_none=True)
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def memory_limit(
        self, state: AppState = "foreground", *, entitled: bool = False
    ) -> Quantity | None:
        """What one app may hold in this state, in the unit of the file; None if unknown.

        Args:
            state: Where the app trains.
            entitled: The app has the platform's entitlement for more memory. It holds in the
                foreground, on devices whose limit with it is known; elsewhere nothing changes.
        """
        figure = getattr(self.memory, f"app_limit_{state}")
        if entitled and state == "foreground" and self.has_entitled_limit:
            figure = self.memory.app_limit_entitled
        return figure if isinstance(figure, Quantity) else None

    def memory_limit_bytes(
        self, state: AppState = "foreground", *, entitled: bool = False
    ) -> int | None:
        """The same in whole bytes; None if unknown."""
        limit = self.memory_limit(state, entitled=entitled)
        return None if limit is None else int(limit.interval("bytes").typical)

    def gpu_memory(self) -> Interval | None:
        """Bytes of memory that its GPU has of its own; None where it has none, or is unknown."""
        return None if self.gpu is None else bounds(self.gpu.own_memory, "bytes")

    @property
    def has_entitled_limit(self) -> bool:
        """Whether it is known what an app with the entitlement for more memory may hold."""
        return isinstance(self.memory.app_limit_entitled, Quantity)

    def gemm_flops(self, threads: int | None = None) -> Interval | None:
        """Rate of a large fp32 matrix product in FLOP/s; None if the profile cannot say.

        The measured ``fp32_gemm`` wins; else ``fp32_peak`` times ``gemm_efficiency``, or the
        share that ONNX Runtime reaches on cores of this kind.

        Args:
            threads: Threads that compute it, on the fastest cores; without it, those of
                :meth:`gemm_threads`. Another number scales the rate by the peak rates of the
                clusters. Where the profile does not give these, the rate stays as it is.
        """
        rate, peak = bounds(self.cpu.fp32_gemm, "compute"), bounds(self.cpu.fp32_peak, "compute")
        if rate is None and peak is not None:
            share = bounds(self.cpu.gemm_efficiency, "ratio")
            rate = peak.times(share or gemm_share(self._core_kind(), self.cpu.extensions))
        known = self.gemm_threads()
        if rate is None or threads is None or threads == known:
            return rate
        if threads == 1:
            single = bounds(self.cpu.fp32_gemm_single, "compute")
            if single is not None:
                return single
        peaks = self._core_peaks()
        if peaks is None or known is None:
            return rate
        return rate.scaled(sum(peaks[:threads]) / sum(peaks[:known]))

    def _core_peaks(self) -> list[float] | None:
        """FLOP/s of every core, the fastest first; None if a cluster's rate is unknown."""
        peaks: list[float] = []
        for cluster in self.cpu.clusters:
            peak, cores = bounds(cluster.fp32_peak, "compute"), bounds(cluster.cores, "count")
            if peak is None or cores is None:
                return None
            peaks += [peak.typical / cores.typical] * round(cores.typical)
        return sorted(peaks, reverse=True) or None

    def gemm_threads(self) -> int | None:
        """Threads for which :meth:`gemm_flops` holds; None if the profile cannot say."""
        for figure in (self.cpu.fp32_gemm, self.cpu.fp32_peak):
            if isinstance(figure, ThreadedQuantity):
                return figure.threads
        return None

    def copy_bandwidth(self) -> Interval | None:
        """Bytes per second that one thread copies in memory; None if unknown.

        What was measured wins; else the share of the memory chips' peak that a copy reaches.
        """
        measured = bounds(self.memory.bandwidth, "bandwidth")
        chips = bounds(self.memory.dram_bandwidth, "bandwidth")
        if measured is not None or chips is None:
            return measured
        return copy_rate(self._core_kind(), chips, self.fastest_clock())

    def int8_ops(self, threads: int | None = None) -> Interval | None:
        """Operations per second of a large int8 matrix product; None if unknown.

        What was measured wins, else the float32 rate by the instructions that the processor
        has for products of bytes.

        Args:
            threads: As for :meth:`gemm_flops`.
        """
        measured = bounds(self.cpu.int8_gemm, "compute")
        rate = self.gemm_flops(threads)
        if measured is not None or rate is None:
            return measured
        return rate.times(int8_factor(self.cpu.extensions))

    def fastest_clock(self) -> Interval | None:
        """Clock in Hz of the fastest cores; None if unknown."""
        clocks = [bounds(cluster.clock, "frequency") for cluster in self.cpu.clusters]
        return max((c for c in clocks if c), key=lambda clock: clock.typical, default=None)

    def _core_kind(self) -> CoreKind:
        """The kind of the cores that train: of the fastest cluster, which comes first."""
        core = self.cpu.clusters[0].core if self.cpu.clusters else self.soc or ""
        return core_kind(core, self.vendor, self.cpu.extensions)

    def storage_bandwidth(self, direction: Literal["read", "write"]) -> Interval | None:
        """Bytes per second of sequential storage access; None if unknown."""
        return bounds(getattr(self.storage, direction), "bandwidth")

    def sustained(self) -> Interval | None:
        """Share of the burst rate left under continuous load, 0 to 1; None if unknown."""
        return bounds(self.sustained_fraction, "ratio")

    def background_seconds(self) -> Interval | None:
        """Seconds that the system grants background work; None if unknown."""
        return bounds(self.background_window, "duration")

    def background_is_open(self) -> bool:
        """Whether a session in the background lasts as long as it needs, as in the foreground.

        So it is where a service runs until it is stopped, and the profile names no window.
        """
        return self.os in _RUNS_SERVICES and self.background_seconds() is None

    def throttle_seconds(self) -> Interval | None:
        """Seconds of full load until the device throttles; None if unknown."""
        return bounds(self.time_to_throttle, "duration")

    def training_threads(self) -> int | None:
        """Threads that a training should use; None if the profile cannot say."""
        count = bounds(self.cpu.training_threads, "count")
        return None if count is None else int(count.typical)

    def warning_bytes(
        self, state: AppState = "foreground", *, entitled: bool = False
    ) -> int | None:
        """Memory from which the system warns the app; None if unknown."""
        share = bounds(self.memory.low_memory_warning, "ratio")
        limit = self.memory_limit_bytes(state, entitled=entitled)
        return None if share is None or limit is None else int(limit * share.typical)

    def idle_watts(self) -> Interval | None:
        """Power without load in watts, whole device; None if unknown."""
        return bounds(self.power.idle, "power")

    def battery_joules(self) -> Interval | None:
        """Energy of a full battery in joules; None if unknown."""
        return bounds(self.power.battery, "energy")

    def load_watts(self) -> Interval | None:
        """Power under full load in watts, whole device; None if unknown."""
        return bounds(self.power.load, "power")

    def costs_no_energy(self) -> bool:
        """Whether the power under load is not above that at rest: one of both must be wrong."""
        load, idle = self.load_watts(), self.idle_watts()
        return load is not None and idle is not None and idle.typical >= load.typical

    def figures(self) -> list[ProfileFigure]:
        """Every figure the format knows, in a fixed order, with the unknown ones among them."""
        return [shown(key, figure) for key, figure in self._walk()]

    def _walk(self) -> Iterator[tuple[str, Quantity | Unknown | None]]:
        for section in SECTIONS:
            part = getattr(self, section)
            if part is None:
                continue
            for key in type(part).model_fields:
                if key == "extensions":
                    continue
                if key != "clusters":
                    yield f"{section}.{key}", getattr(part, key)
                    continue
                for index, cluster in enumerate(self.cpu.clusters):
                    for name in ("cores", "clock", "fp32_peak"):
                        label = f"cpu.clusters[{index}].{name} ({cluster.core})"
                        yield label, getattr(cluster, name)
        for key in ("sustained_fraction", "time_to_throttle", "background_window"):
            yield key, getattr(self, key)


def parse_profile(data: bytes, where: str) -> DeviceProfile:
    """Read a profile from the bytes of a TOML file."""
    content = parse_toml(data, code="profile", what="device profile", where=where)
    try:
        return DeviceProfile.model_validate(content)
    except ValidationError as error:
        found = all_problems(error, DeviceProfile)
        lines = key_lines(data.decode("utf-8"))
        # Of keys such as `memory.ram.value`.
        line, *others = (
            nearest_line(lines, tuple(re.findall(r"[^.\[\]]+", key)))
            for key, _ in found[:_MOST_SHOWN]
        )
        said = "; ".join(
            f"{key}: {problem}" if number is None else f"{key} (line {number}): {problem}"
            for (key, problem), number in zip(found[1:_MOST_SHOWN], others, strict=True)
        )
        more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        raise OdtpackError(
            "profile-invalid",
            f"the device profile is wrong at {found[0][0]}: {found[0][1]}"
            + (f"; at {said}{more}" if said else ""),
            where=where if line is None else f"{where}:{line}",
        ) from error


def load_profile(name_or_path: str | os.PathLike[str]) -> DeviceProfile:
    """Load a shipped profile by name, or any profile by the path of its ``.toml`` file.

    Args:
        name_or_path: ``"google/pixel-8a"``, its last part where that is unique
            (``"pixel-8a"``), or a path that ends in ``.toml``.

    Raises:
        UnknownNameError: No profile of that name; the message lists near ones.
        OdtpackError: The file is absent, too large, not TOML, or not a profile.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml"):
        path = Path(text)
        return parse_profile(_read(path), str(path))
    names = list_profiles()
    full = [name for name in names if text in (name, name.rpartition("/")[2])]
    if len(full) != 1:
        holding = [name for name in names if text and text.lower() in name]
        mean = meant(text, names + [name.rpartition("/")[2] for name in names])
        if Path(text).is_file():
            mean = ": it is a file whose name does not end in .toml"
        elif holding:
            mean = f", did you mean {' or '.join(map(repr, holding[:_MOST_SHOWN]))}?"
        raise UnknownNameError("device-unknown", f"there is no device profile {text[:100]!r}{mean}")
    path = _profile_directory() / f"{full[0]}.toml"
    profile = parse_profile(_read(path), str(path))
    if profile.name != full[0]:
        problem = f"the device profile calls itself {profile.name!r} but is stored as {full[0]!r}"
        raise OdtpackError("profile-misnamed", problem, where=str(path))
    return profile


def list_profiles() -> list[str]:
    """Names of the shipped profiles, ``<vendor>/<device>``, sorted.

    Raises:
        OdtpackError: The installation carries no profiles.
    """
    root = _profile_directory()
    found = (path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/*.toml"))
    return sorted(name for name in found if re.fullmatch(NAME_PATTERN, name))


def _read(path: Path) -> bytes:
    return read_bounded(path, limit=MAX_PROFILE_BYTES, code="profile", what="device profile")


def _profile_directory() -> Path:
    """Where profiles are: beside the package in a wheel, at the repository's root otherwise."""
    package = Path(__file__).resolve().parents[1]
    for root in (package / "device_profiles", package.parents[1] / "device_profiles"):
        if root.is_dir():
            return root
    raise OdtpackError(
        "profiles-missing",
        "the installation carries no device profiles",
        where=str(package / "device_profiles"),
    )


_TOP = ("schema_version", "name", "title", "vendor", "soc", "os", "validated", "held_against")
_FIGURE = ("value", "low", "high", "threads", "unit", "kind", "source", "unknown")


def profile_toml(profile: DeviceProfile, *, comment: str = "") -> str:
    """The text of a profile's file; parsing it gives an equal profile."""
    return "\n".join(_lines(profile.model_dump(mode="json", exclude_none=True), comment)) + "\n"


def _lines(content: dict[str, Any], comment: str) -> Iterator[str]:
    yield from (f"# {line}".rstrip() for line in comment.splitlines())
    yield from _pairs({key: content[key] for key in _TOP if key in content})
    sections = {key: content.pop(key) for key in [*content] if key in SECTIONS}
    yield from _pairs({key: figure for key, figure in content.items() if key not in _TOP})
    for section, figures in sections.items():
        clusters = figures.pop("clusters", [])
        if figures:
            yield from ("", f"[{section}]", *_pairs(figures))
        for cluster in clusters:
            yield from ("", f"[[{section}.clusters]]", *_pairs(cluster))


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return toml_value({key: _whole(value[key]) for key in _FIGURE if key in value})
    return toml_value(_whole(value))


def _whole(value: Any) -> Any:
    """A number without a fraction as a whole one, which people read better."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value


# What ONNX Runtime makes of a data sheet: shares of the published peaks that it reaches.
#
# A data sheet has clocks, vector units and memory chips; a training has matrix products and copies.
# How much of the one becomes the other depends on the kind of core and on ONNX Runtime's kernels
# (MLAS), so the shares are here and not in each device's profile.
#
# Matrix products, in share of the peak of fused multiply-adds at the highest clock:
#
# - 0.83 through ONNX Runtime 1.31 on Zen 3 (93 of 112 GFLOPS at 3.5 GHz, one thread; 0.78 a core
# with two). - 0.80 and 0.86 to 0.90 of one Cortex-A76 (Raspberry Pi 5, Rock 5B; 0.51 and 0.85 of
# all four), 0.80 of one Cortex-A72 and 0.62 of four: HPL in double precision, of which nearly all
# is matrix products (github.com/OpenMathLib/OpenBLAS issues 4581 and 4149). - 0.60 of Cortex-A55,
# 0.48 to 0.57 of Cortex-A53: single-precision products that are tuned for these cores (the same,
# issue 3279 and pull request 2643). They issue in order, and wait for each load.
#
# With SME, ONNX Runtime 1.23 and later hands products to KleidiAI, by which whole networks became
# 1.2 to 1.8 times as fast on M4 (github.com/microsoft/onnxruntime pull request 24346).
#
# Copies by one thread reach 0.21 of the memory chips' peak on Raspberry Pi 4, 0.28 on Pi 5, 0.32 on
# QCS6490 and a half on A18 Pro, and never more than a core can have under way: 1.1 bytes per cycle
# on Cortex-A53, 2.7 to 3.2 on Zen 3 (this library's own copies), 3 to 4.5 on Cortex-A78.

Extension = Literal["dotprod", "i8mm", "bf16", "sve", "sme", "avx2", "avx512", "vnni", "amx"]
"""Instructions for which ONNX Runtime has kernels of their own."""


@dataclass(frozen=True, slots=True)
class CoreKind:
    """What one kind of core reaches."""

    gemm: Interval  # Share of its peak, in a matrix product
    dram: Interval  # Share of the memory chips' peak, in a copy by one thread
    copy_bytes: Interval  # Bytes that it copies per cycle at most


_SHARE: Final = Interval.of(0.17, 0.28, 0.5)
_OUT_OF_ORDER: Final = Interval.of(0.55, 0.8, 0.95)
ARM: Final = CoreKind(_OUT_OF_ORDER, _SHARE, Interval.of(3, 5, 8))
IN_ORDER: Final = CoreKind(Interval.of(0.35, 0.55, 0.75), _SHARE, Interval.of(0.5, 1, 1.5))
APPLE: Final = CoreKind(_OUT_OF_ORDER, Interval.of(0.25, 0.5, 0.6), Interval.of(5, 8, 12))
X86: Final = CoreKind(_OUT_OF_ORDER, _SHARE, Interval.of(2, 3, 5))

_IN_ORDER_NAMES: Final = re.compile(r"A(?:35|53|55|510|520)\b")
_X86_NAMES: Final = re.compile(r"x86|EPYC|Ryzen|Xeon|Core\b.*\bi\d|Zen|Atom|Celeron|Pentium", re.I)
_X86_EXTENSIONS: Final = frozenset({"avx2", "avx512", "vnni", "amx"})

SME: Final = Interval.of(1.0, 1.5, 1.8)
"""Rate of products with SME over that without, of whole networks."""

_INT8: Final[tuple[tuple[str, Interval], ...]] = (
    # Multiply-adds per instruction over those of a single-precision one: 16 lanes in four for
    # SDOT, 32 for SMMLA; the low end is what packing and requantizing leave of it.
    ("amx", Interval.of(4, 8, 16)),
    ("i8mm", Interval.of(2.5, 4.5, 8)),
    ("vnni", Interval.of(2, 3, 4)),
    ("dotprod", Interval.of(1.7, 3, 4)),
    ("avx2", Interval.of(1, 1.6, 2)),
)
_INT8_PLAIN: Final = Interval.of(0.7, 1.2, 2)


def core_kind(core: str, vendor: str, extensions: Sequence[str]) -> CoreKind:
    """The kind of a core, from its name, its maker and the instructions it has."""
    if vendor == "Apple":
        return APPLE
    if not _X86_EXTENSIONS.isdisjoint(extensions) or _X86_NAMES.search(core):
        return X86
    return IN_ORDER if _IN_ORDER_NAMES.search(core) else ARM


def gemm_share(kind: CoreKind, extensions: Sequence[str]) -> Interval:
    """What a float32 product reaches, in share of the peak without SME; it may exceed 1 with it."""
    return kind.gemm.times(SME) if "sme" in extensions else kind.gemm


def int8_factor(extensions: Sequence[str]) -> Interval:
    """Operations per second of an int8 product over those of a float32 one."""
    factor = next((factor for name, factor in _INT8 if name in extensions), _INT8_PLAIN)
    if "sme" not in extensions:
        return factor
    # Of what float32 products gain by SME, these are only sure to have the plain part.
    return Interval.of(
        factor.low / SME.typical, factor.typical / SME.typical, factor.high / SME.typical
    )


def copy_rate(kind: CoreKind, dram: Interval, clock: Interval | None) -> Interval:
    """Bytes per second that one thread copies."""
    # `dram`: Peak of the memory chips in bytes per second.
    # `clock`: Of the fastest core in Hz; None if unknown.
    share = dram.times(kind.dram)
    if clock is None:
        return share
    most = clock.times(kind.copy_bytes)
    return Interval.of(
        min(share.low, most.low), min(share.typical, most.typical), min(share.high, most.high)
    )
