"""Data in batches, and the training loop."""

from __future__ import annotations

import math
import os
import shlex
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy_format

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.graph_signature import TensorSpec, check_labels
from odtpack_runtime.training.lr_scheduler import LRScheduler
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer
from odtpack_runtime.training.private import Normal, private_gradient, secure_normal

# Load training data: an ``.npz`` file with one array per input of the model.
#
# Data come from outside: nothing is unpickled, no array is allocated before its
# declared size has been checked, and every value is checked before training sees
# it, because a NaN or a label that does not exist spoils a model silently.

MAX_BYTES = 2 * 2**30
"""Bytes of all needed arrays together that :func:`load_dataset` takes by default."""

_MASK = "attention_mask"
_NOT_FINITE: dict[str, Callable[[Array], Array]] = {"NaN": np.isnan, "infinity": np.isinf}


def load_dataset(
    path: str | os.PathLike[str],
    inputs: Sequence[TensorSpec],
    *,
    class_count: int | None = None,
    ignored_label: int | None = None,
    max_bytes: int = MAX_BYTES,
    replaces: Callable[[str, str], bool] = lambda *_: False,
) -> dict[str, Array]:
    """Load the arrays that a model's inputs need, and check them.

    Args:
        path: An ``.npz`` file, compressed or not. Arrays that no input is named
            after are ignored, but for an ``attention_mask`` that hides padding before tokens.
        inputs: What the model takes: :meth:`Module.input_specs
            <odtpack_runtime.training.module.Module.input_specs>`. The first axis counts
            samples, so its size is free even where the model fixes the batch.
        class_count: If given, the array ``labels`` must lie in 0 to ``class_count - 1``.
        ignored_label: A further label that is allowed: samples that do not count.
        max_bytes: Most bytes the needed arrays may have together, uncompressed.
        replaces: Asked with the name of an array, and "NaN" or "infinity", which it holds: whether
            the model replaces that, so that it may stay.

    Returns:
        The arrays by name, in the order of ``inputs``; all have the same length.

    Raises:
        OdtpackError: ``data-not-found``, ``data-unreadable``, ``data-too-large``;
            naming the array, ``data-missing``, ``data-type``, ``data-shape``,
            ``data-length``, ``data-empty``, ``data-not-finite``, ``data-padding``,
            ``label-out-of-range``.
    """
    file = Path(path)
    if not file.is_file():
        what = f"{file} is a folder." if file.is_dir() else f"There is no data file {file}."
        raise OdtpackError("data-not-found", what, where=str(file))
    try:
        arrays = _load(file, inputs, max_bytes)
        _check(arrays, inputs)
        _check_finite(arrays, replaces)
        if class_count is not None and "labels" in arrays and arrays["labels"].dtype == np.int64:
            check_labels(arrays["labels"], class_count, ignored_label)
    except OdtpackError as error:
        error.where = str(file)
        if error.code == "label-out-of-range":
            error.hint = "drop or correct those samples, or build the model with more classes"
        raise
    return arrays


def _load(file: Path, inputs: Sequence[TensorSpec], max_bytes: int) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(file) as archive:
            return _arrays(archive, inputs, max_bytes)
    except OdtpackError:
        raise
    except Exception as error:  # what a broken archive makes zip, zlib and numpy raise
        what = f"{file} is not a readable .npz file: {error}"
        raise OdtpackError("data-unreadable", what) from error


def _arrays(
    archive: zipfile.ZipFile, inputs: Sequence[TensorSpec], max_bytes: int
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
            what = f"The data have no array '{spec.name}', which the model takes as {spec}."
            hint = f"the file holds {', '.join(names) or 'nothing'}"
            raise OdtpackError("data-missing", what, hint=hint)
        if member.flag_bits & 1:
            raise ValueError(f"'{spec.name}' is encrypted")
        wanted[spec.name] = member
    mask = members.get(f"{_MASK}.npy") if inputs and _MASK not in wanted else None
    total = sum(info.file_size for info in (*wanted.values(), *filter(None, [mask])))
    if total > max_bytes:
        what = f"The data have {total} bytes uncompressed, and {max_bytes} are allowed."
        raise OdtpackError("data-too-large", what)
    check_axes(inputs)
    if mask is not None:
        _check_mask(archive, mask)
    arrays = {}
    for spec in inputs:
        info = wanted[spec.name]
        with archive.open(info) as stream:
            _check_header(stream, spec, info.file_size)
        with archive.open(info) as stream:
            arrays[spec.name] = np.ascontiguousarray(
                npy_format.read_array(stream, allow_pickle=False)
            )
    return arrays


def _check_mask(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Refuse padding before tokens, which a model that takes no mask would read as tokens."""
    with archive.open(info) as stream:
        shape, dtype, header = _read_header(stream)
    if len(shape) != 2 or dtype.kind not in "biuf":
        return
    _check_size(_MASK, shape, dtype, header, info.file_size)
    with archive.open(info) as stream:
        counts = npy_format.read_array(stream, allow_pickle=False) != 0
    rows = (counts[:, 1:] > counts[:, :-1]).any(axis=1)
    if rows.any():
        raise OdtpackError(
            "data-padding",
            f"Array '{_MASK}' has a 0 before a 1, first in sample {int(np.argmax(rows))}, and the "
            "model takes no such mask: it would read this padding as tokens.",
        )


def check_axes(inputs: Sequence[TensorSpec]) -> None:
    """Check that batches of samples can be cut along the first axis of every input.

    Raises:
        OdtpackError: ``data-shape``.
    """
    named = {spec.shape[0] for spec in inputs if spec.shape and isinstance(spec.shape[0], str)}
    sizes = {
        spec.shape[0]: spec for spec in inputs if spec.shape and isinstance(spec.shape[0], int)
    }
    for size, spec in reversed(sizes.items()):
        axes = [axis for axis, dim in enumerate(spec.shape) if dim in named]
        others = [each for each in sizes.values() if each.shape[0] != size]
        if axes:
            problem = f"has {spec.shape[axes[0]]!r}, the samples of other inputs, on axis {axes[0]}"
        elif others:
            problem = f"takes {size} on its first axis, and '{others[0].name}' {others[0].shape[0]}"
        else:
            continue
        name = shlex.quote(spec.name)
        raise OdtpackError(
            "data-shape",
            f"Input '{spec.name}' {problem}: batches are cut along the first axis of every input.",
            hint=f"build with --input {name}=zeros if it is a state that starts at zero, "
            f"--input {name}=NUMBER if it is always the same, or --input {name}=axis:K "
            "if axis K counts samples",
        )


def _check_header(stream: IO[bytes], spec: TensorSpec, size: int) -> None:
    """Check an array's type and shape against a model's input, before any of it is loaded."""
    shape, dtype, header = _read_header(stream)
    same = dtype.kind == "U" if spec.dtype == object else dtype == spec.dtype
    if not same:
        what = f"Array '{spec.name}' has elements of {dtype}, and the model takes {spec}."
        hint = f"convert it with .astype('{'str' if spec.dtype == object else spec.dtype}')"
        raise OdtpackError("data-type", what, hint=hint)
    # The first axis counts samples, and may have any size.
    free = TensorSpec(spec.name, dtype, (None, *spec.shape[1:]) if spec.shape else ())
    if not shape or not free.fits(dtype, shape):
        raise OdtpackError(
            "data-shape",
            f"Array '{spec.name}' has the shape {list(shape)}, and the model takes {spec}; "
            "the first axis counts samples.",
        )
    _check_size(spec.name, shape, dtype, header, size)


def _check_size(
    name: str, shape: tuple[int, ...], dtype: np.dtype[Any], header: int, size: int
) -> None:
    if header + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"the size of '{name}' does not agree with its shape {list(shape)}")


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape, dtype and size in bytes of an ``.npy`` header."""
    version = npy_format.read_magic(stream)
    readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"it holds an array of format version {version}")
    shape, _, dtype = readers[version](stream)
    return shape, dtype, stream.tell()


def _check_finite(arrays: dict[str, Array], replaces: Callable[[str, str], bool]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind != "f" or np.isfinite(array).all():
            continue
        for what, is_such in _NOT_FINITE.items():
            rows = is_such(array).reshape(len(array), -1).any(axis=1)
            if rows.any() and not replaces(name, what):
                raise OdtpackError(
                    "data-not-finite",
                    f"Array '{name}' holds {what}, first in sample {int(rows.argmax())}.",
                )


def _check(arrays: dict[str, Array], inputs: Sequence[TensorSpec]) -> None:
    counts = {name: len(array) for name, array in arrays.items()}
    for name, count in counts.items():
        first = next(iter(counts))
        if count == 0:
            raise OdtpackError("data-empty", f"Array '{name}' has no samples.")
        if count != counts[first]:
            what = f"Array '{name}' has {count} samples, and '{first}' has {counts[first]}."
            raise OdtpackError("data-length", what)
    sizes: dict[str, tuple[int, str]] = {}
    for spec in inputs:
        shape = arrays[spec.name].shape
        for dim, size in zip(spec.shape[1:], shape[1:], strict=False):
            if isinstance(dim, str):
                known, owner = sizes.setdefault(dim, (size, spec.name))
                if size != known:
                    what = f"'{dim}' is {known} in array '{owner}' and {size} in '{spec.name}'."
                    hint = f"give both arrays the same '{dim}'"
                    raise OdtpackError("data-shape", what, hint=hint)


# The training loop: one optimizer step, and an evaluation, over batches.


def train_step(
    module: Module,
    optimizer: Optimizer,
    batches: Iterable[Sequence[Array]],
    scheduler: LRScheduler | None = None,
    *,
    on_loss: Callable[[float], None] = lambda loss: None,
    before_update: Callable[[], None] | None = None,
    noise: Normal = secure_normal,
    expected: int | None = None,
) -> float:
    """Make one optimizer step from the gradients of some batches.

    One batch, given in a sequence, makes the step in the step model if the module has one and
    nothing asks for its gradients. If the package asks for privacy, gradients are computed sample
    by sample, clipped, and noise is added (:mod:`odtpack_runtime.training.private`).

    Args:
        module: Module in training mode, without accumulated gradients.
        optimizer: Its optimizer.
        batches: The inputs of each batch. The next one is asked for when the last one is done,
            so it may take the same memory.
        scheduler: Sets the learning rate after the step.
        on_loss: Called with each batch's loss, before the step is made, but for a private batch
            without samples.
        before_update: Called once the gradients are complete, which it may change; None if nothing
            looks at them.
        noise: Draws the noise of private gradients.
        expected: Expected samples of a batch whose gradients are private, where the batches differ
            because samples are drawn independently; the samples of the batch if None.

    Returns:
        The mean of the batches' losses; NaN of a private batch without samples. A loss that is not
        finite makes it so; if no step was made because of that (``Module.skipped_steps``), the
        scheduler makes none either.

    Raises:
        OdtpackError: What calls of the module and steps raise; ``private-batch``: also if a private
            step is given a second batch.
    """
    losses: list[float] = []
    done = optimizer.step_count
    if (
        isinstance(batches, Sequence)
        and len(batches) == 1
        and before_update is None
        and optimizer.has_step_model
        and not module.accumulated_batches
    ):
        try:
            losses.append(loss_of(optimizer.step_on(*batches[0])))
            on_loss(losses[0])
        finally:  # a step that is counted may be an error as well: Module's on_not_finite
            if scheduler is not None and optimizer.step_count > done:
                scheduler.step()
        return losses[0]
    for index, batch in enumerate(batches):
        if optimizer.privacy is None:
            own = [loss_of(module(*batch))]
        elif index:
            what = "A private step takes one batch: it clips and adds noise to the whole batch."
            hint = "give the samples as one batch; they are computed one by one anyway"
            raise OdtpackError("private-batch", what, hint=hint)
        else:
            own = private_gradient(module, batch, optimizer.privacy, expected, noise)
        if own:
            losses.append(sum(own) / len(own))
            on_loss(losses[-1])
    if before_update is not None:
        before_update()
    optimizer.step(privatized=optimizer.privacy is not None)
    module.lazy_reset_grad()
    if scheduler is not None and optimizer.step_count > done:
        scheduler.step()
    return sum(losses) / len(losses) if losses else math.nan


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation saw."""

    losses: tuple[float, ...]  # mean loss of each batch
    sizes: tuple[int, ...]  # samples of each batch
    right: int  # labels that the highest score names
    total: int  # labels that count; 0 where there are none, or no scores
    # mean per sample of each further number that is returned
    means: dict[str, float] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()  # of a language model, those that each batch's loss is the mean of

    @property
    def perplexity(self) -> float | None:
        """Exponential of the mean loss per token; None where there are no tokens."""
        if not sum(self.tokens):
            return None
        terms = (x * n for x, n in zip(self.losses, self.tokens, strict=True) if n)
        return float(np.exp(np.minimum(sum(terms) / sum(self.tokens), 1e3)))

    @property
    def loss(self) -> float | None:
        """Mean loss per sample; None without a batch."""
        if not self.sizes:
            return None
        weighted = (loss * size for loss, size in zip(self.losses, self.sizes, strict=True))
        return sum(weighted) / sum(self.sizes)

    @property
    def accuracy(self) -> float | None:
        """Share of the labels that the highest score names; None where there are none."""
        return self.right / self.total if self.total else None


def evaluate(
    module: Module,
    batches: Iterable[Sequence[Array]],
    *,
    scores: int | None = None,
    labels: int | None = None,
    ignored_label: int | None = None,
    numbers: Mapping[str, int] = MappingProxyType({}),
    tokens: int | None = None,
    on_labels: Callable[[Array, Array], None] = lambda right, counted: None,
) -> Evaluation:
    """Run batches in evaluation mode; the module is then in the mode in which it was.

    Args:
        module: The module.
        batches: The inputs of each batch.
        scores: Index among the outputs of scores per class; None if there are none.
        labels: Index among the inputs of the labels; None if there are none.
        ignored_label: Label of samples that do not count; None if all do.
        numbers: Indices among the outputs of further numbers, by name.
        tokens: Index among the inputs of the labels of a language model,
            :attr:`Manifest.token_labels <odtpack_runtime.package.manifest.Manifest.token_labels>`.
        on_labels: Called with each batch's labels that the highest score names, and with all that
            count.
    """
    was_training = module.training
    module.eval()
    losses: list[float] = []
    sizes: list[int] = []
    right = total = 0
    sums = dict.fromkeys(numbers, 0.0)
    counts: list[int] = []
    for batch in batches:
        results: Any = module(*batch)
        outputs = results if isinstance(results, tuple) else (results,)
        losses.append(loss_of(results))
        sizes.append(next((len(array) for array in batch if np.ndim(array)), 1))
        for name, index in numbers.items():
            sums[name] += float(outputs[index]) * sizes[-1]
        if tokens is not None:
            counts.append(int((batch[tokens][:, 1:] != ignored_label).sum()))
        if scores is not None and labels is not None:
            named, counted = right_labels(outputs[scores], batch[labels], ignored_label)
            right, total = right + len(named), total + len(counted)
            on_labels(named, counted)
    module.train(was_training)
    means = {name: each / sum(sizes) for name, each in sums.items() if sizes}
    return Evaluation(tuple(losses), tuple(sizes), right, total, means, tuple(counts))


def loss_of(results: Any) -> float:
    """Return the loss among the results of a call."""
    return float(np.ravel(results[0] if isinstance(results, tuple) else results)[0])


def right_labels(scores: Array, labels: Array, ignored_label: int | None) -> tuple[Array, Array]:
    """Labels that the highest score names, and all that count, each in one axis."""
    # `scores`: one number per class, `[N, C, ...]`.
    # `labels`: class numbers, `[N, ...]`.
    # `ignored_label`: label of samples that do not count; None if all do.
    counted = labels != ignored_label
    return labels[(scores.argmax(axis=1) == labels) & counted], labels[counted]
