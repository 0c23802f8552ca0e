"""The samples of a fleet: which are trained on, which are held out, and of which class each is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.package.package import Package
from odtpack_simulator.fleet.local_training import Indices
from odtpack_simulator.replay.job import HELD_OUT_SHARE


@dataclass(frozen=True, slots=True)
class FleetData:
    """Samples that clients draw from.

    Attributes:
        arrays: By name of input; the first axis counts samples.
        train: Samples that clients have.
        held_out: Samples that the server evaluates on, a fifth.
        classes: For each class the training samples of it; empty where there are no labels.
        digest: SHA-256 of the arrays.
    """

    arrays: Mapping[str, Array]
    train: Indices
    held_out: Indices
    classes: tuple[Indices, ...]
    digest: str


def load_fleet_data(package: Package, path: str | os.PathLike[str], seed: int) -> FleetData:
    """Load and split the data of a fleet, as ``odtpack train`` splits them.

    Raises:
        OdtpackError: As :meth:`~odtpack_runtime.package.package.Package.load_data`;
            ``too-few-samples`` if none would be held out.
    """
    return split_data(package.load_data(path), seed, where=os.fspath(path))


def split_data(arrays: Mapping[str, Array], seed: int, *, where: str = "the data") -> FleetData:
    """Split samples; see :func:`load_fleet_data`."""
    samples = len(next(iter(arrays.values())))
    held_out = int(samples * HELD_OUT_SHARE)
    if not held_out:
        raise OdtpackError(
            "too-few-samples",
            f"The data have {samples} samples, and a fifth of them is held out.",
            where=where,
            hint="give at least 5 samples",
        )
    order = np.random.default_rng([seed, 0]).permutation(samples)
    train = order[: samples - held_out]
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes() if array.dtype.kind != "U" else str(array.tolist()).encode())
    return FleetData(
        arrays,
        train,
        order[samples - held_out :],
        _by_class(arrays.get("labels"), train),
        digest.hexdigest(),
    )


def _by_class(labels: Array | None, train: Indices) -> tuple[npt.NDArray[np.int64], ...]:
    if labels is None or labels.ndim != 1 or labels.dtype.kind != "i" or labels.min() < 0:
        return ()
    own = labels[train]
    return tuple(train[own == label] for label in range(int(labels.max()) + 1))
