"""What may vary in a federation: clients a round, local epochs and the learning rate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from odtpack.errors import OdtpackError
from odtpack.fit.space import SearchConstraints
from odtpack_simulator.fleet.fleet_file import FleetFile


@dataclasses.dataclass(frozen=True)
class FleetSettings:
    """One way to run a federation.

    Attributes:
        number: Its number in the space, from 1.
        clients: Answers that a round waits for; with a buffer, clients at a time.
        epochs: Passes of a client over its samples.
        learning_rate: Of a client's steps.
    """

    number: int
    clients: int
    epochs: int
    learning_rate: float

    def aspects(self) -> tuple[object, ...]:
        """What it chose in each dimension."""
        return (self.clients, self.epochs, self.learning_rate)

    def of(self, fleet: FleetFile) -> FleetFile:
        """A fleet run this way. ``minimum`` and ``buffer`` keep their share of the clients."""
        table = fleet.federation

        def shared(count: int) -> int:
            return max(1, round(count * self.clients / table.clients))

        federation = {
            "clients": self.clients,
            "minimum": shared(table.minimum),
            "buffer": None if table.buffer is None else shared(table.buffer),
        }
        training = {"epochs": self.epochs, "learning_rate": self.learning_rate}
        return fleet.model_copy(
            update={
                "federation": table.model_copy(update=federation),
                "training": fleet.training.model_copy(update=training),
            }
        )


def fleet_space(
    fleet: FleetFile,
    clients: Sequence[int] = (),
    epochs: Sequence[int] = (),
    learning_rates: Sequence[float] = (),
) -> list[FleetSettings]:
    """Every combination; what the fleet file says stands first where nothing else is asked for.

    Args:
        fleet: The fleet file.
        clients: Clients a round to try; by default those of the file, twice and half as many.
        epochs: Likewise.
        learning_rates: By default that of the file, three times it and a third.

    Raises:
        OdtpackError: A value that no fleet file may have.
    """
    SearchConstraints(learning_rates=tuple(learning_rates))
    there = fleet.population.clients
    if any(count > there for count in clients):
        raise OdtpackError(
            "bad-fleet-settings",
            f"{max(clients)} clients a round are more than the {there} of the population",
        )
    usual, passes = fleet.federation.clients, fleet.training.epochs
    rate = fleet.training.learning_rate
    near = [count for count in (usual, 2 * usual, usual // 2) if 1 <= count <= there]
    return [
        FleetSettings(number, *chosen)
        for number, chosen in enumerate(
            itertools.product(
                dict.fromkeys(clients or near or [usual]),
                dict.fromkeys(epochs or (passes, 2 * passes, max(1, passes // 2))),
                dict.fromkeys(learning_rates or (rate, _digits(3 * rate), _digits(rate / 3))),
            ),
            1,
        )
    ]


def _digits(value: float) -> float:
    """A number that people would write."""
    return float(f"{value:.2g}")
