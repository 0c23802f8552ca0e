"""The state of a training: loading, recovery, carrying over, saving."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.flatbuffer import Source
from odtpack_runtime.checkpoint.format import (
    IDENTIFIER,
    OPTIMIZER_PROPERTY,
    CheckpointData,
    OptimizerState,
    PropertyValue,
    check_property,
    read_checkpoint,
)
from odtpack_runtime.checkpoint.parameters import (
    ALIGNMENT,
    Array,
    Layout,
    Parameter,
    Parameters,
    address,
    allocate,
    nominal_error,
    view,
)
from odtpack_runtime.checkpoint.writer import previous_path, write_checkpoint
from odtpack_runtime.errors import OdtpackError, UnknownKeyError, WrongTypeError
from odtpack_runtime.files.atomic import Identity, file_identity, open_regular

# One call at a time: a second one is refused, it does not wait.


class OneCall:
    """Held by whatever computes with a state or changes it, as ``with state.lock``."""

    # The thread that holds it may enter again. Another one gets an error at once: a call that
    # waited would see a state that its caller did not expect.

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Begin a call."""
        if not self._lock.acquire(blocking=False):
            hint = "wait for it, or keep one thread for all calls of a session"
            raise OdtpackError("busy", "A call of this session is still running.", hint=hint)

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._lock.release()

    def after_all(self) -> contextlib.AbstractContextManager[Any]:
        """Wait for the running call, to close what it uses, as ``with state.lock.after_all()``."""
        return self._lock


# Go back to the save before one that is damaged.

_HARMED = ("checkpoint-corrupt", "checkpoint-not-found", "checkpoint-unreadable",
           "checkpoint-version", "checkpoint-dtype")  # fmt: skip


def read_last_good(path: str | os.PathLike[str]) -> tuple[CheckpointData, str | None]:
    """Read a checkpoint, or the one before it if it is damaged or missing."""
    # Raises OdtpackError: As read_checkpoint of `path`, if there is no save before it or that one
    # is damaged as well.
    before = previous_path(path)
    try:
        return read_checkpoint(path), None
    except OdtpackError as error:
        if error.code not in _HARMED or not before.is_file():
            raise
        try:
            data = read_checkpoint(before)
        except OdtpackError as second:
            error.what += f" The save before it is of no use either: {second.what}"
            raise error from second
        return data, f"{error.what} {_lost(Path(path), before, data)}"


def _lost(path: Path, before: Path, data: CheckpointData) -> str:
    """What was loaded, and as far as it is known what was not."""
    if data.optimizer is None:
        return f"The save before it was loaded, {before}: what was trained since is lost."
    step = data.optimizer.step
    last = _last_step(path)
    lost = "what was trained since is lost"
    if last is not None and last > step:
        lost = f"{last - step} optimizer steps made since are lost"
    return f"The save before it was loaded, {before}, of optimizer step {step}: {lost}."


def _last_step(path: Path) -> int | None:
    """The optimizer step of a damaged file, if it can still be read."""
    try:
        with open_regular(path) as stream:
            root = Source(stream, "checkpoint", str(path)).root(IDENTIFIER)
            return next((group.integer(1, "q") for group in root.tables(2)), None)
    except (OSError, OdtpackError):
        return None


# Take what was trained with one package to the next one.


def carry_over(
    trained: CheckpointState,
    fresh: CheckpointState,
    names: Collection[str] | None = None,
    *,
    optimizer_state: bool = True,
) -> CheckpointState:
    """Bring trained parameters into the state of a newer package.

    Everything else comes from the newer package: frozen parameters with its values, and
    parameters that the old one did not have. ``odtpack diff OLD NEW`` says which parameters
    to carry over, and whether the optimizer's state can be carried over::

        trained = CheckpointState.load_checkpoint("trained.ckpt")
        fresh = CheckpointState.load_checkpoint("package/checkpoint")
        state = carry_over(trained, fresh)

    Args:
        trained: State that was trained with the old package.
        fresh: State of the new package's checkpoint, before a Module is made of it. It is
            changed.
        names: Parameters whose values are taken over, ``verdict.carry_over`` of the diff;
            by default those that were trained. Running statistics of batch normalization
            are trained as well, but a checkpoint does not distinguish them from frozen parameters:
            they must be named.
        optimizer_state: Also take over step count, learning rate, its schedule and moments.
            Moments of parameters that are not taken over are zero. Without it the optimizer
            starts afresh.

    Returns:
        ``fresh``, with the user's properties of ``trained`` as well.

    Raises:
        OdtpackError: ``carry-over-parameter``: one of the states has no such parameter, or the
            new package's has another shape or type. ``carry-over-optimizer``: it trains parameters
            that the old one did not train, so that their moments are missing. ``fresh`` is then
            as it was. ``nominal-state``: one of them has no values. ``busy``: a Module trains
            ``fresh``.
    """
    if fresh.placed:
        hint = "carry over before a Module is made of it"
        raise OdtpackError("busy", "A session is training this state.", hint=hint)
    if names is None:
        names = trained.arrays(trainable=True)
    values = {}
    for name in names:
        if name not in trained.parameters:
            _refuse(f"the trained state has no parameter {name!r}")
        source = trained.parameters[name].data
        if name not in fresh.parameters:
            _refuse(f"the new package has no parameter '{name}'")
        target = fresh.parameters[name].data
        if (source.shape, source.dtype) != (target.shape, target.dtype):
            _refuse(
                f"'{name}' is {source.dtype}{list(source.shape)}, and in the new package "
                f"{target.dtype}{list(target.shape)}"
            )
        values[name] = source
    state = _optimizer_state(trained, fresh, values) if optimizer_state else None
    for name, value in values.items():
        np.copyto(fresh.parameters[name].data, value)
    for name, attached in trained.properties:
        if optimizer_state or name != SCHEDULE_PROPERTY:
            fresh.properties[name] = attached
    fresh.optimizer = state
    return fresh


def _optimizer_state(
    trained: CheckpointState, fresh: CheckpointState, carried: Collection[str]
) -> OptimizerState | None:
    old = trained.optimizer
    if old is None:
        return None
    if not old.moments:
        return OptimizerState(old.step, old.learning_rate, {}, kind=old.kind)
    wanted = fresh.arrays(trainable=True)
    before = trained.arrays(trainable=True)
    for name, array in wanted.items():
        if name not in old.moments or before[name].shape != array.shape:
            raise OdtpackError(
                "carry-over-optimizer",
                f"The optimizer's state cannot be carried over: it has none for '{name}', which "
                "the new package trains.",
            )
    moments = {
        name: [moment.copy() if name in carried else np.zeros_like(moment) for moment in own]
        for name, own in ((name, old.moments[name]) for name in wanted)
    }
    return OptimizerState(old.step, old.learning_rate, moments, kind=old.kind)


def _refuse(problem: str) -> None:
    raise OdtpackError("carry-over-parameter", f"Parameters cannot be carried over: {problem}.")


# The state of a training run: parameters, properties, and what the optimizer carries.
#
# The API is that of ``onnxruntime.training.api.CheckpointState`` 1.19.2. Where
# that one falls short this one does what was meant: values may be set before a
# :class:`~odtpack_runtime.training.module.Module` exists, ``np.float32(2.0)`` remains a
# float, and a file is replaced whole or not at all.

_log = logging.getLogger(__name__)

SCHEDULE_PROPERTY = "odtpack.schedule"
"""Property of a state: the schedule that its optimizer follows, as JSON."""

TRAINABLE_TYPES = (np.dtype(np.float32), np.dtype(np.float64))
"""Types that parameters are trained in; a float16 model's are kept in float32."""


class Properties:
    """Values that the user attaches to a state and that are saved with it.

    An integer or bool becomes an ``int`` (int64), any other real number a
    ``float`` with the precision of float32, text and UTF-8 bytes a ``str``.
    Iterating yields (name, value), sorted by name.
    """

    def __init__(self, values: dict[str, PropertyValue]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> PropertyValue:
        try:
            return self._values[name]
        except (KeyError, TypeError):
            what = f"The state has no property {name!r}."
            hint = f"it has {', '.join(sorted(self._values)) or 'none'}"
            raise UnknownKeyError("unknown-property", what, hint=hint) from None

    def __setitem__(self, name: str, value: object) -> None:
        """Attach a value.

        Raises:
            WrongTypeError: Neither a number nor text.
            OdtpackError: A number that does not fit, text that is not UTF-8, or a reserved name.
        """
        if name == OPTIMIZER_PROPERTY:
            what = f"{name!r} is reserved: files keep the optimizer's kind there."
            raise OdtpackError("property-type", what)
        self._values[name] = check_property(name, value)

    def __delitem__(self, name: str) -> None:
        """Take a value off.

        Raises:
            UnknownKeyError: There is none of that name.
        """
        self[name]  # which says what is wrong
        del self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, PropertyValue]]:
        return iter(sorted(self._values.items()))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Properties({self._values!r})"


@dataclass(frozen=True, slots=True)
class FlatState:
    """Memory of a state that a Module placed (:mod:`odtpack_runtime.checkpoint.parameters`)."""

    trainable: Layout
    frozen: Layout
    parameters: npt.NDArray[np.uint8]
    gradients: npt.NDArray[np.uint8]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of all trainable parameters: float32, or float64 throughout."""
        return self.trainable.slots[0].dtype if self.trainable.slots else np.dtype(np.float32)


class CheckpointState:
    """Everything that training changes, in memory; loaded from and saved to one file.

    Made by :meth:`load_checkpoint`, or from the contents of a file.

    Attributes:
        optimizer: What the optimizer carries from step to step; None before
            there is an :class:`~odtpack_runtime.training.optimizer.Optimizer` unless the
            file held it.
        checked: Whether the file carried a digest of all that it holds, which was right: those
            of ONNX Runtime's own training carry none, and load unchecked. None without a file.
        recovered: What is wrong with the file that was to be loaded, and what was lost, if the
            save before it was loaded instead; else None.
        spoilt: Whether the gradients are of no use: a training step that was to replace them was
            skipped or failed, and none was made since. Optimizer steps do nothing then.
        lock: Held by each call of a Module, step of an Optimizer, load and save: another thread's
            call is ``busy`` then, so that nobody sees a state in the middle of a step.
    """

    def __init__(self, data: CheckpointData) -> None:
        if not isinstance(data, CheckpointData):
            raise WrongTypeError(
                "not-a-checkpoint",
                f"A state is made of CheckpointData, not of a {type(data).__name__}.",
                hint="use CheckpointState.load_checkpoint(path)",
            )
        parameters = [
            Parameter(name, array, requires_grad=kind)
            for kind, arrays in ((True, data.trainable), (False, data.frozen))
            for name, array in arrays.items()
        ]
        self._parameters = Parameters(parameters, nominal=data.nominal)
        self._properties = Properties(dict(data.properties))
        self.optimizer = data.optimizer
        self.checked = data.checked
        self.spoilt = False
        self.lock = OneCall()
        self.recovered: str | None = None
        self._whole: Identity | None = None  # the file that was loaded or saved last
        self._flat: FlatState | None = None
        self.modules: weakref.WeakSet[Any] = weakref.WeakSet()  # open, on these parameters; theirs
        self.settled = False  # whether an Optimizer was made on it; Optimizer's
        self.device: Any = None  # where the values live, if not in these arrays; Module's

    def __repr__(self) -> str:
        names = self._parameters.items
        step = "" if self.optimizer is None else f", optimizer at step {self.optimizer.step:,}"
        step += ", from a file without a digest" if self.checked is False else ""
        return f"CheckpointState({len(names)} parameters, {self.elements_text()}{step})"

    def elements_text(self) -> str:
        """How many elements of all parameters train, as text."""
        if self.is_nominal and not self.placed:
            return "names without values"
        arrays = [self.arrays(trainable=trainable).values() for trainable in (True, False)]
        trained, frozen = (sum(array.size for array in group) for group in arrays)
        without = ", no values yet" if self.is_nominal else ""
        return f"{trained:,} of {trained + frozen:,} elements train{without}"

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19.

        If it is damaged or missing and the save before it was kept, that one is loaded;
        :attr:`recovered` then says so, and so does a warning in the log.

        Raises:
            OdtpackError: As :func:`~odtpack_runtime.checkpoint.format.read_checkpoint`.
        """
        found = file_identity(checkpoint_uri)
        data, recovered = read_last_good(checkpoint_uri)
        state = cls(data)
        if recovered is not None:
            state.recovered = recovered
            _log.warning("%s", recovered)
        elif file_identity(checkpoint_uri) == found:
            state._whole = found
        return state

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
        *,
        keep_previous: bool = False,
    ) -> None:
        """Save a state to one file, whole or not at all.

        Accumulated gradients are not part of a checkpoint: save after
        ``optimizer.step()`` and ``lazy_reset_grad()``. With the optimizer's
        state included, training continues from the file bit by bit as if it
        had not been interrupted.

        Args:
            state: The state.
            checkpoint_uri: Destination; its folder must exist.
            include_optimizer_state: Save moments, step count and learning rate too.
            keep_previous: Keep the file that is replaced as ``<checkpoint_uri>.previous``,
                which :meth:`load_checkpoint` goes back to if this one comes to harm. A file
                that is neither the one that this state was loaded from nor one that it saved
                is read first: one that is not whole is replaced, and the save before it stays.

        Raises:
            OdtpackError: ``file-not-written``; if the message says that the file was written, but
                may not survive a power cut, the new file is in place. ``busy`` while another
                thread's call runs.
        """
        if not isinstance(state, CheckpointState):
            raise WrongTypeError(
                "not-a-checkpoint", f"A {type(state).__name__} is not a CheckpointState."
            )
        with state.lock:
            state._whole = write_checkpoint(
                checkpoint_uri,
                state.snapshot(include_optimizer_state),
                previous="replaced" if keep_previous else "none",
                whole=state._whole,
            )

    @property
    def placed(self) -> bool:
        """Whether a Module has placed the parameters, which is open or has had an Optimizer."""
        return self._place() is not None

    def _place(self) -> FlatState | None:
        # Where they lie for a Module whose Optimizer could not be made, and which is gone, is where
        # they happen to lie: the next Module may want another place.
        if self._flat is not None and not self.settled and not self.modules:
            if self.device is not None:
                self.device.asked()
                self.device = None
            for parameter in self._parameters.items.values():
                parameter.watch(None)
                gradient = parameter.grad
                if gradient is not None and not gradient.any():
                    gradient = None
                parameter.place(parameter.data, gradient, keep=False)
            self._flat = None
        return self._flat

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The user's own values by name."""
        return self._properties

    @property
    def is_nominal(self) -> bool:
        """True as long as the parameters have names and no values.

        A Module may be made on such a state. The values come by :meth:`load_parameters`
        or by :meth:`Module.copy_buffer_to_parameters
        <odtpack_runtime.training.module.Module.copy_buffer_to_parameters>`.
        """
        return self._parameters.nominal

    def load_parameters(self, checkpoint_uri: str | os.PathLike[str]) -> None:
        """Set all parameters, trainable or not, to the values in a complete checkpoint.

        A nominal state becomes a complete one. Properties and the optimizer's state
        remain as they are.

        Args:
            checkpoint_uri: A checkpoint of the same model.

        Raises:
            OdtpackError: As :func:`~odtpack_runtime.checkpoint.format.read_checkpoint`;
                ``nominal-state`` if the file is nominal too, ``checkpoint-mismatch`` if it
                holds other parameters; ``busy``. Nothing is changed then.
        """
        with self.lock:
            data = read_checkpoint(checkpoint_uri)
            if data.nominal:
                raise nominal_error("there are no values in it to load")
            found = {**data.trainable, **data.frozen}
            items = self._parameters.items
            without_shapes = self.is_nominal and not self.placed
            wrong = found.keys() ^ items.keys()
            for name in found.keys() - wrong:
                have, new = items[name].data, found[name]
                if have.dtype != new.dtype or (have.shape != new.shape and not without_shapes):
                    wrong.add(name)
            if wrong:
                raise OdtpackError(
                    "checkpoint-mismatch",
                    f"The checkpoint does not go with this state: '{min(wrong)}' is missing in one "
                    "of them, or has another shape or type.",
                    where=str(checkpoint_uri),
                    hint="load a checkpoint of the same model",
                )
            for name, array in found.items():
                if without_shapes:
                    items[name].place(array, None, keep=False)
                else:
                    np.copyto(items[name].data, array)
            self._parameters.nominal = False

    def arrays(self, *, trainable: bool) -> dict[str, Array]:
        """Return the live arrays of the trainable, or of the other, parameters by name."""
        return {
            name: parameter.data
            for name, parameter in sorted(self._parameters.items.items())
            if parameter.requires_grad is trainable
        }

    def snapshot(self, include_optimizer_state: bool) -> CheckpointData:
        """Return the state as the contents of a file; the arrays are the live ones."""
        return CheckpointData(
            self.arrays(trainable=True),
            self.arrays(trainable=False),
            self.is_nominal,
            self.optimizer if include_optimizer_state and not self.is_nominal else None,
            dict(self._properties),
        )

    def place(self, order: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> FlatState:
        """Move the trainable parameters into a flat buffer, in this order. For Module's use."""
        # A state that was placed before stays where it is, so that a second Module shares the
        # parameters with the first; gradients are set to zero.
        # `order`: names of the parameters in the order of the training graph's inputs. Frozen ones
        # that it does not name follow.
        # `shapes`: shape of every parameter, for a nominal state, which has none.
        ranks = {name: rank for rank, name in enumerate(order)}
        items = sorted(
            self._parameters.items.values(),
            key=lambda parameter: (ranks.get(parameter.name, len(ranks)), parameter.name),
        )
        trained = [p for p in items if p.requires_grad]
        _check_one_type(trained)
        trainable = _layout(trained, shapes)
        frozen = _layout((p for p in items if not p.requires_grad), shapes)
        found = self._place()
        if found is None:
            flat = FlatState(
                trainable,
                frozen,
                parameters=allocate(trainable.nbytes),
                gradients=allocate(trainable.nbytes),
            )
            keep = not self.is_nominal
            # One by one: what is moved is freed, so that no second whole copy ever exists.
            for slot in trainable.slots:
                parameter, gradient = self._parameters.items[slot.name], view(flat.gradients, slot)
                if keep and parameter.grad is not None:
                    np.copyto(gradient, parameter.grad)  # of a Module that is gone
                parameter.place(view(flat.parameters, slot), gradient, keep=keep)
            for slot in frozen.slots:
                parameter = self._parameters.items[slot.name]
                # As they are read they stay where they are: they may be larger than all others.
                data = parameter.data
                aligned = data.flags.c_contiguous and address(data) % ALIGNMENT == 0
                if not keep or not aligned:
                    memory = allocate(slot.nbytes).view(slot.dtype).reshape(slot.shape)
                    parameter.place(memory, None, keep=keep)
            self._flat = found = flat
        elif (found.trainable, found.frozen) != (trainable, frozen):
            raise OdtpackError(
                "model-mismatch",
                "The state belongs to a Module whose model takes the parameters in another order.",
                hint="load the checkpoint again for the second Module",
            )
        return found


def _check_one_type(trained: Sequence[Parameter]) -> None:
    """All trainable parameters lie in one vector, and so have one type."""
    for parameter in trained:
        dtype = parameter.data.dtype
        if dtype not in TRAINABLE_TYPES or dtype != trained[0].data.dtype:
            raise OdtpackError(
                "parameter-type",
                f"Trainable parameter '{parameter.name}' has elements of {dtype}; all must be "
                "float32, or all float64.",
                hint="build the package again: odtpack gives the parameters one type",
            )


def _layout(parameters: Iterable[Parameter], shapes: Mapping[str, tuple[int, ...]]) -> Layout:
    return Layout.pack((p.name, shapes.get(p.name, p.data.shape), p.data.dtype) for p in parameters)
