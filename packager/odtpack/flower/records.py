"""From parameters by name to Flower's records and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, RecordDict


def crossing(package: Package) -> list[str]:
    """Names of the parameters that cross between server and clients: all but the frozen ones."""
    return [info.name for info in package.manifest.parameters if info.role != "frozen"]


def to_record(arrays: Mapping[str, Array]) -> ArrayRecord:
    """An ArrayRecord of these arrays by name."""
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord

    return ArrayRecord({name: FlowerArray(np.asarray(array)) for name, array in arrays.items()})


def to_arrays(record: ArrayRecord) -> dict[str, Array]:
    """The arrays of an ArrayRecord by name."""
    arrays = {}
    for name, array in record.items():
        try:
            arrays[name] = array.numpy()
            if not isinstance(arrays[name], np.ndarray):  # NumPy opens archives as well
                raise TypeError("it is not an array")
        except Exception as error:  # NumPy's own, and Flower's, for bytes that are no array
            text = f"The array '{name[:100]}' of a message cannot be read: {error}"
            raise OdtpackError("fleet-arrays", text[:500]) from error
    return arrays


def as_typed(arrays: Mapping[str, Array], wanted: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays in the types of those of the same name, where both are floating."""
    # Strategies such as FedAdam compute in float64 what came to them as float32.
    return {
        name: array.astype(wanted[name].dtype)
        if name in wanted and array.dtype.kind == wanted[name].dtype.kind == "f"
        else array
        for name, array in arrays.items()
    }


def only_arrays(content: RecordDict) -> dict[str, Array]:
    """The arrays of the one ArrayRecord of a message."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise OdtpackError(
            "fleet-arrays", f"A message holds {len(records)} records of arrays, and needs one."
        )
    return to_arrays(records[0])
