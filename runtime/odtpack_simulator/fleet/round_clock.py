"""One round on the virtual clock: who is chosen, what becomes of each, and when the round ends.

Rounds without a common beginning have a clock of their own, at the end of this file.

A pure function of the population, the devices and the time: nothing is trained. Every client
that is chosen comes to exactly one end.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.fleet_file import chosen_clients
from odtpack_simulator.fleet.population import NS, Availability, Client, Population, uniform
from odtpack_simulator.result import Count
from odtpack_simulator.values.part import Part

End = Literal[
    "over memory",
    "no data",
    "window ended",
    "battery low",
    "left",
    "lost",
    "unfinished",
    "late",
    "stale",
    "surplus",
    "given up",
    "refused",
    "averaged",
]
"""What becomes of a chosen client."""
ENDS: Final[tuple[End, ...]] = get_args(End)
NEVER_STARTED: Final = frozenset({"over memory", "no data"})
ANSWERED: Final = frozenset({"stale", "surplus", "given up", "refused", "averaged"})
NO_LOSS: Final = frozenset({"averaged", "surplus", "unfinished"})
"""Ends that say nothing against a client."""

_LEVEL: Final = 30
_FLOOR: Final = 0.2  # Share of the battery below which the system ends work in the background
_LOOK: Final = 4096
"""Clients that are looked at in one go: what a round takes does not grow with the population."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A chosen client in a round. Times are nanoseconds from when it was chosen."""

    client: int  # Its number
    model: int  # Index of its model of device
    end: End  # What became of it
    at: int  # When it came to that end
    steps: int  # Optimizer steps of its training
    work: int = 0  # Time under load
    radio: int = 0  # Time in which it sent or received
    energy_j: float | None = 0.0  # Energy of both; null if unknown
    moved_bytes: int = 0  # Bytes received and sent
    staleness: int = 0  # How often the model has changed since it was chosen


class Flight(Part):
    """A client at work between two changes of the model: what its visit follows from.

    Attributes:
        client: Its number.
        version: Rounds that made the model that it began with.
        attempt: In which pass over the population it was chosen.
        start: When, in nanoseconds from the first midnight.
    """

    client: Count
    version: Count
    attempt: Count
    start: Count


@dataclass(frozen=True, slots=True)
class Look:
    """What the server finds when it looks for clients."""

    chosen: list[int]  # Those that are there
    place: int  # Place in the order of the clients after the last that was looked at
    looked_at: int  # How many were looked at
    absent: Counter[str]  # How many of them were absent, by reason


@dataclass(frozen=True)
class PlayedRound:
    """A round as the clock has it."""

    start: int  # Nanoseconds from the first midnight
    duration: int  # Until it was over
    looked_at: int  # Clients that were looked at, to find enough
    absent: dict[str, int] = field(default_factory=dict)  # How many of them were absent, by reason
    # What became of those chosen; in the order of their staleness and numbers.
    visits: tuple[Visit, ...] = ()
    flights: tuple[Flight, ...] = ()  # Clients that are still at work

    @property
    def averaged(self) -> list[Visit]:
        """Those whose answers are averaged."""
        return [visit for visit in self.visits if visit.end == "averaged"]


@dataclass(frozen=True)
class RoundClock:
    """Plays rounds."""

    population: Population  # The clients
    devices: Sequence[FleetDevice]  # Their models of device, in the order of the fleet file
    availability: Availability  # When clients may train
    steps: Callable[[int], int]  # Optimizer steps of a client with so many samples
    payload: int  # Bytes of the parameters that cross, one way

    def play(self, number: int, now: int, flights: Sequence[Flight] = ()) -> PlayedRound | None:
        """Play a round that may start at a time or later."""
        # Returns: The round; None if enough clients are not available on any of the days that the
        # federation lasts.
        federation = self.population.fleet.federation
        last = int(federation.days * 86_400 * NS)
        wanted = chosen_clients(federation.clients, federation.over_selection)
        wanted = min(wanted, len(self.population))
        attempt = 0
        while now <= last:
            look = self._look(number, attempt, now, wanted)
            if len(look.chosen) >= min(federation.minimum, wanted):
                return self._finish(number, now, look)
            now += int(federation.retry * NS)
            attempt += 1
        return None

    def _look(
        self,
        number: int,
        attempt: int,
        now: int,
        wanted: int,
        place: int = 0,
        busy: Collection[int] = (),
    ) -> Look:
        """Clients that are there and not busy, from a place of the round's own order on."""
        chosen: list[int] = []
        absent: Counter[str] = Counter()
        looked_at = 0
        others = np.fromiter(busy, np.int64, len(busy))
        while len(chosen) < wanted and place < len(self.population):
            size = min(_LOOK, max(64, 2 * (wanted - len(chosen)), looked_at))
            clients = self.population.in_order(number, attempt, place, place + size)
            free = ~np.isin(clients, others)
            reasons = self.availability.absences(clients, now)
            there = free.copy()
            for gone in reasons.values():
                there &= ~gone
            # Clients after the last one needed are not looked at.
            enough = np.flatnonzero(np.cumsum(there) == wanted - len(chosen))
            seen = int(enough[0]) + 1 if len(enough) else len(clients)
            chosen += clients[:seen][there[:seen]].tolist()
            for reason, gone in reasons.items():
                absent[reason] += int((gone & free)[:seen].sum())
            looked_at += int(free[:seen].sum())
            place += seen
        return Look(chosen, place, looked_at, absent)

    def _finish(self, number: int, now: int, look: Look) -> PlayedRound:
        federation = self.population.fleet.federation
        deadline = int(federation.deadline * NS)
        visits = [self._visit((number,), now, client) for client in sorted(look.chosen)]
        answered = sorted(
            (visit for visit in visits if visit.end == "averaged"), key=lambda v: (v.at, v.client)
        )
        counted = answered[: federation.clients]
        enough = len(counted) >= federation.minimum
        duration = deadline
        if enough and len(counted) == federation.clients:
            duration = counted[-1].at
        elif len(answered) == len(visits):  # no other answer can come
            duration = max((visit.at for visit in answered), default=0)
        ends: dict[int, End] = {visit.client: "surplus" for visit in answered}
        ends |= {visit.client: "averaged" if enough else "given up" for visit in counted}
        final = tuple(
            replace(visit, end=ends[visit.client]) if visit.client in ends else visit
            for visit in visits
        )
        return PlayedRound(now, duration, look.looked_at, dict(+look.absent), final)

    def _visit(
        self, draw: tuple[int, ...], now: int, index: int, until: int | None = None
    ) -> Visit:
        """What becomes of a client by itself; ``averaged`` if it answers in time."""
        # `draw`: The round, and what distinguishes one try of it from another, by which it may be
        # lost.
        deadline = int(self.population.fleet.federation.deadline * NS)
        client = self.population.client(index)
        model = client.model
        device = self.devices[model]
        steps = self.steps(client.examples)
        if not device.fits:
            return Visit(index, model, "over memory", 0, 0)
        if not steps:
            return Visit(index, model, "no data", 0, 0)
        session = device.session(steps)
        traffic = self.population.fleet.traffic
        payload = math.ceil(self.payload * traffic.compression)
        down, up = (0 if device.ideal else math.ceil(payload / r * NS) for r in client.rates())
        trained = down + session.duration
        finish = trained + up
        # What cuts it off, and when; the first of all counts.
        cuts: list[tuple[int, End]] = []
        if session.kept < steps:
            cuts.append((trained, "window ended"))
        if until is not None:
            cuts.append((until - now, "unfinished"))
        lost = client.lost_at(*draw)
        if lost is not None:
            cuts.append((int(lost * max(0, finish - 1)), "lost"))
        leaves = self.availability.leaves(index, now, now + min(finish, deadline) + 1)
        if leaves is not None:
            cuts.append((leaves - now, "left"))
        low = self._battery_low(client, device, now, down, session.duration)
        if low is not None:
            cuts.append((low, "battery low"))
        # Where all take no time, as with ideal devices, a lost one is lost.
        at, end = min(
            [(finish, "averaged"), *cuts], key=lambda cut: (cut[0], cut[1] != "lost", cut)
        )
        whole = end == "averaged"
        if at > deadline:
            end = "late"  # it goes on in vain, as far as it comes
        work = min(max(0, at - down), session.duration)
        sent = min(max(0, at - trained), up)
        radio = min(at, down) + sent
        energy = None
        if device.watts is not None:
            energy = device.watts * work / NS + (traffic.radio_power or 0.0) * radio / NS
        moved = payload if at >= down else math.floor(payload * at / down)
        moved += payload if whole else math.floor(payload * sent / max(up, 1))
        energy = 0.0 if device.ideal else energy
        return Visit(index, model, end, at, steps, work, radio, energy, moved)

    def _battery_low(
        self, client: Client, device: FleetDevice, now: int, down: int, duration: int
    ) -> int | None:
        """When the battery of a device that need not charge is too low to go on."""
        # Its level is drawn evenly from empty to full for each day.
        on_charger = "charging" in self.population.fleet.population.requires
        if on_charger or not device.watts or not device.battery_j:
            return None
        day = now // (86_400 * NS)
        level = uniform((self.population.fleet.seed, _LEVEL, int(day)), client.number)
        seconds = max(0.0, (level - _FLOOR) * device.battery_j / device.watts)
        at = down + int(seconds * NS)
        return at if at < down + duration else None


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
        """Play until the buffer is full."""
        # Returns: The round, in which nothing is averaged if the days of the federation are over
        # before the buffer is full; None if no client was at work in it.
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
