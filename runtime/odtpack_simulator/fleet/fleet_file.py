"""``fleet.toml``: who takes part in a federation, how it is run, and what it may cost.

The declarations below are what the file is checked by, and ``docs/fleet.md`` is made from them.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from odtpack_simulator.device.profile import AppState
from odtpack_simulator.values.part import Part, wrong_file
from odtpack_simulator.values.text import key_lines, parse_toml, read_bounded, shown_path
from odtpack_simulator.values.units import parse_quantity

MAX_FLEET_BYTES: Final = 256 * 1024
MOST_CLIENTS: Final = 10**9
HOURS: Final = 24

Condition = Literal["idle", "charging", "unmetered"]


@dataclass(frozen=True)
class Quantity:
    """Validator: a number with a unit of a dimension, in its base unit."""

    dimension: str
    example: str
    positive: bool = True
    least: str | None = None

    def __call__(self, value: object) -> float:
        """The number in the base unit."""
        if not isinstance(value, str):
            msg = f'needs a number with a unit in quotes, such as "{self.example}", found {value!r}'
            raise ValueError(msg[:200])
        number = parse_quantity(value, self.dimension)
        if self.positive and not number > 0:
            raise ValueError(f"must be more than nothing, found {value!r}"[:200])
        if self.least is not None and number < parse_quantity(self.least, self.dimension):
            raise ValueError(f"must be at least {self.least}, found {value!r}"[:200])
        return number


def _pair(value: object) -> object:
    """One value stands for both ends."""
    return value if isinstance(value, list | tuple) else (value, value)


def _ordered(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] <= pair[1]:
        msg = f"the first of two values must not be above the second, found {list(pair)}"
        raise ValueError(msg)
    return pair


Seconds = Annotated[float, BeforeValidator(Quantity("duration", "10 min")), Field(le=1e9)]
ByteCount = Annotated[float, BeforeValidator(Quantity("bytes", "20 MB"))]
# Bounds far beyond any device: times are counted in nanoseconds, and written down in 64 bits.
Rate = Annotated[
    float, BeforeValidator(Quantity("bandwidth", "2 MB/s", least="1 B/s")), Field(le=1e12)
]
Watts = Annotated[float, BeforeValidator(Quantity("power", "800 mW")), Field(le=1e6)]
Joules = Annotated[float, BeforeValidator(Quantity("energy", "50 J"))]
Percent = Annotated[
    float, BeforeValidator(Quantity("percentage", "80 %", positive=False)), Field(le=1)
]
Share = Annotated[float, Field(ge=0, le=1)]
Hours = Annotated[tuple[Share, ...], Field(min_length=HOURS, max_length=HOURS)]
Samples = Annotated[int, Field(ge=0, le=10**7)]


class _Table(Part):
    """A table of the file: no unknown keys, no guesses."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic takes them for numbers."""
        if info.field_name != "learns" and any(
            isinstance(each, bool) for each in (value if isinstance(value, list) else [value])
        ):
            raise ValueError(f"must not be true or false, found {value!r}"[:200])
        return value


class DeviceShare(_Table):
    """One model of device and how much of the population has it."""

    profile: str = Field(min_length=1, max_length=500)
    """Name of a device profile, or the path of one that ends in `.toml`."""
    share: float = Field(default=1.0, gt=0, le=1e9)
    """Weight of this model: the shares of all models need not sum to one."""


class DataTable(_Table):
    """What a client has to learn from. Drawn with replacement from the samples to train on."""

    samples: Annotated[tuple[Samples, Samples], BeforeValidator(_pair)] = (32, 32)
    """Samples of a client: a number, or `[least, most]`, between which they are spread evenly."""
    dirichlet: float | None = Field(default=None, gt=0, le=1e6)
    """Label skew: each client's shares of the classes are drawn from a Dirichlet distribution with
    this concentration (0.1 is strong, 100 next to none). Without it every client draws from all
    samples alike. Needs a package that classifies; a label that its loss ignores is no class."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _ordered(self.samples)
        return self


class AvailabilityTable(_Table):
    """When a device may train. Without this table it always may."""

    idle: Hours | None = None
    """For each hour of the day the share of devices that are idle. Absent: always all."""
    charging: Hours | None = None
    """Likewise the share that charges."""
    unmetered: Hours | None = None
    """Likewise the share in a network that costs nothing by the byte."""
    trace: str | None = Field(default=None, min_length=1, max_length=500)
    """In place of the three: a file of recorded states in the format of FLASH's
    `state_traces.json`. Each client is one of its devices."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.trace is not None and (self.idle or self.charging or self.unmetered):
            msg = "a trace takes the place of idle, charging and unmetered: leave out one of them"
            raise ValueError(msg)
        return self


class PopulationTable(_Table):
    """Who there is."""

    clients: int = Field(ge=1, le=MOST_CLIENTS)
    """Number of clients. Each is derived from the seed and its number, and never stored."""
    devices: tuple[DeviceShare, ...] = Field(default=(), max_length=200, alias="device")
    """`[[population.device]]`: device models. Without them, devices are ideal: they take no
    time and no energy, and have memory for everything."""
    state: AppState = "background"
    """Where the app trains: `background`, in the windows that the system grants, or
    `foreground`."""
    times: Literal["fast", "typical", "slow"] = "typical"
    """Which end of the predicted intervals of times and energy to use."""
    requires: tuple[Condition, ...] = ("idle", "charging", "unmetered")
    """What must hold while a device takes part."""
    lost: Share = 0.0
    """Share of started clients that stop responding, for no other reason."""
    data: DataTable = Field(default_factory=DataTable)
    """`[population.data]`: what each client has."""
    availability: AvailabilityTable = Field(default_factory=AvailabilityTable)
    """`[population.availability]`: when each client may train."""


class TrainingTable(_Table):
    """What a client does in a round."""

    batch_size: int = Field(default=32, ge=1, le=2**20)
    """Samples per batch."""
    epochs: int = Field(default=1, ge=1, le=10_000)
    """Passes over its samples."""
    learning_rate: float = Field(default=0.01, ge=0, le=1e6)
    """Learning rate of every step. The optimizer starts afresh in every round."""
    proximal: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of FedProx's term, which holds clients near to what the round began with."""


def chosen_clients(answers: int, over_selection: float) -> int:
    """Clients that a round chooses to wait for so many answers."""
    return math.ceil(round(answers * over_selection, 6))  # 1.1 is a bit above it


class FederationTable(_Table):
    """How rounds are run."""

    clients: int = Field(ge=1, le=1_000_000)
    """Answers that a round waits for and averages; with `buffer`, clients that train at the same
    time."""
    over_selection: float = Field(default=1.0, ge=1, le=100)
    """Clients that are chosen for each of these answers: with 1.3, 130 for 100."""
    minimum: int = Field(default=1, ge=1)
    """A round with fewer answers at its deadline is given up, and changes nothing. Answers that are
    then refused count: the mean is that of the others, as on Flower."""
    deadline: Seconds = 600.0
    """How long a round waits for answers."""
    every: Seconds | None = None
    """Time from the start of one round to that of the next, where the round is not longer.
    Without it rounds follow each other at once."""
    retry: Annotated[
        float, BeforeValidator(Quantity("duration", "10 min", least="1 s")), Field(le=1e9)
    ] = 600.0
    """How long the server waits where too few clients are available, before it looks again."""
    rounds: int = Field(default=100, ge=1, le=1_000_000)
    """Most rounds; with `buffer`, changes of the model."""
    buffer: int | None = Field(default=None, ge=1, le=1_000_000)
    """Asynchronous aggregation (FedBuff): clients begin as others finish, and the server changes
    the model whenever so many have answered. Without it rounds are synchronous."""
    most_staleness: int | None = Field(default=None, ge=0, le=1000)
    """Of `buffer` (10 if absent): an answer is left out if the model has changed more often since
    its client began."""
    days: float = Field(default=30.0, gt=0, le=3650)
    """No round starts later than this many simulated days after the first midnight."""
    evaluate_every: int = Field(default=1, ge=1)
    """Rounds between two evaluations on the held-out samples; the last one is always evaluated."""
    strategy: Literal["fedavg", "fedavgm", "fedadam"] = "fedavg"
    """How the server uses the mean of the answers: as the new model, or its difference as a
    gradient for SGD with momentum or for Adam."""
    server_learning_rate: float | None = Field(default=None, gt=0, le=1e3)
    """Of `fedavgm` (1 if absent) and `fedadam` (0.1 if absent)."""
    server_momentum: float | None = Field(default=None, ge=0, lt=1)
    """Of `fedavgm` (0.9 if absent)."""
    most_times_median: float = Field(default=10.0, gt=1)
    """Updates longer than this many times the round's median are refused, as is NaN."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.minimum > self.clients:
            msg = f"minimum is {self.minimum}, more than the {self.clients} clients of a round"
            raise ValueError(msg)
        if self.buffer is None and self.most_staleness is not None:
            msg = "most_staleness is one of asynchronous aggregation: set buffer as well"
            raise ValueError(msg)
        if self.buffer is not None:
            if self.buffer > self.clients:
                msg = f"buffer is {self.buffer}, more than the {self.clients} clients at a time"
                raise ValueError(msg)
            rounds_only = {"over_selection", "minimum", "every"} & self.model_fields_set
            if rounds_only:
                msg = f"with a buffer no round is waited for: leave out {min(rounds_only)}"
                raise ValueError(msg)
        if self.strategy == "fedavg" and self.server_learning_rate is not None:
            msg = "fedavg takes no server_learning_rate: it is one of fedavgm and fedadam"
            raise ValueError(msg)
        if self.strategy != "fedavgm" and self.server_momentum is not None:
            raise ValueError(f"{self.strategy} takes no server_momentum: it is one of fedavgm")
        return self

    def evaluated(self, number: int) -> bool:
        """Whether the model is evaluated after the round of that number."""
        return number == self.rounds or number % self.evaluate_every == 0

    @property
    def staleness_limit(self) -> int:
        """Most changes of the model between a client's beginning and an answer that counts."""
        return 10 if self.most_staleness is None else self.most_staleness


class TrafficTable(_Table):
    """How parameters are transferred."""

    down: Annotated[tuple[Rate, Rate], BeforeValidator(_pair)] = (2e6, 2e6)
    """Rate to a client: one, or `[least, most]`, between which clients are spread evenly on a
    logarithmic scale."""
    up: Annotated[tuple[Rate, Rate], BeforeValidator(_pair)] = (1e6, 1e6)
    """Rate from a client, likewise."""
    compression: float = Field(default=1.0, gt=0, le=1)
    """Compression ratio: bytes sent per byte of parameters."""
    radio_power: Watts | None = None
    """What a device takes while it sends or receives. Without it that energy is not counted."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        _ordered(self.down)
        _ordered(self.up)
        return self


class FleetBudgets(_Table):
    """What the federation must reach, and may cost. An absent key sets no limit."""

    accuracy: Share | None = None
    """Least accuracy on the held-out samples at the end."""
    worst_tenth: Share | None = None
    """Least mean accuracy of the tenth of the clients for whom the model does worst."""
    final_loss: float | None = None
    """Most loss on the held-out samples at the end."""
    rounds: int | None = Field(default=None, ge=1)
    """Most rounds until `accuracy` is reached."""
    days: float | None = Field(default=None, gt=0)
    """Most simulated days until `accuracy` is reached."""
    participation: Percent | None = None
    """Least share of the population that took part: had an answer averaged at least once."""
    traffic_per_device: ByteCount | None = None
    """Most bytes, up and down, of any device that took part."""
    energy_per_device: Joules | None = None
    """Most energy of any device that took part."""
    learns: StrictBool = True
    """Whether it must learn: the loss on the held-out samples must fall by more than its noise."""

    @model_validator(mode="after")
    def _until_what(self) -> Self:
        if self.accuracy is None and (self.rounds is not None or self.days is not None):
            msg = "rounds and days count until an accuracy is reached: set accuracy as well"
            raise ValueError(msg)
        return self


class FleetFile(_Table):
    """A federation that does not exist yet."""

    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Seed of everything that is drawn."""
    population: PopulationTable
    """The clients."""
    training: TrainingTable = Field(default_factory=TrainingTable)
    """What a client does in a round."""
    federation: FederationTable
    """How rounds are run."""
    traffic: TrafficTable = Field(default_factory=TrafficTable)
    """How parameters are transferred."""
    budgets: FleetBudgets = Field(default_factory=FleetBudgets)
    """Goals, and limits on costs."""

    @model_validator(mode="after")
    def _fills(self) -> Self:
        clients = self.population.clients
        for name in ("buffer", "minimum"):
            count = getattr(self.federation, name)
            if count is not None and count > clients:
                msg = f"federation.{name} is {count}, and the population has {clients} clients"
                raise ValueError(msg)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """What it says but its budgets, each key by its path, such as ``federation.clients``."""
        content = self.model_dump(mode="json", by_alias=True, exclude={"budgets"})
        return dict(_settings(content, ""))

    @property
    def digest(self) -> str:
        """SHA-256 of what the file says but its budgets, whatever its layout and comments."""
        content = self.model_dump(mode="json", exclude={"budgets"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _settings(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Keys by their paths; tables of a list are counted."""
    tables = isinstance(value, list) and all(isinstance(each, dict) for each in value)
    if isinstance(value, dict) or (tables and value):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _settings(inner, f"{path}.{key}" if path else str(key))
    else:
        is_path = path.endswith((".profile", ".trace")) and value is not None
        yield path, shown_path(Path(value)) if is_path else value


def parse_fleet(data: bytes, source: str = "fleet.toml") -> FleetFile:
    """Read a fleet from the bytes of a TOML file."""
    content = parse_toml(data, code="fleet", what="fleet file", where=source)
    return make_fleet(content, source, key_lines(data.decode("utf-8")))


def make_fleet(
    content: dict[str, Any],
    source: str = "fleet.toml",
    lines: dict[tuple[str, ...], int] | None = None,
) -> FleetFile:
    """Read a fleet from the tables of a TOML file."""
    try:
        return FleetFile.model_validate(content)
    except ValidationError as error:
        says = "the fleet file is wrong"
        raise wrong_file(error, FleetFile, "fleet-invalid", says, source, lines or {}) from error


def read_fleet(path: str | os.PathLike[str]) -> FleetFile:
    """Read a fleet file."""
    file = Path(path)
    data = read_bounded(file, limit=MAX_FLEET_BYTES, code="fleet", what="fleet file")
    return parse_fleet(data, str(file))


def budget_places(path: str | os.PathLike[str]) -> dict[str, str]:
    """Where each budget of a fleet file stands, such as ``fleet.toml:12``."""
    data = read_bounded(Path(path), limit=MAX_FLEET_BYTES, code="fleet", what="fleet file")
    lines = key_lines(data.decode("utf-8")).items()
    return {key[1]: f"{path}:{n}" for key, n in lines if len(key) == 2 and key[0] == "budgets"}
