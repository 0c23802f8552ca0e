"""The costs of a round on each model of device: measured here and carried, or from a result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import scratch_folder
from odtpack_runtime.package.package import Package
from odtpack_simulator.device.kits import RUNTIME_LIBRARY_BYTES, default_footprint, kit_of
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.fleet.dataset import FleetData
from odtpack_simulator.fleet.devices import FleetDevice, carried_device
from odtpack_simulator.fleet.fleet_file import FleetFile
from odtpack_simulator.latency.latency import carry, measure_host
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_phases import MARGIN
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.job import make_sample_plan
from odtpack_simulator.replay.replay import (
    OnMessage,
    choose_rate,
    make_job,
    with_sessions,
    write_data,
)
from odtpack_simulator.result.result import SimulationResult

OnStage = Callable[[str], None]
"""Called with what is being done, in words for people."""


def measure_devices(
    package: Package,
    data: FleetData,
    fleet: FleetFile,
    batch_size: int,
    *,
    on_stage: OnStage = lambda stage: None,
    on_message: OnMessage | None = None,
) -> list[FleetDevice]:
    """Plan the memory of a client's training, time its steps here, and carry them to each model.

    Args:
        package: What is trained.
        data: Samples to time steps on.
        fleet: The models of device.
        batch_size: Samples of the largest batch of any client.
        on_stage: Called as it goes on.
        on_message: Called with the messages of the timing process.

    Raises:
        OdtpackError: A profile cannot be read or lacks what times follow from; a model of the
            package does not load, or the timing fails.
    """
    if not fleet.population.devices:
        return []
    profiles = [load_profile(device.profile) for device in fleet.population.devices]
    samples = len(next(iter(data.arrays.values())))
    plan = make_sample_plan(
        package.manifest.input_specs(),
        samples,
        batch_size=batch_size,
        epochs=1,
        seed=fleet.seed,
        accumulation_steps=package.manifest.accumulation_steps,
    )
    shapes = {name: (plan.largest_batch, *a.shape[1:]) for name, a in data.arrays.items()}
    on_stage("predict the memory")
    uses = {p.os: session_use(package.manifest, kit_of(p.os)) for p in profiles}
    peaks = {
        each: int(plan_memory(package, shapes, **each._asdict()).peak.nbytes * (1 + MARGIN))
        for each in dict.fromkeys(uses.values())
    }
    on_stage("time the operators")
    with scratch_folder("fleet") as folder:
        files = write_data(data.arrays, Path(folder))
        rate = choose_rate(package.manifest, fleet.training.learning_rate, plan.steps)
        job = make_job(package, files, plan, rate, 1, Path(folder))
        timings = {
            use.step_model: measure_host(
                dataclasses.replace(with_sessions(job, package, use), task="time"),
                on_message=on_message,
            )
            for use in {use.step_model: use for use in uses.values()}.values()
        }
    return [
        carried_device(
            profile,
            carry(timings[uses[profile.os].step_model], profile),
            peaks[uses[profile.os]],
            default_footprint(profile).nbytes + RUNTIME_LIBRARY_BYTES,
            share=device.share,
            state=fleet.population.state,
            times=fleet.population.times,
        )
        for profile, device in zip(profiles, fleet.population.devices, strict=True)
    ]


def devices_of_result(
    package: Package, result: SimulationResult, fleet: FleetFile, batch_size: int
) -> list[FleetDevice]:
    """The same from what ``odtpack simulate`` measured before, of this package and batch.

    Raises:
        OdtpackError: ``fleet-times``: the result is of another package or batch, or lacks one of
            the fleet's devices as it is now.
    """
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
    for wanted in fleet.population.devices:
        profile = load_profile(wanted.profile)
        known = found.get(profile.name)
        if known is None or known.profile_digest != profile.digest:
            raise OdtpackError(
                "fleet-times", f"The result holds nothing of {profile.name} as its profile is now."
            )
        devices.append(
            carried_device(
                profile,
                known.latency,
                known.memory.peak_bytes,
                known.memory.others_bytes,
                share=wanted.share,
                state=fleet.population.state,
                times=fleet.population.times,
            )
        )
    return devices
