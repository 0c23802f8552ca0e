"""The result of a fleet's simulation: one record, from which every report is drawn."""

from __future__ import annotations

import itertools
import os
from typing import Final, Literal

from pydantic import Field

from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.result import (
    Bytes,
    Count,
    Loss,
    NonNegative,
    Origin,
    read_record,
)
from odtpack_simulator.values.figure import Check, Text, Verdict
from odtpack_simulator.values.part import Part
from odtpack_simulator.values.text import last_part

SCHEMA_VERSION: Final = 1
MAX_RESULT_BYTES: Final = 256 * 1024 * 1024
_SHA256: Final = "^[0-9a-f]{64}$"


class FleetPackage(Part):
    """What was trained. ``payload_bytes`` cross in each direction, before compression."""

    path: Text
    manifest_sha256: str = Field(pattern=_SHA256)
    loss: Text
    optimizer: Text
    crossing_parameters: Count
    payload_bytes: Bytes

    @property
    def name(self) -> str:
        """The last part of the path: what the package is called wherever it lies."""
        return last_part(self.path)


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


class RoundRecord(Part):
    """One round. ``ends`` counts what became of the chosen clients; null was not evaluated.

    ``loss`` and ``accuracy`` are those of the model after the round, on the held-out samples. In
    asynchronous rounds ``staleness`` counts the averaged answers by how often the model had changed
    since their clients began: none, once, and so on.
    """

    number: Count
    start_s: NonNegative
    duration_s: NonNegative
    looked_at: Count
    absent: dict[str, Count]
    ends: dict[str, Count]
    training_loss: Loss = None
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
        clients: Clients that have it, by its share.
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

    def reached(self, accuracy: float) -> SeedPoint | None:
        """The first point with this accuracy."""
        return next(
            (p for p in self.points if p.accuracy is not None and p.accuracy >= accuracy), None
        )


class FleetResult(Part):
    """One federation, simulated. ``unknown`` says what was counted as nothing, and why.

    ``seeds`` has the federation as each seed has it, from the second on in figures alone; the
    checks are those of the seed that keeps each worst. It is empty where only one was played.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    tool_version: Text
    origin: Origin = Origin()
    package: FleetPackage
    plan: FleetPlan
    loss_before: Loss
    accuracy_before: float | None
    rounds: list[RoundRecord]
    devices: list[DeviceOutcome]
    took_part: Count
    chosen: Count
    traffic_bytes: PerDevice
    energy_j: PerDevice | None
    fairness: Fairness | None
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
        return next((each for each in reversed(self.rounds) if each.loss is not None), None)

    @property
    def days(self) -> float:
        """Simulated days from the first midnight to the end of the last round."""
        return self.rounds[-1].end_day if self.rounds else 0.0

    def ends(self) -> dict[str, int]:
        """What became of the chosen clients in all rounds."""
        total: dict[str, int] = {}
        for each in self.rounds:
            for end, count in each.ends.items():
                total[end] = total.get(end, 0) + count
        return total

    def staleness(self) -> list[int]:
        """Averaged answers of all rounds by their staleness, as in each round."""
        rows = itertools.zip_longest(*(each.staleness for each in self.rounds), fillvalue=0)
        return [sum(row) for row in rows]


def load_fleet_result(path: str | os.PathLike[str]) -> FleetResult:
    """Read a result that :meth:`FleetResult.to_json` wrote."""
    return read_record(path, FleetResult, MAX_RESULT_BYTES, SCHEMA_VERSION)
