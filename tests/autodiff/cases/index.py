"""Operators that pick or write elements by index."""

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Array, Case, cases, ints, joined, normal, spread, spread_apart

X = normal(2, 3, 4)
EVERY = (12, 18, 24)
REPEATED = np.array([[0, 2, 1, -1], [0, 1, 1, -1]])  # along an axis of length 3
TUPLES = np.array([[0, 1], [1, -1], [0, 1]])  # into (2, 3), one of them twice
OF_REDUCTION = {"mul": "prod", "max": "amax", "min": "amin"}  # in PyTorch


def gathered_nd(x: torch.Tensor, indices: torch.Tensor, batch: int = 0) -> torch.Tensor:
    """GatherND by plain indexing."""
    wide = []
    for axis, size in enumerate(indices.shape[:batch]):
        wide.append(torch.arange(size).reshape(-1, *[1] * (indices.ndim - 2 - axis)))
    return x[(*wide, *indices.unbind(-1))]


def scattered(reduction: str):  # type: ignore[no-untyped-def]
    """ScatterElements along axis 0 of length 3."""

    def function(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(0, i % 3, u, OF_REDUCTION[reduction])

    return function


def scattered_rows(reduction: str):  # type: ignore[no-untyped-def]
    """ScatterND of rows into an array of shape (2, 3, 4)."""

    def function(x: torch.Tensor, i: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        rows = (i % torch.tensor([2, 3])) @ torch.tensor([3, 1])
        table = x.reshape(6, 4)
        places = rows.reshape(-1, 1).expand(-1, 4)
        return table.scatter_reduce(0, places, u, OF_REDUCTION[reduction]).reshape(x.shape)

    return function


def with_zeros(array: Array) -> Array:
    """The same with zeros at (0, 0), and at (0, 2) and (1, 2), which hit one element."""
    array = array.copy()
    array[[0, 0, 1], [0, 2, 2]] = 0
    return array


def with_extremes(*shapes: tuple[int, ...]) -> dict[str, Array | None]:
    """Data, indices and updates of a scatter none of whose elements are equal."""
    x, u = spread_apart(*shapes)
    return {"x": x, "i": REPEATED if u.shape == (2, 4) else TUPLES, "u": u}


def chosen(i: torch.Tensor, d: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.where(F.one_hot(i % 3, 3).bool(), v[1], v[0])


def top(k: int, axis: int, largest: int):  # type: ignore[no-untyped-def]
    return lambda x, _: x.topk(k, axis, bool(largest), sorted=True)[0]


CASES: list[Case] = [
    # Picking by index
    *cases("Gather", {"x": X[0], "i": ints(2, 0, 2)}, lambda x, i: x[i], EVERY, runtime=["i"]),
    *cases("Gather", {"x": X[0], "i": np.array([[2, -1], [0, -3]])},
           lambda x, i: x[i], (12, 15, 16, 18), runtime=["i"], batch=["i"], label="negative"),
    *cases("Gather", {"x": X, "i": np.array([[2, 0, 1, 1], [0, 2, 2, 0]])},
           lambda x, i: x[:, i], (12, 17), axis=1, runtime=["i"], label="middle"),
    *cases("Gather", {"x": X, "i": np.array([[2, 0], [0, 2]])},
           lambda x, i: x[:, :, i], (12, 17), axis=-1, runtime=["i"], batch=["x"], label="last"),
    *cases("Gather", {"x": X, "i": np.array([[2, 0], [0, 2]])},
           lambda x, i: x[:, i], (12, 17), axis=1, batch=["x"], label="middle"),
    *cases("Gather", {"x": X, "i": np.array(-1)}, lambda x, i: x[:, i], EVERY, axis=1,
           batch=["x"], label="scalar"),
    *cases("Gather", {"x": X, "i": np.array(1)}, lambda x, i: x[:, :, i], (12, 17), axis=2,
           runtime=["i"], batch=["x"], label="scalar-at-run-time"),
    *cases("Gather", {"x": X, "i": np.array([-1])}, lambda x, i: x[i], axis=0, batch=["x"],
           label="last-of-batch"),
    *cases("Gather", {"x": X, "i": np.array([0, 1, 0], np.int32)}, lambda x, i: x[i.long()],
           label="int32"),
    *cases("GatherElements", {"x": X[0], "i": np.array([[0, 2, 1, -1], [2, 2, 0, 0]])},
           lambda x, i: x.gather(0, i % 3), (16, 18, 24), runtime=["i"]),
    *cases("GatherElements", {"x": X[0], "i": np.array([[0, 3], [-1, 2], [1, 1]])},
           lambda x, i: x.gather(1, i % 4), (12, 13, 17), axis=1, runtime=["i"], label="axis1"),
    *cases("GatherElements", {"x": X[0], "i": np.array([[0, 3], [-1, 2], [1, 1]])},
           lambda x, i: x.gather(1, i % 4), (12, 17), axis=-1, runtime=["i"],
           batch=["x", "i"], label="axis-1", differences="torch"),
    *cases("GatherND", {"x": X, "i": np.array([[0, 1], [1, -1], [0, 1]])}, gathered_nd,
           (16, 18, 24), runtime=["i"], batch=["x"]),
    *cases("GatherND", {"x": X, "i": np.array([[[0, 1, 3]], [[-1, 2, 0]]])}, gathered_nd,
           label="elements"),
    *cases("GatherND", {"x": X, "i": np.array([[1], [0], [1]])}, gathered_nd, label="rows",
           batch=["x"]),
    *cases("GatherND", {"x": X, "i": np.array([[[1], [1]], [[0], [2]]])},
           lambda x, i: gathered_nd(x, i, 1), batch_dims=1, batch=["x", "i"], runtime=["i"],
           label="batch-dims"),
    *cases("GatherND", {"x": X, "i": np.array([[[1], [1], [2]], [[0], [2], [3]]])},
           lambda x, i: gathered_nd(x, i, 2), batch_dims=2, label="two-batch-dims"),
    *cases("GatherND", {"x": X, "i": TUPLES}, gathered_nd, (12,), runtime=["i"], batch=["x"],
           label="old"),
    *cases("GatherND", {"x": X, "i": np.array([[[0, 1]], [[1, -1]]])}, gathered_nd, (12, 17),
           runtime=["i"], label="more-axes"),
    *cases("GatherElements", {"x": X[0], "i": ints(0, 1)[None]}, lambda x, i: x.gather(0, i),
           (12, 17), differences="torch", label="few"),
    *cases("Compress", {"x": X, "c": np.array([True, False, True])},
           lambda x, _: x[:, [0, 2]], EVERY, axis=1, batch=["x"]),
    *cases("Compress", {"x": X, "c": np.array([True, False, True])},
           lambda x, _: x[..., [0, 2]], EVERY, axis=-1, label="short"),
    *cases("Compress", {"x": X, "c": np.array([True] + 7 * [False] + [True])},
           lambda x, _: x.flatten()[[0, 8]], EVERY, batch=["x"], label="flat"),
    *cases("Unique", {"x": spread(2, 3)}, lambda x: x.flatten().sort()[0], EVERY),
    # The reference implementation sorts whatever ``sorted`` says.
    *cases("Unique", {"x": spread(2, 3)}, lambda x: x.flatten(), EVERY, sorted=0,
           differences="torch", label="in-order"),
    *cases("Unique", {"x": spread(3, 2)}, lambda x: x[x[:, 0].argsort()], EVERY, axis=0,
           label="rows"),
    *cases("Unique", {"x": spread(2, 3)[:, [0, 1, 0, 2]]},
           lambda x: torch.stack([(x[:, 0] + x[:, 2]) / 2, x[:, 1], x[:, 3]], 1), axis=1, sorted=0,
           differences="none", label="ties"),
    *cases("OneHot", {"i": np.array([[0, 2], [1, -1]]), "d": np.array(3),
                      "v": np.float32([0.5, 2])}, chosen, EVERY, runtime=["i"]),
    *cases(
        "OneHot", {"i": np.array([[0, 2], [1, -1]]), "d": np.array(3), "v": np.float32([0.5, 2])},
        lambda *x: chosen(*x).permute(0, 2, 1), EVERY, axis=1, runtime=["i", "d"], label="axis1"),
    # Writing by index
    *cases("ScatterElements", {"x": X[0], "i": np.array([[0, 2, 1, -1]]),
                               "u": normal(1, 4, seed=1)},
           lambda x, i, u: x.scatter(0, i % 3, u), EVERY, runtime=["i"]),
    *cases("ScatterElements", {"x": X[0], "i": np.array([[0, 2], [1, -1], [1, 0]]),
                               "u": normal(3, 2, seed=1)},
           lambda x, i, u: x.scatter(1, i % 4, u), axis=-1, batch=["x", "i", "u"], label="axis-1"),
    *cases("ScatterElements", {"x": X[0], "i": np.array([[0, 0], [1, -1], [1, 1]]),
                               "u": normal(3, 2, seed=1)},
           lambda x, i, u: x.scatter_add(1, i % 4, u), (16, 18), axis=1, reduction="add",
           label="add"),
    *cases("ScatterND", {"x": X, "i": np.array([[0, 1], [1, -1]]), "u": normal(2, 4, seed=1)},
           lambda x, i, u: x.index_put(tuple(i.unbind(-1)), u), EVERY, batch=["x"], runtime=["i"]),
    *cases("ScatterND", {"x": X, "i": np.array([[1], [0], [1]]), "u": normal(3, 3, 4, seed=1)},
           lambda x, i, u: x.index_put(tuple(i.unbind(-1)), u, accumulate=True), (16, 18),
           reduction="add", label="add"),
    *cases("TopK", {"x": spread(3, 5), "k": ints(2)}, lambda x, _: x.topk(2)[0], EVERY, outputs=2,
           used=[0], batch=["x"]),
    *cases("TopK", {"x": spread(3, 5), "k": ints(2)}, lambda x, _: x.topk(2, 0, largest=False)[0],
           axis=0, largest=0, outputs=2, used=[0], label="smallest"),
    *cases("ReverseSequence", {"x": normal(4, 2, 3), "n": ints(3, 2)},
           lambda x, _: torch.stack([x[[2, 1, 0, 3], 0], x[[1, 0, 2, 3], 1]], 1), EVERY),
    *cases("ReverseSequence", {"x": normal(2, 4, 3), "n": ints(3, 2)},
           lambda x, _: torch.stack([x[0, [2, 1, 0, 3]], x[1, [1, 0, 2, 3]]]), batch_axis=0,
           time_axis=1, batch=["x"], label="batch-first"),
    *joined(
        [*cases("ScatterElements", with_extremes((3, 4), (2, 4)), scattered(reduction), opsets,
                reduction=reduction, runtime=["i"], label=reduction),
         *cases("ScatterND", with_extremes((2, 3, 4), (3, 4)), scattered_rows(reduction), opsets,
                reduction=reduction, runtime=["i"], batch=["x"], label=reduction)]
        for reduction, opsets in (("mul", (16, 18, 24)), ("max", (18, 24)), ("min", (18, 24)))),
    *cases("ScatterElements", {"x": X[0], "i": REPEATED, "u": with_zeros(normal(2, 4, seed=1))},
           scattered("mul"), (16, 24), reduction="mul", label="mul-zeros"),
    *cases("ScatterElements", {"x": X[0], "i": REPEATED, "u": X[0][[0, 1]]},
           scattered("max"), (18,), reduction="max", differences="none", label="max-ties"),
    *cases("TensorScatter", {"x": normal(2, 3, 5, 2), "u": normal(2, 3, 2, 2, seed=1),
                             "at": ints(1, 3)},
           lambda x, u, _: torch.stack([
               torch.cat([x[0, :, :1], u[0], x[0, :, 3:]], 1),
               torch.cat([x[1, :, :3], u[1]], 1),
           ]), (24, 26), runtime=["at"], batch=["x", "u", "at"]),
    *cases("TensorScatter", {"x": normal(2, 3, 5, 2), "u": normal(2, 3, 2, 2, seed=1)},
           lambda x, u: torch.cat([u, x[:, :, 2:]], 2), (24, 26), label="from-the-start"),
    *cases("TensorScatter", {"x": normal(2, 5, 2), "u": normal(2, 2, 2, seed=1),
                             "at": ints(1, 4)},
           lambda x, u, _: torch.stack([
               torch.cat([x[0, :1], u[0], x[0, 3:]]),
               torch.cat([u[1, 1:], x[1, 1:4], u[1, :1]]),
           ]), (24, 26), runtime=["at"], mode="circular", axis=1, label="circular"),
    *joined(cases("TopK", {"x": spread(4, 5), "k": ints(3)}, top(3, axis, largest), (12, 24),
                  axis=axis, largest=largest, outputs=2, used=[0], runtime=["k"],
                  label=f"axis{axis}-{('smallest', 'largest')[largest]}")
            for axis in (0, -1) for largest in (0, 1)),
]  # fmt: skip
