"""Files of measurements, which the benchmark of a training kit writes on a device."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.device.profile import OsClass
from odtpack_simulator.values.part import Part, first_problem
from odtpack_simulator.values.textfile import read_bounded

# Figures of a device profile as they are written: rounded, with kind and source.

Figure = dict[str, Any]


def rounded(value: float) -> float:
    """To four significant digits."""
    return float(f"{value:.4g}")


def unknown(why: str) -> Figure:
    """A figure that is unknown."""
    return {"unknown": why}


def known(value: float, unit: str, kind: str, source: str) -> Figure:
    """A figure without bounds."""
    return {"value": rounded(value), "unit": unit, "kind": kind, "source": source}


def repeated(values: Sequence[float], factor: float, unit: str, source: str) -> Figure:
    """A measured figure: the median of its repetitions, between the lowest and the highest."""
    # `factor`: What the values are divided by to be in `unit`.
    scaled = [value / factor for value in values]
    figure = known(statistics.median(scaled), unit, "measured", source)
    return figure | {"low": rounded(min(scaled)), "high": rounded(max(scaled))}


def whole_mebibytes(count: int, kind: str, source: str) -> Figure:
    """A size in whole MiB, rounded down: a limit must not be more than what is there."""
    return {"value": float(count // 2**20), "unit": "MiB", "kind": kind, "source": source}


# What the benchmark of a training kit wrote on a device: read, and checked before it is used.
#
# ``docs/formats/measurements.md`` describes the file; ``docs/schemas/measurements.schema.json``
# is made from this declaration. The file comes from a phone, through whatever carried it here.

MAX_MEASUREMENTS_BYTES: Final = 2**20
_MOST_VALUES: Final = 10_000


def _integral(value: object) -> object:
    """A count of bytes that a kit wrote as a floating-point number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Rate = Annotated[float, Field(ge=1, le=1e17)]
_Rates = Annotated[list[_Rate], Field(max_length=_MOST_VALUES)]
_Seconds = Annotated[float, Field(gt=0, le=3600)]
_Times = Annotated[list[_Seconds], Field(max_length=_MOST_VALUES)]
_Bytes = Annotated[int, BeforeValidator(_integral), Field(ge=2**20, le=2**50)]
_Word = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w .,:;+()/-]+$")]


class Sustained(Part):
    """Matrix products one after the other for minutes: how the device throttles.

    Attributes:
        seconds: When each rate was measured, from the start, in rising order.
        gemm_flops: FLOP/s of products with the threads of a training, as many.
    """

    seconds: list[Annotated[float, Field(ge=0, le=86_400)]] = Field(max_length=_MOST_VALUES)
    gemm_flops: _Rates

    @model_validator(mode="after")
    def _in_order(self) -> Sustained:
        if len(self.seconds) != len(self.gemm_flops):
            msg = f"has {len(self.seconds)} times and {len(self.gemm_flops)} rates"
            raise ValueError(msg)
        if self.seconds != sorted(self.seconds):
            msg = "needs times in rising order"
            raise ValueError(msg)
        return self


class DeviceMeasurements(Part):
    """What the benchmark of a training kit writes about a device.

    Lists hold one value for each repetition; an empty one was not measured.

    Attributes:
        format: Version of the format.
        kit: Which kit measured.
        onnxruntime: Version of ONNX Runtime.
        system: Operating system; null where the kit does not say.
        device: Name of the device for people; null where the kit does not say.
        threads: Threads of the rates that have no other number.
        gemm_flops: FLOP/s of a float32 matrix product with ``threads``.
        gemm_single_flops: The same with one thread.
        convolution_flops: FLOP/s of a 3 x 3 convolution with ``threads``.
        copy_bytes_per_second: Bytes that an elementwise operator writes, one thread.
        sustained: Products over minutes; null where that was not measured.
        file_bytes: Size of the file that was written and read.
        write_bytes_per_second: With fsync.
        read_bytes_per_second: After its pages were dropped from the page cache.
        sync_seconds: Of a write of 4 KiB with fsync.
        memory_bytes: Of the device; null where the system does not report it.
        memory_limit_bytes: What the system grants the app; null where it does not tell.
        gpu: Name of the GPU for people; null where none was measured, or has none.
        gpu_gemm_flops: FLOP/s of a float32 matrix product.
        gpu_copy_bytes_per_second: Bytes that an elementwise operator writes.
        gpu_operator_seconds: Of an elementwise operator on 16 numbers.
    """

    format: Literal[1]
    kit: _Word
    onnxruntime: _Word
    system: OsClass | None = None
    device: _Word | None = None
    threads: int = Field(ge=1, le=1024)
    gemm_flops: _Rates
    gemm_single_flops: _Rates
    convolution_flops: _Rates = Field(default_factory=list)
    copy_bytes_per_second: _Rates
    sustained: Sustained | None = None
    file_bytes: int = Field(default=0, ge=0, le=2**50)
    write_bytes_per_second: _Rates = Field(default_factory=list)
    read_bytes_per_second: _Rates = Field(default_factory=list)
    sync_seconds: _Times = Field(default_factory=list)
    memory_bytes: _Bytes | None = None
    memory_limit_bytes: _Bytes | None = None
    gpu: _Word | None = None
    gpu_gemm_flops: _Rates = Field(default_factory=list)
    gpu_copy_bytes_per_second: _Rates = Field(default_factory=list)
    gpu_operator_seconds: _Times = Field(default_factory=list)

    @model_validator(mode="after")
    def _limit_within_memory(self) -> DeviceMeasurements:
        limit, memory = self.memory_limit_bytes, self.memory_bytes
        if limit is not None and memory is not None and limit > memory:
            msg = f"grants the app {limit} bytes of a device that has {memory}"
            raise ValueError(msg)
        return self


def load_measurements(path: Path) -> DeviceMeasurements:
    """Read the file that a kit's benchmark wrote."""
    data = read_bounded(
        path, limit=MAX_MEASUREMENTS_BYTES, code="measurements", what="file of measurements"
    )
    hint = "name the JSON that a kit's benchmark wrote: docs/formats/measurements.md"
    try:
        content = json.loads(data, parse_int=_whole)
        return DeviceMeasurements.model_validate(content, strict=True)
    except ValidationError as error:
        key, problem = first_problem(error, DeviceMeasurements)
        text = f"the measurements are wrong at {key}: {problem}"
        raise OdtpackError("measurements-invalid", text, where=str(path), hint=hint) from error
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, ValueError) else "nested too deeply"
        text = f"the measurements are not JSON in UTF-8: {detail[:200]}"
        raise OdtpackError("measurements-invalid", text, where=str(path), hint=hint) from error


def _whole(digits: str) -> int | float:
    """A whole number; one of many digits is beyond every bound, and slow to read."""
    return int(digits) if len(digits) < 40 else float("inf")
