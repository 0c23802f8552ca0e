"""What a round costs on each model of device: memory, time and power, carried from this machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, Literal

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.campaign.campaign import device_times, watts_above_idle
from odtpack_simulator.campaign.virtual_clock import NEVER, DeviceTimes, Session, play_session
from odtpack_simulator.device.profile import AppState, DeviceProfile
from odtpack_simulator.measure.host import BUSY
from odtpack_simulator.result.result import Bytes, DeviceLatency, NonNegative
from odtpack_simulator.values.figure import Text
from odtpack_simulator.values.part import Part

Scenario = Literal["fast", "typical", "slow"]
_SCENARIOS: Final[tuple[Scenario, ...]] = ("fast", "typical", "slow")


class FleetDevice(Part):
    """A model of device in a fleet. Times are nanoseconds; null is unknown, or without end.

    Attributes:
        name: Name of its profile.
        title: Its name for people.
        share: Its share of the population.
        validated: Whether the profile's times were compared with the device.
        peak_bytes: Peak of the training there; null for an ideal device.
        limit_bytes: What the device leaves a training, beside the app and ONNX Runtime's library;
            null if unknown: then nothing is too much.
        creation: Creating the sessions.
        load: Reading a checkpoint.
        first_step: The first step of a session.
        step: Every other step, before the device throttles.
        save: Writing a checkpoint.
        window: Longest session that the system grants; null for no end.
        throttle_after: Load until the device throttles; null for never.
        sustained: Share of the rate that is left then.
        watts: Power of the training beyond rest; null if unknown.
        battery_j: Energy of a full battery; null if unknown.
    """

    name: Text
    title: Text
    share: NonNegative = 1.0
    validated: bool = True
    peak_bytes: Bytes | None = None
    limit_bytes: Bytes | None = None
    creation: int = 0
    load: int = 0
    first_step: int = 0
    step: int = 0
    save: int = 0
    window: int | None = None
    throttle_after: int | None = None
    sustained: float = 1.0
    watts: NonNegative | None = None
    battery_j: NonNegative | None = None

    @property
    def fits(self) -> bool:
        """Whether the training fits into the device's memory, as far as that is known."""
        return (
            self.limit_bytes is None
            or self.peak_bytes is None
            or self.peak_bytes <= self.limit_bytes
        )

    @property
    def ideal(self) -> bool:
        """Whether it takes no time."""
        return self.step == 0

    def session(self, steps: int) -> Session:
        """What a session that makes so many steps does."""
        if self.ideal:
            return Session(made=steps, kept=steps, writes=0, duration=0, throttled=0)
        return _session(self, steps)


@functools.lru_cache(maxsize=65_536)
def _session(device: FleetDevice, steps: int) -> Session:
    pace = DeviceTimes(
        device.creation,
        device.load,
        device.first_step,
        device.step,
        device.save,
        NEVER if device.window is None else device.window,
        NEVER if device.throttle_after is None else device.throttle_after,
        Fraction(device.sustained).limit_denominator(10**6),
    )
    return play_session(pace, steps, None)


_WAIT: Final = (
    "run it again when the machine has less to do, or with --times and a result of odtpack simulate"
)

IDEAL: Final = FleetDevice(name="ideal", title="Ideal device")
"""Takes no time and has memory for everything."""


def carried_device(
    profile: DeviceProfile,
    latency: DeviceLatency,
    peak_bytes: int,
    others_bytes: int,
    *,
    share: float,
    state: AppState,
    times: Scenario,
) -> FleetDevice:
    """A model of device from what a simulation says about it.

    Args:
        profile: The device.
        latency: Times carried to it.
        peak_bytes: Peak of the training.
        others_bytes: What the app's process holds besides the training.
        share: Its share of the population.
        state: Where the app trains.
        times: Which end of the intervals to take.

    Raises:
        OdtpackError: ``fleet-device``: the profile lacks what the times of a step, or of a
            window in the background, follow from.
    """
    paces = device_times(profile, latency, state)
    if isinstance(paces, str):
        raise OdtpackError(
            "fleet-device",
            f"{profile.name} cannot be part of a fleet: {paces}.",
            where=profile.name,
            hint=_WAIT if BUSY in paces else None,
        )
    which, granted = _SCENARIOS.index(times), profile.memory_limit_bytes(state)
    pace = paces[which]
    watts, battery = watts_above_idle(profile), profile.battery_joules()
    return FleetDevice(
        name=profile.name,
        title=profile.title,
        share=share,
        validated=profile.validated,
        peak_bytes=peak_bytes,
        limit_bytes=None if granted is None else max(0, granted - others_bytes),
        creation=pace.creation,
        load=pace.load,
        first_step=pace.first_step,
        step=pace.step,
        save=pace.save,
        window=None if pace.window >= NEVER else pace.window,
        throttle_after=None if pace.throttle_after >= NEVER else pace.throttle_after,
        sustained=float(pace.sustained),
        watts=None if watts is None else watts[which],
        battery_j=None if battery is None else battery.typical,
    )


def unmeasured(devices: Sequence[FleetDevice]) -> list[str]:
    """What the devices' profiles leave out, in words for people."""
    said = []
    for what, names in (
        ("memory limit", [d.title for d in devices if d.limit_bytes is None and not d.ideal]),
        ("power under load", [d.title for d in devices if d.watts is None and not d.ideal]),
    ):
        if names:
            said.append(f"the {what} of {', '.join(names)} is unknown")
    return said
