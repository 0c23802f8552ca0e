"""Every combination of the attributes of operators that have several."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.cases.matrix import REDUCTIONS
from tests.autodiff.oracle import Case, cases, ints, normal, spread

X = spread(2, 3, 4)
POSITIVE = spread(2, 3, 4, low=0.3)


def permutations() -> Iterator[Case]:
    for perm in itertools.permutations(range(3)):
        yield from cases("Transpose", {"x": X}, lambda x, p=perm: x.permute(p), (13,), perm=perm,
                         batch=["x"], label="".join(map(str, perm)))  # fmt: skip


def flattened() -> Iterator[Case]:
    for axis in range(-3, 4):
        rows = int(np.prod(X.shape[: axis % 3 if axis < 0 else axis]))
        yield from cases("Flatten", {"x": X}, lambda x, r=rows: x.reshape(r, -1), (13,), axis=axis,
                         label=f"axis{axis}-of-3")  # fmt: skip


def reductions() -> Iterator[Case]:
    """Axes as attribute before, as input from the opset on that the row names."""
    subsets = [axes for count in (1, 2, 3) for axes in itertools.combinations(range(3), count)]
    for op, function, x, since in REDUCTIONS:
        for axes, keep in itertools.product(subsets, (0, 1)):
            label = f"axes{''.join(map(str, axes))}-keepdims{keep}"

            def reduced(x: Any, *_: Any, f: Any = function, a: Any = axes, k: int = keep) -> Any:
                return f(x, a, bool(k))

            yield from cases(op, {"x": x, "axes": ints(*axes)}, reduced, (since,), keepdims=keep,
                             batch=["x"], label=label)  # fmt: skip
            yield from cases(op, {"x": x}, reduced, (12,), axes=[a - 3 for a in axes],
                             keepdims=keep, label=f"{label}-attribute")  # fmt: skip


def gathers() -> Iterator[Case]:
    for axis, shape in itertools.product((0, 1, 2, -1, -3), ((), (1,), (3,), (2, 2))):
        indices = np.random.default_rng(len(shape)).integers(-2, 2, shape)
        size = X.shape[axis]

        def picked(x: Any, i: Any, axis: int = axis, size: int = size) -> Any:
            flat = x.index_select(axis, (i % size).reshape(-1))
            return flat.unflatten(axis, i.shape) if i.ndim else flat.squeeze(axis)

        for where in ((), ("i",)):
            label = f"axis{axis}-{'x'.join(map(str, shape))}{'-fed' * len(where)}"
            yield from cases("Gather", {"x": X, "i": np.asarray(indices)}, picked, (13,),
                             axis=axis, runtime=list(where), batch=["x"] if axis % 3 else [],
                             label=label)  # fmt: skip


def elements() -> Iterator[Case]:
    for axis in (0, 1, -1):
        indices = np.random.default_rng(0).integers(-3, 3, X.shape)
        size = X.shape[axis]
        yield from cases("GatherElements", {"x": X, "i": indices % size},
                         lambda x, i, a=axis: x.gather(a, i), (13,), axis=axis, runtime=["i"],
                         label=f"axis{axis}-of-3")  # fmt: skip
        yield from cases("ScatterElements", {"x": X, "i": indices % size, "u": normal(2, 3, 4)},
                         lambda x, i, u, a=axis: x.scatter_add(a, i, u), (16,), axis=axis,
                         reduction="add", runtime=["i"], label=f"add-axis{axis}-of-3")  # fmt: skip
        order = np.argsort(indices + np.arange(X.size).reshape(X.shape) / X.size, axis)
        yield from cases("ScatterElements", {"x": X, "i": order, "u": normal(2, 3, 4)},
                         lambda x, i, u, a=axis: x.scatter(a, i, u), (13,), axis=axis,
                         runtime=["i"], label=f"axis{axis}-of-3")  # fmt: skip


def softmaxes() -> Iterator[Case]:
    for axis, name in itertools.product(range(-3, 3), ("softmax", "log_softmax")):
        op = "".join(part.capitalize() for part in name.split("_"))
        function = getattr(torch, name)
        yield from cases(op, {"x": X}, lambda x, f=function, a=axis: f(x, a), (13,), axis=axis,
                         label=f"axis{axis}-of-3")  # fmt: skip
        yield from cases(op, {"x": X}, lambda x, f=function, a=axis % 3:
                         f(x.flatten(a), a).reshape(x.shape), (12,), axis=axis,
                         differences="torch", label=f"axis{axis}-of-3")  # fmt: skip


def activations() -> Iterator[Case]:
    for alpha, beta in itertools.product((0.1, 0.3, 1.0), (0.2, 0.5)):
        kinks = [-beta / alpha, (1 - beta) / alpha]
        yield from cases("HardSigmoid", {"x": spread(3, 4, low=-4, high=4, avoid=kinks)},
                         lambda x, a=alpha, b=beta: torch.clamp(a * x + b, 0, 1), (12,),
                         alpha=alpha, beta=beta, label=f"{alpha}-{beta}")  # fmt: skip
    for alpha, gamma in itertools.product((0.5, 1.6), (0.7, 1.2)):
        yield from cases("Selu", {"x": X},
                         lambda x, a=alpha, g=gamma: g * torch.where(x > 0, x, a * torch.expm1(x)),
                         (12,), alpha=alpha, gamma=gamma, label=f"{alpha}-{gamma}")  # fmt: skip
    for alpha in (-0.3, 0.0, 0.4):
        yield from cases("ThresholdedRelu", {"x": spread(3, 4, avoid=[alpha])},
                         lambda x, a=alpha: torch.where(x > a, x, 0.0), (12,), alpha=alpha,
                         label=f"alpha{alpha}")  # fmt: skip
    for shape in ((1,), (4,), (3, 1), (1, 3, 1), (2, 3, 4)):
        yield from cases("PRelu", {"x": X, "slope": spread(*shape, seed=2)},
                         lambda x, s: torch.where(x > 0, x, x * s), (16,), batch=["x"] *
                         (shape != (2, 3, 4)), label="x".join(map(str, shape)))  # fmt: skip
    for low, high in itertools.product((None, -1.0), (None, 0.5)):
        given = {"lo": None if low is None else np.float32(low)}
        given |= {} if high is None else {"hi": np.float32(high)}
        for fixed in ((), tuple(name for name, bound in given.items() if bound is not None)):

            def clipped(x: Any, *bounds: Any, low: Any = low, high: Any = high) -> Any:
                rest = list(bounds)
                least = None if low is None else rest.pop(0)
                return torch.clamp(x, least, None if high is None else rest.pop(0))

            if low is None is high:
                continue
            label = f"{low}-{high}{'-fed' * (not fixed)}"
            yield from cases("Clip", {"x": spread(3, 4, avoid=[-1, 0.5])} | given, clipped, (12,),
                             const=list(fixed), label=label)  # fmt: skip


def powers() -> Iterator[Case]:
    for dtype, e in itertools.product(("int32", "int64", "float32", "float64"), (-1, 0, 1, 2, 3)):
        for fixed in (True, False):
            exponent = np.array([e], dtype)
            yield from cases("Pow", {"x": spread(2, 3, low=0.4), "e": exponent},
                             lambda x, e: x ** e.double(), (12,), wrt=["x"],
                             const=["e"] if fixed and exponent.dtype.kind == "f" else [],
                             runtime=[] if fixed else ["e"],
                             label=f"{dtype}{e}{'' if fixed else '-fed'}")  # fmt: skip


def norms() -> Iterator[Case]:
    for p, axis in itertools.product((1, 2), range(-3, 3)):
        yield from cases("LpNormalization", {"x": X},
                         lambda x, p=p, a=axis: F.normalize(x, p=p, dim=a), (12,), p=p, axis=axis,
                         differences="torch", label=f"p{p}-axis{axis}")  # fmt: skip
    for axis, bias in itertools.product(range(-3, 3), (False, True)):
        shape = X.shape[axis % 3 :]
        inputs = {"x": X, "scale": normal(*shape, seed=2)}
        inputs |= {"bias": normal(*shape, seed=3)} if bias else {}
        yield from cases("LayerNormalization", inputs,
                         lambda x, *p, s=shape: F.layer_norm(x, s, *p, eps=1e-3), (17, 23),
                         axis=axis, epsilon=1e-3, label=f"axis{axis}-{bias}-of-3")  # fmt: skip


def joins() -> Iterator[Case]:
    for axis in range(-3, 3):
        other = normal(2, 3, 4, seed=1)
        yield from cases("Concat", {"a": X, "b": other}, lambda *x, a=axis: torch.cat(x, a), (13,),
                         axis=axis, label=f"axis{axis}-of-3")  # fmt: skip
        if X.shape[axis] > 2:
            sizes = [1, X.shape[axis] - 1]
            yield from cases("Split", {"x": X, "split": ints(*sizes)},
                             lambda x, _, a=axis, s=sizes: x.split(s, a), (13,), axis=axis,
                             outputs=2, label=f"axis{axis}-of-3")  # fmt: skip
            yield from cases("Split", {"x": X}, lambda x, a=axis, s=sizes: x.split(s, a), (12,),
                             axis=axis, split=sizes, outputs=2,
                             label=f"axis{axis}-of-3")  # fmt: skip
    for condition, a, b in itertools.product(((3, 4), (2, 1, 1)), ((2, 3, 4), (4,)), ((3, 1), ())):
        flags = np.random.default_rng(1).random(condition) > 0.5
        inputs = {"c": flags, "a": normal(*a), "b": np.asarray(normal(*b, seed=1), np.float32)}
        yield from cases("Where", inputs, torch.where, (12,), wrt=["a", "b"],
                         label=f"{len(condition)}{len(a)}{len(b)}")  # fmt: skip


CASES: list[Case] = [
    *permutations(), *flattened(), *reductions(), *gathers(), *elements(), *softmaxes(),
    *activations(), *powers(), *norms(), *joins(),
]  # fmt: skip
