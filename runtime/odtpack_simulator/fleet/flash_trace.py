"""Recorded states of devices, in the format of FLASH (Yang et al., WWW 2021).

``state_traces.json`` is an object with one entry per device: ``messages``, lines of a time, a
tab and a state. A device is idle while its screen is locked, charging after
``battery_charged_on``, and unmetered on ``wifi``. A trace that has ended begins anew.
"""

from __future__ import annotations

import bisect
import calendar
import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.fleet.availability import NS, Numbers
from odtpack_simulator.fleet.draws import uniforms
from odtpack_simulator.values.textfile import read_bounded

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

    def absences(self, clients: Numbers, now: int) -> dict[str, npt.NDArray[np.bool_]]:
        """See :class:`~odtpack_simulator.fleet.availability.Availability`."""
        of = self._devices(clients)
        used = np.unique(of)
        ready = np.zeros(len(self.devices), np.bool_)
        ready[used] = [
            self.devices[index].ready_until(now // NS) is not None for index in used.tolist()
        ]  # fmt: skip
        return {"not ready by its trace": ~ready[of]}

    def leaves(self, client: int, now: int, until: int) -> int | None:
        """See :class:`~odtpack_simulator.fleet.availability.Availability`."""
        device = self.devices[int(self._devices(np.array([client], np.int64))[0])]
        end = device.ready_until(now // NS)
        leaving = now if end is None else end * NS
        return leaving if leaving < until else None

    def _devices(self, clients: Numbers) -> Numbers:
        share = uniforms((self.seed, _DEVICE), clients)
        return (share * len(self.devices)).astype(np.int64)


def read_trace(path: str, requires: Collection[str], seed: int) -> FlashTrace:
    """Read a file of traces.

    Args:
        path: The file.
        requires: Conditions under which a device is ready.
        seed: Seed by which clients are given their device.

    Raises:
        OdtpackError: ``fleet-trace``: it is not one, or no device in it is ever ready; and as
            :func:`~odtpack_simulator.values.textfile.read_bounded`.
    """
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
    """A device from its messages; None of one that has less than two times.

    Raises:
        ValueError: A line is not a time, a tab and a state, or times go back.
    """
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
    return OdtpackError(
        "fleet-trace", f"the trace of states is wrong: {problem}", where=path
    )  # fmt: skip
