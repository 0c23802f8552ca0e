"""The clients of a fleet, each a function of the seed and its number: nothing is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.fleet.draws import shuffled, uniform, uniforms
from odtpack_simulator.fleet.fleet_file import FleetFile

if TYPE_CHECKING:
    from odtpack_simulator.fleet.dataset import FleetData
    from odtpack_simulator.fleet.local_training import Indices

_MODEL: Final = 20
_SAMPLES: Final = 21
_DOWN: Final = 22
_UP: Final = 23
_LOST: Final = 24
_LOST_AT: Final = 25
_ORDER: Final = 26
_LABELS: Final = 3


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        population: Whose it is.
        number: Its number.
    """

    population: Population
    number: int

    @property
    def model(self) -> int:
        """Index of its model of device among those of the fleet file; 0 without any."""
        return int(self.population.models(np.array([self.number]))[0])

    @property
    def examples(self) -> int:
        """Number of its samples."""
        least, most = self.population.fleet.population.data.samples
        share = uniform((self.population.fleet.seed, _SAMPLES), self.number)
        return least + int(share * (most - least + 1))

    def down_rate(self) -> float:
        """Bytes per second to it."""
        return self._between(_DOWN, self.population.fleet.traffic.down)

    def up_rate(self) -> float:
        """Bytes per second from it."""
        return self._between(_UP, self.population.fleet.traffic.up)

    def lost_at(self, *when: int) -> float | None:
        """After which share of its work it falls silent; None where it does not.

        Args:
            when: Number of the round, and whatever else distinguishes one try of it from another.
        """
        seed, lost = self.population.fleet.seed, self.population.fleet.population.lost
        if not lost or uniform((seed, _LOST, *when), self.number) >= lost:
            return None
        return uniform((seed, _LOST_AT, *when), self.number)

    def label_shares(self) -> npt.NDArray[np.float64]:
        """Its share of each class; as in the data where the fleet has no label skew."""
        return self._labels(
            np.random.default_rng([self.population.fleet.seed, _LABELS, self.number])
        )

    def samples(self) -> Indices:
        """Its samples, drawn with replacement from those to train on."""
        data, skew = self.population.data, self.population.fleet.population.data.dirichlet
        random = np.random.default_rng([self.population.fleet.seed, _LABELS, self.number])
        if skew is None:
            return data.train[random.integers(len(data.train), size=self.examples)]
        counts = random.multinomial(self.examples, self._labels(random))
        return np.concatenate([
            data.classes[label][random.integers(len(data.classes[label]), size=count)]
            for label, count in enumerate(counts)
            if count
        ] or [np.empty(0, np.int64)])  # fmt: skip

    def _labels(self, random: np.random.Generator) -> npt.NDArray[np.float64]:
        classes, skew = (
            self.population.data.classes,
            self.population.fleet.population.data.dirichlet,
        )
        there = np.array([len(each) > 0 for each in classes])
        if skew is None:
            sizes = np.array([len(each) for each in classes], np.float64)
            return sizes / sizes.sum() if len(sizes) else sizes
        shares = np.zeros(len(classes))
        drawn = random.dirichlet(np.full(int(there.sum()), skew))
        # A tiny concentration can underflow to nothing at all: then it is all of one class.
        if not math.isclose(drawn.sum(), 1.0, rel_tol=1e-6):
            drawn = np.eye(len(drawn))[random.integers(len(drawn))]
        shares[there] = drawn / drawn.sum()
        return shares

    def _between(self, stream: int, ends: tuple[float, float]) -> float:
        low, high = ends
        if low == high:
            return low
        share = uniform((self.population.fleet.seed, stream), self.number)
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))


class Population:
    """All clients of a fleet.

    Args:
        fleet: The fleet file.
        data: The samples.

    Raises:
        OdtpackError: ``fleet-labels``: the file asks for label skew, and there are no labels.
    """

    def __init__(self, fleet: FleetFile, data: FleetData) -> None:
        self.fleet, self.data = fleet, data
        if fleet.population.data.dirichlet is not None and not data.classes:
            raise OdtpackError(
                "fleet-labels",
                "The fleet file asks for label skew, and the data have no label for each sample.",
                hint="leave out population.data.dirichlet",
            )
        shares = [device.share for device in fleet.population.devices] or [1.0]
        self._edges = np.cumsum(shares) / sum(shares)

    def __len__(self) -> int:
        return self.fleet.population.clients

    def client(self, number: int) -> Client:
        """A client by its number, from 0."""
        return Client(self, number)

    def models(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Index of the model of device of each of these clients."""
        drawn = uniforms((self.fleet.seed, _MODEL), numbers)
        return np.minimum(np.searchsorted(self._edges, drawn, "right"), len(self._edges) - 1)

    def in_order(self, round_number: int, attempt: int, start: int, stop: int) -> Indices:
        """Places ``start`` to ``stop`` of the order in which a round looks at the clients."""
        return shuffled((self.fleet.seed, _ORDER, round_number, attempt), start, stop, len(self))

    def sample(self, count: int) -> Sequence[Client]:
        """Some clients, for figures about all: all of them if there are no more."""
        chosen = shuffled((self.fleet.seed, _ORDER), 0, count, len(self))
        return [self.client(number) for number in chosen.tolist()]
