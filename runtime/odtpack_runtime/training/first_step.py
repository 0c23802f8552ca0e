"""Compare one step on another device, or in native kernels, with that of plain nodes."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.export import onnx_wire as wire
from odtpack_runtime.files.protobuf_wire import Piece, bytes_field, messages, replaced
from odtpack_runtime.session.device import Device
from odtpack_runtime.session.graph_signature import (
    LOSS_SCALE_NAMES,
    ORDER_PREFIX,
    RATE_NAME,
    UPDATE_SUFFIX,
)
from odtpack_runtime.session.native import VARIABLE
from odtpack_runtime.session.session import run_failed
from odtpack_runtime.training.optimizer_contract import MOMENT_NAMES

_OFF = 1e-3  # of the largest element: rounding leaves a hundredth of it, a wrong kernel does not
_OFF_IN_HALF = 3e-2  # the same where the device computes in float16, and the processor does not
_MODEST = 256.0  # a loss scale that makes no overflow of one device alone
_NOISE = 1e-5  # of the largest of all: a gradient that is 0 but for rounding has nothing to compare
_AMPLIFIED = 30.0  # times what the last digit of each number changes
_WRONG = 1e-2  # of the largest element of what one node computes


Run = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Makes a step of some values and returns all results by name, the loss first."""


def run_of(session: onnxruntime.InferenceSession) -> Run:
    """Steps of a training or step model."""
    names = [n.name for n in session.get_outputs() if not n.name.startswith(ORDER_PREFIX)]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


def compare_step(
    device: Device | None,
    path: Path,
    feeds: Mapping[str, Array],
    there: Run,
    here: Callable[[], Run],
) -> None:
    """Run a training or step model on a device and on the processor; nothing is changed."""
    # `device`: None for native kernels, which are compared with the bodies of their nodes.
    # `here`: opens the model on the processor, with the bodies.
    # Raises OdtpackError: `device-wrong`, of kernels `self-check-failed`. What was right once on a
    # device is not run again.
    mark = None if device is None else _mark(device, path)
    if mark is not None and mark.exists():
        return
    _compare_step(device, path, feeds, there, here())
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _mark(device: Device, path: Path) -> Path | None:
    """A file of the user's cache that is there once a model was found right on a plug-in."""
    if not device.identity:
        return None
    digest = hashlib.sha256(device.identity.encode())
    for each in (path, path.with_name("manifest.json")):
        if each.is_file():
            digest.update(hashlib.sha256(each.read_bytes()).digest())
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return None
    return cache / "odtpack" / f"right-{digest.hexdigest()[:32]}"


def _compare_step(
    device: Device | None, path: Path, feeds: Mapping[str, Array], there: Run, here: Run
) -> None:
    share, scale = _OFF, LOSS_SCALE_NAMES[0]
    if scale in feeds:
        share, feeds = _OFF_IN_HALF, {**feeds, scale: np.full_like(feeds[scale], _MODEST)}
    try:
        expected, again, shaken = (here(each) for each in (feeds, feeds, _rounded(feeds)))
        found = there(feeds)
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        raise run_failed(error) from error
    names = list(expected)
    if any(not np.array_equal(expected[n], again[n], equal_nan=True) for n in names):
        return  # dropout, or another operator that draws numbers
    both = {n: (e, found[n]) for n, e in expected.items() if e.dtype.kind == "f"}
    sensitive = {n: _AMPLIFIED * _distance(e, shaken[n]) for n, (e, _) in both.items()}
    if RATE_NAME in feeds:
        both = _changes(both, feeds)
    largest = max((_largest(e) for n, (e, _) in both.items() if n != names[0]), default=0.0)
    for name, (right, wrong) in both.items():
        allowed = sensitive[name] + share * _largest(right)
        allowed += _NOISE * largest if name != names[0] else 0.0
        off = _distance(right, wrong)
        if off > allowed:
            by = f"by {off:.2g} where the largest element is {_largest(right):.2g}"
            if device is None:
                what = f"Native kernels compute {name!r:.80} differently from their bodies, {by}."
                hint = f"{VARIABLE}=0 turns them off"
                raise OdtpackError("self-check-failed", what, where=str(path), hint=hint)
            raise OdtpackError(
                "device-wrong",
                f"{device.name} computes {name!r:.80} differently from the processor, {by}"
                f"{_first_wrong(device, path, feeds)}.",
                where=str(path),
            )


def _changes(
    both: Mapping[str, tuple[Array, Array]], feeds: Mapping[str, Array]
) -> dict[str, tuple[Array, Array]]:
    """What a step model's outputs add to its inputs; of parameters where the gradient is large."""
    # An optimizer that divides by the gradient's magnitude makes a step of what is only rounding.
    changes: dict[str, tuple[Array, Array]] = {}
    for name, pair in both.items():
        stem, shape = name.removesuffix(UPDATE_SUFFIX), pair[0].shape
        added = [each - feeds[stem].reshape(shape) for each in pair] if stem in feeds else [*pair]
        moment = both.get(f"{stem}.{MOMENT_NAMES[0]}{UPDATE_SUFFIX}")
        if moment is not None:
            sizes = np.abs(moment[0].reshape(shape))
            added = [np.where(sizes > _WRONG * _largest(sizes), each, 0) for each in added]
        changes[name] = added[0], added[1]
    return changes


def _rounded(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The same numbers, each off by its last digit, up or down."""
    # What a step makes of that it makes of rounding anywhere: batch normalization of a few samples
    # makes much of it.
    random = np.random.default_rng(0)
    return {
        name: array * (1 + np.finfo(array.dtype).eps * random.choice((-1, 1), array.shape))
        .astype(array.dtype)
        if array.dtype.kind == "f" and name != RATE_NAME
        else array
        for name, array in feeds.items()
    }  # fmt: skip


def _largest(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max(initial=0))


def _distance(right: Array, wrong: Array) -> float:
    """The largest difference of two arrays; infinity where only one is finite."""
    if right.shape != wrong.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        differences = np.abs(np.subtract(right, wrong, dtype=np.float64))
    same = (right == wrong) | (np.isnan(right) & np.isnan(wrong))
    differences = np.where(same, 0, differences)
    return float(np.nan_to_num(differences, nan=np.inf).max(initial=0))


def _first_wrong(device: Device, path: Path, feeds: Mapping[str, Array]) -> str:
    """The first node whose result is wrong though what it reads is right, as a sentence goes on."""
    try:
        model, nodes = _with_all_outputs(path)
        results = []
        for on_device in (False, True):
            options = onnxruntime.SessionOptions()
            level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.graph_optimization_level = level
            session: Any
            if on_device:
                session = device.session(model, options)
            else:
                session = onnxruntime.InferenceSession(
                    model, options, providers=["CPUExecutionProvider"]
                )
            names = [each.name for each in session.get_outputs()]
            results.append(dict(zip(names, session.run(names, dict(feeds)), strict=True)))
    except Exception:
        return ""
    right, wrong = results
    off = {
        name: _distance(array, wrong[name]) / (_largest(array) or 1.0)
        for name, array in right.items()
        if array.dtype.kind in "fiub"
    }
    for node in nodes:
        outputs = [name for name in node.outputs if off.get(name, 0) > _WRONG]
        if outputs and all(off.get(name, 0) < _OFF for name in node.names_read()):
            return f"; the first node that does is {node.op_type}, which computes {outputs[0]!r}"
    return ""


def _with_all_outputs(path: Path) -> tuple[bytes, list[wire.Node]]:
    """A model that returns all that its nodes compute, and its nodes."""
    nodes: list[wire.Node] = []

    def widened(graph: memoryview) -> list[Piece]:
        nodes[:] = [wire.Node.read(each) for each in messages(graph, wire.NODES)]
        known = {wire.value_name(each) for each in messages(graph, wire.OUTPUTS)}
        new = [n for node in nodes for n in node.outputs if n and n not in known]
        values = (bytes_field(wire.OUTPUTS, bytes_field(1, [name.encode()])) for name in new)
        return [graph, *(piece for value in values for piece in value)]

    pieces = replaced(memoryview(path.read_bytes()), {wire.MODEL_GRAPH: widened})
    return b"".join(pieces), nodes
