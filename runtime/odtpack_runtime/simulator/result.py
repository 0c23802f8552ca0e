"""The result of a simulation: the one object between measuring, judging and rendering.

A replay fills it, :mod:`odtpack_runtime.simulator.judge` adds checks and
verdicts, and each renderer in :mod:`odtpack_runtime.reports` draws it. Units
are in the names (``_bytes``, ``_ms``, ``_s``). A null figure is unknown: what
it would have judged is "not judged". Losses that are not finite are null too,
because a diverged training must be reportable in JSON.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.simulator.figures import FigureKind
from odtpack_runtime.simulator.profile import OsClass, ProfileFigure
from odtpack_runtime.simulator.schema_errors import first_problem
from odtpack_runtime.simulator.textfile import read_bounded
from odtpack_runtime.simulator.units import Interval

SCHEMA_VERSION: Final = 1
MAX_RESULT_BYTES: Final = 64 * 1024 * 1024

Verdict = Literal["pass", "warn", "fail", "not judged"]
CheckStatus = Literal["pass", "fail", "not judged"]
CheckLevel = Literal["error", "warn"]
CheckUnit = Literal["B", "ms", "s", "%", "1"]
OperatorClass = Literal["compute", "memory", "other"]
MemoryKind = Literal[
    "parameters", "gradients", "optimizer_state", "inputs", "activations", "session"
]


def _finite_or_null(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Bytes = Annotated[int, Field(ge=0, le=2**62)]
Count = Annotated[int, Field(ge=0, le=2**62)]
NonNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(max_length=4000)]
Loss = Annotated[float | None, BeforeValidator(_finite_or_null)]
"""A loss; null where it was NaN or infinite."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PackageInfo(_Part):
    """The training package that was replayed."""

    path: Text
    manifest_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    trainable_parameters: Count
    total_parameters: Count
    parameter_bytes: Bytes
    package_bytes: Bytes
    loss: Text
    optimizer: Text


class DataInfo(_Part):
    """The data and the schedule of the replay; ``steps`` are the optimizer's."""

    samples: Count
    train_samples: Count
    held_out_samples: Count
    batch_size: Count
    accumulation_steps: Count = 1
    epochs: Count
    steps: Count
    seed: int


class HostInfo(_Part):
    """The machine that ran the replay and what its calibration measured."""

    cpu: Text
    cores: int = Field(ge=1)
    threads: int = Field(ge=1)
    os: Text
    python: Text
    onnxruntime: Text
    gemm_gflops: NonNegative | None
    memory_bandwidth_gbs: NonNegative | None


class TrainingInfo(_Part):
    """What the training did to the loss and to the metric on the held-out samples."""

    losses: list[Loss]
    eval_loss_before: Loss
    eval_loss_after: Loss
    metric_name: Text | None = None
    metric_before: float | None = None
    metric_after: float | None = None

    @property
    def diverged(self) -> bool:
        """Whether any training loss was not finite."""
        return any(loss is None for loss in self.losses)


class OperatorCost(_Part):
    """Time of one operator type over the profiled steps of the host."""

    op_type: Text
    operator_class: OperatorClass
    calls: Count
    total_ms: NonNegative
    share: float = Field(ge=0, le=1.0001)


class HostLatency(_Part):
    """Times on the host: the first step, the steady ones after it, and where they go."""

    first_step_ms: NonNegative | None
    steps_ms: list[NonNegative]
    by_operator: list[OperatorCost]


class MemoryBreakdown(_Part):
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


class PredictedMemory(_Part):
    """The memory plan's peak before anything ran."""

    peak_bytes: Bytes
    breakdown: MemoryBreakdown

    @model_validator(mode="after")
    def _parts_sum_to_peak(self) -> PredictedMemory:
        if self.breakdown.total != self.peak_bytes:
            msg = f"the breakdown sums to {self.breakdown.total}, the peak is {self.peak_bytes}"
            raise ValueError(msg)
        return self


class TimelinePoint(_Part):
    """Working set while one node of the training step runs."""

    index: Count
    node: Text
    op_type: Text
    live_bytes: Bytes


class PeakTensor(_Part):
    """A tensor that is alive at the predicted peak."""

    name: Text
    bytes: Bytes
    kind: MemoryKind


class MemoryInfo(_Part):
    """Memory of the training step, device-independent."""

    predicted: PredictedMemory
    measured_peak_bytes: Bytes | None
    timeline: list[TimelinePoint]
    tensors_at_peak: list[PeakTensor]


class DeviceMemory(_Part):
    """Memory of the replay against what this device gives one app.

    ``outcome``: ``fits`` or ``over`` the limit, ``killed`` when the child
    process hit it, ``not judged`` when the limit is unknown.
    """

    limit_bytes: Bytes | None
    limit_kind: FigureKind | None = None
    limit_source: Text | None = None
    limit_state: Literal["foreground", "background"] = "foreground"
    entitled_limit_bytes: Bytes | None = None
    predicted_peak_bytes: Bytes
    measured_peak_bytes: Bytes | None
    outcome: Literal["fits", "over", "killed", "not judged"] = "not judged"
    detail: Text = ""

    @property
    def peak_bytes(self) -> int:
        """The peak to judge: measured where the child measured one, else predicted."""
        if self.measured_peak_bytes is None:
            return self.predicted_peak_bytes
        return self.measured_peak_bytes


class DeviceLatency(_Part):
    """Host times carried to the device; either a step time or the reason why there is none."""

    step_ms: Interval | None
    finish_s: Interval | None = None
    basis: Text
    not_judged: Text | None = None

    @model_validator(mode="after")
    def _figure_or_reason(self) -> DeviceLatency:
        if self.step_ms is None and not self.not_judged:
            msg = "latency without step_ms needs not_judged, the reason"
            raise ValueError(msg)
        return self


class DeviceTraining(_Part):
    """How the replay under this device's limits ended."""

    outcome: Literal["completed", "killed"]
    steps_done: Count
    final_loss: Loss
    detail: Text = ""


class Check(_Part):
    """One assertion over the result.

    ``actual`` and ``limit`` stand in ``unit``; ``"1"`` is a plain number.
    """

    metric: Text
    limit: float | None
    actual: float | None
    unit: CheckUnit
    level: CheckLevel
    status: CheckStatus
    message: Text
    advice: Text | None = None
    budget_location: Text | None = None


class DeviceResult(_Part):
    """Everything about one device, with the figures of the profile that it rests on."""

    name: Text
    title: Text
    os: OsClass
    validated: bool
    profile_digest: str = Field(pattern="^[0-9a-f]{64}$")
    memory: DeviceMemory
    latency: DeviceLatency
    training: DeviceTraining | None
    figures: list[ProfileFigure]
    checks: list[Check] = Field(default_factory=list)
    verdict: Verdict = "not judged"


class SimulationResult(_Part):
    """One replay of one package, for any number of devices."""

    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: Text
    package: PackageInfo
    data: DataInfo
    host: HostInfo
    training: TrainingInfo
    latency_host: HostLatency
    memory: MemoryInfo
    devices: list[DeviceResult]
    checks: list[Check] = Field(default_factory=list)
    verdict: Verdict = "not judged"

    @property
    def over_budget(self) -> bool:
        """Whether a check at level ``error`` failed anywhere: exit code 1."""
        return self.verdict == "fail"

    def all_checks(self) -> list[tuple[DeviceResult | None, Check]]:
        """Every check with the device it belongs to (None: the package), in stored order."""
        whole: list[tuple[DeviceResult | None, Check]] = [(None, check) for check in self.checks]
        return whole + [(device, check) for device in self.devices for check in device.checks]

    def to_json(self) -> str:
        """The result as JSON text in the order of the fields; the same result, the same bytes."""
        content = self.model_dump(mode="json")
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def load_result(path: str | os.PathLike[str]) -> SimulationResult:
    """Read a result file that :meth:`SimulationResult.to_json` wrote.

    Raises:
        OdtpackError: Absent, larger than 64 MiB, not JSON, or not a result of this version.
    """
    file = Path(path)
    data = read_bounded(file, limit=MAX_RESULT_BYTES, code="result", what="result file")
    try:
        return SimulationResult.model_validate_json(data)
    except ValidationError as error:
        key, problem = first_problem(error, SimulationResult)
        if key == "schema_version":
            problem += f"; this odtpack reads version {SCHEMA_VERSION}"
        raise OdtpackError(
            "result-invalid",
            f"the result file is wrong at {key}: {problem}",
            where=str(file),
            hint="write it again with `odtpack simulate`",
        ) from error
