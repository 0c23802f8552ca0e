"""Rounds without a common beginning: clients begin as others finish (Nguyen et al. 2022, FedBuff).

A round is here what lies between two changes of the model. As in synchronous rounds nothing is
trained, a client comes to exactly one end, and the server hears only of those that answer.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from odtpack_simulator.fleet.availability import NS
from odtpack_simulator.fleet.round_clock import Flight, PlayedRound, RoundClock, Visit


class _Place(NamedTuple):
    """One of the places for clients at work; the order is that in which they become free."""

    free_at: int
    version: int
    client: int
    flight: Flight
    visit: Visit


@dataclass
class _Period:
    """What has happened since the model changed last."""

    places: list[_Place]
    look_at: int
    attempt: int = 0
    place: int = 0
    looked_at: int = 0
    absent: Counter[str] = field(default_factory=Counter)
    buffer: list[Visit] = field(default_factory=list)
    ended: list[Visit] = field(default_factory=list)


class BufferedClock(RoundClock):
    """Plays asynchronous rounds.

    At most ``clients`` are at work at a time. A place is free again when its client has answered,
    or when its deadline has passed; then the server looks on in the round's order of the clients,
    leaving out those at work and those whose answers wait. At the end of the order it begins a new
    one, ``retry`` later. Answers that arrive at the same instant are counted before anyone begins.
    """

    def play(self, number: int, now: int, flights: Sequence[Flight] = ()) -> PlayedRound | None:
        """Play until the buffer is full.

        Args:
            number: Number of the round, from 1.
            now: When the model changed last: nanoseconds from the first midnight.
            flights: Clients that were at work then.

        Returns:
            The round, in which nothing is averaged if the days of the federation are over before
            the buffer is full; None if no client was at work in it.
        """
        federation = self.population.fleet.federation
        last = int(federation.days * 86_400 * NS)
        begun = now
        period = _Period([self._place(flight) for flight in flights], look_at=now)
        heapq.heapify(period.places)
        while True:
            while period.places and period.places[0].free_at <= now:
                self._land(number, period)
                if len(period.buffer) == federation.buffer:
                    return self._round(number, begun, now, period)
            if period.look_at <= now <= last:
                self._start(number, now, period)
            times = [place.free_at for place in period.places[:1]]
            if len(period.places) < federation.clients and now < period.look_at <= last:
                times.append(period.look_at)
            if not times:
                break
            now = min(times)
        # The next look would come too late: from then on no client begins.
        now = max(now, period.look_at)
        period.ended += [replace(visit, end="given up") for visit in period.buffer]
        period.buffer = []
        return self._round(number, begun, now, period) if period.ended else None

    def _place(self, flight: Flight) -> _Place:
        visit = self._visit(_draw(flight), flight.start, flight.client)
        deadline = int(self.population.fleet.federation.deadline * NS)
        free_at = flight.start + (visit.at if visit.end == "averaged" else deadline)
        return _Place(free_at, flight.version, flight.client, flight, visit)

    def _land(self, number: int, period: _Period) -> None:
        """Free the first place: its client has answered, or is not waited for any longer."""
        place = heapq.heappop(period.places)
        visit = replace(place.visit, staleness=number - 1 - place.version)
        if visit.end != "averaged":
            period.ended.append(visit)
        elif visit.staleness > self.population.fleet.federation.staleness_limit:
            period.ended.append(replace(visit, end="stale"))
        else:
            period.buffer.append(visit)

    def _start(self, number: int, now: int, period: _Period) -> None:
        """Let clients begin where there are places, as far as there are any."""
        wanted = self.population.fleet.federation.clients - len(period.places)
        busy = {place.client for place in period.places}
        busy |= {visit.client for visit in period.buffer}
        look = self._look(number, period.attempt, now, wanted, period.place, busy)
        for client in look.chosen:
            flight = Flight(client=client, version=number - 1, attempt=period.attempt, start=now)
            heapq.heappush(period.places, self._place(flight))
        period.place = look.place
        period.looked_at += look.looked_at
        period.absent += look.absent
        if period.place >= len(self.population):
            period.attempt, period.place = period.attempt + 1, 0
            period.look_at = now + int(self.population.fleet.federation.retry * NS)

    def _round(self, number: int, begun: int, now: int, period: _Period) -> PlayedRound:
        flights = tuple(place.flight for place in sorted(period.places))
        visits = period.buffer + period.ended
        if number == self.population.fleet.federation.rounds:
            visits += [self._stop(number, now, flight) for flight in flights]
            flights = ()
        visits.sort(key=lambda visit: (visit.staleness, visit.client))
        return PlayedRound(
            begun, now - begun, period.looked_at, dict(period.absent), tuple(visits), flights
        )

    def _stop(self, number: int, now: int, flight: Flight) -> Visit:
        """What becomes of a client at work when the federation ends."""
        visit = self._visit(_draw(flight), flight.start, flight.client, until=now)
        stale = replace(visit, staleness=number - 1 - flight.version)
        return replace(stale, end="surplus") if visit.end == "averaged" else stale


def _draw(flight: Flight) -> tuple[int, int]:
    return flight.version + 1, flight.attempt
