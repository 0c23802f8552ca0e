"""The result of a simulation: the one object between measuring, judging and rendering.

A replay fills it, :mod:`odtpack_simulator.figures.judge` adds checks and
verdicts, and each renderer in :mod:`odtpack_simulator.reports` draws it. Units
are in the names (``_bytes``, ``_ms``, ``_s``). A null figure is unknown: what
it would have judged is "not judged". Losses that are not finite are null too,
because a diverged training must be reportable in JSON.
"""

import json
import math
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeVar, get_args

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.app import judged_peak
from odtpack_simulator.device.kits import Kit, Loop, Sharing
from odtpack_simulator.device.profile import AppState, OsClass, ProfileFigure
from odtpack_simulator.values.figure import Check, Text, Unit, Verdict
from odtpack_simulator.values.part import Part, all_problems, first_problem
from odtpack_simulator.values.text import counted, last_part, read_bounded
from odtpack_simulator.values.units import Interval, SourceKind, format_bytes

Bytes = Annotated[int, Field(ge=0, le=2**62)]
Count = Annotated[int, Field(ge=0, le=2**62)]
NonNegative = Annotated[float, Field(ge=0)]
Loss = Annotated[
    float | None,
    BeforeValidator(lambda x: None if isinstance(x, float) and not math.isfinite(x) else x),
]
"""A loss; null where it was NaN or infinite."""


class NotJudged(Part):
    """A figure that is null, and why."""

    figure: Text
    reason: Text


class Origin(Part):
    """When a result was made (UTC, ISO 8601), and from which commit; null where unknown."""

    commit: str | None = Field(default=None, pattern="^[0-9a-f]{7,64}$")
    date: str | None = Field(default=None, max_length=40)


class Policy(Part):
    """How the app trains: in which state, how often, and what it keeps."""

    state: AppState = "foreground"
    """In the foreground a session lasts as long as the training needs; in the background the
    system grants a window."""
    entitled: bool = False
    """The app has the platform's entitlement for more memory, which holds in the foreground."""
    kit: Kit | None = None
    """The kit that the app trains with; null for the usual one of each device's system."""
    loop: Loop = "step"
    """How the app makes its steps: `step` with the package's step model, where package and kit have
    one; `train` with the training model, and the optimizer model after it, which takes more
    memory."""
    session_options: Literal["package", "default"] = "package"
    """Options of the app's sessions: the manifest's, which every kit uses, or `default`, those of
    ONNX Runtime, as an app has them that does not use the manifest's."""
    native: bool | None = None
    """Whether sessions run native kernels; null for what the kit does by itself."""
    sessions_per_day: float = Field(default=1.0, gt=0, le=1440)
    """Sessions (foreground) or windows (background) per day."""
    save_every: int | None = Field(default=None, ge=1, le=2**31)
    """Optimizer steps between two checkpoints; null for one at the end of every session."""
    pieces: int = Field(default=1, ge=1, le=10_000)
    """The training data arrive in so many pieces of equal size (the first ones may have a sample
    more), one per session at most, and each is trained on for the epochs by itself when it is
    there."""


class CampaignPoint(Part):
    """Where the training stands after so many steps, in the typical case."""

    step: Count
    active_s: NonNegative
    energy_j: NonNegative | None
    session: int = Field(ge=1)
    loss: Loss = None
    metric: float | None = None


class DeviceCampaign(Part):
    """What the whole training takes on one device. A null figure stands in ``not_judged``.

    Attributes:
        active_s: Seconds of work: sessions created, checkpoints loaded and saved, steps
            slowed down once the device throttles, steps repeated after a window ended.
        sessions: Number of sessions or windows.
        days: Elapsed days of 24 hours, from the start of the first session to the end of the last.
            Reports and budgets count whole days, the first and the last included: 1.2 are 2.
        energy_j: Joules above idle of all sessions.
        battery_share: The same as a share of one full battery.
        battery_share_per_session: Share of one full battery that the longest session takes.
        written_bytes: Bytes of checkpoints written in all, and in a day.
        written_bytes_per_day: See written_bytes.
        throttled_share: Share of the active time in which the device throttles.
        repeated_steps: Steps that are made twice because a window ended between two checkpoints.
        restart_s: Seconds that one low-memory warning adds, on which the app saves, frees
            everything and starts anew: they are not part of ``active_s``.
        endless: Which case never finishes, because windows end before a checkpoint is written.
            The figures are null then: an interval has no end that is infinite.
        curve: The training in the typical case, at the evaluated steps that it reaches.
        left_out: What the figures above count as nothing because it is unknown, and why.
        not_judged: What is null, and why.
    """

    active_s: Interval | None = None
    sessions: Interval | None = None
    days: Interval | None = None
    energy_j: Interval | None = None
    battery_share: Interval | None = None
    battery_share_per_session: Interval | None = None
    written_bytes: Interval | None = None
    written_bytes_per_day: Interval | None = None
    throttled_share: Interval | None = None
    repeated_steps: Interval | None = None
    restart_s: Interval | None = None
    endless: Literal["typical", "worst case"] | None = None
    curve: list[CampaignPoint] = Field(default_factory=list)
    left_out: list[NotJudged] = Field(default_factory=list)
    not_judged: list[NotJudged] = Field(default_factory=list)

    @property
    def calendar_days(self) -> Interval | None:
        """Whole days that the training spans, the first and the last included."""
        # A day lasts 24 hours, from the start of the first session on. Three sessions at two a day
        # start after 0, 12 and 24 hours: the third is on the second day.
        days = self.days
        if days is None:
            return None
        low, typical, high = (max(1, math.ceil(d)) for d in (days.low, days.typical, days.high))
        return Interval(low=low, typical=typical, high=high)


OperatorClass = Literal["compute", "memory", "other"]


class OperatorCost(Part):
    """Time of one operator type over the profiled steps of the host.

    ``flops`` and ``moved_bytes`` are its arithmetic and its least memory traffic
    over the same steps, as far as its shapes give it; null where they do not.
    """

    op_type: Text
    operator_class: OperatorClass
    calls: Count
    total_ms: NonNegative
    share: float = Field(ge=0, le=1.0001)
    flops: NonNegative | None = None
    moved_bytes: NonNegative | None = None


class HostLatency(Part):
    """Times on the host: the first step, the steady ones after it, and where they go.

    Session creation, loading and saving are medians for all sessions of the
    package together, and for a checkpoint with the optimizer's state;
    ``session_creation_cpu_ms`` is the processor time, with its confidence interval.
    ``steps_ms`` are those that other programs left alone; ``waited_share`` is the
    share of all steps' time that they waited for a processor, ``drift`` the ratio of
    the faster to the slower of two calibrations, and ``busy`` why no time is judged.
    """

    first_step_ms: NonNegative
    steps_ms: list[NonNegative] = Field(min_length=1)
    by_operator: list[OperatorCost]
    p50_ms: Interval
    p90_ms: Interval
    session_creation_ms: NonNegative
    session_creation_cpu_ms: Interval
    checkpoint_load_ms: NonNegative
    checkpoint_save_ms: NonNegative
    checkpoint_bytes: Bytes
    waited_share: float = Field(ge=0, le=1)
    drift: float = Field(ge=1)
    busy: Text | None = None


class ClassTime(Part):
    """Time of one class of operators in a step: here, and carried to the device."""

    operator_class: OperatorClass
    host_ms: NonNegative
    device_ms: Interval


class DeviceLatency(Part):
    """Host times carried to the device; either a step time or the reason why there is none.

    ``step_ms`` is the median steady step before the device throttles, ``p90_ms``
    its 90th percentile. Loading and saving are null where the storage is unknown, and all are
    where there is no step time.
    """

    step_ms: Interval | None
    p90_ms: Interval | None = None
    first_step_ms: Interval | None = None
    session_creation_ms: Interval | None = None
    checkpoint_load_ms: Interval | None = None
    checkpoint_save_ms: Interval | None = None
    threads: int | None = Field(default=None, ge=1)
    by_class: list[ClassTime] = Field(default_factory=list)
    basis: Text
    not_judged: Text | None = None

    @model_validator(mode="after")
    def _figure_or_reason(self) -> Self:
        if self.step_ms is None and not self.not_judged:
            raise ValueError("latency without step_ms needs not_judged, the reason")
        if self.step_ms and not (self.first_step_ms and self.session_creation_ms):
            raise ValueError("latency with step_ms needs first_step_ms and session_creation_ms")
        return self


MemoryKind = Literal[
    "parameters", "gradients", "optimizer_state", "inputs", "activations", "session"
]
LimitMethod = Literal["cgroup", "rlimit", "watchdog"]
"""How a child was held: by the kernel's control group, by RLIMIT_DATA, or by being watched."""


class MemoryBreakdown(Part):
    """What is alive at the predicted peak; the parts sum to the peak."""

    parameters: Bytes
    gradients: Bytes
    optimizer_state: Bytes
    inputs: Bytes
    activations: Bytes
    session: Bytes

    @property
    def total(self) -> int:
        """Sum of the parts in bytes."""
        return sum(getattr(self, name) for name in type(self).model_fields)


class PredictedMemory(Part):
    """The memory plan's peak before anything ran."""

    peak_bytes: Bytes
    breakdown: MemoryBreakdown

    @model_validator(mode="after")
    def _parts_sum_to_peak(self) -> Self:
        if self.breakdown.total != self.peak_bytes:
            msg = f"the breakdown sums to {self.breakdown.total}, the peak is {self.peak_bytes}"
            raise ValueError(msg)
        return self


class TimelinePoint(Part):
    """Working set while one node of the training step runs."""

    index: Count
    node: Text
    op_type: Text
    live_bytes: Bytes
    part: Literal["forward", "backward", "update"] | None = None


class PeakTensor(Part):
    """A tensor that is alive at the predicted peak."""

    name: Text
    bytes: Bytes
    kind: MemoryKind


class PhasePeak(Part):
    """The most memory of one phase of a training: as planned, and as measured."""

    phase: Text
    predicted_bytes: Bytes
    measured_bytes: Bytes | None


class PlannedChange(Part):
    """The peak that was planned for the package with something changed.

    Attributes:
        micro_batch: Samples in memory at once, accumulated to the same update; null for all.
        freeze: What stays frozen besides what is, in words; null for nothing.
        stateless_optimizer: Whether the optimizer is SGD without momentum, which keeps nothing.
        peak_bytes: The planned peak.
    """

    micro_batch: Count | None = None
    freeze: Text | None = None
    stateless_optimizer: bool = False
    peak_bytes: Bytes


class MemoryInfo(Part):
    """Memory of the training step, device-independent.

    Of several kits in a result (see :class:`DeviceMemory`) it is that of the one that needs most:
    ``sharing`` says how its sessions allocate memory.
    ``mapped_bytes`` are those of frozen weights in a file that is mapped: clean pages, which the
    system drops and reads again, and which no limit of memory is about. They are no part of
    any other figure; null where all weights are in memory. ``gpu_bytes`` are planned for the GPU's
    memory; null where the package is not built for one.
    ``changes`` are planned where a check about memory failed; null where none did. ``shapes`` are
    those of a batch, for planning them later.
    """

    predicted: PredictedMemory
    measured_peak_bytes: Bytes | None
    phases: list[PhasePeak]
    timeline: list[TimelinePoint]
    tensors_at_peak: list[PeakTensor]
    changes: list[PlannedChange] | None = None
    shapes: dict[Text, list[Count]]
    sharing: Sharing
    mapped_bytes: Bytes | None = None
    gpu_bytes: Bytes | None = None

    @property
    def replayed_bytes(self) -> int:
        """The planned peak of what was measured: a replay does not export, and may not resume."""
        measured = (p.predicted_bytes for p in self.phases if p.measured_bytes is not None)
        return max(measured, default=self.predicted.peak_bytes)


class DeviceMemory(Part):
    """Memory of the replay, and of the app around it, against what this device gives one app.

    The limit holds for the process: ``app_bytes`` is what the app holds without the training, and
    ``runtime_bytes`` what ONNX Runtime's library and the kit's process do. ``kit`` is what the app
    trains with, ``sharing`` whether its sessions share an arena, and ``loop`` how it makes its
    steps. ``app_kind`` is null where the budgets say what the app holds.
    ``native`` is whether its sessions run native kernels; null where a package has no such nodes.

    ``outcome``: the planned peak, with its margin, ``fits`` the limit; it is ``close``, within the
    limit but not with the margin; or it is ``over``. ``killed``: it fits, and a replay under the
    limit was ended, so the plan is too low. ``not judged``: the limit is unknown. ``depends``: the
    limit has a range, and the peak fits ``limit_bytes`` but not its low end,
    ``limit_low_bytes``. ``held`` says how this limit was enforced in a replay; null where
    the plan does not fit, is far below the limit, or a lower limit was kept; and ``held_bytes`` to
    how much: what the limit leaves a training. ``limit_entitled``: the limit is that of an
    app with the entitlement for more memory. From ``warning_bytes`` on the system warns the
    app that memory is low. ``phase`` is the part whose tensors are the reason of the peak.
    ``gpu_own_bytes`` is the memory that a GPU has of its own; null where it shares the app's, or
    is not known.
    ``unbounded``: the plan does not know how often a Loop turns that keeps something of every turn.
    """

    limit_bytes: Bytes | None
    limit_low_bytes: Bytes | None = None
    limit_kind: SourceKind | None = None
    limit_source: Text | None = None
    limit_state: Literal["foreground", "background"] = "foreground"
    limit_entitled: bool = False
    entitled_limit_bytes: Bytes | None = None
    predicted_peak_bytes: Bytes
    measured_peak_bytes: Bytes | None
    outcome: Literal["fits", "depends", "close", "over", "killed", "not judged"] = "not judged"
    held: LimitMethod | None = None
    held_bytes: Bytes | None = None
    warning_bytes: Bytes | None = None
    gpu_own_bytes: Bytes | None = None
    phase: Text
    app_bytes: Bytes
    app_kind: SourceKind | None = None
    app_source: Text
    runtime_bytes: Bytes
    kit: Kit
    sharing: Sharing
    loop: Loop
    native: bool | None = None
    unbounded: bool = False
    detail: Text = ""

    @property
    def others_bytes(self) -> int:
        """What the process holds besides the training: the app, ONNX Runtime, the kit's process."""
        return self.app_bytes + self.runtime_bytes

    @property
    def need_bytes(self) -> int:
        """What the whole process holds at the peak of the training."""
        return self.peak_bytes + self.others_bytes

    @property
    def room_bytes(self) -> int | None:
        """What the limit leaves a training; None if the limit is unknown."""
        return None if self.limit_bytes is None else max(0, self.limit_bytes - self.others_bytes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the training: the planned one, unless a replay took more than its margin.

        Where the plan knows no bound, it is the measured one.
        """
        if self.unbounded and self.measured_peak_bytes is not None:
            return self.measured_peak_bytes
        return judged_peak(self.predicted_peak_bytes, self.measured_peak_bytes)

    @property
    def has_no_bound(self) -> bool:
        """Whether neither the plan nor a measurement says what the training takes at most."""
        return self.unbounded and self.measured_peak_bytes is None

    @property
    def is_measured(self) -> bool:
        """Whether the peak to judge was measured, and the plan is too low."""
        return self.peak_bytes != self.predicted_peak_bytes


class EvaluationPoint(Part):
    """Loss and metric on the held-out samples after so many optimizer steps (0: before any)."""

    step: Count
    loss: Loss
    metric: float | None = None


class HeldOutFall(Part):
    """By how much the loss on held-out samples fell, with the interval that chance leaves open.

    The ends of the interval are one-sided 95 % bounds, see
    :mod:`odtpack_simulator.replay.paired_loss`. ``groups`` of samples were compared, each
    with itself.
    """

    groups: Count
    samples: Count
    fall: float
    low: float
    high: float


class TrainingInfo(Part):
    """What the training did to the loss and to the metric on the held-out samples.

    ``learning_rate`` is that of every step, or the one that a schedule starts from.
    ``metric_interval`` is the 95 % Wilson score interval of ``metric_after``:
    on few held-out samples it is wide, and a floor inside it proves little. ``skipped_batches`` are
    those whose loss or gradients were not finite, and ``not_finite`` says what was, of the last.
    ``perplexity_after`` is that of a language model, e to the mean loss of so many held-out
    ``tokens``; null for others, and where it is not finite.
    ``overflows`` are those besides that only lowered the loss scale of mixed precision.
    """

    losses: list[Loss]
    learning_rate: NonNegative
    eval_loss_before: Loss
    eval_loss_after: Loss
    metric_name: Text | None = None
    metric_before: float | None = None
    metric_after: float | None = None
    metric_interval: tuple[float, float] | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    tokens: Count | None = None
    curve: list[EvaluationPoint] = Field(default_factory=list)
    held_out_fall: HeldOutFall | None = None
    skipped_batches: Count = 0
    overflows: Count = 0
    not_finite: Text = ""

    @property
    def diverged(self) -> bool:
        """Whether any loss was not finite: of a step, or on held-out samples after a step."""
        return None in self.losses or any(point.step and point.loss is None for point in self.curve)

    @property
    def metric_unit(self) -> Unit:
        """Unit of the metric."""
        return "share" if self.metric_name == "accuracy" else "1"


class DeviceTraining(Part):
    """How the replay under this device's limits ended."""

    outcome: Literal["completed", "killed"]
    steps_done: Count
    final_loss: Loss
    detail: Text = ""


class Interruption(Part):
    """One time that the training process was ended or had to give up its memory.

    ``at``: killed between two steps, killed while it wrote a checkpoint, or a
    low-memory warning, on which it saves, frees everything and starts anew.
    """

    at: Literal["step", "save", "memory warning"]
    step: Count
    resumed_from_step: Count
    repeated_steps: Count


class InterruptionInfo(Part):
    """A training that was interrupted on purpose, against the one that was not.

    ``equal``: whether it ended with the same bits in every parameter and moment;
    null where that cannot be expected, and ``detail`` says why.
    """

    interruptions: list[Interruption]
    save_every: Count
    saves: Count
    equal: bool | None
    detail: Text = ""


MAX_RESULT_BYTES: Final = 64 * 1024 * 1024


class NamedPackage(Part):
    """Where a package lies, and what it is."""

    path: Text
    manifest_sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def name(self) -> str:
        """The last part of the path: what the package is called wherever it lies."""
        return last_part(self.path)


class PackageInfo(NamedPackage):
    """The training package that was replayed.

    ``trained_layers`` counts the trained matrices and filters.
    ``adapter_bytes`` are those of an adapter's parameters, null if the package trains none.
    """

    trainable_parameters: Count
    total_parameters: Count
    trained_layers: Count
    parameter_bytes: Bytes
    package_bytes: Bytes
    adapter_bytes: Bytes | None = None
    loss: Text
    optimizer: Text


class DataInfo(Part):
    """The data and the schedule of the replay; ``steps`` are the optimizer's.

    ``trained_steps`` and ``trained_samples`` are those that the replay really trained: of a
    very long training a part.
    ``tokens_per_sample`` are the tokens of one sequence, padding included; null of other data.
    ``evaluated_apart`` says that the held-out samples, the last of ``samples``, are a file's own.
    ``batch_size`` is that of the largest batch that occurs, less than ``asked_batch_size`` where a
    part of the data has fewer samples.
    ``step_samples`` are those of the largest optimizer step that occurs, less than
    ``accumulation_steps`` batches where a pass has fewer.
    ``evaluated_samples`` of the held-out samples were evaluated: fewer where the model fixes the
    batch, as those that fill none are left out, or where only a part was trained.
    ``sha256`` is that of all samples as they are trained and evaluated on.
    """

    samples: Count
    train_samples: Count
    held_out_samples: Count
    batch_size: Count
    accumulation_steps: Count
    epochs: Count
    steps: Count
    seed: int
    trained_steps: Count
    trained_samples: Count
    tokens_per_sample: Count | None = None
    evaluated_apart: bool
    asked_batch_size: Count
    step_samples: Count
    evaluated_samples: Count
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def held_out(self) -> str:
        """What losses and metrics are of, in words: ``32 of 37 held-out samples``."""
        all_of_them = self.evaluated_samples == self.held_out_samples
        of = "" if all_of_them else f" of {self.held_out_samples}"
        return f"{self.evaluated_samples}{of} held-out samples"

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of the largest optimizer step."""
        return (self.tokens_per_sample or 0) * self.step_samples or None

    @property
    def small_evaluation(self) -> str | None:
        """What is said where no evaluation is as large as a batch; None where one is."""
        if self.held_out_samples >= self.batch_size:
            return None
        count = 0 if self.evaluated_samples == 0 else self.held_out_samples
        of = f"evaluations of {counted(count, 'sample')}" if count else "no evaluation"
        return f"memory is that of {of}, and an app that evaluates whole batches may need more"

    @property
    def smaller_batch(self) -> str | None:
        """What is said where no batch or step is as large as was asked for; None where one is."""
        if self.asked_batch_size != self.batch_size:
            return (
                f"the largest batch has {counted(self.batch_size, 'sample')}, "
                f"not the {self.asked_batch_size:,} asked for: memory and times are those of this "
                "one"
            )
        batches = math.ceil(self.step_samples / max(1, self.batch_size))
        if batches >= self.accumulation_steps:
            return None
        return (
            f"a pass has {batches:,} batch{'es' * (batches != 1)}, fewer than the "
            f"{self.accumulation_steps:,} to accumulate: times are those of a step of so many"
        )

    @property
    def extrapolated(self) -> str | None:
        """What was trained of a training that is too long to be replayed whole; None if all."""
        if self.trained_steps >= self.steps:
            return None
        of = ""
        if self.trained_samples != self.samples:
            of = f" on {self.trained_samples:,} of {self.samples:,} samples"
        return (
            f"{self.trained_steps:,} of {self.steps:,} steps were trained{of}: losses and metrics "
            "are those of that part; times, energy and days follow from the whole schedule"
        )


class HostInfo(Part):
    """The machine that ran the replay and what its calibration measured."""

    cpu: Text
    cores: int = Field(ge=1)
    threads: int = Field(ge=1)
    os: Text
    python: Text
    onnxruntime: Text
    gemm_gflops: NonNegative
    memory_bandwidth_gbs: NonNegative


class DeviceResult(Part):
    """Everything about one device, with the figures of the profile that it rests on."""

    name: Text
    title: Text
    os: OsClass
    validated: bool
    profile_digest: str = Field(pattern="^[0-9a-f]{64}$")
    memory: DeviceMemory
    latency: DeviceLatency
    campaign: DeviceCampaign
    training: DeviceTraining
    figures: list[ProfileFigure]
    checks: list[Check] = Field(default_factory=list)
    verdict: Verdict = "not judged"

    def __repr__(self) -> str:
        peak = format_bytes(self.memory.peak_bytes)
        return f"DeviceResult({self.name}, peak {peak}: {self.verdict})"

    __str__ = __repr__


class SimulationResult(Part):
    """One replay of one package, for any number of devices, each named once."""

    schema_version: Literal[4]
    tool_version: Text
    package: PackageInfo
    data: DataInfo
    origin: Origin
    policy: Policy
    host: HostInfo
    training: TrainingInfo
    interruption: InterruptionInfo | None = None
    latency_host: HostLatency
    memory: MemoryInfo
    devices: list[DeviceResult]
    checks: list[Check] = Field(default_factory=list)
    verdict: Verdict = "not judged"

    @field_validator("devices")
    @classmethod
    def _each_device_once(cls, devices: list[DeviceResult]) -> list[DeviceResult]:
        places: dict[str, int] = {}
        for index, device in enumerate(devices):
            first = places.setdefault(device.name, index)
            if first != index:
                msg = f"names {device.name[:100]!r} twice, as number {first + 1} and {index + 1}"
                raise ValueError(msg)
        return devices

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{device.name} {device.verdict}" for device in self.devices[:3])
        more = f" and {len(self.devices) - 3} more" if len(self.devices) > 3 else ""
        on = f" on {verdicts}{more}" if verdicts else ""
        return (
            f"SimulationResult({self.package.name}, {self.data.steps:,} steps{on}: {self.verdict})"
        )

    __str__ = __repr__

    @property
    def over_budget(self) -> bool:
        """Whether a check at level ``error`` failed anywhere: exit code 1."""
        return self.verdict == "fail"

    def all_checks(self) -> list[tuple[DeviceResult | None, Check]]:
        """Every check with the device it belongs to (None: the package), in stored order."""
        whole: list[tuple[DeviceResult | None, Check]] = [(None, check) for check in self.checks]
        return whole + [(device, check) for device in self.devices for check in device.checks]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a figure is read from: a result, and one of its devices where the metric has one."""

    result: SimulationResult
    device: DeviceResult | None = None

    @property
    def on(self) -> DeviceResult:
        """The device."""
        if self.device is None:
            raise ValueError("this metric is read from a device")
        return self.device


def load_result(path: str | os.PathLike[str]) -> SimulationResult:
    """Read a result file that :meth:`SimulationResult.to_json` wrote.

    Raises:
        OdtpackError: Absent, larger than 64 MiB, not JSON, or not a result of this version.
    """
    return read_record(path, SimulationResult, MAX_RESULT_BYTES)


Record = TypeVar("Record", bound=Part)
_KINDS: Final = {
    "rounds": ("odtpack fleet run", "use odtpack fleet compare"),
    "latency_host": ("odtpack simulate", "use odtpack judge, compare or history"),
}
"""A key that only one kind of result has: what writes that kind, and what reads it."""


def read_record(path: str | os.PathLike[str], record: type[Record], most_bytes: int) -> Record:
    """Read a file that :meth:`Part.to_json` wrote."""
    file = Path(path)
    data = read_bounded(file, limit=most_bytes, code="result", what="result file")
    if (encoding := json.detect_encoding(data)) != "utf-8":  # as PowerShell writes it
        with suppress(UnicodeDecodeError):
            data = data.decode(encoding).encode()
    try:
        return record.model_validate_json(data)
    except ValidationError as error:
        broken = error.errors(include_url=False)[0]
        if broken["type"] == "json_invalid":
            raise OdtpackError(
                "result-invalid",
                f"the result file is not JSON: {broken['ctx']['error']}",
                where=str(file),
                hint="name a file that odtpack simulate or odtpack fleet run wrote",
            ) from error
        for each in error.errors(include_url=False):
            unknown = str(each["loc"][0]) if each["type"] == "extra_forbidden" else ""
            if len(each["loc"]) == 1 and unknown in _KINDS:
                writer, hint = _KINDS[unknown]
                what = f"this is a result of {writer}"
                raise OdtpackError("result-invalid", what, where=str(file), hint=hint) from error
        key, problem = first_problem(error, record)
        own, writer = next((k, of) for k, (of, _) in _KINDS.items() if k in record.model_fields)
        version = dict(all_problems(error, record)).get("schema_version")
        for each in error.errors(include_url=False):
            lacks = each["type"] == "missing" and each["loc"] == (own,)
            if lacks or (each["loc"] == ("schema_version",) and type(each["input"]) is not int):
                version = None  # it is not a result, of whatever version
        if version is not None:  # what else is wrong may come of it
            key, kind = "schema_version", record.model_fields["schema_version"].annotation
            problem = f"{version}; this odtpack reads version {get_args(kind)[0]}"
        raise OdtpackError(
            "result-invalid" if version is None else "result-version",
            f"the result file is wrong at {key}: {problem}",
            where=str(file),
            hint=f"run {writer} again, which writes a whole result of this version",
        ) from error


_SECONDS = 5.0


def find_origin(folder: Path) -> Origin:
    """The time of now, and the commit that is checked out around a folder."""
    # A pipeline's own word for the commit (`GITHUB_SHA`, `CI_COMMIT_SHA`) comes first.
    # `SOURCE_DATE_EPOCH`, in seconds, takes the place of the time.
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    commit = os.environ.get("GITHUB_SHA") or os.environ.get("CI_COMMIT_SHA") or ""
    if not commit:
        asked = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        with suppress(OSError, subprocess.SubprocessError):  # no git, or outside of a repository
            found = subprocess.run(
                asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=True
            )
            commit = found.stdout.decode(errors="replace")
    commit = commit.strip().lower()
    known = 7 <= len(commit) <= 64 and set(commit) <= set("0123456789abcdef")
    return Origin(commit=commit if known else None, date=now.isoformat(timespec="minutes"))


def tool_version() -> str:
    """The version of odtpack."""
    try:
        return metadata.version("odtpack")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
