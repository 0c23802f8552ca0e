"""What another engine's trainings take on a phone: counts of a network, at the phone's roofs.

A step is the sum of three kinds of work: products, at the matrix rate of the phone's data sheet;
one pass over the activations and one over the parameters, at its copy bandwidth. Each is taken so
many times. The three factors are the other engine's own; they are fitted to the networks in
:data:`CALIBRATION` and to no other.
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.latency import DeviceRates, device_rates
from scripts.harness import table

FOLDER: Final = Path(__file__).parent
DEVICE: Final = "xiaomi/mi-9"
CALIBRATION: Final = ("Lenet", "GoogLenet", "Alexnet")
"""Small kernels, products, parameters. The others are held out."""
_QUANTILE: Final = 2.179  # Student's t, 97.5 %, 12 degrees of freedom

_FIGURES: Final = ("ms_per_step", "infer_ms", "mem_MB")
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """A published training."""

    network: str
    batch: int
    step_ms: float
    infer_ms: float  # A forward pass by the same engine on the same phone
    memory_mb: float  # Resident memory

    @property
    def held_out(self) -> bool:
        """Whether nothing was fitted to it."""
        return self.network not in CALIBRATION


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one network, whatever machine counts them."""

    flops: float  # Products of a forward pass of one sample
    activations: float  # Bytes of what its layers return
    parameters: float  # Bytes

    def parts_ms(self, batch: int, rates: DeviceRates) -> Vector:
        """Products of a step, one pass over its activations and one over its parameters."""
        memory = 2 * rates.copy.typical
        products = 3 * self.flops * batch / rates.gemm.typical
        passes = (self.activations * batch / memory, self.parameters / memory)
        return 1e3 * np.array([products, *passes])


@dataclass(frozen=True, slots=True)
class Engine:
    """How many times over a step of the other engine does each kind of work."""

    rates: DeviceRates
    counts: dict[str, Counts]
    factors: tuple[float, float, float]  # Products, activations and parameters
    spread: float  # Factor between the typical step and either end of the interval

    def holds(self, row: Row) -> bool:
        """Whether a published step is inside of its interval."""
        low, _, high = self.step_ms(row.network, row.batch)
        return low <= row.step_ms <= high

    def step_ms(self, network: str, batch: int) -> tuple[float, float, float]:
        """Low end, typical and high end of a step."""
        typical = float(self.counts[network].parts_ms(batch, self.rates) @ np.array(self.factors))
        return typical / self.spread, typical, typical * self.spread


def published() -> list[Row]:
    """All rows of ``training.csv``."""
    with (FOLDER / "training.csv").open(newline="") as stream:
        return [
            Row(each["model"], int(each["batch"]), *(float(each[name]) for name in _FIGURES))
            for each in csv.DictReader(stream)
        ]


def counted() -> dict[str, Counts]:
    """What ``python -m benchmarks.published`` counted."""
    content = json.loads((FOLDER / "counts.json").read_text())
    return {name: Counts(**values) for name, values in content.items()}


def fitted(networks: tuple[str, ...] = CALIBRATION) -> Engine:
    """Least squares of the logarithms, and the interval that holds 95 % of further rows."""
    from scipy.optimize import least_squares  # takes a second

    rates, counts = device_rates(load_profile(DEVICE)), counted()
    rows = [row for row in published() if row.network in networks]
    parts = np.array([counts[row.network].parts_ms(row.batch, rates) for row in rows])
    times = np.log([row.step_ms for row in rows])
    # Their logarithms keep the factors above 0.
    solved = least_squares(lambda logs: np.log(parts @ np.exp(logs)) - times, np.zeros(3))
    products, activations, parameters = np.exp(solved.x).tolist()
    error = math.sqrt(2 * solved.cost / (len(rows) - 3) * (1 + 3 / len(rows)))
    spread = math.exp(_QUANTILE * error)
    return Engine(rates, counts, (products, activations, parameters), spread)


def published_phones_parts() -> dict[str, str]:
    """The generated parts of docs/published-phones.md."""
    rows, engine, counts = published(), fitted(), counted()
    simulated = json.loads((FOLDER / "simulated.json").read_text())
    networks: dict[str, dict[int, Row]] = {}
    for row in rows:
        networks.setdefault(row.network, {})[row.batch] = row
    held = [row for row in rows if row.held_out]
    products, activations, parameters = engine.factors
    own_steps = {
        (name, int(size)): step
        for name, each in simulated.items()
        for size, step in each["step_ms"].items()
        if step is not None
    }
    plain = sum(
        step["low"] <= row.step_ms <= step["high"]
        for row in rows
        if (step := own_steps.get((row.network, row.batch)))
    )
    pace, errors, samples = [], {}, []
    for name, of in networks.items():
        work = counts[name].flops * 16 / 1e6
        pace.append((name, f"{work / of[16].infer_ms:.0f}", f"{3 * work / of[16].step_ms:.0f}"))
        times = {size: row.step_ms for size, row in of.items()}
        errors[name] = [line(times, size) / times[size] - 1 for size in (2, 4, 8)]
        peaks = simulated.get(name, {}).get("peak_bytes", {})
        planned = f"{(peaks['16'] - peaks['1']) / 15e6:.3g}" if peaks else "-"
        samples.append((name, f"{(of[16].memory_mb - of[1].memory_mb) / 15:.3g}", planned))
    every = [error for own in errors.values() for error in own]
    factors = {
        "products, three times those of a forward pass": f"{products:.2f}",
        "one pass over the activations": f"{activations:.0f}",
        "one pass over the parameters": f"{parameters:.0f}",
    }
    gemm = engine.rates.gemm
    return {
        "rate": f"{gemm.typical / 1e9:.0f} ({gemm.low / 1e9:.0f} to {gemm.high / 1e9:.0f})",
        "pace": table(("network", "inference:", "training:"), pace),
        "factors": table(("kind of work", "times over:"), factors.items()),
        "spread": f"{engine.spread:.2f}",
        "width": f"{engine.spread**2:.1f}",
        "held out": f"**{sum(map(engine.holds, held))} of {len(held)} held-out rows "
        "are inside.**",
        "other fits": "; ".join(_other_fits(rows)) + ".",
        "hosts": " and ".join(dict.fromkeys(each["host"] for each in simulated.values())),
        "plain": f"{plain} of {len(rows)} published steps are inside",
        "steps": table(
            ("network", "batch:", "published:", "other engine:", "inside", "ONNX Runtime:",
             "published / it:"),
            (_step(row, engine, own_steps.get((row.network, row.batch))) for row in rows),
        ),
        "between": table(
            ("network", "batch 2:", "4:", "8:"),
            ((name, *(f"{100 * error:+.1f} %" for error in own)) for name, own in errors.items()),
        ),
        "within": f"{sum(abs(error) <= 0.1 for error in every)} of {len(every)}",
        "samples": table(("network", "published:", "planned:"), samples),
    }  # fmt: skip


def _other_fits(rows: list[Row]) -> Iterator[str]:
    """Published over typical steps of each network that is fitted to, without it in the fit."""
    for name in CALIBRATION:
        engine = fitted(tuple(each for each in CALIBRATION if each != name))
        ratios = [
            row.step_ms / engine.step_ms(name, row.batch)[1] for row in rows if row.network == name
        ]
        yield f"{name} {min(ratios):.2f} to {max(ratios):.2f}"


def _step(row: Row, engine: Engine, own: dict[str, float] | None) -> tuple[object, ...]:
    """What was published, and what is said of it, as cells."""
    low, typical, high = engine.step_ms(row.network, row.batch)
    simulated, ratio = "not judged", "-"
    if own is not None:
        simulated = f"{own['typical']:.3g} ({own['low']:.3g} to {own['high']:.3g})"
        ratio = f"{row.step_ms / own['typical']:.2g}"
    return (
        f"**{row.network}**" if row.held_out else row.network, row.batch, f"{row.step_ms:.4g}",
        f"{typical:.3g} ({low:.3g} to {high:.3g})", "yes" if engine.holds(row) else "no",
        simulated, ratio,
    )  # fmt: skip


def line(ends: dict[int, float], size: int) -> float:
    """What lies on the line through the smallest and the largest of some points."""
    low, high = min(ends), max(ends)
    return ends[low] + (ends[high] - ends[low]) * (size - low) / (high - low)
