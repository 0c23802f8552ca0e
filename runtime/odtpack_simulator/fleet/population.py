"""Who takes part: the population, what its clients have, and when they are available."""

from __future__ import annotations

import bisect
import calendar
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.fleet_file import HOURS, FleetFile
from odtpack_simulator.replay.job import HELD_OUT_SHARE, Indices, split
from odtpack_simulator.values.text import read_bounded

Numbers = npt.NDArray[np.uint64]
Uniforms = npt.NDArray[np.float64]


@functools.lru_cache(maxsize=4096)
def _key(words: tuple[int, ...]) -> np.uint64:
    return np.uint64(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def uniforms(words: tuple[int, ...], numbers: npt.NDArray[np.int64]) -> Uniforms:
    """Numbers from 0 to below 1, one for each client."""
    # The mixing function is that of SplitMix64 (Steele, Lea and Flood 2014).
    with np.errstate(over="ignore"):
        x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x += _key(words)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(words: tuple[int, ...], number: int) -> float:
    """The same for one client."""
    return float(uniforms(words, np.array([number], np.int64))[0])


def shuffled(words: tuple[int, ...], start: int, stop: int, count: int) -> npt.NDArray[np.int64]:
    """Places ``start`` to ``stop`` of an order of the numbers from 0 to below ``count``."""
    # No memory but that of the answer: number `k` of the order is `(a k + b) mod count`, where a
    # has no factor in common with the count. Clients are derived from their numbers by a mixing
    # function, so that such a set of them is as good as any.
    key = int(_key(words))
    step = key % count or 1
    while math.gcd(step, count) != 1:
        step += 1
    offset = (key >> 32) % count
    # Below 2**60: counts are at most 10**9.
    places = np.arange(start, min(stop, count), dtype=np.int64)
    return (places * (step % count) + offset) % count


NS: Final = 10**9
_HOUR: Final = 3600 * NS
_NOON: Final = 12
_STREAMS: Final = {"idle": 11, "charging": 12, "unmetered": 13}
_MINUTES: Final = 10
ABSENCE: Final = {"idle": "in use", "charging": "not charging", "unmetered": "on a metered network"}
"""Why a device is absent while a condition does not hold."""

Clients = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HourModel:
    """The model by the hour; times are nanoseconds from the first midnight."""

    seed: int  # Seed of the fleet
    # Per required condition the share of devices in each hour of the day.
    shares: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def absences(self, clients: Clients, now: int) -> dict[str, npt.NDArray[np.bool_]]:
        """For each reason, which of the clients are absent by it now, and by none before it."""
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
        """When a client that is there now no longer is; None if not before ``until``."""
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

    def _shifts(self, clients: Clients) -> Clients:
        return (uniforms((self.seed, _MINUTES), clients) * (_HOUR - 1)).astype(np.int64)

    def _levels(self, name: str, clients: Clients, hours: Clients) -> Uniforms:
        days = (hours - _NOON) // HOURS
        levels = np.empty(len(clients))
        for day in np.unique(days):  # two at most: clients are less than an hour apart
            chosen = days == day
            # Days are counted from the noon before the first midnight.
            levels[chosen] = uniforms((self.seed, _STREAMS[name], int(day) + 1), clients[chosen])
        return levels


MAX_TRACE_BYTES: Final = 1024 * 1024 * 1024
_DEVICE: Final = 14
_FORMAT: Final = "%Y-%m-%d %H:%M:%S"
_DAY: Final = 86_400
_METERED: Final = frozenset({"unknown", "2g", "3g", "4g", "5g"})


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """One device: seconds from a midnight in which its trace begins and ends, and is ready."""

    begin: int
    end: int
    ready: tuple[tuple[int, int], ...]

    def folded(self, seconds: int) -> int:
        """The second of the trace that stands for a second of the simulation."""
        return (seconds - self.begin) % (self.end - self.begin) + self.begin

    def ready_until(self, seconds: int) -> int | None:
        """When the stretch ends in which the device is ready at this second; None if it is not."""
        now = self.folded(seconds)
        index = bisect.bisect_right(self.ready, now, key=lambda stretch: stretch[0]) - 1
        if index < 0 or now >= self.ready[index][1]:
            return None
        return seconds + self.ready[index][1] - now


@dataclass(frozen=True)
class FlashTrace:
    """The availability of clients, each of whom is one of the recorded devices."""

    devices: tuple[DeviceTrace, ...]
    seed: int

    def absences(self, clients: Clients, now: int) -> dict[str, npt.NDArray[np.bool_]]:
        """See :class:`HourModel`."""
        of = self._devices(clients)
        used = np.unique(of)
        ready = np.zeros(len(self.devices), np.bool_)
        ready[used] = [
            self.devices[index].ready_until(now // NS) is not None for index in used.tolist()
        ]  # fmt: skip
        return {"not ready by its trace": ~ready[of]}

    def leaves(self, client: int, now: int, until: int) -> int | None:
        """See :class:`HourModel`."""
        device = self.devices[int(self._devices(np.array([client], np.int64))[0])]
        end = device.ready_until(now // NS)
        leaving = now if end is None else end * NS
        return leaving if leaving < until else None

    def _devices(self, clients: Clients) -> Clients:
        return (uniforms((self.seed, _DEVICE), clients) * len(self.devices)).astype(np.int64)


Availability = HourModel | FlashTrace


def make_availability(fleet: FleetFile) -> Availability:
    """When clients may train, as a fleet file says."""
    table = fleet.population.availability
    if table.trace is not None:
        return read_trace(table.trace, fleet.population.requires, fleet.seed)
    shares: dict[str, npt.NDArray[np.float64]] = {
        name: np.array(hours)
        for name in dict.fromkeys(fleet.population.requires)
        if (hours := getattr(table, name)) is not None
    }
    return HourModel(fleet.seed, shares)


def read_trace(path: str, requires: Collection[str], seed: int) -> FlashTrace:
    """Read a file of traces."""
    data = read_bounded(Path(path), limit=MAX_TRACE_BYTES, code="trace", what="trace of states")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"it is not JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict) or not content:
        raise _wrong(path, "it is not an object with an entry for each device")
    devices = []
    for name, entry in content.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("messages"), str):
            raise _wrong(path, f"device {name[:60]!r} has no text 'messages'")
        try:
            device = _device(entry["messages"], requires)
        except ValueError as error:
            raise _wrong(path, f"device {name[:60]!r}: {str(error)[:200]}") from error
        if device is not None:
            devices.append(device)
    if not any(device.ready for device in devices):
        raise _wrong(path, f"no device is ever {' and '.join(requires) or 'recorded'}")
    return FlashTrace(tuple(devices), seed)


def _device(messages: str, requires: Collection[str]) -> DeviceTrace | None:
    """A device from its messages; None of one that has less than two times."""
    holds = {"idle": False, "charging": False, "unmetered": False}
    ready: list[tuple[int, int]] = []
    begin = now = None
    since: int | None = None
    for line in messages.splitlines():
        if not line.strip():
            continue
        moment, tab, state = line.strip().partition("\t")
        if not tab:
            raise ValueError(f"{line[:60]!r} is not a time, a tab and a state")
        # UTC for all: only differences and the hour of the day matter.
        at = calendar.timegm(time.strptime(moment.strip(), _FORMAT))
        if now is not None and at < now:
            raise ValueError(f"{moment[:40]} comes after a later time")
        now = at
        begin = at if begin is None else begin
        _take(state.strip().lower(), holds)
        good = all(holds[name] for name in requires)
        if good and since is None:
            since = at
        elif not good and since is not None:
            if at > since:
                ready.append((since, at))
            since = None
    if begin is None or now is None or now == begin:
        return None
    if since is not None and now > since:
        ready.append((since, now))
    midnight = begin - begin % _DAY
    shifted = tuple((first - midnight, last - midnight) for first, last in ready)
    return DeviceTrace(begin - midnight, now - midnight, shifted)


def _take(state: str, holds: dict[str, bool]) -> None:
    if state in ("battery_charged_on", "battery_charged_off"):
        holds["charging"] = state.endswith("_on")
    elif state in ("screen_lock", "screen_unlock"):
        holds["idle"] = state == "screen_lock"
    elif state == "wifi" or state in _METERED:
        holds["unmetered"] = state == "wifi"
    elif state == "phone_off":
        holds.update(dict.fromkeys(holds, False))


def _wrong(path: str, problem: str) -> OdtpackError:
    return OdtpackError("fleet-trace", f"the trace of states is wrong: {problem}", where=path)


@dataclass(frozen=True, slots=True)
class FleetData:
    """Samples that clients draw from."""

    arrays: Mapping[str, Array]  # By name of input; the first axis counts samples
    train: Indices  # Samples that clients have
    held_out: Indices  # Samples that the server evaluates on, a fifth
    # For each class the training samples of it; empty where there are no labels.
    classes: tuple[Indices, ...]
    digest: str  # SHA-256 of the arrays


def load_fleet_data(package: Package, path: str | os.PathLike[str], seed: int) -> FleetData:
    """Load and split the data of a fleet, as ``odtpack train`` splits them."""
    ignored = package.manifest.ignored_label
    return split_data(package.load_data(path), seed, ignored, where=os.fspath(path))


def split_data(
    arrays: Mapping[str, Array], seed: int, ignored: int | None = None, *, where: str = "the data"
) -> FleetData:
    """Split samples; see :func:`load_fleet_data`."""
    samples = len(next(iter(arrays.values())))
    train, held_out = split(samples, HELD_OUT_SHARE, seed)
    if not len(held_out):
        raise OdtpackError(
            "too-few-samples",
            f"The data have {samples} samples, and a fifth of them is held out.",
            where=where,
            hint="give at least 5 samples",
        )
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes() if array.dtype.kind != "U" else str(array.tolist()).encode())
    return FleetData(
        arrays,
        train,
        held_out,
        _by_class(arrays.get("labels"), train, ignored),
        digest.hexdigest(),
    )


def _by_class(
    labels: Array | None, train: Indices, ignored: int | None
) -> tuple[npt.NDArray[np.int64], ...]:
    """The samples to train on of each class; none where not every label is a class or ignored."""
    if labels is None or labels.ndim != 1 or labels.dtype.kind != "i":
        return ()
    known = labels[labels != ignored] if ignored is not None else labels
    if not len(known) or known.min() < 0:
        return ()
    own = labels[train]
    return tuple(train[(own == n) & (n != ignored)] for n in range(int(known.max()) + 1))


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
    """One client."""

    population: Population  # Whose it is
    number: int  # Its number

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

    def rates(self) -> tuple[float, float]:
        """Bytes per second to it, and from it."""
        traffic = self.population.fleet.traffic
        return self._between(_DOWN, traffic.down), self._between(_UP, traffic.up)

    def lost_at(self, *when: int) -> float | None:
        """After which share of its work it falls silent; None where it does not."""
        # `when`: Number of the round, and whatever else distinguishes one try of it from another.
        seed, lost = self.population.fleet.seed, self.population.fleet.population.lost
        if not lost or uniform((seed, _LOST, *when), self.number) >= lost:
            return None
        return uniform((seed, _LOST_AT, *when), self.number)

    def label_shares(self) -> npt.NDArray[np.float64]:
        """Its share of each class; as in the data where the fleet has no label skew."""
        return self._labels(self._random())

    def samples(self) -> Indices:
        """Its samples, drawn with replacement from those to train on."""
        data, skew = self.population.data, self.population.fleet.population.data.dirichlet
        random = self._random()
        if skew is None:
            return data.train[random.integers(len(data.train), size=self.examples)]
        return np.concatenate([
            data.classes[label][random.integers(len(data.classes[label]), size=count)]
            for label, count in enumerate(random.multinomial(self.examples, self._labels(random)))
            if count
        ] or [np.empty(0, np.int64)])  # fmt: skip

    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self.population.fleet.seed, _LABELS, self.number])

    def _labels(self, random: np.random.Generator) -> npt.NDArray[np.float64]:
        classes = self.population.data.classes
        skew = self.population.fleet.population.data.dirichlet
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
    """All clients of a fleet."""

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
