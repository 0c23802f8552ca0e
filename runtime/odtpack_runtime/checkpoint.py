"""The state of a training run: parameters, properties, and what the optimizer carries.

The API is that of ``onnxruntime.training.api.CheckpointState`` 1.19.2. Where
that one falls short this one does what was meant: values may be set before a
:class:`~odtpack_runtime.module.Module` exists, ``np.float32(2.0)`` remains a
float, and a file is replaced whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint_format import (
    CheckpointData,
    PropertyValue,
    check_property,
    read_checkpoint,
)
from odtpack_runtime.checkpoint_writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError, UnknownKeyError, WrongTypeError
from odtpack_runtime.layout import Array, Layout, allocate, view


class Parameter:
    """One named tensor of the state.

    ``data`` and ``grad`` are views of the memory that training works on: they
    show the values of the moment, and writing to ``data`` in place changes the
    parameter. A Module moves the parameters when it is made; views taken before
    that keep the old values.
    """

    __slots__ = ("_data", "_grad", "_name", "_requires_grad")

    def __init__(self, name: str, data: Array, *, requires_grad: bool) -> None:
        self._name = name
        self._data = data
        self._grad: Array | None = None
        self._requires_grad = requires_grad

    @property
    def name(self) -> str:
        """Name in the model."""
        return self._name

    @property
    def requires_grad(self) -> bool:
        """True if training changes the parameter by its gradient."""
        return self._requires_grad

    @property
    def data(self) -> Array:
        """The value: a live array of the parameter's shape and dtype.

        Setting it copies the new value; shape and dtype must be the same.

        Raises:
            OdtpackError: ``parameter-shape`` or ``parameter-type`` on setting.
        """
        return self._data

    @data.setter
    def data(self, value: npt.ArrayLike) -> None:
        array = np.asarray(value)
        if array.shape != self._data.shape:
            raise OdtpackError(
                "parameter-shape",
                f"Parameter '{self._name}' has the shape {list(self._data.shape)}, "
                f"and the new value {list(array.shape)}.",
            )
        if array.dtype != self._data.dtype:
            raise OdtpackError(
                "parameter-type",
                f"Parameter '{self._name}' has elements of {self._data.dtype}, "
                f"and the new value of {array.dtype}.",
                hint=f"convert it with .astype('{self._data.dtype}')",
            )
        np.copyto(self._data, array)

    @property
    def grad(self) -> Array | None:
        """The accumulated gradient, live; None if frozen or as long as no Module exists."""
        return self._grad

    def place(self, data: Array, grad: Array | None) -> None:
        """Move the value into ``data``; ``grad`` becomes the gradient. For Module's use."""
        np.copyto(data, self._data)
        self._data = data
        self._grad = grad

    def __repr__(self) -> str:
        kind = "trainable" if self._requires_grad else "frozen"
        return f"Parameter('{self._name}', {self._data.dtype}{list(self._data.shape)}, {kind})"


class Parameters:
    """The parameters of a state by name. Iterating yields (name, Parameter), sorted by name."""

    def __init__(self, parameters: Iterable[Parameter], *, nominal: bool) -> None:
        self._items = {parameter.name: parameter for parameter in parameters}
        self._nominal = nominal

    def __getitem__(self, name: str) -> Parameter:
        self._require_values()
        try:
            return self._items[name]
        except (KeyError, TypeError):
            raise UnknownKeyError(
                "unknown-parameter",
                f"The state has no parameter {name!r}.",
                hint=f"it has {', '.join(sorted(self._items)) or 'none'}",
            ) from None

    def __setitem__(self, name: str, value: npt.ArrayLike) -> None:
        """Set a parameter's value; see :attr:`Parameter.data`."""
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        self._require_values()
        return iter(sorted(self._items.items()))

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(sorted(self._items))})"

    def _require_values(self) -> None:
        if self._nominal:
            raise nominal_error("its parameters have no values")


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
            raise UnknownKeyError(
                "unknown-property",
                f"The state has no property {name!r}.",
                hint=f"it has {', '.join(sorted(self._values)) or 'none'}",
            ) from None

    def __setitem__(self, name: str, value: object) -> None:
        """Attach a value.

        Raises:
            WrongTypeError: Neither a number nor text.
            OdtpackError: A number that does not fit, or text that is not UTF-8.
        """
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
    """The memory of a state after a Module placed it: see :mod:`odtpack_runtime.layout`."""

    trainable: Layout
    frozen: Layout
    parameters: npt.NDArray[np.uint8]
    gradients: npt.NDArray[np.uint8]
    constants: npt.NDArray[np.uint8]


class CheckpointState:
    """Everything that training changes, in memory; loaded from and saved to one file.

    Made by :meth:`load_checkpoint`, or from the contents of a file.

    Attributes:
        optimizer: What the optimizer carries from step to step; None before
            there is an :class:`~odtpack_runtime.optimizer.Optimizer` unless the
            file held it.
    """

    def __init__(self, data: CheckpointData) -> None:
        if not isinstance(data, CheckpointData):
            raise WrongTypeError(
                "not-a-checkpoint",
                f"A state is made of CheckpointData, not of a {type(data).__name__}.",
                hint="use CheckpointState.load_checkpoint(path)",
            )
        self._nominal = data.nominal
        parameters = [
            Parameter(name, array, requires_grad=kind)
            for kind, arrays in ((True, data.trainable), (False, data.frozen))
            for name, array in arrays.items()
        ]
        self._parameters = Parameters(parameters, nominal=data.nominal)
        self._properties = Properties(dict(data.properties))
        self.optimizer = data.optimizer
        self._flat: FlatState | None = None

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Load a checkpoint of odtpack or of ONNX Runtime training 1.17 to 1.19.

        Raises:
            OdtpackError: As :func:`~odtpack_runtime.checkpoint_format.read_checkpoint`.
        """
        return cls(read_checkpoint(checkpoint_uri))

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
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

        Raises:
            OdtpackError: ``file-not-written``.
        """
        if not isinstance(state, CheckpointState):
            raise WrongTypeError(
                "not-a-checkpoint", f"A {type(state).__name__} is no CheckpointState."
            )
        write_checkpoint(checkpoint_uri, state.snapshot(include_optimizer_state))

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
        """True if the file named the parameters without their values."""
        return self._nominal

    def arrays(self, *, trainable: bool) -> dict[str, Array]:
        """Return the live arrays of the trainable, or of the other, parameters by name."""
        return {
            name: parameter.data
            for name, parameter in sorted(self._parameters._items.items())
            if parameter.requires_grad is trainable
        }

    def snapshot(self, include_optimizer_state: bool) -> CheckpointData:
        """Return the state as the contents of a file; the arrays are the live ones."""
        return CheckpointData(
            self.arrays(trainable=True),
            self.arrays(trainable=False),
            self._nominal,
            self.optimizer if include_optimizer_state else None,
            dict(self._properties),
        )

    def place(self, order: Sequence[str]) -> FlatState:
        """Move the parameters into flat buffers, in the given order. For Module's use.

        A state that was placed before stays where it is, so that a second
        Module shares the parameters with the first; gradients are set to zero.

        Args:
            order: Names of the parameters in the order of the training graph's
                inputs. Frozen ones that it does not name follow.

        Raises:
            OdtpackError: ``nominal-state``, ``parameter-type`` for a trainable
                parameter that is not float32, ``model-mismatch`` if the state
                was placed in another order.
        """
        self._parameters._require_values()
        ranks = {name: rank for rank, name in enumerate(order)}
        items = sorted(
            (parameter for _, parameter in self._parameters),
            key=lambda parameter: ranks.get(parameter.name, len(ranks)),
        )
        for parameter in items:
            if parameter.requires_grad and parameter.data.dtype != np.float32:
                raise OdtpackError(
                    "parameter-type",
                    f"Trainable parameter '{parameter.name}' has elements of "
                    f"{parameter.data.dtype}, and only float32 can be trained.",
                    hint="freeze it, or convert the model to float32 before building the package",
                )
        trainable = _layout(p for p in items if p.requires_grad)
        frozen = _layout(p for p in items if not p.requires_grad)
        if self._flat is None:
            flat = FlatState(
                trainable,
                frozen,
                parameters=allocate(trainable.nbytes),
                gradients=allocate(trainable.nbytes),
                constants=allocate(frozen.nbytes),
            )
            # One by one: what is moved is freed, so that no second whole copy ever exists.
            for slot in trainable.slots:
                self._parameters[slot.name].place(
                    view(flat.parameters, slot), view(flat.gradients, slot)
                )
            for slot in frozen.slots:
                self._parameters[slot.name].place(view(flat.constants, slot), None)
            self._flat = flat
        elif (self._flat.trainable, self._flat.frozen) != (trainable, frozen):
            raise OdtpackError(
                "model-mismatch",
                "The state belongs to a Module whose model takes the parameters in another order.",
                hint="load the checkpoint again for the second Module",
            )
        else:
            self._flat.gradients[:] = 0
        return self._flat


def _layout(parameters: Iterable[Parameter]) -> Layout:
    return Layout.pack((p.name, p.data.shape, p.data.dtype) for p in parameters)


def nominal_error(reason: str) -> OdtpackError:
    """Return the error for a use of a nominal state that needs values."""
    return OdtpackError(
        "nominal-state",
        f"The checkpoint is nominal: {reason}.",
        hint="load a complete checkpoint",
    )
