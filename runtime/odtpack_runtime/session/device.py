"""A device beside the processor: its provider, and the memory in which a training lives there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array, address
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.protobuf_wire import Piece, bytes_field, number_field

# Every array that a session is bound to has a twin there, which steps read and write in place.
# Arrays of the processor are brought up to date when someone asks for them, and the twins before
# the next run after that: whoever asked may have written.

_KNOWN = {  # provider, its memory as ONNX Runtime names it, what to install, module of a plug-in
    "webgpu": (
        *("WebGpuExecutionProvider", "webgpu"),
        *("onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu"),
    ),
    "cuda": ("CUDAExecutionProvider", "cuda", "onnxruntime-gpu", ""),
}
_OPTIONS = {"CUDAExecutionProvider": {"use_tf32": "0"}}  # products in float32, not in 19 bits
_JOINED = 7  # values that a node may join: with its result eight buffers, which each adapter has
_OPSET = 17


def _registered(provider: str, module: str) -> list[Any]:
    """The devices of a plug-in, which is registered if it is installed."""

    def found() -> list[Any]:
        ask = getattr(onnxruntime, "get_ep_devices", None)  # since 1.22
        return [] if ask is None else [each for each in ask() if each.ep_name == provider]

    return found() or (found() if module and _register(module) else [])


@cache
def _register(module: str) -> bool:
    """Register a plug-in with ONNX Runtime, which takes each once; whether it is installed."""
    try:
        library = import_module(module).get_library_path()
        onnxruntime.register_execution_provider_library(module, library)
    except (ImportError, AttributeError):
        return False
    return True


class Device:
    """A provider of ONNX Runtime, and the twins of arrays in its memory."""

    # `name`: `webgpu`, `cuda`, or the name of a provider; `:1` for the second such device.

    def __init__(self, name: str) -> None:
        base, _, index = name.partition(":")
        provider, self._memory, package, module = _KNOWN.get(base, (base, "cpu", "", ""))
        self.name, self.provider = name, provider
        self._index = int(index) if index.isdigit() else 0
        self._plugged = _registered(provider, module)[self._index :][:1]
        if not self._plugged and provider not in onnxruntime.get_available_providers():
            known = sorted({*_KNOWN, *onnxruntime.get_available_providers()})
            raise OdtpackError(
                "unsupported-device",
                f"ONNX Runtime {onnxruntime.__version__} has no device {name!r:.40} here.",
                hint=f"pip install {package}, beside a driver for the device"
                if package
                else f"use 'cpu' or one of {', '.join(known)}",
            )
        self.resident = self._memory != "cpu"
        self._twins: dict[tuple[int, int], tuple[Array, Any]] = {}
        self._written: set[tuple[int, int]] = set()
        self._spares: dict[tuple[int, int], Any] = {}
        self._sums: dict[str, tuple[Any, Any]] = {}
        self._options: list[onnxruntime.SessionOptions] = []
        self.ran = self._asked = False  # whether twins, or arrays, may be newer than the others

    @property
    def place(self) -> tuple[str, int]:
        """Its memory as bindings of ONNX Runtime name it."""
        return self._memory, self._index

    @property
    def identity(self) -> str:
        """What is known of a plug-in and its device; nothing of providers without memory."""
        found = [
            (each.ep_name, each.ep_vendor, each.ep_metadata, each.device.device_id,
             each.device.metadata)
            for each in self._plugged
        ]  # fmt: skip
        return f"{onnxruntime.__version__} {found}" if self.resident and found else ""

    def session(
        self, model: str | bytes, options: onnxruntime.SessionOptions
    ) -> onnxruntime.InferenceSession:
        """Load a model for the device."""
        names: list[Any] = [
            (self.provider, _OPTIONS.get(self.provider, {})),
            "CPUExecutionProvider",
        ]
        if self.provider == "CPUExecutionProvider":
            del names[0]
        if self._plugged:
            if not any(each is options for each in self._options):
                options.add_provider_for_devices(self._plugged, {})
                self._options.append(options)
            session = onnxruntime.InferenceSession(model, options)
        else:
            session = onnxruntime.InferenceSession(model, options, providers=names)
        if self.provider not in session.get_providers():
            what = f"ONNX Runtime did not take {self.provider} for this model."
            hint = "its log says why: a driver or a library may be missing"
            raise OdtpackError("unsupported-device", what, hint=hint)
        return session

    def bind_input(
        self, binding: Any, name: str, array: Array, shape: Sequence[int] | None = None
    ) -> None:
        """Let an input be the twin of an array, in another shape if one is given."""
        where = (*self.place, array.dtype.type, shape or array.shape)
        binding.bind_input(name, *where, self._twin(array).data_ptr())

    def bind_output(self, binding: Any, name: str, array: Array) -> None:
        """Let an output be written to the twin of an array."""
        where = (*self.place, array.dtype.type, array.shape)
        binding.bind_output(name, *where, self._twin(array).data_ptr())
        self._written.add(_key(array))

    def _twin(self, array: Array) -> Any:
        key = _key(array)
        if key not in self._twins:
            self._twins[key] = array, self._copied(array)
        return self._twins[key][1]

    def _copied(self, array: Array) -> Any:
        new = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), array.dtype.type, *self.place
        )
        new.update_inplace(array)
        return new

    def push(self, arrays: Iterable[Array]) -> None:
        """Bring the twins of some arrays up to date."""
        for array in arrays:
            self._twin(array).update_inplace(array)

    def copied(self, value: Any) -> Any:
        """A copy of a value that lies there already."""
        new = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            value.shape(), value.element_type(), *self.place
        )
        self._copy([value], [new])
        return new

    def before_run(self) -> None:
        """Bring twins up to date with what may have been written to arrays."""
        if self._asked:
            for array, twin in self._twins.values():
                twin.update_inplace(array)
            self._asked = False

    def asked(self) -> None:
        """Bring arrays up to date for someone who may read and write them."""
        if self.ran:
            for key in self._written:
                array, twin = self._twins[key]
                np.copyto(array, twin.numpy().reshape(array.shape))
            self.ran = False
        self._asked = True

    def keep(self, arrays: Sequence[Array]) -> None:
        """Copy twins inside the device's memory, for :meth:`put_back`."""
        twins = [self._twin(array) for array in arrays]
        for array in arrays:
            if _key(array) not in self._spares:
                self._spares[_key(array)] = self._copied(array)
        self._copy(twins, [self._spares[_key(array)] for array in arrays])

    def put_back(self, arrays: Sequence[Array]) -> None:
        """Undo what changed twins since :meth:`keep`."""
        spares = [self._spares[_key(array)] for array in arrays]
        self._copy(spares, [self._twin(array) for array in arrays])

    def _copy(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        if self._plugged and self.resident and sources:
            onnxruntime.copy_tensors(sources, targets)
            return
        for source, target in zip(sources, targets, strict=True):  # no copy without a plug-in
            target.update_inplace(source.numpy())

    def sums(self, reduction: str, arrays: Sequence[Array]) -> npt.NDArray[Any]:
        """A sum over each twin: of magnitudes (`ReduceL1`) or of squares (`ReduceSumSquare`)."""
        # All have one type, and the arrays are the same in every call.
        if reduction not in self._sums:
            model = _sums_model(reduction, len(arrays), arrays[0].dtype)
            session = self.session(model, onnxruntime.SessionOptions())
            binding = session.io_binding()
            for index, array in enumerate(arrays):
                self.bind_input(binding, f"x{index}", array, (array.size,))
            self._sums[reduction] = session, binding
        session, binding = self._sums[reduction]
        if not self.resident:
            for index, array in enumerate(arrays):
                self.bind_input(binding, f"x{index}", array, (array.size,))
        binding.bind_output("sums")
        session.run_with_iobinding(binding)
        return np.asarray(binding.get_outputs()[0].numpy())

    def norm(self, arrays: Sequence[Array]) -> float:
        """The L2 norm of all twins together."""
        return math.sqrt(float(self.sums("ReduceSumSquare", arrays).sum(dtype=np.float64)))


def _key(array: Array) -> tuple[int, int]:
    return address(array), array.nbytes


def _sums_model(reduction: str, count: int, dtype: np.dtype[Any]) -> bytes:
    """A model that sums each of some vectors, and joins the results a few at a time."""
    kind = 1 if dtype == np.float32 else 11
    nodes: list[list[Piece]] = []

    def node(op_type: str, inputs: Sequence[str], output: str, *attributes: list[Piece]) -> None:
        content = [piece for name in inputs for piece in bytes_field(1, [name.encode()])]
        content += [*bytes_field(2, [output.encode()]), *bytes_field(4, [op_type.encode()])]
        nodes.append([*content, *(p for each in attributes for p in bytes_field(5, each))])

    def number(name: str, value: int) -> list[Piece]:
        return [*bytes_field(1, [name.encode()]), number_field(3, value), number_field(20, 2)]

    values = [f"s{index}" for index in range(count)]
    for index, name in enumerate(values):
        node(reduction, [f"x{index}"], name, number("keepdims", 1))
    level = 0
    while len(values) > 1 or not level:
        groups = [values[i : i + _JOINED] for i in range(0, len(values), _JOINED)]
        values = [f"j{level}.{i}" for i in range(len(groups))] if len(groups) > 1 else ["sums"]
        for group, name in zip(groups, values, strict=True):
            node("Concat", group, name, number("axis", 0))
        level += 1

    def value(name: str) -> list[Piece]:
        vector = bytes_field(2, bytes_field(1, bytes_field(2, [name.encode()])))
        tensor = bytes_field(1, [number_field(1, kind), *vector])
        return [*bytes_field(1, [name.encode()]), *bytes_field(2, tensor)]

    graph = [piece for each in nodes for piece in bytes_field(1, each)]
    graph += bytes_field(2, [b"sums"])
    for index in range(count):
        graph += bytes_field(11, value(f"x{index}"))
    graph += bytes_field(12, value("sums"))
    opset = bytes_field(8, [number_field(2, _OPSET)])
    return b"".join([number_field(1, 8), *bytes_field(7, graph), *opset])
