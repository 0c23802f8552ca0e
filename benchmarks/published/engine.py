"""What another engine's trainings take on a phone: counts of a network, at the phone's roofs.

A step is the sum of three kinds of work: products, at the matrix rate of the phone's data sheet;
one pass over the activations and one over the parameters, at its copy bandwidth. Each is taken so
many times. The three factors are the other engine's own; they are fitted to the networks in
:data:`CALIBRATION` and to no other.
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.latency import DeviceRates, device_rates

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


@dataclass(frozen=True, slots=True)
class Engine:
    """How many times over a step of the other engine does each kind of work."""

    rates: DeviceRates
    counts: dict[str, Counts]
    factors: tuple[float, float, float]  # Products, activations and parameters
    spread: float  # Factor between the typical step and either end of the interval

    def step_ms(self, network: str, batch: int) -> tuple[float, float, float]:
        """Low end, typical and high end of a step."""
        parts = parts_ms(self.counts[network], batch, self.rates)
        typical = float(parts @ np.array(self.factors))
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


def parts_ms(counts: Counts, batch: int, rates: DeviceRates) -> Vector:
    """Products of a step, one pass over its activations and one over its parameters."""
    memory = 2 * rates.copy.typical
    products = 3 * counts.flops * batch / rates.gemm.typical
    passes = (counts.activations * batch / memory, counts.parameters / memory)
    return 1e3 * np.array([products, *passes])


def fitted(networks: tuple[str, ...] = CALIBRATION) -> Engine:
    """Least squares of the logarithms, and the interval that holds 95 % of further rows."""
    rates = device_rates(load_profile(DEVICE))
    assert not isinstance(rates, str)
    counts = counted()
    rows = [row for row in published() if row.network in networks]
    parts = np.array([parts_ms(counts[row.network], row.batch, rates) for row in rows])
    times = np.log([row.step_ms for row in rows])
    # Their logarithms keep the factors above 0.
    solved = least_squares(lambda logs: np.log(parts @ np.exp(logs)) - times, np.zeros(3))
    products, activations, parameters = np.exp(solved.x).tolist()
    error = math.sqrt(2 * solved.cost / (len(rows) - 3) * (1 + 3 / len(rows)))
    spread = math.exp(_QUANTILE * error)
    return Engine(rates, counts, (products, activations, parameters), spread)
