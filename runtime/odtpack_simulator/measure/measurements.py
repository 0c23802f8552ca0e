"""Files of measurements, and calibration by them."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_simulator.device.profile import OsClass
from odtpack_simulator.measure.host import clock_hz, spread
from odtpack_simulator.measure.operators import Operator, bound_operators, model_runs, typical_step
from odtpack_simulator.memory.operator_work import Roof
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.schema_errors import first_problem
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
    """A measured figure: the median of its repetitions, between the lowest and the highest.

    Args:
        values: One per repetition, at least one.
        factor: What the values are divided by to be in ``unit``.
        unit: Of the figure.
        source: How it was measured.
    """
    low, middle, high = spread(tuple(value / factor for value in values))
    figure = known(middle, unit, "measured", source)
    return figure | {"low": rounded(low), "high": rounded(high)}


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
    sync_seconds: Annotated[
        list[Annotated[float, Field(gt=0, le=3600)]], Field(max_length=_MOST_VALUES)
    ] = Field(default_factory=list)
    memory_bytes: _Bytes | None = None
    memory_limit_bytes: _Bytes | None = None

    @model_validator(mode="after")
    def _limit_within_memory(self) -> DeviceMeasurements:
        limit, memory = self.memory_limit_bytes, self.memory_bytes
        if limit is not None and memory is not None and limit > memory:
            msg = f"grants the app {limit} bytes of a device that has {memory}"
            raise ValueError(msg)
        return self


def load_measurements(path: Path) -> DeviceMeasurements:
    """Read the file that a kit's benchmark wrote.

    Raises:
        OdtpackError: Absent, larger than 1 MiB, not JSON, or not what the format allows.
    """
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


# What this machine reaches through ONNX Runtime: rates and the runtime's own costs.
#
# Measured on single operators on memory that is already there: a large matrix
# product, a large copy, and chains of operators with nothing to do. A rate is the
# best of many runs, as is usual for what a machine can reach (STREAM does so).

_GEMM_SIZES: Final = (256, 512, 1024)
_COPY_ELEMENTS: Final = 16 * 2**20  # 64 MiB: several times any cache of a phone
CALIBRATION_SECONDS: Final = 0.3
"""Time for each of the figures: enough for the best of many runs."""

_CHAIN: Final = (200, 10)
"""Lengths of two chains of operators: their difference is free of what a run costs."""
_CHAIN_ELEMENTS: Final = 16
_CHAIN_RUNS: Final = 40


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates and costs of this machine.

    Attributes:
        threads: Intra-operator threads of the two rates that follow.
        gemm_flops: FLOP/s of a large single-precision matrix product.
        copy_bandwidth: Bytes per second of a large copy, in bytes copied.
        core_flops: ``gemm_flops`` of one thread.
        node_us: Time of an operator that has nothing to do, in microseconds.
        profile_us: What a profile adds to the duration of each operator.
        clock_hz: Clock of the processor as the system reports it; None if it does not.
        int8_ops: Operations per second of a large int8 matrix product.
    """

    threads: int
    gemm_flops: float
    copy_bandwidth: float
    core_flops: float
    node_us: float
    profile_us: float
    clock_hz: float | None
    int8_ops: float

    @classmethod
    def from_message(cls, content: Mapping[str, Any]) -> Calibration:
        """Read what a child sent."""
        return cls(**{name: content[name] for name in cls.__slots__})

    @property
    def roof(self) -> Roof:
        """The machine's two roofs: a copy reads as many bytes as it writes."""
        return Roof(self.gemm_flops, 2 * self.copy_bandwidth)


def calibrate(threads: int, seconds: float = CALIBRATION_SECONDS) -> Calibration:
    """Measure this machine, in about eight times ``seconds``."""
    node_us, profile_us = runtime_costs(seconds)
    gemm = gemm_flops(threads, seconds)
    return Calibration(
        threads=threads,
        gemm_flops=gemm,
        copy_bandwidth=copy_bandwidth(threads, seconds=seconds),
        core_flops=gemm if threads == 1 else gemm_flops(1, seconds),
        node_us=node_us,
        profile_us=profile_us,
        clock_hz=clock_hz(),
        int8_ops=int8_ops(threads, seconds),
    )


def rates(threads: int, seconds: float = CALIBRATION_SECONDS) -> tuple[float, float]:
    """The two rates of a calibration once more, in half of its time."""
    return gemm_flops(threads, seconds), copy_bandwidth(threads, seconds=seconds)


def gemm_flops(threads: int, seconds: float = CALIBRATION_SECONDS) -> float:
    """FLOP/s of a square single-precision matrix product in ONNX Runtime, best of three sizes."""
    return max(
        2 * size**3 / min(operator_seconds("MatMul", [(size, size)] * 2, threads, seconds))
        for size in _GEMM_SIZES
    )


def int8_ops(threads: int, seconds: float = CALIBRATION_SECONDS) -> float:
    """Operations per second of a matrix product of bytes in ONNX Runtime, best of two sizes."""
    return max(
        2 * size**3 / min(operator_seconds("MatMulInteger", shapes, threads, seconds, int8=True))
        for size, shapes in ((size, [(size, size)] * 2) for size in _GEMM_SIZES[:2])
    )


def copy_bandwidth(
    threads: int, elements: int = _COPY_ELEMENTS, seconds: float = CALIBRATION_SECONDS
) -> float:
    """Bytes per second that an elementwise operator in ONNX Runtime reads and writes anew."""
    return 4 * elements / min(operator_seconds("Neg", [(elements,)], threads, seconds))


def operator_seconds(
    op_type: str,
    shapes: Sequence[tuple[int, ...]],
    threads: int,
    seconds: float = CALIBRATION_SECONDS,
    *,
    int8: bool = False,
) -> list[float]:
    """Durations of one operator on float32 tensors, run again and again.

    Args:
        op_type: An operator whose result has the shape of its last input.
        shapes: Of its inputs.
        threads: Intra-operator threads.
        seconds: Time that it may take; five runs are made in any case.
        int8: On tensors of bytes instead.
    """
    names = [f"input{index}" for index in range(len(shapes))]
    inputs = dict(zip(names, shapes, strict=True))
    operator = Operator(op_type, names, "output")
    work = bound_operators([operator], inputs, shapes[-1], threads, int8=int8)
    return list(_seconds(work, seconds))


def runtime_costs(seconds: float = CALIBRATION_SECONDS) -> tuple[float, float]:
    """Microseconds of an operator that has nothing to do, and what a profile adds to it."""
    long, short = (_median_seconds(_chain(length), seconds) * 1e6 for length in _CHAIN)
    node_us = max(0.0, (long - short) / (_CHAIN[0] - _CHAIN[1]))
    with scratch_folder("calibrate") as folder:
        run = _chain(_CHAIN[0], Path(folder) / "chain")
        for _ in range(_CHAIN_RUNS):
            run()
        del run  # a session writes its profile when it goes
        file = next(Path(folder).glob("chain*.json"))
        nodes = typical_step(model_runs(file), _CHAIN_RUNS)
    profiled = statistics.fmean(node.us for node in nodes)
    return node_us, max(0.0, profiled - node_us)


def _chain(length: int, profile: Path | None = None) -> Callable[[], object]:
    shape = (_CHAIN_ELEMENTS,)
    values = itertools.pairwise(f"value{index}" for index in range(length + 1))
    operators = [Operator("Neg", [before], after) for before, after in values]
    return bound_operators(operators, {"value0": shape}, shape, 1, profile=profile)


def _median_seconds(work: Callable[[], object], seconds: float) -> float:
    """Median duration over so much time, the first two calls left out."""
    return statistics.median(itertools.islice(_seconds(work, seconds), 2, None))


def _seconds(work: Callable[[], object], seconds: float) -> Iterator[float]:
    """Durations of five calls, and of more while the time lasts."""
    end = time.perf_counter() + seconds
    for count in range(200):
        start = time.perf_counter()
        if count >= 5 and start > end:
            return
        work()
        yield time.perf_counter() - start
