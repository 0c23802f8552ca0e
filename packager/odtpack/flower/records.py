"""From parameters by name to Flower's records and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.local_training import crossing

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, RecordDict

REFUSED: Final = 100
"""Code of a Flower error for a client that cannot take part; its reason says why."""


def warn(text: str, *what: object) -> None:
    """Warn in Flower's log, which stays on this machine."""
    from logging import WARNING

    from flwr.common.logger import log

    log(WARNING, text, *what)


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
        what = f"A message holds {len(records)} records of arrays, and needs one."
        raise OdtpackError("fleet-arrays", what)
    return to_arrays(records[0])


# Flower's older messages, in which parameters have places and no names.
#
# Secure aggregation (SecAgg+, Bell et al. 2020, doi:10.1145/3372297.3417885) exists in Flower for
# these alone.

Mod = Callable[["Message", "Context", Callable[..., "Message"]], "Message"]

_ASKED: Final = "fitins"
_ANSWER: Final = "fitres"


def legacy_mod(package: str | os.PathLike[str]) -> Mod:
    """A mod with which the ClientApp trains for strategies and workflows of ``flwr.server``.

    It is the innermost one: ``client_app(..., mods=[secaggplus_mod, legacy_mod(package)])``. The
    answer holds the parameters and the number of samples, and no loss, which such a server would
    read. A server that only sees sums cannot refuse an answer that would spoil them: the client
    itself holds one back that is not finite, and answers with an error.

    Args:
        package: Folder of the package.

    Raises:
        OdtpackError: The package is not one.
    """
    names = list(crossing(Package.open(package).manifest))

    def translate(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

        content = message.content
        if f"{_ASKED}.parameters" not in content.array_records:
            return call_next(message, context)
        sent = list(content.array_records[f"{_ASKED}.parameters"].values())
        message.content = RecordDict(
            {
                "arrays": _named(names, [array.numpy() for array in sent]),
                "config": content.config_records[f"{_ASKED}.config"],
            }
        )
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        arrays = only_arrays(reply.content)
        if not all(np.isfinite(arrays[name]).all() for name in names):
            reason = "fleet-arrays: the training came to NaN or infinity"
            return Message(Error(code=REFUSED, reason=reason), reply_to=message)
        examples = int(reply.content["metrics"]["num-examples"])
        return Message(
            RecordDict(
                {
                    f"{_ANSWER}.parameters": to_record(
                        {str(place): arrays[name] for place, name in enumerate(names)}
                    ),
                    f"{_ANSWER}.num_examples": MetricRecord({"num_examples": examples}),
                    f"{_ANSWER}.metrics": ConfigRecord({}),
                    f"{_ANSWER}.status": ConfigRecord({"code": 0, "message": ""}),
                }
            ),
            reply_to=message,
        )

    return translate


def named_arrays(package: str | os.PathLike[str], arrays: Sequence[Array]) -> ArrayRecord:
    """The record of parameters that stand in the order of :func:`initial_arrays`.

    Args:
        package: Folder of the package.
        arrays: The parameters.

    Raises:
        OdtpackError: ``fleet-arrays``: they are not as many as the package has.
    """
    return _named(list(crossing(Package.open(package).manifest)), arrays)


def _named(names: Sequence[str], arrays: Sequence[Array]) -> ArrayRecord:
    if len(arrays) != len(names):
        what = f"There are {len(arrays)} parameters, and the package has {len(names)}."
        raise OdtpackError("fleet-arrays", what)
    return to_record(dict(zip(names, arrays, strict=True)))
