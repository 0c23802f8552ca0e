"""Open models on ONNX Runtime and run them on memory that the caller owns."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array, address
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.graph_signature import (
    KEPT_NAME,
    RATE_NAME,
    RESET_NAME,
    STEP_NAME,
    ModelMetadata,
    TensorSpec,
    check_labels,
    check_tensors,
)
from odtpack_runtime.session.model_file import check_model_file
from odtpack_runtime.session.native import register_kernels

_INTERRUPTED = f"system error number {errno.EINTR}"
"""How ONNX Runtime says that a signal interrupted it while it opened a file: it does not retry."""

_TRAINING_ONLY = re.compile(
    r"com\.microsoft:(Scale|\w*(Grad|Training|Internal|Accumulator|Optimizer)\w*)\("
)
"""Operators of onnxruntime-training that ONNX Runtime does not know."""


def open_session(
    path: str | os.PathLike[str],
    options: onnxruntime.SessionOptions,
    device: Device | None = None,
    beside: Collection[str] = (),
) -> onnxruntime.InferenceSession:
    """Load an ``.onnx`` or ``.ort`` model for the CPU, or for another device."""
    # `beside`: files of its folder that its tensors may lie in.
    file = Path(path)
    if not file.is_file():
        raise OdtpackError("model-not-found", f"There is no model {file}.", where=str(file))
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        what = f"The path {str(file)!r} is not UTF-8 text, and ONNX Runtime opens no other."
        hint = "move the package to a folder with another name"
        raise OdtpackError("model-not-readable", what, where=str(file), hint=hint) from error
    check_model_file(file, beside)
    if device is None:
        register_kernels(options, file)
    problem: Exception | None = None
    for _ in range(3):
        try:
            if device is not None:
                return device.session(str(file), options)
            return onnxruntime.InferenceSession(
                str(file), options, providers=["CPUExecutionProvider"]
            )
        except OdtpackError:
            raise
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            problem = error
            if not str(error).endswith(_INTERRUPTED):
                break
    assert problem is not None  # noqa: S101 - the loop returns, or it has one
    if number := re.search(r"system error number (\d+)$", str(problem)):
        what = f"{file} cannot be read: {os.strerror(int(number[1]))}."
        hint = "check its permissions, and the disk"
        raise OdtpackError("model-not-readable", what, where=str(file), hint=hint) from problem
    raise OdtpackError(
        "model-not-loadable",
        f"ONNX Runtime {onnxruntime.__version__} cannot load {file}: {first_line(problem)}",
        where=str(file),
        hint="this is a model of onnxruntime-training: "
        f"odtpack import {shlex.quote(str(file.parent))} --out package"
        if _TRAINING_ONLY.search(str(problem))
        else None,
    ) from problem


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


_FED = (RESET_NAME, RATE_NAME, STEP_NAME)
"""Inputs that a device takes from the processor in each run: they change, and are numbers."""


def bind_here(bind: Callable[..., None], name: str, array: Array) -> None:
    """Let an input or an output of a binding, whose method ``bind`` is, be an array by address."""
    bind(name, "cpu", 0, array.dtype.type, array.shape, address(array))


_TOKENS = ("input_ids", "decoder_input_ids")
"""Inputs with numbers of tokens, as exporters of language models name them."""


class UserInputs:
    """The user inputs of a graph, the values that are passed for them, and its memory."""

    # `metadata`: if it says the number of classes, labels are checked.
    # Numbers of tokens are too: ONNX's Gather counts negative ones from the end of its table.

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        metadata: ModelMetadata | None = None,
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        # Also keeps the memory alive: ONNX Runtime holds bare addresses.
        self._memory_in: dict[str, Array] = {}
        self._memory_out: dict[str, Array] = {}
        known = {} if metadata is None else metadata.labels
        self._labels = [
            (index, *known[spec.name])
            for index, spec in enumerate(inputs)
            if spec.name in known and spec.dtype == np.int64
        ]
        self._tokens = [
            index
            for index, spec in enumerate(inputs)
            if spec.name in _TOKENS and spec.dtype.kind == "i"
        ]
        self._dtypes = [spec.dtype for spec in inputs]
        self._shapes: list[tuple[int, ...]] | None = None
        self.began = False  # whether the last values were taken, and not refused before a run

    def __call__(self, values: Sequence[object]) -> list[Any]:
        """Run the graph once; in training forth and back."""
        # `values`: the user inputs: arrays or nested lists, or OrtValues all of them.
        # Returns the user outputs: arrays, or OrtValues if OrtValues came in.
        arrays = self.arrays(values)
        if arrays is None:
            return [owned_ortvalue(each) for each in self(self.from_ortvalues(values))]
        return self._results(arrays)

    def _results(self, arrays: Sequence[Array]) -> list[Any]:
        raise NotImplementedError

    def feeds(self, values: Sequence[object]) -> dict[str, Array]:
        """What a run with these user inputs reads, as arrays, by name."""
        arrays = self.arrays(values)
        arrays = self.from_ortvalues(values) if arrays is None else arrays
        return self._memory_in | self._named(arrays)

    def _named(self, arrays: Sequence[Array]) -> dict[str, Any]:
        return dict(zip((spec.name for spec in self.inputs), arrays, strict=True))

    def arrays(self, values: Sequence[object]) -> Sequence[Array] | None:
        """Return values as arrays that can be bound; None if they are OrtValues all of them."""
        self.began = False
        if len(values) != len(self.inputs):
            wanted = ", ".join(f"{spec.name}: {spec}" for spec in self.inputs)
            raise OdtpackError(
                "input-count",
                f"The model takes {len(self.inputs)} inputs and {len(values)} "
                f"{'was' if len(values) == 1 else 'were'} given.",
                hint=f"pass, in this order, {wanted}",
            )
        arrays: Sequence[Any] = values
        for value, dtype in zip(values, self._dtypes, strict=True):
            # Nearly always: an array that can be bound as it is.
            if (
                type(value) is not np.ndarray
                or value.dtype != dtype
                or not value.flags.c_contiguous
            ):
                if all(isinstance(other, onnxruntime.OrtValue) for other in values):
                    return None
                arrays = [_array(*pair) for pair in zip(self.inputs, values, strict=True)]
                self._shapes = None
                break
        shapes = [array.shape for array in arrays]
        if shapes != self._shapes:  # shapes that passed once need no second look
            check_tensors(self.inputs, [(array.dtype, array.shape) for array in arrays])
            self._shapes = shapes
        for index, class_count, ignored in self._labels:
            check_labels(arrays[index], class_count, ignored, name=self.inputs[index].name)
        for index in self._tokens:
            _check_tokens(self.inputs[index].name, arrays[index])
        self.began = True
        return arrays

    def from_ortvalues(self, values: Sequence[Any]) -> list[Array]:
        """Return views of OrtValues' own memory."""
        for spec, value in zip(self.inputs, values, strict=True):
            if value.device_name() != "cpu" or not value.is_tensor():
                what = f"Input '{spec.name}' must be a tensor in the CPU's memory."
                raise OdtpackError("input-type", what)
        return [value.numpy() for value in values]


def _check_tokens(name: str, tokens: Array) -> None:
    """Check that numbers of tokens are not negative."""
    if (least := tokens.min(initial=0)) < 0:
        what = f"Input '{name}' holds {least}, and tokens are numbered from 0."
        hint = "pass the numbers that the tokenizer gives: -100 is for labels only"
        raise OdtpackError("bad-prompt", what, hint=hint)


class BoundGraph(UserInputs):
    """A session whose parameters, gradients and state are bound once, by address."""

    # What changes from call to call, the user's inputs and outputs, is bound as it comes, and an
    # array that stands where the last one stood is not even bound again. Nothing is copied, in or
    # out; only the loss, a scalar, leaves as a copy, so that a caller may keep it while the next
    # step runs.
    # ONNX Runtime for Python cannot bind text. A graph with a text input is run the plain way, and
    # what belongs into bound memory is copied there.
    # Not safe for concurrent calls.

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        metadata: ModelMetadata,
        device: Device | None,
    ) -> None:
        super().__init__(inputs, outputs, metadata)
        self.session = session
        self._device = device
        self._binding = session.io_binding()
        self._text = any(spec.dtype == object for spec in inputs)
        self._bound: list[tuple[int, tuple[int, ...]] | None] = [None] * len(inputs)
        first = self.outputs[0]
        self._loss = None
        if not first.shape and first.dtype != object and not self._text:
            self._loss = np.zeros((), first.dtype)
            bind_here(self._binding.bind_output, first.name, self._loss)
        # Outputs come back in the order in which they are bound first: now the user's.
        self._fresh = [spec.name for spec in self.outputs[self._loss is not None :]]
        self._renew_outputs()

    def bind_input(self, name: str, memory: Array) -> None:
        """Let the graph's input ``name`` be ``memory``, from now on."""
        self._memory_in[name] = memory
        if self._device is not None and name not in _FED:
            self._device.bind_input(self._binding, name, memory)
        elif not self._text:
            bind_here(self._binding.bind_input, name, memory)

    def bind_output(self, name: str, memory: Array) -> None:
        """Let the graph write its output ``name`` to ``memory``, from now on."""
        self._memory_out[name] = memory
        if self._device is not None and name != KEPT_NAME:
            self._device.bind_output(self._binding, name, memory)
        elif not self._text:
            bind_here(self._binding.bind_output, name, memory)

    def _results(self, arrays: Sequence[Array]) -> list[Any]:
        if self._text:
            return self._run_text(arrays)
        for index, array in enumerate(arrays):
            place = (array.ctypes.data, array.shape)
            if place != self._bound[index] or self._device is not None:
                name, dtype = self.inputs[index].name, self._dtypes[index]
                self._binding.bind_input(name, "cpu", 0, dtype.type, place[1], place[0])
                self._bound[index] = place
        vector = self._run()
        if self._loss is None:
            return [vector[index].numpy() for index in range(len(self.outputs))]
        loss = self._loss.copy()
        return [loss, *(vector[index].numpy() for index in range(1, len(self.outputs)))]

    def _run(self) -> Any:
        self._renew_outputs()
        device = self._device
        try:
            if device is not None:  # bind anew what a binding copied when it was made
                device.before_run()
                for name, memory in self._memory_in.items():
                    if name in _FED or not device.resident:
                        self.bind_input(name, memory)
                device.ran = True
            self.session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise run_failed(error) from error
        return self._binding.get_outputs_as_ortvaluevector() if self._fresh else None

    def _renew_outputs(self) -> None:
        # An output that keeps the tensor of the last run would write into an array that
        # the caller holds, and fail when the batch has another size.
        for name in self._fresh:
            self._binding.bind_output(name)

    def _run_text(self, arrays: Sequence[Array]) -> list[Any]:
        feeds = self._named(arrays)
        names = [*(spec.name for spec in self.outputs), *self._memory_out]
        try:
            results = self.session.run(names, feeds | self._memory_in)
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise run_failed(error) from error
        count = len(self.outputs)
        for memory, result in zip(self._memory_out.values(), results[count:], strict=True):
            np.copyto(memory, result)
        return [np.asarray(result) for result in results[:count]]


def _array(spec: TensorSpec, value: object) -> Array:
    """Return a value as an array that can be bound."""
    if not isinstance(value, np.ndarray):
        if isinstance(value, onnxruntime.OrtValue):
            value = value.numpy()
        try:
            array = np.asarray(value)
        except ValueError as error:
            what = f"Input '{spec.name}' is not a regular array: {error}."
            raise OdtpackError("input-shape", what) from error
        # A list has no type of its own: integers may become floats, not the reverse.
        if spec.dtype != object and np.can_cast(array.dtype, spec.dtype, "same_kind"):
            array = array.astype(spec.dtype)
    else:
        array = value
    if spec.dtype == object and array.dtype.kind in "US":
        return array.astype(object)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def run_failed(error: Exception) -> OdtpackError:
    """Return the error for a run that ONNX Runtime broke off."""
    if "requires f16" in str(error):
        what = f"The device does not compute in float16: {first_line(error)}"
        hint = "train on the processor, or build the package without --precision mixed"
        return OdtpackError("unsupported-device", what, hint=hint)
    text = first_line(error)
    if found := re.search(r"idx=(-?\d+) must be within the inclusive range \[-\d+,(\d+)\]", text):
        text = (
            f"row {found[1]} is looked up in a table of {int(found[2]) + 1} rows. In a language "
            "model a token is beyond the vocabulary, or a sequence longer than the positions. "
            f"({text})"
        )
    what = f"ONNX Runtime failed in the middle of a step: {text}"
    return OdtpackError("run-failed", what, hint="nothing was changed by it")


def owned_ortvalue(array: Array) -> onnxruntime.OrtValue:
    """Copy an array into an OrtValue with memory of its own."""
    # `OrtValue.ortvalue_from_numpy` borrows the array's memory: a view taken by `.numpy()` outlives
    # neither the array nor the OrtValue, and reads freed memory without an error. Text, which ONNX
    # Runtime copies, is the exception.
    if array.dtype.kind in "OUS":
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(np.ascontiguousarray(array))
    return value
