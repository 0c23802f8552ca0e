"""Checkpoints to read and write, and a second writer that also makes wrong ones."""

from collections.abc import Sequence
from typing import Any

import flatbuffers
import numpy as np

from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState


def sample() -> CheckpointData:
    """Every feature of the format in under two kilobytes."""
    rng = np.random.default_rng(0)
    weights = {
        "layer.W": rng.standard_normal((3, 4)).astype(np.float32),
        "b": np.array(2.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
    }
    moments = {
        name: [np.full_like(w, 0.5), np.full_like(w, np.float32(1e-30))]
        for name, w in weights.items()
    }
    return CheckpointData(
        weights,
        {"table": np.arange(5, dtype=np.int64), "mask": np.array([True, False]),
         "half": np.ones((2, 1), np.float16)},
        False,
        OptimizerState(41, float(np.float32(0.03)), moments, kind="adamw"),
        {"epoch": 3, "loss": float(np.float32(0.1)), "note": "grüße", "zero": 0},
    )  # fmt: skip


def assert_same(left: CheckpointData, right: CheckpointData) -> None:
    assert _told(left) == _told(right)


def _told(data: CheckpointData) -> tuple[object, ...]:
    """All of it but the order of properties."""
    optimizer = data.optimizer
    moments = {} if optimizer is None else optimizer.moments
    arrays = [data.trainable, data.frozen, *(dict(enumerate(m)) for m in moments.values())]
    return (
        data.nominal,
        {name: (type(value), value) for name, value in data.properties.items()},
        optimizer and (optimizer.step, optimizer.learning_rate, optimizer.kind, list(moments)),
        [[(n, a.dtype, a.shape, a.tobytes()) for n, a in each.items()] for each in arrays],
    )


class Foreign:
    """A writer of single tensors that shares nothing with ours but the flatbuffers package."""

    def __init__(self) -> None:
        self.b = flatbuffers.Builder(64)

    def table(self, fields: dict[int, Any]) -> int:
        """Fields with their kinds; a number alone is the offset of what it refers to."""
        self.b.StartObject(8)
        for slot, field in fields.items():
            kind, value = field if isinstance(field, tuple) else ("UOffsetTRelative", field)
            getattr(self.b, f"Prepend{kind}Slot")(slot, value, -99 if kind == "Int64" else 0)
        return self.b.EndObject()

    def vector(self, offsets: Sequence[int]) -> int:
        self.b.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self.b.PrependUOffsetTRelative(offset)
        return self.b.EndVector()

    def tensor(self, name="w", dims=(2,), code=1, raw=bytes(8), offset=None, doc=None):
        fields: dict[int, Any] = {0: self.b.CreateString(name)}
        fields[2] = self.b.CreateNumpyVector(np.array(dims, np.int64))
        if doc is not None:
            fields[1] = self.b.CreateString(doc)
        if raw is not None:
            fields[4] = self.b.CreateByteVector(raw)
        fields[3] = ("Int32", code)
        if offset is not None:
            fields[6] = ("Int64", offset)
        return self.table(fields)

    def finish(
        self, trainable: Sequence[int], frozen: Sequence[int] = (), version: int = 2,
        external: bool = False, nominal: bool = False, groups: int = 0, bag: int = 0,
    ) -> bytes:  # fmt: skip
        a, b = self.vector(trainable), self.vector(frozen)
        module = self.table({0: a, 1: b, 2: ("Bool", nominal), 3: ("Bool", external)})
        root = self.table({0: ("Int32", version), 1: module, 2: groups, 3: bag})
        self.b.Finish(root, b"ODTC")
        return bytes(self.b.Output())

    def group(self, name: str = "group0", states: Sequence[int] = (), step: int = 1) -> int:
        label, entries = self.b.CreateString(name), self.vector(states)
        return self.table({0: label, 1: ("Int64", step), 3: entries})

    def state(self, name: str, moments: Sequence[int]) -> int:
        label, tensors = self.b.CreateString(name), self.vector(moments)
        return self.table({0: label, 1: tensors})
