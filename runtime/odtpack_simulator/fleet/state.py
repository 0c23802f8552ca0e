"""Where a simulated federation stands after a round, in one file, from which it goes on."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.atomic import atomic_write
from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.fleet_file import FleetFile
from odtpack_simulator.fleet.local_training import Arrays, mismatch
from odtpack_simulator.fleet.result import RoundRecord
from odtpack_simulator.fleet.round_clock import ENDS, Flight, Visit
from odtpack_simulator.result import Count, Loss
from odtpack_simulator.values.part import Part

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
        values = {f"array{index}": parts[part][name] for index, (part, name) in enumerate(rows)}
        with atomic_write(path) as stream:
            np.savez(
                stream,
                allow_pickle=False,
                record=record,
                parts=np.array([part for part, _ in rows], np.str_),
                names=np.array([name for _, name in rows], np.str_),
                visits=self.all_visits(),
                **values,
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
            needed = age <= fleet.federation.staleness_limit
            if age < 1 or (needed and version not in models):
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
