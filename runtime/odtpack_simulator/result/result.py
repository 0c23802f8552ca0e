"""The result of a simulation: the one object between measuring, judging and rendering.

A replay fills it, :mod:`odtpack_simulator.figures.judge` adds checks and
verdicts, and each renderer in :mod:`odtpack_simulator.reports` draws it. Units
are in the names (``_bytes``, ``_ms``, ``_s``). A null figure is unknown: what
it would have judged is "not judged". Losses that are not finite are null too,
because a diverged training must be reportable in JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, ValidationError, field_validator

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import OsClass, ProfileFigure
from odtpack_simulator.result.base import (
    Bytes,
    Count,
    Loss,
    NonNegative,
    NotJudged,
    Origin,
    Text,
)
from odtpack_simulator.result.campaign import CampaignPoint, DeviceCampaign, Policy
from odtpack_simulator.result.latency import (
    ClassTime,
    DeviceLatency,
    HostLatency,
    OperatorClass,
    OperatorCost,
)
from odtpack_simulator.result.memory import (
    DeviceMemory,
    LimitMethod,
    MemoryBreakdown,
    MemoryInfo,
    MemoryKind,
    PeakTensor,
    PhasePeak,
    PlannedChange,
    PredictedMemory,
    TimelinePoint,
)
from odtpack_simulator.result.training import (
    DeviceTraining,
    EvaluationPoint,
    HeldOutFall,
    Interruption,
    InterruptionInfo,
    TrainingInfo,
)
from odtpack_simulator.values.figure import Check, Verdict
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.paths import last_part
from odtpack_simulator.values.schema_errors import first_problem
from odtpack_simulator.values.textfile import read_bounded
from odtpack_simulator.values.units import format_bytes

__all__ = [
    "CampaignPoint",
    "ClassTime",
    "DataInfo",
    "DeviceCampaign",
    "DeviceLatency",
    "DeviceMemory",
    "DeviceResult",
    "DeviceTraining",
    "EvaluationPoint",
    "HeldOutFall",
    "HostInfo",
    "HostLatency",
    "Interruption",
    "InterruptionInfo",
    "LimitMethod",
    "Loss",
    "MemoryBreakdown",
    "MemoryInfo",
    "MemoryKind",
    "NotJudged",
    "OperatorClass",
    "OperatorCost",
    "Origin",
    "PackageInfo",
    "PeakTensor",
    "PhasePeak",
    "PlannedChange",
    "Policy",
    "PredictedMemory",
    "SimulationResult",
    "Subject",
    "TimelinePoint",
    "TrainingInfo",
    "load_result",
]

SCHEMA_VERSION: Final = 2
MAX_RESULT_BYTES: Final = 64 * 1024 * 1024


class PackageInfo(Part):
    """The training package that was replayed.

    ``trained_layers`` counts the trained matrices and filters; null where it was not counted.
    ``adapter_bytes`` are those of an adapter's parameters, null if the package trains none.
    """

    path: Text
    manifest_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    trainable_parameters: Count
    total_parameters: Count
    trained_layers: Count | None = None
    parameter_bytes: Bytes
    package_bytes: Bytes
    adapter_bytes: Bytes | None = None
    loss: Text
    optimizer: Text

    @property
    def name(self) -> str:
        """The last part of the path: what the package is called wherever it lies."""
        return last_part(self.path)


class DataInfo(Part):
    """The data and the schedule of the replay; ``steps`` are the optimizer's.

    ``trained_steps`` and ``trained_samples`` are those that the replay really trained: of a
    very long training a part. Null in results of earlier versions, which trained all.
    ``tokens_per_sample`` are the tokens of one sequence, padding included; null of other data.
    """

    samples: Count
    train_samples: Count
    held_out_samples: Count
    batch_size: Count
    accumulation_steps: Count = 1
    epochs: Count
    steps: Count
    seed: int
    trained_steps: Count | None = None
    trained_samples: Count | None = None
    tokens_per_sample: Count | None = None

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one optimizer step, the batches that it accumulates together."""
        if not self.tokens_per_sample:
            return None
        return self.tokens_per_sample * self.batch_size * self.accumulation_steps

    @property
    def made_steps(self) -> int:
        """Steps that the replay really trained."""
        return self.steps if self.trained_steps is None else self.trained_steps

    @property
    def extrapolated(self) -> str | None:
        """What was trained of a training that is too long to be replayed whole; None if all."""
        if self.trained_steps is None or self.trained_steps >= self.steps:
            return None
        of = (
            ""
            if self.trained_samples in (None, self.samples)
            else (f" on {self.trained_samples:,} of {self.samples:,} samples")
        )
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
    gemm_gflops: NonNegative | None
    memory_bandwidth_gbs: NonNegative | None


class DeviceResult(Part):
    """Everything about one device, with the figures of the profile that it rests on."""

    name: Text
    title: Text
    os: OsClass
    validated: bool
    profile_digest: str = Field(pattern="^[0-9a-f]{64}$")
    memory: DeviceMemory
    latency: DeviceLatency
    campaign: DeviceCampaign | None = None
    training: DeviceTraining | None
    figures: list[ProfileFigure]
    checks: list[Check] = Field(default_factory=list)
    verdict: Verdict = "not judged"

    def __repr__(self) -> str:
        peak = format_bytes(self.memory.peak_bytes)
        return f"DeviceResult({self.name}, peak {peak}: {self.verdict})"

    __str__ = __repr__


class SimulationResult(Part):
    """One replay of one package, for any number of devices, each named once."""

    schema_version: Literal[2] = SCHEMA_VERSION
    tool_version: Text
    package: PackageInfo
    data: DataInfo
    origin: Origin = Origin()
    policy: Policy = Policy()
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

    def to_json(self) -> str:
        """The result as JSON text in the order of the fields; the same result, the same bytes."""
        content = self.model_dump(mode="json")
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a figure is read from: a result, and one of its devices where the metric has one."""

    result: SimulationResult
    device: DeviceResult | None = None

    @property
    def on(self) -> DeviceResult:
        """The device.

        Raises:
            ValueError: A device's metric was read from a package: a bug of the caller.
        """
        if self.device is None:
            msg = "this metric is read from a device"
            raise ValueError(msg)
        return self.device


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
        broken = error.errors(include_url=False)[0]
        if broken["type"] == "json_invalid":
            raise OdtpackError(
                "result-invalid",
                f"the result file is not JSON: {broken['ctx']['error']}",
                where=str(file),
                hint="name a file that `odtpack simulate --report json:PATH` wrote",
            ) from error
        key, problem = first_problem(error, SimulationResult)
        if key == "schema_version":
            problem += f"; this odtpack reads version {SCHEMA_VERSION}"
        raise OdtpackError(
            "result-invalid", f"the result file is wrong at {key}: {problem}", where=str(file)
        ) from error
