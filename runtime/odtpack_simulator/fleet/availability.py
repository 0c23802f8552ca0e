"""When the devices of a population may train: a model by the hour of the day.

A device has, for each condition and each day (from noon to noon, so that nights stay whole), a
number drawn evenly between 0 and 1. The condition holds in the hours whose share is above it: in
every hour the stated share of devices is there, and one that charges at ten in the evening still
charges at two, where more do. Devices' hours begin at minutes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from odtpack_simulator.fleet.draws import Uniforms, uniforms
from odtpack_simulator.fleet.fleet_file import HOURS, FleetFile

NS: Final = 10**9
_HOUR: Final = 3600 * NS
_NOON: Final = 12
_STREAMS: Final = {"idle": 11, "charging": 12, "unmetered": 13}
_MINUTES: Final = 10
ABSENCE: Final = {"idle": "in use", "charging": "not charging", "unmetered": "on a metered network"}
"""Why a device is absent while a condition does not hold."""

Numbers = npt.NDArray[np.int64]


class Availability(Protocol):
    """When clients may train."""

    def absences(self, clients: Numbers, now: int) -> dict[str, npt.NDArray[np.bool_]]:
        """For each reason, which of the clients are absent by it now, and by none before it."""
        ...

    def leaves(self, client: int, now: int, until: int) -> int | None:
        """When a client that is there now no longer is; None if not before ``until``."""
        ...


@dataclass(frozen=True)
class HourModel:
    """The model by the hour; times are nanoseconds from the first midnight.

    Attributes:
        seed: Seed of the fleet.
        shares: Per required condition the share of devices in each hour of the day.
    """

    seed: int
    shares: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def absences(self, clients: Numbers, now: int) -> dict[str, npt.NDArray[np.bool_]]:
        """See :class:`Availability`."""
        absent: dict[str, npt.NDArray[np.bool_]] = {}
        gone = np.zeros(len(clients), np.bool_)
        if not self.shares:
            return absent
        hours = (now + self._shifts(clients)) // _HOUR
        for name, shares in self.shares.items():
            fails = ~gone & (self._levels(name, clients, hours) >= shares[hours % HOURS])
            absent[ABSENCE[name]] = fails
            gone |= fails
        return absent

    def leaves(self, client: int, now: int, until: int) -> int | None:
        """See :class:`Availability`."""
        if not self.shares:
            return None
        number = np.array([client], np.int64)
        shift = int(self._shifts(number)[0])
        hour = (now + shift) // _HOUR + 1
        while hour * _HOUR - shift < until:
            at = np.array([hour])
            for name, shares in self.shares.items():
                if self._levels(name, number, at)[0] >= shares[hour % HOURS]:
                    return hour * _HOUR - shift
            hour += 1
        return None

    def _shifts(self, clients: Numbers) -> Numbers:
        minutes = uniforms((self.seed, _MINUTES), clients) * (_HOUR - 1)
        return minutes.astype(np.int64)

    def _levels(self, name: str, clients: Numbers, hours: Numbers) -> Uniforms:
        days = (hours - _NOON) // HOURS
        levels = np.empty(len(clients))
        for day in np.unique(days):  # two at most: clients are less than an hour apart
            chosen = days == day
            # Days are counted from the noon before the first midnight.
            words = (self.seed, _STREAMS[name], int(day) + 1)
            levels[chosen] = uniforms(words, clients[chosen])
        return levels


def make_availability(fleet: FleetFile) -> Availability:
    """What a fleet file asks for.

    Raises:
        OdtpackError: The trace cannot be read.
    """
    table = fleet.population.availability
    if table.trace is not None:
        from odtpack_simulator.fleet.flash_trace import read_trace

        return read_trace(table.trace, fleet.population.requires, fleet.seed)
    shares: dict[str, npt.NDArray[np.float64]] = {
        name: np.array(hours)
        for name in dict.fromkeys(fleet.population.requires)
        if (hours := getattr(table, name)) is not None
    }
    return HourModel(fleet.seed, shares)
