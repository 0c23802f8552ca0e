"""Make the result of a federation from its last state."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.devices import FleetDevice, unmeasured
from odtpack_simulator.fleet.fleet_file import FleetFile
from odtpack_simulator.fleet.local_training import LocalSettings, ModelEvaluation
from odtpack_simulator.fleet.population import NS, FleetData, Population
from odtpack_simulator.fleet.result import (
    DeviceOutcome,
    Fairness,
    FleetPackage,
    FleetPlan,
    FleetResult,
    PerDevice,
)
from odtpack_simulator.fleet.round_clock import ANSWERED, ENDS
from odtpack_simulator.fleet.state import FleetState, StateRecord, Visits
from odtpack_simulator.host_result import tool_version
from odtpack_simulator.result.result import find_origin
from odtpack_simulator.values.paths import shown_path

_FAIRNESS_CLIENTS: Final = 1000


class Simulated(Protocol):
    """What a result needs to know of its federation."""

    package: Package
    given: str
    fleet: FleetFile
    data: FleetData
    population: Population
    settings: LocalSettings
    initial: dict[str, Array]
    devices: list[FleetDevice]
    payload: int


def summarize(federation: Simulated, state: FleetState) -> FleetResult:
    """The result of the rounds that a state holds, not judged."""
    record, visits = state.record, state.all_visits()
    manifest = federation.package.manifest
    outcomes = [_outcome(federation, index, visits) for index in range(len(federation.devices))]
    chosen = np.unique(visits["client"])
    averaged = visits["end"] == ENDS.index("averaged")
    unknown = unmeasured(federation.devices)
    if federation.fleet.traffic.radio_power is None and not all(
        d.ideal for d in federation.devices
    ):
        unknown.append("energy is that of the training: traffic.radio_power is not given")
    return FleetResult(
        tool_version=tool_version(),
        origin=find_origin(federation.package.path),
        package=FleetPackage(
            path=shown_path(Path(federation.given)),
            manifest_sha256=federation.package.manifest_sha256,
            loss=manifest.loss,
            optimizer=manifest.optimizer.kind,
            crossing_parameters=sum(array.size for array in federation.initial.values()),
            payload_bytes=federation.payload,
        ),
        plan=_plan(federation),
        loss_before=record.loss_before,
        accuracy_before=record.accuracy_before,
        rounds=record.rounds,
        devices=outcomes,
        took_part=len(np.unique(visits["client"][averaged])),
        chosen=len(chosen),
        traffic_bytes=_per_device(visits, "bytes") or PerDevice(mean=0, most=0),
        energy_j=_per_device(visits, "energy"),
        fairness=_fairness(federation, record),
        unknown=unknown,
    )


def _plan(federation: Simulated) -> FleetPlan:
    fleet = federation.fleet
    return FleetPlan(
        digest=fleet.digest,
        data_digest=federation.data.digest,
        seed=fleet.seed,
        clients=fleet.population.clients,
        per_round=fleet.federation.clients,
        buffer=fleet.federation.buffer,
        most_staleness=None
        if fleet.federation.buffer is None
        else fleet.federation.staleness_limit,
        over_selection=fleet.federation.over_selection,
        minimum=fleet.federation.minimum,
        deadline_s=fleet.federation.deadline,
        rounds=fleet.federation.rounds,
        days=fleet.federation.days,
        state=fleet.population.state,
        requires=list(fleet.population.requires),
        times=fleet.population.times,
        batch_size=federation.settings.batch_size,
        epochs=federation.settings.epochs,
        learning_rate=federation.settings.learning_rate,
        proximal=federation.settings.proximal,
        train_samples=len(federation.data.train),
        held_out_samples=len(federation.data.held_out),
    )


def _outcome(federation: Simulated, index: int, visits: Visits) -> DeviceOutcome:
    own = visits[visits["model"] == index]
    total = sum(device.share for device in federation.devices)
    device = federation.devices[index]
    counts = np.bincount(own["end"], minlength=len(ENDS))
    answered = np.isin(own["end"], [ENDS.index(end) for end in ENDS if end in ANSWERED])
    quantiles = None
    if answered.any():
        seconds = np.quantile(own["at"][answered] / NS, (0.1, 0.5, 0.9))
        quantiles = (float(seconds[0]), float(seconds[1]), float(seconds[2]))
    energy = float(own["energy"].sum())
    return DeviceOutcome(
        device=device,
        clients=round(len(federation.population) * device.share / total),
        took_part=len(np.unique(own["client"][own["end"] == ENDS.index("averaged")])),
        ends={end: int(counts[i]) for i, end in enumerate(ENDS) if counts[i]},
        energy_j=None if np.isnan(energy) else energy,
        traffic_bytes=int(own["bytes"].sum()),
        round_s=quantiles,
    )


def _fairness(federation: Simulated, record: StateRecord) -> Fairness | None:
    """By the last model's accuracy for each class, and the clients' shares of them."""
    found = ModelEvaluation(0.0, tuple(record.class_right), tuple(record.class_total))
    if found.accuracy is None or not federation.data.classes:
        return None
    by_class = found.class_accuracy()[: len(federation.data.classes)]
    known = ~np.isnan(by_class)
    accuracies = []
    for client in federation.population.sample(_FAIRNESS_CLIENTS):
        shares = client.label_shares()[known]
        if shares.sum() > 0:
            accuracies.append(float(shares @ by_class[known] / shares.sum()))
    if not accuracies:
        return None
    ordered = np.sort(accuracies)
    tenth = max(1, len(ordered) // 10)
    return Fairness(
        clients=len(ordered),
        mean=float(ordered.mean()),
        worst_tenth=float(ordered[:tenth].mean()),
        deciles=np.quantile(ordered, np.linspace(0, 1, 11)).tolist(),
    )


def _per_device(visits: Visits, column: str) -> PerDevice | None:
    """Mean and most over the chosen clients for which it is known; None where there are none."""
    _, places = np.unique(visits["client"], return_inverse=True)
    totals = np.bincount(places, weights=visits[column].astype(np.float64))
    totals = totals[~np.isnan(totals)]
    if not len(totals):
        return None
    return PerDevice(mean=float(totals.mean()), most=float(totals.max()))
