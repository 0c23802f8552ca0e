"""What decided a build, as one number: equal digests, equal packages.

A package's ``recipe_digest`` is the SHA-256 of canonical JSON (keys sorted, no spaces, ASCII)
of the model's digest and of every resolved setting. The versions of the tools stand beside
it in the manifest: with the same of them the same digest means the same bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir


def recipe_digest(model: ir.Model, **settings: object) -> str:
    """Return the digest of a build.

    Args:
        model: Forward model as :func:`odtpack.model.loading.load_model` returns it.
        settings: Everything else that decides what is written, by name.

    Returns:
        SHA-256 in hex.
    """
    content = {"model": model_digest(model), **settings}
    text = json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def model_digest(model: ir.Model) -> str:
    """Return the digest of a model: of its graph, and of its initializers one by one.

    It does not depend on where the model came from, nor on whether its values lay in files
    of their own.
    """
    digest = hashlib.sha256()
    tensors: dict[ir.Value, ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            continue
        head = [name, tensor.dtype.name, list(tensor.shape.numpy())]
        digest.update(json.dumps(head).encode())
        digest.update(_tensor_digest(tensor))
        tensors[value] = tensor
    try:
        for value in tensors:
            value.const_value = ir.Tensor(np.empty(0, np.float32), name=value.name)
        proto = ir.to_proto(model)
    finally:
        for value, tensor in tensors.items():
            value.const_value = tensor
    del proto.graph.value_info[:]  # what shape inference found follows from the rest
    digest.update(proto.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _tensor_digest(tensor: ir.TensorProtocol) -> bytes:
    array = tensor.numpy()
    if array.dtype == object:  # text
        lines = [item if isinstance(item, bytes) else str(item).encode() for item in array.flat]
        return hashlib.sha256(json.dumps([line.hex() for line in lines]).encode()).digest()
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8).data).digest()


def _canonical(value: Any) -> Any:
    """A value as JSON has it, with nothing left out that distinguishes two settings.

    Raises:
        TypeError: Of a kind that no setting has had so far.
    """
    if value is None or (
        isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)
    ):
        return value
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **_canonical(fields)}
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(_canonical, value))
    if hasattr(value, "SerializeToString"):
        return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"a setting is a {type(value).__name__}, which has no canonical form")
