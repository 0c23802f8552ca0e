"""Records of a result with other values."""

from typing import Any, TypeVar

from pydantic import BaseModel

from odtpack_simulator.result import SimulationResult

Record = TypeVar("Record", bound=BaseModel)


def changed(record: Record, **values: Any) -> Record:
    """The record with other values; a dict changes the record that stands there."""
    for name, value in values.items():
        old = getattr(record, name)
        if isinstance(value, dict) and not isinstance(old, dict):
            values[name] = changed(old, **value)
    return record.model_copy(update=values)


def on_devices(result: SimulationResult, **values: Any) -> SimulationResult:
    """The result with other values of each of its devices."""
    return changed(result, devices=[changed(device, **values) for device in result.devices])
