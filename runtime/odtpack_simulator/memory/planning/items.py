"""What lies in memory throughout a training or a part of it: parameters, moments, a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import onnx

from odtpack_runtime.checkpoint.layout import CHUNK_ELEMENTS, Layout
from odtpack_runtime.package.manifest import Manifest, ParameterInfo
from odtpack_runtime.package.package import Package
from odtpack_runtime.training.optimizer_contract import OptimizerContract, matrix, read_contract
from odtpack_runtime.training.optimizer_state import state_layout
from odtpack_simulator.memory.allocation import allocated_size
from odtpack_simulator.memory.memory_phases import Item

GRADIENT: Final = "gradient of "
"""Begins the name of the item that is a parameter's gradient."""


def vectors(contract: OptimizerContract, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shapes of the vectors in the largest run of the optimizer model."""
    if contract.by_parameter:
        largest = max((slot.shape for slot in layout.slots), key=math.prod)
        shapes = {vector.name: vector.bound_shape(largest) for vector in contract.state}
        return {**shapes, **dict.fromkeys(("params", "gradients"), matrix(largest))}
    dtype = layout.slots[0].dtype if layout.slots else np.dtype(np.float32)
    elements = max(1, layout.nbytes // dtype.itemsize)
    if not contract.whole:
        elements = min(CHUNK_ELEMENTS, elements)
    names = (vector.name for vector in contract.state)
    return dict.fromkeys(("params", "gradients", *names), (elements,))


def optimizer_contract(package: Package) -> OptimizerContract:
    """How the optimizer model is run."""
    model = onnx.load(str(package.optimizer_model), load_external_data=False)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    names = [value.name for value in model.graph.input]
    return read_contract(metadata, names, str(package.optimizer_model))


def flat_layout(manifest: Manifest) -> Layout:
    """Layout of all trainable parameters."""
    trainable = [p for p in manifest.parameters if p.role == "trainable"]
    return Layout.pack((p.name, p.shape, np.dtype(p.dtype)) for p in trainable)


def state_items(contract: OptimizerContract, layout: Layout) -> Iterable[Item]:
    """What the optimizer keeps, a vector each."""
    for index in range(len(contract.state)):
        nbytes = state_layout(layout, contract, index).nbytes
        yield Item(f"moment {index + 1} of all parameters", nbytes, "optimizer_state")


def moved(layout: Layout, copies: int) -> Iterable[Item]:
    """What is moved into a flat buffer exists twice, one parameter's after the other's."""
    largest = max(layout.slots, key=lambda slot: slot.nbytes, default=None)
    if largest is not None and copies:
        nbytes = copies * allocated_size(largest.nbytes)
        yield Item(f"{largest.name} as it was read", nbytes, "parameters")


def _slots(parameters: Iterable[ParameterInfo]) -> Iterable[tuple[str, int]]:
    """Each parameter with the bytes it takes in a flat buffer, the gap after it included."""
    for parameter in parameters:
        dtype = np.dtype(parameter.dtype)
        yield parameter.name, Layout.pack([(parameter.name, parameter.shape, dtype)]).nbytes


def parameter_items(parameters: Iterable[ParameterInfo]) -> Iterable[Item]:
    """All parameters."""
    return (Item(name, nbytes, "parameters") for name, nbytes in _slots(parameters))


def gradient_items(parameters: Iterable[ParameterInfo]) -> Iterable[Item]:
    """Gradients of the trained ones."""
    trainable = (p for p in parameters if p.role == "trainable")
    return (Item(f"{GRADIENT}{name}", nbytes, "gradients") for name, nbytes in _slots(trainable))


def statistics_copy(parameters: Iterable[ParameterInfo]) -> Iterable[Item]:
    """What a step whose loss is not finite is undone with: a copy of the running statistics."""
    slots = _slots(p for p in parameters if p.role == "state")
    if nbytes := sum(nbytes for _, nbytes in slots):
        yield Item("copy of the running statistics", nbytes, "parameters")


def gradients_copy(parameters: Iterable[ParameterInfo]) -> Iterable[Item]:
    """The same where a step adds to gradients, from the first such step on."""
    if nbytes := sum(item.nbytes for item in gradient_items(parameters)):
        yield Item("copy of the accumulated gradients", nbytes, "gradients")


def exported(manifest: Manifest) -> Iterable[Item]:
    """The inference template, three times while its outputs are chosen, and a parameter's copy.

    That is the largest of those that the model holds in another type.
    """
    template = manifest.files.inference_template
    if template is None or manifest.inference is None:
        return
    yield Item("inference template", 3 * template.size_bytes, "activations")
    converted = (
        math.prod(p.shape) * 4
        for p in manifest.parameters
        if p.name in manifest.inference.parameters and (p.scale or p.model_dtype)
    )
    yield Item("a parameter in the model's type", max(converted, default=0), "activations")


def batch_items(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> Iterable[Item]:
    """One batch of every input."""
    for spec in manifest.input_specs():
        nbytes = int(np.prod(shapes[spec.name], dtype=np.int64)) * spec.dtype.itemsize
        yield Item(spec.name, allocated_size(nbytes), "inputs")
