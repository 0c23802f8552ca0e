"""Checkpoints to read and write, and a second writer that also makes wrong ones."""

from collections.abc import Sequence

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
    assert left.nominal == right.nominal
    ours, theirs = ({k: (type(v), v) for k, v in each.properties.items()} for each in (left, right))
    assert ours == theirs
    pairs = [(left.trainable, right.trainable), (left.frozen, right.frozen)]
    assert (left.optimizer is None) == (right.optimizer is None)
    if left.optimizer and right.optimizer:
        for key in ("step", "learning_rate", "kind"):
            assert getattr(left.optimizer, key) == getattr(right.optimizer, key), key
        moments = left.optimizer.moments, right.optimizer.moments
        assert list(moments[0]) == list(moments[1])
        for name in moments[0]:
            one, other = (dict(enumerate(each[name])) for each in moments)
            pairs.append((one, other))
    for ours, theirs in pairs:
        assert list(ours) == list(theirs)
        for name, array in ours.items():
            assert array.dtype == theirs[name].dtype
            assert array.shape == theirs[name].shape
            assert array.tobytes() == theirs[name].tobytes()


class Foreign:
    """A writer of single tensors that shares nothing with ours but the flatbuffers package."""

    def __init__(self) -> None:
        self.b = flatbuffers.Builder(64)

    def table(self, fields: dict[int, tuple[str, object]]) -> int:
        self.b.StartObject(8)
        for slot, (kind, value) in fields.items():
            getattr(self.b, f"Prepend{kind}Slot")(slot, value, -99 if kind == "Int64" else 0)
        return self.b.EndObject()

    def vector(self, offsets: Sequence[int]) -> int:
        self.b.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self.b.PrependUOffsetTRelative(offset)
        return self.b.EndVector()

    def tensor(
        self, name: str = "w", dims: tuple[int, ...] = (2,), code: int = 1,
        raw: bytes | None = bytes(8), offset: int | None = None, doc: str | None = None,
    ) -> int:  # fmt: skip
        fields: dict[int, tuple[str, object]] = {3: ("Int32", code)}
        references = {0: self.b.CreateString(name)}
        references[2] = self.b.CreateNumpyVector(np.array(dims, np.int64))
        if doc is not None:
            references[1] = self.b.CreateString(doc)
        if raw is not None:
            references[4] = self.b.CreateByteVector(raw)
        if offset is not None:
            fields[6] = ("Int64", offset)
        return self.table({k: ("UOffsetTRelative", v) for k, v in references.items()} | fields)

    def finish(
        self, trainable: Sequence[int], frozen: Sequence[int] = (), version: int = 2,
        external: bool = False, nominal: bool = False, groups: int = 0, bag: int = 0,
    ) -> bytes:  # fmt: skip
        a, b = self.vector(trainable), self.vector(frozen)
        module = self.table({
            0: ("UOffsetTRelative", a), 1: ("UOffsetTRelative", b), 2: ("Bool", nominal),
            3: ("Bool", external),
        })  # fmt: skip
        root = self.table({
            0: ("Int32", version), 1: ("UOffsetTRelative", module), 2: ("UOffsetTRelative", groups),
            3: ("UOffsetTRelative", bag),
        })  # fmt: skip
        self.b.Finish(root, b"ODTC")
        return bytes(self.b.Output())

    def group(self, name: str = "group0", states: Sequence[int] = (), step: int = 1) -> int:
        label, entries = self.b.CreateString(name), self.vector(states)
        return self.table(
            {0: ("UOffsetTRelative", label), 1: ("Int64", step), 3: ("UOffsetTRelative", entries)}
        )

    def state(self, name: str, moments: Sequence[int]) -> int:
        label, tensors = self.b.CreateString(name), self.vector(moments)
        return self.table({0: ("UOffsetTRelative", label), 1: ("UOffsetTRelative", tensors)})
