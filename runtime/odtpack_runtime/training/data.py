"""Load training data: an ``.npz`` file with one array per input of the model.

Data come from outside: nothing is unpickled, no array is allocated before its
declared size has been checked, and every value is checked before training sees
it, because a NaN or a label that does not exist spoils a model silently.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.graph_signature import TensorSpec, check_labels

MAX_BYTES = 2 * 2**30
"""Bytes of all needed arrays together that :func:`load_dataset` takes by default."""


def load_dataset(
    path: str | os.PathLike[str],
    inputs: Sequence[TensorSpec],
    *,
    class_count: int | None = None,
    ignored_label: int | None = None,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Array]:
    """Load the arrays that a model's inputs need, and check them.

    Args:
        path: An ``.npz`` file, compressed or not. Arrays that no input is named
            after are ignored.
        inputs: What the model takes: :meth:`Module.input_specs
            <odtpack_runtime.training.module.Module.input_specs>`. The first axis counts
            samples, so its size is free even where the model fixes the batch.
        class_count: If given, the array ``labels`` must lie in 0 to ``class_count - 1``.
        ignored_label: A further label that is allowed: samples that do not count.
        max_bytes: Most bytes the needed arrays may have together, uncompressed.

    Returns:
        The arrays by name, in the order of ``inputs``; all have the same length.

    Raises:
        OdtpackError: ``data-not-found``, ``data-unreadable``, ``data-too-large``;
            naming the array, ``data-missing``, ``data-type``, ``data-shape``,
            ``data-length``, ``data-empty``, ``data-not-finite``,
            ``label-out-of-range``.
    """
    file = Path(path)
    if not file.is_file():
        raise OdtpackError("data-not-found", f"There is no data file {file}.", where=str(file))
    try:
        with zipfile.ZipFile(file) as archive:
            arrays = _load(archive, inputs, max_bytes, str(file))
    except OdtpackError:
        raise
    except Exception as error:  # what a broken archive makes zip, zlib and numpy raise
        raise OdtpackError(
            "data-unreadable", f"{file} is not a readable .npz file: {error}", where=str(file)
        ) from error
    _check(arrays, inputs, str(file))
    if class_count is not None and "labels" in arrays and arrays["labels"].dtype == np.int64:
        try:
            check_labels("labels", arrays["labels"], class_count, ignored_label)
        except OdtpackError as error:
            error.where = str(file)
            error.hint = "drop or correct those samples, or build the model with more classes"
            raise
    return arrays


def _load(
    archive: zipfile.ZipFile, inputs: Sequence[TensorSpec], max_bytes: int, where: str
) -> dict[str, Array]:
    members: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        if info.filename in members:
            raise ValueError(f"it holds '{info.filename}' twice")
        members[info.filename] = info
    wanted: dict[str, zipfile.ZipInfo] = {}
    for spec in inputs:
        member = members.get(f"{spec.name}.npy")
        if member is None:
            names = sorted(name.removesuffix(".npy") for name in members)
            raise OdtpackError(
                "data-missing",
                f"The data have no array '{spec.name}', which the model takes as {spec}.",
                where=where,
                hint=f"the file holds {', '.join(names) or 'nothing'}",
            )
        if member.flag_bits & 1:
            raise ValueError(f"'{spec.name}' is encrypted")
        wanted[spec.name] = member
    total = sum(info.file_size for info in wanted.values())
    if total > max_bytes:
        raise OdtpackError(
            "data-too-large",
            f"The data have {total} bytes uncompressed, and {max_bytes} are allowed.",
            where=where,
        )
    arrays = {}
    for spec in inputs:
        info = wanted[spec.name]
        with archive.open(info) as stream:
            _check_header(stream, spec, info.file_size, where)
        with archive.open(info) as stream:
            arrays[spec.name] = np.ascontiguousarray(
                npy_format.read_array(stream, allow_pickle=False)
            )
    return arrays


def _check_header(stream: IO[bytes], spec: TensorSpec, size: int, where: str) -> None:
    """Check an array's type and shape against a model's input, before any of it is loaded."""
    shape, dtype, header = _read_header(stream)
    same = dtype.kind == "U" if spec.dtype == object else dtype == spec.dtype
    if not same:
        raise OdtpackError(
            "data-type",
            f"Array '{spec.name}' has elements of {dtype}, and the model takes {spec}.",
            where=where,
            hint=f"convert it with .astype('{'str' if spec.dtype == object else spec.dtype}')",
        )
    wanted = spec.shape[1:]
    fits = not spec.shape or (
        len(shape) == len(spec.shape)
        and all(
            size == dim for size, dim in zip(shape[1:], wanted, strict=True) if isinstance(dim, int)
        )
    )
    if not shape or not fits:
        raise OdtpackError(
            "data-shape",
            f"Array '{spec.name}' has the shape {list(shape)}, and the model takes {spec}; "
            "the first axis counts samples.",
            where=where,
        )
    if header + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"the size of '{spec.name}' does not agree with its shape {list(shape)}")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, dtype and size in bytes of an ``.npy`` header."""
    version = npy_format.read_magic(stream)
    readers = {
        (1, 0): npy_format.read_array_header_1_0,
        (2, 0): npy_format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"it holds an array of format version {version}")
    shape, _, dtype = readers[version](stream)
    return shape, dtype, stream.tell()


def _check(arrays: dict[str, Array], inputs: Sequence[TensorSpec], where: str) -> None:
    counts = {name: len(array) for name, array in arrays.items()}
    for name, count in counts.items():
        first = next(iter(counts))
        if count == 0:
            raise OdtpackError("data-empty", f"Array '{name}' has no samples.", where=where)
        if count != counts[first]:
            raise OdtpackError(
                "data-length",
                f"Array '{name}' has {count} samples, and '{first}' has {counts[first]}.",
                where=where,
            )
    sizes: dict[str, tuple[int, str]] = {}
    for spec in inputs:
        shape = arrays[spec.name].shape
        for dim, size in zip(spec.shape[1:], shape[1:], strict=False):
            if isinstance(dim, str):
                known, owner = sizes.setdefault(dim, (size, spec.name))
                if size != known:
                    raise OdtpackError(
                        "data-shape",
                        f"'{dim}' is {known} in array '{owner}' and {size} in '{spec.name}'.",
                        where=where,
                        hint=f"give both arrays the same '{dim}'",
                    )
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
            raise OdtpackError(
                "data-not-finite",
                f"Array '{name}' holds NaN or infinity, first in sample {row}.",
                where=where,
            )
