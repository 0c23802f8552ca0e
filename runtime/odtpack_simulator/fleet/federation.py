"""Simulate a federation: rounds on the virtual clock, in which the clients really train."""

import hashlib
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write, file_sha256
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.devices import IDEAL, FleetDevice, unmeasured
from odtpack_simulator.fleet.fleet_file import FleetFile
from odtpack_simulator.fleet.local_training import (
    Arrays,
    ClientPool,
    Group,
    LocalSettings,
    LocalTrainer,
    ModelEvaluation,
    mismatch,
)
from odtpack_simulator.fleet.population import (
    NS,
    FleetData,
    Population,
    load_fleet_data,
    make_availability,
)
from odtpack_simulator.fleet.result import (
    DeviceOutcome,
    Fairness,
    FleetPackage,
    FleetPlan,
    FleetResult,
    PerDevice,
    RoundRecord,
)
from odtpack_simulator.fleet.round_clock import (
    ANSWERED,
    ENDS,
    BufferedClock,
    Flight,
    PlayedRound,
    RoundClock,
    Visit,
)
from odtpack_simulator.fleet.updates import (
    ServerOptimizer,
    capped,
    discounted,
    refusals,
    weighted_mean,
)
from odtpack_simulator.replay.executor import Executor, LocalExecutor
from odtpack_simulator.replay.paired_loss import finer_groups, held_out_fall, pooled
from odtpack_simulator.result import Count, HeldOutFall, Loss, find_origin, tool_version
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.text import shown_path

# Where a federation stands after a round, in one file, from which it goes on.

VISIT: Final = np.dtype(
    [
        ("client", np.int64),
        ("model", np.int32),
        ("end", np.int32),
        ("at", np.int64),
        ("energy", np.float64),
        ("bytes", np.int64),
    ]
)
"""A chosen client in a round: what a result counts. An unknown energy is NaN."""

Visits = npt.NDArray[Any]
_CURRENT: Final = ""
_SERVER: Final = "server"
"""What an array of the file is part of; those of an earlier model have its number of rounds."""
MAX_STATE_BYTES: Final = 8 * 2**30


class StateRecord(Part):
    """The state but its arrays. ``run`` is the digest of everything that the federation is of."""

    run: str = Field(pattern="^[0-9a-f]{64}$")
    now: Count
    loss_before: Loss
    accuracy_before: float | None
    devices: list[FleetDevice]
    rounds: list[RoundRecord]
    flights: list[Flight] = Field(default_factory=list)
    class_right: list[Count] = Field(default_factory=list)
    class_total: list[Count] = Field(default_factory=list)


@dataclass
class FleetState:
    """Where a federation stands."""

    record: StateRecord  # What is not an array; `rounds` are those that are over
    arrays: Arrays  # The parameters
    server: Arrays = field(default_factory=dict)  # The state of the server's optimizer
    visits: list[Visits] = field(default_factory=list)  # Of all rounds so far
    # The parameters that clients at work began with, by the number of rounds that made them; not
    # those that are too old to count.
    models: dict[int, Arrays] = field(default_factory=dict)

    def all_visits(self) -> Visits:
        """The visits of all rounds."""
        return np.concatenate([np.empty(0, VISIT), *self.visits])

    def save(self, path: Path) -> None:
        """Write the state whole or not at all."""
        record = np.frombuffer(self.record.model_dump_json().encode(), np.uint8)
        parts = {_CURRENT: self.arrays, _SERVER: self.server}
        parts |= {str(number): arrays for number, arrays in self.models.items()}
        rows = [(part, name) for part, arrays in parts.items() for name in arrays]
        with atomic_write(path) as stream:
            np.savez(
                stream,
                allow_pickle=False,
                record=record,
                parts=np.array([part for part, _ in rows], np.str_),
                names=np.array([name for _, name in rows], np.str_),
                visits=self.all_visits(),
                **{f"array{index}": parts[part][name] for index, (part, name) in enumerate(rows)},
            )

    @classmethod
    def load(cls, path: Path, run: str, initial: Arrays, server: Arrays, fleet: FleetFile) -> Self:
        """Read a state."""
        if not path.is_file():
            raise _wrong(path, "there is none")
        if path.stat().st_size > MAX_STATE_BYTES:
            raise _wrong(path, f"it is larger than {MAX_STATE_BYTES} bytes")
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                entries = [] if file.zip is None else file.zip.infolist()
                if sum(entry.file_size for entry in entries) > MAX_STATE_BYTES:
                    raise ValueError(f"it unpacks to more than {MAX_STATE_BYTES} bytes")
                record = StateRecord.model_validate_json(file["record"].tobytes())
                parts: dict[str, Arrays] = {_CURRENT: {}, _SERVER: {}}
                places = zip(file["parts"], file["names"], strict=True)
                for index, (part, name) in enumerate(places):
                    parts.setdefault(str(part), {})[str(name)] = file[f"array{index}"]
                arrays, kept = parts.pop(_CURRENT), parts.pop(_SERVER)
                models = {int(part): own for part, own in parts.items()}
                visits = file["visits"]
        except Exception as error:  # what a broken archive makes zip, zlib and numpy raise
            detail = "its record is wrong" if isinstance(error, ValidationError) else str(error)
            raise _wrong(path, f"it cannot be read: {detail[:200]}") from error
        if record.run != run:
            raise _wrong(path, "it is that of another package, data or fleet file")
        pairs = ((initial, arrays), (server, kept), *((initial, each) for each in models.values()))
        if problem := next(filter(None, itertools.starmap(mismatch, pairs)), None):
            raise _wrong(path, problem)
        for version in dict.fromkeys(flight.version for flight in record.flights):
            age = len(record.rounds) - version
            if age < 1 or (age <= fleet.federation.staleness_limit and version not in models):
                raise _wrong(path, f"it lacks the model after round {version}")
        clients, now = fleet.population.clients, record.now
        if any(flight.client >= clients or flight.start > now for flight in record.flights):
            raise _wrong(path, "clients are at work that do not exist, or have not begun")
        if visits.dtype != VISIT or visits.ndim != 1:
            raise _wrong(path, "it has no visits")
        for column, most in (("model", len(record.devices)), ("end", len(ENDS))):
            if not ((visits[column] >= 0) & (visits[column] < most)).all():
                raise _wrong(path, "its visits name devices or ends that do not exist")
        return cls(record, arrays, kept, [visits], models)


def visit_rows(visits: Sequence[Visit]) -> Visits:
    """The visits of a round as rows."""
    rows = np.empty(len(visits), VISIT)
    for index, visit in enumerate(visits):
        energy = np.nan if visit.energy_j is None else visit.energy_j
        end = ENDS.index(visit.end)
        rows[index] = (visit.client, visit.model, end, visit.at, energy, visit.moved_bytes)
    return rows


def _wrong(path: Path, problem: str) -> OdtpackError:
    return OdtpackError(
        "fleet-state", f"The federation cannot continue from its state: {problem}.", where=str(path)
    )


_EVALUATION_BATCH: Final = 256
_MOST_REFUSALS: Final = 20  # Reasons of refusal that a round's record keeps; the ends count all


@dataclass(frozen=True, slots=True)
class FleetProgress:
    """How far a federation is: the round, and of its clients how many have trained."""

    round_number: int
    rounds: int
    day: float
    trained: int
    clients: int
    accuracy: float | None


OnFleetProgress = Callable[[FleetProgress], None]


class Federation:
    """A federation of a package's clients."""

    # `data`: `.npz` file that the clients' samples are drawn from; a fifth is held out.
    # `devices`: The models of device, in the order of the fleet file; ideal ones without any.

    def __init__(
        self,
        package: str | os.PathLike[str],
        data: str | os.PathLike[str],
        fleet: FleetFile,
        devices: Sequence[FleetDevice] = (),
    ) -> None:
        self.package = Package.open(package)
        self.package.require_stock()
        self.package.require_one_model("A fleet")
        self.given = os.fspath(package)
        self.fleet = fleet
        self.data: FleetData = load_fleet_data(self.package, data, fleet.seed)
        self.population = Population(fleet, self.data)
        self.trainer = LocalTrainer(self.package)
        training = fleet.training
        self.settings = LocalSettings(
            self.trainer.fixed_batch or training.batch_size,
            training.epochs,
            training.learning_rate,
            fleet.seed,
            training.proximal,
        )
        self.initial = self.trainer.initial()
        self.server = ServerOptimizer.of(fleet.federation, self.trainer.trainable)
        self.devices = list(devices) or [IDEAL] * max(1, len(fleet.population.devices))
        self.payload = sum(array.nbytes for array in self.initial.values())

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch of any client."""
        most = self.fleet.population.data.samples[1]
        return self.trainer.fixed_batch or max(1, min(self.settings.batch_size, most))

    @property
    def run(self) -> str:
        """Digest of everything that the result follows from, but the costs on devices."""
        parts = [self.package.manifest_sha256, self.fleet.digest, self.data.digest]
        trace = self.fleet.population.availability.trace
        if trace is not None:
            parts.append(file_sha256(Path(trace)))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def simulate(
        self,
        *,
        executor: Executor | None = None,  # Trains clients; by default in this process
        state_path: Path | None = None,  # Where to write the state after every round
        resume: bool = False,  # Go on from the state there, on the devices that it began with
        until: int | None = None,  # Stop after this round
        progress: OnFleetProgress | None = None,  # Called as clients finish and rounds end
    ) -> tuple[FleetResult, FleetState]:
        """Run all rounds; the result, not judged, and the state after the last round."""
        # The result is a function of the package, the data, the fleet file and the devices,
        # whatever the number of processes and however often it was stopped and resumed.
        if resume and state_path is not None:
            state = FleetState.load(
                state_path, self.run, self.initial, self.server.begin(self.initial), self.fleet
            )
            if len(state.record.devices) != len(self.devices):
                raise _wrong(state_path, "the devices differ")
            self.devices = list(state.record.devices)
        else:
            before = self._evaluate(self.initial)
            record = StateRecord(
                run=self.run,
                now=0,
                loss_before=before.loss,
                accuracy_before=before.accuracy,
                devices=self.devices,
                rounds=[],
                **before.by_class(),
            )
            arrays = {name: array.copy() for name, array in self.initial.items()}
            state = FleetState(record, arrays, self.server.begin(arrays))
        federation = self.fleet.federation
        clock = (RoundClock if federation.buffer is None else BufferedClock)(
            self.population,
            self.devices,
            make_availability(self.fleet),
            lambda examples: self.trainer.steps(examples, self.settings),
            self.payload,
        )
        where = executor or LocalExecutor()
        data, settings = self.data.arrays, self.settings
        with ClientPool(self.trainer, self.package, data, settings, where) as pool:
            while len(state.record.rounds) < min(until or federation.rounds, federation.rounds):
                number = len(state.record.rounds) + 1
                played = clock.play(number, state.record.now, state.record.flights)
                if played is None:
                    break
                self._round(number, played, pool, state, progress)
                if state_path is not None:
                    state.save(state_path)
        rounds = state.record.rounds
        if rounds and not federation.evaluated(rounds[-1].number):
            found = self._evaluate(state.arrays)
            last = RoundRecord.model_validate({**rounds[-1].model_dump(), **found.figures()})
            changes = {"rounds": [*rounds[:-1], last], **found.by_class()}
            state.record = state.record.model_copy(update=changes)
        if state_path is not None and until is None:
            state.save(state_path)
        return _summarize(self, state), state

    def save_checkpoint(self, state: FleetState, path: Path) -> None:
        """Write a checkpoint of the package with the parameters that the rounds came to."""
        fresh = CheckpointState.load_checkpoint(self.package.checkpoint)
        for name, array in state.arrays.items():
            fresh.parameters[name].data = array
        CheckpointState.save_checkpoint(fresh, path)

    def _round(
        self,
        number: int,
        played: PlayedRound,
        pool: ClientPool,
        state: FleetState,
        progress: OnFleetProgress | None,
    ) -> None:
        federation = self.fleet.federation
        accuracy = next(
            (r.accuracy for r in reversed(state.record.rounds) if r.accuracy is not None),
            state.record.accuracy_before,
        )
        day = played.start / NS / 86_400

        def report(trained: int, of: int) -> None:
            if progress is not None:
                progress(FleetProgress(number, federation.rounds, day, trained, of, accuracy))

        answers = played.averaged
        report(0, len(answers))
        models = {**state.models, number - 1: state.arrays}
        trained = pool.train(_groups(self.population, number, answers, models), report)
        updates = [
            replace(
                update,
                arrays=discounted(
                    update.arrays,
                    models[number - 1 - visit.staleness],
                    state.arrays,
                    visit.staleness,
                    self.trainer.trainable,
                ),
            )
            for visit, update in zip(answers, trained, strict=True)
        ]
        # A private client steps by its noise alone where no sample was drawn or none is finite.
        lost = [
            bool(update.steps) and not self.trainer.private and not math.isfinite(update.loss)
            for update in updates
        ]
        reasons = refusals(
            state.arrays,
            [update.arrays for update in updates],
            federation.most_times_median,
            trainable=self.trainer.trainable,
            known=["no batch of it has a finite loss" if each else None for each in lost],
        )
        kept = [update for update, reason in zip(updates, reasons, strict=True) if reason is None]
        refused = {
            visit.client: f"client {visit.client}: {reason}"
            for visit, reason in zip(answers, reasons, strict=True)
            if reason is not None
        }
        if kept:
            mean = weighted_mean(
                [update.arrays for update in kept], capped([update.examples for update in kept])
            )
            state.arrays, state.server = self.server.step(state.arrays, mean, state.server, number)
        rows = visit_rows(played.visits)
        for index, visit in enumerate(played.visits):
            if visit.end == "averaged" and visit.client in refused:
                rows["end"][index] = ENDS.index("refused")
        state.visits.append(rows)
        evaluated = self._evaluate(state.arrays) if federation.evaluated(number) else None
        every = 0 if federation.every is None else int(federation.every * NS)
        told = [update for update in kept if update.examples and math.isfinite(update.loss)]
        record = RoundRecord(
            number=number,
            start_s=played.start / NS,
            duration_s=played.duration / NS,
            looked_at=played.looked_at,
            absent=played.absent,
            ends=_ends(rows),
            training_loss=sum(u.loss * u.examples for u in told) / sum(u.examples for u in told)
            if told
            else None,
            refused=list(refused.values())[:_MOST_REFUSALS],
            staleness=[]
            if federation.buffer is None
            else np.bincount([v.staleness for v in answers if v.client not in refused]).tolist(),
            **({"evaluated": False} if evaluated is None else evaluated.figures()),
        )
        needed = {flight.version for flight in played.flights}
        oldest = number - federation.staleness_limit
        state.models = {v: models[v] for v in sorted(needed) if v >= oldest}
        changes: dict[str, object] = {
            "now": played.start + max(every, played.duration),
            "rounds": [*state.record.rounds, record],
            "flights": list(played.flights),
        }
        if evaluated is not None:
            changes |= evaluated.by_class()
        state.record = state.record.model_copy(update=changes)

    def _evaluate(self, arrays: Arrays, batch: int = _EVALUATION_BATCH) -> ModelEvaluation:
        return self.trainer.evaluate(arrays, self.data.arrays, self.data.held_out, batch)

    def fall(self, arrays: Arrays) -> HeldOutFall | None:
        """By how much the held-out loss of parameters is below that of the package's."""
        found = []
        for each in (self.initial, arrays):
            whole = self._evaluate(each, self.settings.batch_size)
            if not whole.sizes:  # fewer than a fixed batch
                return None

            def small(size: int, each: Arrays = each) -> tuple[Sequence[float], Sequence[int]]:
                groups = self._evaluate(each, size)
                return groups.losses, groups.sizes

            batch = 0 if self.trainer.fixed_batch else self.settings.batch_size
            groups = finer_groups(len(self.data.held_out), batch, whole.loss, small)
            found.append([pooled(whole.losses, whole.sizes), *groups])
        return held_out_fall(*found)


def _groups(
    population: Population, number: int, answers: Sequence[Visit], models: Mapping[int, Arrays]
) -> list[Group]:
    """The clients of a round, in the order of their staleness, by what they begin with."""
    return [
        Group(
            models[number - 1 - staleness],  # by the number of rounds that made them
            number - staleness,
            [(visit.client, population.client(visit.client).samples()) for visit in visits],
        )
        for staleness, visits in itertools.groupby(answers, lambda visit: visit.staleness)
    ]


_FAIRNESS_CLIENTS: Final = 1000


def _summarize(federation: Federation, state: FleetState) -> FleetResult:
    """The result of the rounds that a state holds, not judged."""
    record, visits = state.record, state.all_visits()
    manifest = federation.package.manifest
    counts = _count_models(federation.population)
    outcomes = [_outcome(federation, index, visits, count) for index, count in enumerate(counts)]
    chosen = np.unique(visits["client"])
    averaged = visits["end"] == ENDS.index("averaged")
    unknown = unmeasured(federation.devices)
    if federation.fleet.traffic.radio_power is None and not all(
        d.ideal for d in federation.devices
    ):
        unknown.append("energy is that of the training: traffic.radio_power is not given")
    if len(counts) > 1 and len(federation.population) > _MOST_COUNTED:
        unknown.append(
            f"the clients of each device are not counted one by one: there are more than "
            f"{_MOST_COUNTED:,}, and their number follows from the shares"
        )
    if manifest.privacy is not None:
        settings = federation.settings
        size = manifest.fixed_batch or settings.batch_size
        unknown.append(
            "epsilon, which follows from a device's samples N and its rounds R: odtpack privacy "
            f"--noise {manifest.privacy.noise_multiplier:g} --samples N "
            f"--batch-size {size} --epochs E, E being R x {settings.epochs}"
        )
    return FleetResult(
        schema_version=2,
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
        settings=federation.fleet.settings,
        loss_before=record.loss_before,
        accuracy_before=record.accuracy_before,
        rounds=record.rounds,
        devices=outcomes,
        took_part=len(np.unique(visits["client"][averaged])),
        chosen=len(chosen),
        traffic_bytes=_per_device(visits, "bytes") or PerDevice(mean=0, most=0),
        energy_j=_per_device(visits, "energy"),
        fairness=_fairness(federation, record),
        held_out_fall=federation.fall(state.arrays)
        if record.rounds and federation.fleet.budgets.learns
        else None,
        unknown=unknown,
    )


def _plan(federation: Federation) -> FleetPlan:
    fleet, rounds = federation.fleet, federation.fleet.federation
    return FleetPlan(
        digest=fleet.digest,
        data_digest=federation.data.digest,
        per_round=rounds.clients,
        most_staleness=None if rounds.buffer is None else rounds.staleness_limit,
        deadline_s=rounds.deadline,
        train_samples=len(federation.data.train),
        held_out_samples=len(federation.data.held_out),
        **rounds.model_dump(include={"buffer", "over_selection", "minimum", "rounds", "days"}),
        **fleet.population.model_dump(include={"clients", "state", "requires", "times"}),
        **asdict(federation.settings),
    )


_MOST_COUNTED: Final = 10**7
_BLOCK: Final = 2**20


def _count_models(population: Population) -> list[int]:
    """How many clients have each model of device; of a very large population by the shares."""
    shares = [device.share for device in population.fleet.population.devices] or [1.0]
    if len(population) > _MOST_COUNTED:
        return [round(len(population) * share / sum(shares)) for share in shares]
    counts = np.zeros(len(shares), np.int64)
    for start in range(0, len(population), _BLOCK):
        numbers = np.arange(start, min(start + _BLOCK, len(population)))
        counts += np.bincount(population.models(numbers), minlength=len(shares))
    return [int(count) for count in counts]


def _ends(visits: Visits) -> dict[str, int]:
    """How many visits came to each end."""
    counts = np.bincount(visits["end"], minlength=len(ENDS))
    return {end: int(counts[place]) for place, end in enumerate(ENDS) if counts[place]}


def _outcome(federation: Federation, index: int, visits: Visits, clients: int) -> DeviceOutcome:
    own = visits[visits["model"] == index]
    device = federation.devices[index]
    answered = np.isin(own["end"], [ENDS.index(end) for end in ENDS if end in ANSWERED])
    quantiles = None
    if answered.any():
        seconds = np.quantile(own["at"][answered] / NS, (0.1, 0.5, 0.9))
        quantiles = (float(seconds[0]), float(seconds[1]), float(seconds[2]))
    energy = float(own["energy"].sum())
    return DeviceOutcome(
        device=device,
        clients=clients,
        took_part=len(np.unique(own["client"][own["end"] == ENDS.index("averaged")])),
        ends=_ends(own),
        energy_j=None if np.isnan(energy) else energy,
        traffic_bytes=int(own["bytes"].sum()),
        round_s=quantiles,
    )


def _fairness(federation: Federation, record: StateRecord) -> Fairness | None:
    """By the last model's accuracy for each class, and the clients' shares of them."""
    found = ModelEvaluation(0.0, tuple(record.class_right), tuple(record.class_total))
    if found.accuracy is None or not federation.data.classes:
        return None
    # Of a class without samples it is unknown.
    right, total = (
        np.array(each)[: len(federation.data.classes)] for each in (found.right, found.total)
    )
    known = total > 0
    by_class = right / np.maximum(total, 1)
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
