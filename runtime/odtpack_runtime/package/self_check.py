"""Runs a package's models on its own samples and compares the results."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from odtpack_runtime.apart.child import alive
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.checkpoint.state import CheckpointState
from odtpack_runtime.errors import OdtpackError, out_of_memory
from odtpack_runtime.package.manifest import InputInfo
from odtpack_runtime.package.native import has_native_nodes
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.records import SELF_CHECK_STEPS, SelfCheckInput
from odtpack_runtime.session.native import native_library
from odtpack_runtime.training.loop import evaluate, train_step
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer import Optimizer

# Find parameters that would train in silence: marked as trainable, with a gradient of zero.

MOST_STEPS = 8


def zero_gradients(
    package: Package, arrays: Mapping[str, Array], batch_size: int
) -> tuple[str, ...]:
    """Run training steps on sample data, without an optimizer, and look at the gradients."""
    # A gradient that is exactly zero for every element and every sample says that the parameter has
    # no effect where the data lie: a unit that is never active, an embedding that no index names, a
    # branch that is not taken, a value that is rounded away.
    # `batch_size`: Samples in a step. What does not fill a batch is left out, and steps end after
    # MOST_STEPS.
    # Returns the names of the trainable parameters whose accumulated gradient was zero in every
    # step, in the order of the checkpoint.
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state)
    names = module.input_names()
    silent = list(state.arrays(trainable=True))
    samples = len(next(iter(arrays.values())))
    for start in range(0, min(samples, MOST_STEPS * batch_size) - batch_size + 1, batch_size):
        module.lazy_reset_grad()
        module(*(np.ascontiguousarray(arrays[n][start : start + batch_size]) for n in names))
        silent = [name for name in silent if not _gradient(state, name).any()]
        alive()
        if not silent:
            break
    return tuple(silent)


def _gradient(state: CheckpointState, name: str) -> Array:
    gradient = state.parameters[name].grad
    assert gradient is not None  # noqa: S101 - it is trainable, and a Module holds the state
    return gradient


# Whether training is right on this device: five steps whose losses are known.
#
# A package's manifest holds the losses that its builder saw with a made-up batch. A device that
# gets the same losses, within a tolerance, has an ONNX Runtime and a loop that train rightly.

NO_SIZES = "no sizes are known with which the models run"
"""Why a package has no self-check, though its model can be trained."""
_MULTIPLIER = 2654435761  # 2^32 divided by the golden ratio: neighbours land far apart
_HALF = 2**23
_MOST_ELEMENTS = 2**22
"""What an input may have where sizes are tried that only the model holds."""
_SAME = 1e-6
"""Part of a loss by which a sum in another order may differ."""
_PATIENCE = 30  # seconds in which sizes are looked for
_OTHER_SIZES = (2, 8, 32, 224)
"""What a size that may vary is taken to be, until the models run: images need room."""


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """What a self-check saw, beside what it expected.

    Attributes:
        losses: Loss of each training step.
        evaluation_loss: Loss of the same batch after them, in evaluation mode.
        expected: The same from the manifest, the evaluation loss at the end.
        largest_part: The largest difference as a part of its tolerance.
    """

    losses: tuple[float, ...]
    evaluation_loss: float
    expected: tuple[float, ...]
    largest_part: float


def self_check(package: Package) -> SelfCheckResult:
    """Make the steps of a package's self-check, from its own checkpoint.

    With native kernels the first step is also compared with one without them: what it makes of
    parameters, moments and the loss.

    Raises:
        OdtpackError: ``self-check-failed`` if a loss is not the one that was seen when the
            package was built, within its tolerance, or if kernels compute something else than
            their bodies; ``no-self-check`` if the package has none; and whatever a step raises.
    """
    info = package.manifest.self_check
    if info is None or info.learning_rate is None or info.evaluation_loss is None:
        reason = "it was built without one" if info is None else info.reason
        raise OdtpackError(
            "no-self-check",
            f"The package has no self-check: {reason}.",
            where=str(package.path),
            hint="odtpack build without --no-self-check" if info is None else None,
        )
    batch = made_up_batch(package.manifest.inputs, info.inputs)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    kernels = native_library() is not None and has_native_nodes(package.manifest)
    module = Module(
        package.training_model, state, package.eval_model,
        step_model_uri=package.step_model if kernels else None,
    )  # fmt: skip
    if kernels:
        module.check_kernels()
    optimizer = Optimizer(package.optimizer_model, module)
    found = first_losses(module, optimizer, batch, info.learning_rate)
    expected = (*info.losses, info.evaluation_loss)
    parts = []
    for step, (loss, wanted, tolerance) in enumerate(
        zip(found, expected, info.tolerances, strict=True), 1
    ):
        if not abs(loss - wanted) <= tolerance:  # NaN is not within any
            what = f"training step {step}" if step <= SELF_CHECK_STEPS else "the evaluation"
            raise OdtpackError(
                "self-check-failed",
                f"The loss of {what} is {loss:.7g}, and should be {wanted:.7g} within "
                f"{tolerance:g}.",
                where=str(package.path),
            )
        parts.append(abs(loss - wanted) / tolerance if tolerance else 0.0)
    return SelfCheckResult(tuple(found[:-1]), found[-1], expected, max(parts))


def first_losses(
    module: Module, optimizer: Optimizer, batch: Sequence[Array], learning_rate: float
) -> list[float]:
    """Return the losses of five training steps, and of an evaluation after them."""
    optimizer.set_learning_rate(learning_rate)
    losses = []
    for _ in range(SELF_CHECK_STEPS):
        losses.append(train_step(module, optimizer, [batch]))
        alive()
    return [*losses, *evaluate(module, [batch]).losses]


def made_up_batch(inputs: Sequence[InputInfo], chosen: Sequence[SelfCheckInput]) -> list[Array]:
    """Return a batch that is the same in every language."""
    # One counter i runs from 0 over the elements of all inputs. With u = (i + 1) 2654435761 modulo
    # 2^32 and v = u >> 8, a floating-point element is (v - 2^23) / 2^23, which float32 holds
    # exactly, an integer v modulo its bound, and a bool whether v is odd. Text, which a self-check
    # does not have, is "a".
    start, batch = 0, []
    for item, wanted in zip(inputs, chosen, strict=True):
        count = math.prod(wanted.shape)
        index = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
        start += count
        number = (index * np.uint64(_MULTIPLIER) & np.uint64(2**32 - 1)) >> np.uint64(8)
        batch.append(_array(item.dtype, number.astype(np.int64), wanted.bound, wanted.shape))
    return batch


def cannot_teach(module: Module, batch: Sequence[Array], inputs: Sequence[InputInfo]) -> str | None:
    """What a batch shows of a loss from which nothing is learned; None if it shows nothing."""
    if (found := _idle(module, batch, inputs)) is None:
        return None
    # Made-up sequences may begin alike: predictions that are alike do not tell their targets apart.
    turned = [
        np.ascontiguousarray(np.flip(array, tuple(range(1, array.ndim))))
        if item.role == "data"
        else array
        for array, item in zip(batch, inputs, strict=True)
    ]
    return found if _idle(module, turned, inputs) else None


def _idle(module: Module, batch: Sequence[Array], inputs: Sequence[InputInfo]) -> str | None:
    compared = [index for index, item in enumerate(inputs) if item.role != "data"]

    def loss(*changes: Callable[[Array, InputInfo], Array]) -> float | None:
        """The loss with other targets; None where the last change makes no difference."""
        changed, before = list(batch), list(batch)
        for change in changes:
            before = list(changed)
            for index in compared:
                changed[index] = np.array(change(changed[index], inputs[index]), order="C")
        if changes and all(np.array_equal(*pair) for pair in zip(before, changed, strict=True)):
            return None
        return evaluate(module, [changed]).losses[0]

    first, shuffled, other = loss(), loss(_shuffled), loss(_other_values)
    names = " and ".join(repr(inputs[index].name) for index in compared)
    if all(each in (0, None) for each in (first, shuffled, other)):
        return "the loss is exactly 0" + (f", whatever {names} holds" if compared else "")
    if first == other and shuffled in (first, None):
        return f"the loss does not depend on {names}"
    # Of several targets one may be the length of another.
    pairs = [(first, shuffled)] if len(compared) == 1 else []
    if pairs and (shuffled is None or abs(shuffled - (first or 0)) <= _SAME * abs(first or 0)):
        pairs.append((other, loss(_other_values, _shuffled)))
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if known and all(abs(a - b) <= _SAME * abs(a) for a, b in known):
        return f"the loss is the same for {names} in another order"
    return None


def _shuffled(array: Array, _item: InputInfo) -> Array:
    return np.roll(array, 1, axis=0) if array.ndim else array


def _other_values(array: Array, item: InputInfo) -> Array:
    """Other targets of the same kind: another class, or what is missing to 1."""
    if array.dtype.kind == "f":
        return np.asarray(1 - array)
    if array.dtype.kind == "b":
        return np.asarray(~array)
    counts = (array >= 0) & (array != item.ignore_index)
    most = max(int(array.max(initial=0, where=counts)) + 1, 2)
    further = array + 1 + np.arange(array.size).reshape(array.shape)
    return np.where(counts, further % most, array).astype(array.dtype)


def _array(dtype: str, number: Array, bound: int | None, shape: Sequence[int]) -> Array:
    if dtype == "string":
        return np.full(shape, "a", dtype=object)
    kind = np.dtype(dtype)
    if kind.kind == "f":
        values = ((number - _HALF) / _HALF).astype(kind)
    elif kind.kind == "b":
        values = number % 2 == 1
    else:
        values = (number % (bound or 1)).astype(kind)
    return values.reshape(shape)


def possible_inputs(
    inputs: Sequence[InputInfo], samples: int, sizes: Sequence[int] = _OTHER_SIZES
) -> Iterator[tuple[SelfCheckInput, ...]]:
    """Yield sizes and bounds of batches of made-up data, the likeliest to fit first."""
    seen = set()
    ways = itertools.product(sizes, (False, True), (False, True))
    for other, low, unnamed in ways:
        chosen = tuple(_sized(inputs, samples, other, low=low, unnamed=unnamed))
        key = tuple((item.shape, item.bound) for item in chosen)
        most = max((math.prod(item.shape) for item in chosen), default=0)
        if key not in seen and (sizes is _OTHER_SIZES or most <= _MOST_ELEMENTS):
            seen.add(key)
            yield chosen


def _sized(
    inputs: Sequence[InputInfo], samples: int, other: int, *, low: bool, unnamed: bool
) -> Iterable[SelfCheckInput]:
    """Give every input its sizes."""
    # `unnamed`: axes without a name count samples where the first has a fixed size: of a state.
    # `low`: whole numbers are all 0, for indices into something that has one entry.
    names = {item.shape[0] for item in inputs if item.shape and isinstance(item.shape[0], str)}
    for item in inputs:
        shape = tuple(
            dim
            if isinstance(dim, int)
            else samples
            if dim in names
            or not axis
            or (unnamed and dim is None and isinstance(item.shape[0], int))
            else other
            for axis, dim in enumerate(item.shape)
        )
        whole = item.dtype not in ("string", "bool") and np.dtype(item.dtype).kind != "f"
        bound = (1 if low else item.class_count or 2) if whole else None
        yield SelfCheckInput(name=item.name, shape=shape, bound=bound)


def run_first_that_fits(
    inputs: Sequence[InputInfo],
    samples: int,
    run: Callable[[tuple[SelfCheckInput, ...]], Any],
    sizes: Sequence[int] = _OTHER_SIZES,
) -> Any:
    """Return what a function makes of the first batch of made-up data with which it runs."""
    failed: OdtpackError | None = None
    for chosen in possible_inputs(inputs, samples, sizes):
        try:
            return run(chosen)
        except OdtpackError as error:
            if error.code != "run-failed" or out_of_memory(error):
                raise
            failed = failed or error
    assert failed is not None  # noqa: S101 - there is always a batch to try
    raise failed


def search_batch(
    inputs: Sequence[InputInfo],
    samples: int,
    run: Callable[[tuple[SelfCheckInput, ...]], Any],
    sizes: Callable[[], list[int]],
) -> Any:
    """:func:`run_first_that_fits`, and then with further sizes, which are asked for if needed."""
    until = time.monotonic() + _PATIENCE

    def fitted(chosen: tuple[SelfCheckInput, ...]) -> Any:
        alive()
        if time.monotonic() > until:
            raise OdtpackError("run-failed", "no sizes were found with which the models run")
        return run(chosen)

    try:
        return run_first_that_fits(inputs, samples, fitted)
    except OdtpackError as error:
        if error.code != "run-failed" or out_of_memory(error):
            raise
        others = sizes()
        ways = [(samples, others), (1, _OTHER_SIZES), (1, others)]
        # The last are those of the batch with which a model was traced.
        for count, tried in (*ways, *((each, (each, 2, 8)) for each in others)):
            with suppress(OdtpackError):
                return run_first_that_fits(inputs, count, fitted, tried)
        raise
