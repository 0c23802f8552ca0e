"""Models of device in a fleet, and what a round costs on each."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Final

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_simulator.campaign import (
    NEVER,
    DeviceTimes,
    Session,
    device_times,
    left_out,
    play_session,
    watts_above_idle,
)
from odtpack_simulator.device.app import default_footprint, memory_fit, runtime_bytes
from odtpack_simulator.device.kits import Loop, kit_of
from odtpack_simulator.device.profile import DeviceProfile, load_profile
from odtpack_simulator.fleet.fleet_file import FleetFile, PopulationTable
from odtpack_simulator.fleet.population import FleetData
from odtpack_simulator.latency import carry, measure_sessions
from odtpack_simulator.measure.host import BUSY
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.job import make_sample_plan
from odtpack_simulator.replay.replay import choose_rate, make_job, write_data
from odtpack_simulator.result import (
    Bytes,
    DeviceLatency,
    HostLatency,
    NonNegative,
    SimulationResult,
)
from odtpack_simulator.values.figure import Text, without
from odtpack_simulator.values.part import Part

_SCENARIOS: Final = ("fast", "typical", "slow")


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
        left_out: What its times and energy do not count because its profile does not know it.
        disturbed: What else ran when its times were measured, too much to judge by them; null
            for nothing.
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
    left_out: tuple[Text, ...] = ()
    disturbed: Text | None = None

    @property
    def fits(self) -> bool:
        """Whether the training fits into the device's memory, as far as that is known."""
        return (
            self.limit_bytes is None
            or self.peak_bytes is None
            or memory_fit(self.peak_bytes, self.limit_bytes) == "fits"
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
    times = {name: getattr(device, name) for name in DeviceTimes.__slots__}
    times |= {name: NEVER for name, value in times.items() if value is None}
    times["sustained"] = Fraction(device.sustained).limit_denominator(10**6)
    return play_session(DeviceTimes(**times), steps, None)


_MOST_SPREAD: Final = 1.25
"""Between which factors the host's typical step must be known, for times to be judged by."""


def _disturbed(host: HostLatency, note: str = "") -> str | None:
    """Why the times of a fleet cannot be judged; None where they can."""
    if host.busy is not None:
        return host.busy
    spread = host.p50_ms.high / max(host.p50_ms.low, 1e-9)
    if spread <= _MOST_SPREAD:
        return None
    return f"steps here are only known within a factor of {spread:.2g}{note and f': {note}'}"


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
    share: float,
    population: PopulationTable,
    disturbed: str | None,
) -> FleetDevice:
    """A model of device from what a simulation says about it."""
    state = population.state
    paces = device_times(profile, latency, state)
    if isinstance(paces, str):
        raise OdtpackError(
            "fleet-device",
            f"{profile.name} cannot be part of a fleet: {paces}.",
            where=profile.name,
            hint=_WAIT if BUSY in paces else None,
        )
    which, granted = _SCENARIOS.index(population.times), profile.memory_limit_bytes(state)
    times = asdict(paces[which])
    times |= {name: None for name, value in times.items() if value >= NEVER}
    times["sustained"] = float(times["sustained"])
    watts, battery = watts_above_idle(profile), profile.battery_joules()
    return FleetDevice(
        name=profile.name,
        title=profile.title,
        share=share,
        validated=profile.validated,
        peak_bytes=peak_bytes,
        limit_bytes=None if granted is None else max(0, granted - others_bytes),
        **times,
        watts=None if watts is None else watts[which],
        battery_j=None if battery is None else battery.typical,
        left_out=tuple(each.figure for each in left_out(profile, latency)),
        disturbed=disturbed,
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
    for each in dict.fromkeys(d.left_out for d in devices if d.left_out):
        names = [d.title for d in devices if d.left_out == each]
        what = "energy" if each == ("power.idle",) else "times and energy"
        said.append(f"the {what} of {', '.join(names)}: {without(each)}")
    return said


def _profiles(fleet: FleetFile) -> list[DeviceProfile]:
    """The profiles of a fleet's devices, each only once: results are told apart by their names."""
    found = [load_profile(device.profile) for device in fleet.population.devices]
    (name, count), *_ = Counter(profile.name for profile in found).most_common(1) or [("", 0)]
    if count > 1:
        raise OdtpackError(
            "fleet-invalid",
            f"The population has {name} {count} times.",
            hint="give one [[population.device]] the share of all",
        )
    return found


OnStage = Callable[[str], None]  # Called with what is being done, in words for people


def measure_devices(
    package: Package,
    data: FleetData,
    fleet: FleetFile,
    batch_size: int,  # Samples of the largest batch of any client
    *,
    on_stage: OnStage = lambda stage: None,
) -> list[FleetDevice]:
    """Plan the memory of a client's training, time its steps here, and carry them to each model."""
    if not fleet.population.devices:
        return []
    profiles = _profiles(fleet)
    plan = make_sample_plan(
        package.manifest.input_specs(),
        len(next(iter(data.arrays.values()))),
        batch_size=batch_size,
        epochs=1,
        seed=fleet.seed,
        accumulation_steps=package.manifest.accumulation_steps,
    )
    shapes = {name: (plan.largest_batch, *a.shape[1:]) for name, a in data.arrays.items()}
    on_stage("predict the memory")
    loop: Loop = "train" if fleet.training.proximal else "step"  # FedProx changes gradients
    uses = {p.os: session_use(package.manifest, kit_of(p.os), loop) for p in profiles}
    peaks = {
        each: plan_memory(
            package,
            shapes,
            each,
            evaluated=plan.evaluated_samples,
            samples=fleet.population.data.samples,  # of the clients with the fewest and the most
        )
        .bounded()
        .peak.nbytes
        for each in dict.fromkeys(uses.values())
    }
    on_stage("time the operators")
    with scratch_folder("fleet") as folder:
        files = write_data(data.arrays, Path(folder))
        threads = package.manifest.threads
        rate = choose_rate(package.manifest, fleet.training.learning_rate, plan.steps)
        job = make_job(package, files, plan, rate, threads, Path(folder))
        timings = measure_sessions(job, package, uses.values())
    found = []
    for profile, device in zip(profiles, fleet.population.devices, strict=True):
        use = uses[profile.os]
        host, peak = timings[use.work], peaks[use]
        latency = carry(host.quiet(), profile, threads)
        others = default_footprint(profile).nbytes
        others += runtime_bytes(kit_of(profile.os), profile.os, peak)
        disturbed = _disturbed(host.host_latency(), host.steady.note)
        found.append(
            carried_device(
                profile, latency, peak, others, device.share, fleet.population, disturbed
            )
        )
    return found


def devices_of_result(
    package: Package, result: SimulationResult, fleet: FleetFile, batch_size: int
) -> list[FleetDevice]:
    """The same from what ``odtpack simulate`` measured before, of this package and batch."""
    if result.package.manifest_sha256 != package.manifest_sha256:
        raise OdtpackError("fleet-times", "The result is of another package.")
    if result.data.batch_size != batch_size:
        raise OdtpackError(
            "fleet-times",
            f"The result is of batches of {result.data.batch_size} samples, not of the fleet's "
            f"{batch_size}.",
        )
    found = {device.name: device for device in result.devices}
    devices = []
    for profile, wanted in zip(_profiles(fleet), fleet.population.devices, strict=True):
        known = found.get(profile.name)
        if known is None or known.profile_digest != profile.digest:
            raise OdtpackError(
                "fleet-times", f"The result has no times for the current profile of {profile.name}."
            )
        if fleet.training.proximal and known.memory.loop == "step":
            raise OdtpackError(
                "fleet-times",
                "The result is of steps of the step model, and FedProx (training.proximal) changes "
                "gradients, which that does not give.",
                hint="simulate with --loop train",
            )
        if known.memory.has_no_bound:
            raise OdtpackError(
                "memory-not-planned",
                "The result plans a Loop of which nothing says how much it keeps, and has no "
                f"measured peak for {profile.name}.",
            )
        devices.append(
            carried_device(
                profile,
                known.latency,
                known.memory.peak_bytes,
                known.memory.others_bytes,
                wanted.share,
                fleet.population,
                _disturbed(result.latency_host),
            )
        )
    return devices
