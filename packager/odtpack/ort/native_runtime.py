"""Runs models on an ONNX Runtime library by its C API, such as a minimal build without Python.

The library is loaded by this module alone, in a process of its own that loads no other ONNX
Runtime: see :mod:`odtpack.ort.native_training`. Only what is needed of the C API is here: the first
version of it, which every later release keeps, in the order of its functions.

Source: include/onnxruntime/core/session/onnxruntime_c_api.h, ``struct OrtApi``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_INDEX: Final = {
    "GetErrorMessage": 2,
    "CreateEnv": 3,
    "CreateSessionFromArray": 8,
    "Run": 9,
    "CreateSessionOptions": 10,
    "SessionGetInputCount": 30,
    "SessionGetOutputCount": 31,
    "SessionGetInputName": 36,
    "SessionGetOutputName": 37,
    "CreateTensorWithDataAsOrtValue": 49,
    "GetTensorMutableData": 51,
    "GetTensorElementType": 60,
    "GetDimensionsCount": 61,
    "GetDimensions": 62,
    "GetTensorTypeAndShape": 65,
    "CreateCpuMemoryInfo": 69,
    "GetAllocatorWithDefaultOptions": 78,
    "ReleaseStatus": 93,
    "ReleaseValue": 96,
    "ReleaseTensorTypeAndShapeInfo": 99,
}
"""Position of each function in the table of functions."""

_NO_STATUS: Final = {"GetErrorMessage", "ReleaseStatus", "ReleaseValue",
                     "ReleaseTensorTypeAndShapeInfo"}  # fmt: skip

_TYPES: Final = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64",
}  # fmt: skip
"""ONNXTensorElementDataType, but for text and what NumPy has no type for."""
_NUMBERS: Final = {name: number for number, name in _TYPES.items()}

_WARNING, _ARENA, _DEFAULT = 2, 1, 0
_FIRST_API: Final = 1


class NativeError(Exception):
    """ONNX Runtime refused; its message."""


class _ApiBase(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),
        ("get_version", ctypes.CFUNCTYPE(ctypes.c_char_p)),
    )


class NativeRuntime:
    """A loaded library. It stays loaded until the process ends.

    Args:
        library: Path of the shared library: libonnxruntime.so, .dylib or .dll.

    Raises:
        NativeError: It is none, or cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
            get_base = self._library.OrtGetApiBase
        except (OSError, AttributeError) as error:
            raise NativeError(f"{library} is not a library of ONNX Runtime: {error}") from error
        get_base.restype = ctypes.POINTER(_ApiBase)
        base = get_base().contents
        self.version: str = base.get_version().decode()
        address = base.get_api(_FIRST_API)
        if not address:
            raise NativeError(f"{library} does not offer the C API")
        self._table = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))
        self._environment, self._options = ctypes.c_void_p(), ctypes.c_void_p()
        self._memory, self._allocator = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("CreateEnv", _WARNING, b"odtpack", ctypes.byref(self._environment))
        self.call("CreateSessionOptions", ctypes.byref(self._options))
        self.call("CreateCpuMemoryInfo", _ARENA, _DEFAULT, ctypes.byref(self._memory))
        self.call("GetAllocatorWithDefaultOptions", ctypes.byref(self._allocator))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the C API, with ctypes values; raise its error."""
        result: Any = ctypes.c_char_p if name == "GetErrorMessage" else ctypes.c_void_p
        function = ctypes.CFUNCTYPE(None if name.startswith("Release") else result)(
            self._table[_INDEX[name]]
        )
        returned = function(*arguments)
        if name in _NO_STATUS or not returned:
            return returned
        status = ctypes.c_void_p(returned)
        message = self.call("GetErrorMessage", status).decode(errors="replace")
        self.call("ReleaseStatus", status)
        raise NativeError(message)

    def open(self, model: Path) -> NativeSession:
        """Load a model.

        Raises:
            NativeError: The library refuses it: it lacks an operator, for example.
        """
        return NativeSession(self, model)

    def tensor(self, array: Array) -> ctypes.c_void_p:
        """Return a tensor on an array's memory, which must outlive it."""
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        value = ctypes.c_void_p()
        self.call(
            "CreateTensorWithDataAsOrtValue",
            self._memory,
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
            shape,
            ctypes.c_size_t(array.ndim),
            _NUMBERS[array.dtype.name],
            ctypes.byref(value),
        )
        return value

    def array(self, value: ctypes.c_void_p) -> Array:
        """Return a copy of a tensor."""
        info, count, kind = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
        data = ctypes.c_void_p()
        self.call("GetTensorTypeAndShape", value, ctypes.byref(info))
        self.call("GetDimensionsCount", info, ctypes.byref(count))
        shape = (ctypes.c_int64 * count.value)()
        self.call("GetDimensions", info, shape, count)
        self.call("GetTensorElementType", info, ctypes.byref(kind))
        self.call("ReleaseTensorTypeAndShapeInfo", info)
        self.call("GetTensorMutableData", value, ctypes.byref(data))
        result = np.empty(tuple(shape), _TYPES[kind.value])
        ctypes.memmove(result.ctypes.data, data, result.nbytes)
        return result

    def create_session(self, model: bytes) -> ctypes.c_void_p:
        """Return a session on a model's bytes, with the library's default options."""
        session = ctypes.c_void_p()
        self.call(
            "CreateSessionFromArray",
            self._environment,
            model,
            ctypes.c_size_t(len(model)),
            self._options,
            ctypes.byref(session),
        )
        return session

    def names(self, session: ctypes.c_void_p, side: str) -> list[str]:
        """Return the names of a session's inputs or outputs, ``side`` being Input or Output."""
        count = ctypes.c_size_t()
        self.call(f"SessionGet{side}Count", session, ctypes.byref(count))
        names = []
        for index in range(count.value):
            name = ctypes.c_char_p()  # of the allocator; freed with the process
            self.call(
                f"SessionGet{side}Name",
                session,
                ctypes.c_size_t(index),
                self._allocator,
                ctypes.byref(name),
            )
            names.append((name.value or b"").decode())
        return names


class NativeSession:
    """A model on a :class:`NativeRuntime`."""

    def __init__(self, runtime: NativeRuntime, model: Path) -> None:
        self._runtime = runtime
        self._session = runtime.create_session(model.read_bytes())
        self.inputs = runtime.names(self._session, "Input")
        self.outputs = runtime.names(self._session, "Output")

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model.

        Args:
            feeds: Inputs by name; others are ignored.

        Returns:
            Outputs by name, copies.

        Raises:
            NativeError: The library refuses an input, or fails.
        """
        arrays = [np.asarray(feeds[name], order="C") for name in self.inputs]
        tensors = [self._runtime.tensor(array) for array in arrays]
        results = (ctypes.c_void_p * len(self.outputs))()
        try:
            self._runtime.call(
                "Run",
                self._session,
                ctypes.c_void_p(),
                _texts(self.inputs),
                (ctypes.c_void_p * len(tensors))(*(tensor.value for tensor in tensors)),
                ctypes.c_size_t(len(tensors)),
                _texts(self.outputs),
                ctypes.c_size_t(len(self.outputs)),
                results,
            )
            values = [ctypes.c_void_p(result) for result in results]
            found = {
                name: self._runtime.array(value)
                for name, value in zip(self.outputs, values, strict=True)
            }
        finally:
            for value in (*tensors, *map(ctypes.c_void_p, results)):
                if value:
                    self._runtime.call("ReleaseValue", value)
        return found


def _texts(names: list[str]) -> Any:
    return (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
