"""The result of a fleet's simulation, with the federation as each of its seeds has it.

Its figures and checks are in :mod:`odtpack_simulator.fleet.judge`.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterable
from typing import Final, Literal

from pydantic import Field

from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.fleet_file import chosen_clients
from odtpack_simulator.result import (
    Bytes,
    Count,
    HeldOutFall,
    Loss,
    NamedPackage,
    NonNegative,
    Origin,
    read_record,
)
from odtpack_simulator.values.figure import Check, Text, Verdict
from odtpack_simulator.values.part import Part

MAX_RESULT_BYTES: Final = 256 * 1024 * 1024
_SHA256: Final = "^[0-9a-f]{64}$"
Setting = bool | int | float | Text | list[int | float | Text] | None


class FleetPackage(NamedPackage):
    """What was trained. ``payload_bytes`` cross in each direction, before compression."""

    loss: Text
    optimizer: Text
    crossing_parameters: Count
    payload_bytes: Bytes


class FleetPlan(Part):
    """The fleet file, as far as a report shows it; ``buffer`` is null for synchronous rounds."""

    digest: str = Field(pattern=_SHA256)
    data_digest: str = Field(pattern=_SHA256)
    seed: Count
    clients: Count
    per_round: Count
    buffer: Count | None = None
    most_staleness: Count | None = None
    over_selection: NonNegative
    minimum: Count
    deadline_s: NonNegative
    rounds: Count
    days: NonNegative
    state: Literal["foreground", "background"]
    requires: list[Text]
    times: Literal["fast", "typical", "slow"]
    batch_size: Count
    epochs: Count
    learning_rate: NonNegative
    proximal: NonNegative
    train_samples: Count
    held_out_samples: Count

    @property
    def chosen(self) -> int:
        """Clients that a synchronous round chooses."""
        return min(self.clients, chosen_clients(self.per_round, self.over_selection))


class RoundRecord(Part):
    """One round. ``ends`` counts what became of the chosen clients.

    ``loss`` and ``accuracy`` are those of the model after the round, on the held-out samples, where
    it was ``evaluated``; its loss is then null if it is not finite. Held-out samples that fill no
    batch of a package's fixed size are not evaluated. In asynchronous rounds ``staleness`` counts
    the averaged answers by how often the model had changed since their clients began: none, once,
    and so on.
    """

    number: Count
    start_s: NonNegative
    duration_s: NonNegative
    looked_at: Count
    absent: dict[str, Count]
    ends: dict[str, Count]
    training_loss: Loss = None
    evaluated: bool
    loss: Loss = None
    accuracy: float | None = Field(default=None, ge=0, le=1)
    refused: list[Text] = Field(default_factory=list)
    staleness: list[Count] = Field(default_factory=list)

    @property
    def end_day(self) -> float:
        """Simulated days from the first midnight to its end."""
        return (self.start_s + self.duration_s) / 86_400


class DeviceOutcome(Part):
    """What became of the clients with one model of device, over all rounds.

    Attributes:
        device: The model, with the costs of a round.
        clients: Clients that have it; of a very large population by its share.
        took_part: Those of them with an answer averaged at least once.
        ends: What became of those that were chosen, counted once per round.
        energy_j: Energy of all rounds; null if unknown.
        traffic_bytes: Bytes up and down in all rounds.
        round_s: Seconds from a round's start to the answer, for the clients that answered: the
            10th, 50th and 90th percentile; null without answers.
    """

    device: FleetDevice
    clients: Count
    took_part: Count
    ends: dict[str, Count]
    energy_j: NonNegative | None
    traffic_bytes: Bytes
    round_s: tuple[NonNegative, NonNegative, NonNegative] | None = None

    @property
    def participation(self) -> float | None:
        """Share of its clients that took part; None where there are none."""
        # Where the clients are an estimate, more may have taken part.
        return min(1.0, self.took_part / self.clients) if self.clients else None


class PerDevice(Part):
    """A cost of the devices that were chosen at least once, over the whole federation."""

    mean: NonNegative
    most: NonNegative


class Fairness(Part):
    """How differently the last model does for clients, by their shares of the classes.

    Attributes:
        clients: Clients that this is from.
        mean: Mean of their accuracies.
        worst_tenth: Mean over the tenth for whom it does worst.
        deciles: Accuracy at the 0th, 10th, ... 100th percentile.
    """

    clients: Count
    mean: NonNegative
    worst_tenth: NonNegative
    deciles: list[NonNegative]


class SeedPoint(Part):
    """The model after a round: the simulated day on which it ended, and what evaluation found."""

    round: Count
    day: NonNegative
    loss: Loss
    accuracy: float | None = Field(default=None, ge=0, le=1)


class SeedRun(Part):
    """The federation as one seed has it. Traffic and energy are means over the chosen devices.

    Attributes:
        seed: The seed.
        loss_before: Held-out loss before the first round.
        accuracy_before: Accuracy then.
        points: The model after each round that was evaluated.
        worst_tenth: Mean accuracy of the tenth of the clients for whom it does worst.
        took_part: Share of the population with an answer averaged at least once.
        traffic_bytes: Bytes up and down.
        energy_j: Energy; null if unknown.
    """

    seed: Count
    loss_before: Loss
    accuracy_before: float | None
    points: list[SeedPoint]
    worst_tenth: NonNegative | None
    took_part: NonNegative
    traffic_bytes: NonNegative
    energy_j: NonNegative | None

    @property
    def accuracy(self) -> float | None:
        """Accuracy after the last round."""
        return self.points[-1].accuracy if self.points else self.accuracy_before

    @property
    def loss(self) -> float | None:
        """Held-out loss after the last round; None where it is not finite."""
        return self.points[-1].loss if self.points else self.loss_before

    def curve(self, *, by_day: bool, by_accuracy: bool) -> list[tuple[float, float | None]]:
        """Accuracy or loss by simulated day or by round, from before the first round on."""
        return [(0.0, self.accuracy_before if by_accuracy else self.loss_before)] + [
            (p.day if by_day else float(p.round), p.accuracy if by_accuracy else p.loss)
            for p in self.points
        ]

    def reached(self, accuracy: float) -> SeedPoint | None:
        """The first point with this accuracy; the model before the first round is one too."""
        start = self.accuracy_before
        if start is not None and start >= accuracy:
            return SeedPoint(round=0, day=0.0, loss=self.loss_before, accuracy=start)
        return next(
            (
                p
                for p in self.points
                if p.loss is not None and p.accuracy is not None and p.accuracy >= accuracy
            ),
            None,
        )


class FleetResult(Part):
    """One federation, simulated. ``unknown`` says what was counted as nothing, and why.

    ``settings`` are the keys of the fleet file but its budgets, by their paths, in base units.
    ``held_out_fall`` compares the last model with the first; it is null where the budgets have
    ``learns = false``.
    ``seeds`` has the federation as each seed has it, from the second on in figures alone; the
    checks are those of the seed that keeps each worst. It is empty where only one was played.
    """

    schema_version: Literal[2]
    tool_version: Text
    origin: Origin
    package: FleetPackage
    plan: FleetPlan
    settings: dict[Text, Setting]
    loss_before: Loss
    accuracy_before: float | None
    rounds: list[RoundRecord]
    devices: list[DeviceOutcome]
    took_part: Count
    chosen: Count
    traffic_bytes: PerDevice
    energy_j: PerDevice | None
    fairness: Fairness | None
    held_out_fall: HeldOutFall | None = None
    seeds: list[SeedRun] = Field(default_factory=list)
    unknown: list[Text] = Field(default_factory=list)
    checks: list[Check] = Field(default_factory=list)
    verdict: Verdict = "not judged"

    @property
    def over_budget(self) -> bool:
        """Whether a check failed: exit code 1."""
        return self.verdict == "fail"

    @property
    def disturbed(self) -> str | None:
        """What disturbed the measurement of the devices' times; None for nothing."""
        return next((d.device.disturbed for d in self.devices if d.device.disturbed), None)

    @property
    def last_evaluation(self) -> RoundRecord | None:
        """The last round after which the model was evaluated."""
        return next((each for each in reversed(self.rounds) if each.evaluated), None)

    @property
    def days(self) -> float:
        """Simulated days from the first midnight to the end of the last round."""
        return self.rounds[-1].end_day if self.rounds else 0.0

    def ends(self) -> dict[str, int]:
        """What became of the chosen clients in all rounds."""
        total = Counter[str]()
        for each in self.rounds:
            total.update(each.ends)
        return dict(total)

    def staleness(self) -> list[int]:
        """Averaged answers of all rounds by their staleness, as in each round."""
        rows = itertools.zip_longest(*(each.staleness for each in self.rounds), fillvalue=0)
        return [sum(row) for row in rows]


def load_fleet_result(path: str | os.PathLike[str]) -> FleetResult:
    """Read a result that :meth:`FleetResult.to_json` wrote."""
    return read_record(path, FleetResult, MAX_RESULT_BYTES)


_MOST_PLACES: Final = 250  # An outline has two points at each: so many a drawing shows


def seed_run(result: FleetResult) -> SeedRun:
    """A result's figures, as they stand beside those of other seeds."""
    return SeedRun(
        seed=result.plan.seed,
        loss_before=result.loss_before,
        accuracy_before=result.accuracy_before,
        points=[
            SeedPoint(round=each.number, day=each.end_day, loss=each.loss, accuracy=each.accuracy)
            for each in result.rounds
            if each.evaluated
        ],
        worst_tenth=None if result.fairness is None else result.fairness.worst_tenth,
        took_part=result.took_part / result.plan.clients,
        traffic_bytes=result.traffic_bytes.mean,
        energy_j=None if result.energy_j is None else result.energy_j.mean,
    )


def seed_runs(result: FleetResult) -> list[SeedRun]:
    """The figures of every seed that was played."""
    return result.seeds or [seed_run(result)]


def band(
    runs: Iterable[SeedRun], *, by_day: bool, by_accuracy: bool
) -> list[tuple[float, float, float]]:
    """Between which values the seeds' curves lie: place, lowest and highest."""
    # A seed's value at a place is that of its last evaluation until then, so that its rounds need
    # not end when those of another do. Of many places those beside each other are taken together.
    steps = [run.curve(by_day=by_day, by_accuracy=by_accuracy) for run in runs]
    found = []
    for place in sorted({x for curve in steps for x, _ in curve}):
        values = [[y for x, y in curve if x <= place][-1] for curve in steps]
        known = [value for value in values if value is not None]
        if known:
            found.append((place, min(known), max(known)))
    width = -(-len(found) // _MOST_PLACES)
    parts = [found[at : at + width] for at in range(0, len(found), width or 1)]
    return [(part[-1][0], min(p[1] for p in part), max(p[2] for p in part)) for part in parts]
