"""Arithmetic, elementary functions and activations."""

import numpy as np
import torch
from torch.nn import functional as F

from tests.autodiff.oracle import Case, cases, ints, joined, normal, spread, spread_apart

EVERY = (12, 18, 24)
A, B = spread_apart((2, 3, 4), (3, 1))
ROW = spread(4, seed=3)
MILD = {"low": -0.8, "high": 0.8}
TIED = np.array([-1, 0.5, 0.5, 0.75, 2, 3], np.float32)  # met by 0.5
FLAG = np.array([[True, False, True], [False, True, True]])

# operator, PyTorch function, range of the points, has a float64 kernel
UNARY = [
    ("Identity", lambda x: x * 1, {}, True),
    ("Neg", torch.neg, {}, True),
    ("Abs", torch.abs, {}, True),
    ("Reciprocal", torch.reciprocal, {"avoid": [0], "gap": 0.3}, True),
    ("Sqrt", torch.sqrt, {"low": 0.3}, True),
    ("Exp", torch.exp, {}, True),
    ("Log", torch.log, {"low": 0.3}, True),
    ("Sin", torch.sin, {}, True),
    ("Cos", torch.cos, {}, True),
    ("Tan", torch.tan, {"low": -1.2, "high": 1.2}, False),
    ("Sinh", torch.sinh, {}, False),
    ("Cosh", torch.cosh, {}, False),
    ("Tanh", torch.tanh, {}, True),
    ("Asin", torch.asin, MILD, False),
    ("Acos", torch.acos, MILD, False),
    ("Atan", torch.atan, {}, False),
    ("Asinh", torch.asinh, {}, False),
    ("Acosh", torch.acosh, {"low": 1.3, "high": 4}, False),
    ("Atanh", torch.atanh, MILD, False),
    ("Relu", torch.relu, {}, False),
    ("Sigmoid", torch.sigmoid, {"low": -4, "high": 4}, True),
    ("Softplus", F.softplus, {}, False),
    ("Softsign", F.softsign, {}, False),
]

CASES: list[Case] = [
    *joined(cases(op, {"x": spread(2, 3, **points)}, function, EVERY, double=double, batch=["x"])
            for op, function, points, double in UNARY),
    # The reference implementation rounds erf to float32, and softmax ignores the opset.
    *cases("Erf", {"x": A}, torch.erf, EVERY, differences="torch"),
    *cases("Gelu", {"x": A}, F.gelu, (20, 23), differences="torch"),
    *cases("Gelu", {"x": A}, lambda x: F.gelu(x, approximate="tanh"), (20,), approximate="tanh",
           label="tanh"),
    # Arithmetic, with and without broadcasting
    *cases("Add", {"a": A, "b": B}, torch.add, EVERY, double=True),
    *cases("Add", {"a": B, "b": A}, torch.add, label="left"),
    *cases("Add", {"a": A, "b": ROW}, torch.add, (12, 17), batch=["a"], label="bias"),
    *cases("Sub", {"a": A, "b": B}, torch.sub, EVERY, double=True),
    *cases("Sub", {"a": ROW, "b": A}, torch.sub, batch=["b"], label="left"),
    *cases("Mul", {"a": A, "b": B}, torch.mul, EVERY, double=True),
    *cases("Mul", {"a": A, "b": spread(1, seed=2)[0]}, torch.mul, label="scalar"),
    *cases("Mul", {"a": A, "b": ROW}, torch.mul, wrt=["b"], label="one-wanted"),
    *cases("Div", {"a": A, "b": B}, torch.div, EVERY, double=True),
    *cases("Div", {"a": ROW, "b": A}, torch.div, batch=["b"], label="left"),
    *cases("Sum", {"a": A, "b": B, "c": ROW}, lambda *x: sum(x), EVERY, double=True),
    *cases("Sum", {"a": A}, lambda x: x * 1, label="one"),
    *cases("Mean", {"a": A, "b": B, "c": ROW}, lambda *x: sum(x) / 3, EVERY),
    *cases("Mean", {"a": A}, lambda x: x * 1, label="one"),
    *cases("Max", {"a": A, "b": B}, torch.maximum, EVERY, double=True),
    *cases("Min", {"a": A, "b": B}, torch.minimum, EVERY, double=True),
    *cases("Max", {"a": A}, lambda x: x * 1, label="one"),
    *cases("Max", dict(zip("abc", spread_apart((2, 3), (3,), (2, 1)), strict=True)),
           lambda a, b, c: torch.maximum(torch.maximum(a, b), c), label="three"),
    *cases("Max", {"a": A, "b": A.copy()}, torch.maximum, differences="none", label="ties"),
    *cases("Min", {"a": A, "b": A.copy()}, torch.minimum, differences="none", label="ties"),
    # A constant takes no part of a tie, as in clamp_min and clamp_max
    *cases("Max", {"a": TIED, "b": np.float32(0.5)}, lambda a, b: a.clamp(min=0.5), EVERY,
           const=["b"], differences="none", label="tie-with-a-constant", double=True),
    *cases("Min", {"a": np.float32(0.5), "b": TIED}, lambda a, b: b.clamp(max=0.5), EVERY,
           const=["a"], differences="none", label="tie-with-a-constant", double=True),
    *cases("Max", {"a": TIED, "b": TIED.copy(), "c": np.float32(0.5)},
           lambda a, b, c: torch.maximum(a, b).clamp(min=0.5), const=["c"], differences="none",
           label="ties-and-a-constant"),
    # Powers
    *joined(cases("Pow", {"x": spread(2, 3, gap=0.3), "e": np.float32([e])}, torch.pow, (12, 17),
                  const=["e"], label=f"constant{e:g}", double=True)
            for e in (2.0, 3.0, 1.0, 0.0, -1.0)),
    *cases("Pow", {"x": spread(2, 3, low=0.3), "e": np.float32(0.5)}, torch.pow, const=["e"]),
    *cases("Pow", {"x": spread(2, 3, low=0.3), "e": np.float32(2)}, torch.pow, const=["e"],
           wrt=["x", "e"], differences="torch", label="learnt-initializer"),
    *cases("Pow", {"x": spread(2, 3), "e": ints(3)}, lambda x, e: x**3, EVERY,
           label="integer-exponent"),
    *cases("Pow", {"x": spread(2, 3, low=0.3), "e": spread(3, seed=4)}, torch.pow, EVERY,
           label="both", double=True),
    *cases("Pow", {"x": spread(2, 3), "e": np.float32([0, 2, 3])}, torch.pow, wrt=["x"],
           label="exponent-with-zero"),
    *cases("Pow", {"x": np.float32([0.0, 2.0]), "e": np.float32(0.0)}, torch.pow, const=["e"],
           label="zero-to-the-zero"),
    *cases("Mod", {"a": spread(2, 3, low=-5, high=5), "b": np.float32([1.3, -1.7, 2.3])},
           torch.fmod, EVERY, fmod=1, differences="torch"),
    # Choices and conversions
    *cases("Where", {"c": FLAG, "a": A[0, :2, :3], "b": ROW[:3]}, torch.where, EVERY, double=True),
    *cases("Where", {"c": FLAG[:1], "a": A[0, :2, :3], "b": ROW[:1]}, torch.where, label="wide"),
    *cases("Where", {"c": FLAG, "a": ROW[:3], "b": B[:2]}, torch.where, batch=["c"], label="batch"),
    *cases("Cast", {"x": A}, lambda x: x.double(), EVERY, to=11),
    *cases("CastLike", {"x": A, "like": ROW}, lambda x, _: x * 1, (15, 19, 23), wrt=["x"]),
    # Activations with parameters
    *cases("LeakyRelu", {"x": A}, lambda x: F.leaky_relu(x, 0.01), EVERY, batch=["x"]),
    *joined(cases("LeakyRelu", {"x": A}, lambda x, alpha=alpha: F.leaky_relu(x, alpha),
                  label=f"alpha{alpha}", alpha=alpha) for alpha in (0.3, 0.0, -0.2, 1.5)),
    *cases("ThresholdedRelu", {"x": spread(2, 3, avoid=[0.7])},
           lambda x: torch.where(x > 0.7, x, 0.0), EVERY, alpha=0.7),
    *cases("PRelu", {"x": A, "slope": B}, lambda x, s: torch.where(x > 0, x, x * s), (12, 16, 23)),
    *cases("HardSigmoid", {"x": spread(3, 4, low=-4, high=4, avoid=[-2.5, 2.5])},
           lambda x: torch.clamp(0.2 * x + 0.5, 0, 1), EVERY),
    *cases("HardSigmoid", {"x": spread(3, 4, avoid=[-1, 1])},
           lambda x: torch.clamp(0.5 * x + 0.5, 0, 1), alpha=0.5, label="alpha"),
    *cases("Elu", {"x": A}, F.elu, EVERY),
    *cases("Elu", {"x": A}, lambda x: F.elu(x, 0.4), alpha=0.4, label="alpha"),
    *cases("Elu", {"x": A}, lambda x: torch.where(x > 0, x, -0.4 * torch.expm1(x)), alpha=-0.4,
           label="negative-alpha"),
    *cases("Selu", {"x": A}, F.selu, EVERY),
    *cases("HardSwish", {"x": spread(3, 4, low=-5, high=5, avoid=[-3, 3])}, F.hardswish, (14, 22)),
    # Clip: bounds present, absent, learnt
    *cases("Clip", {"x": spread(3, 4, avoid=[-1, 1]), "lo": np.float32(-1), "hi": np.float32(1)},
           torch.clamp, EVERY, const=["lo", "hi"]),
    *cases("Clip", {"x": spread(3, 4, low=-3, high=9, avoid=[0, 6]), "lo": np.float32(0),
                    "hi": np.float32(6)}, torch.clamp, const=["lo", "hi"], label="relu6"),
    *cases("Clip", {"x": spread(3, 4, avoid=[0.3]), "lo": np.float32(0.3)},
           lambda x, lo: torch.clamp(x, min=lo), const=["lo"], label="lower"),
    *cases("Clip", {"x": spread(3, 4, avoid=[-0.1]), "lo": None, "hi": np.float32(-0.1)},
           lambda x, hi: torch.clamp(x, max=hi), const=["hi"], label="upper"),
    *cases("Clip", {"x": spread(3, 4)}, lambda x: x * 1, label="unbounded"),
    # At a bound the cotangent passes, but for two numbers, which may be those of ReLU6
    *(case for bound in (0.5, 0) for case in
      cases("Clip", {"x": TIED - np.float32(0.5 - bound), "lo": np.float32(bound)},
            lambda x, lo: torch.clamp(x, min=lo), EVERY, const=["lo"], differences="none",
            label=f"at-the-lower-bound{bound}", double=True)),
    *(case for bound in (0.5, 0) for case in
      cases("Clip", {"x": TIED - np.float32(0.5 - bound), "lo": None, "hi": np.float32(bound)},
            lambda x, hi: torch.clamp(x, max=hi), EVERY, const=["hi"], differences="none",
            label=f"at-the-upper-bound{bound}", double=True)),
    *cases("Clip", {"x": TIED, "lo": np.float32(0.5), "hi": np.float32(2)},
           lambda x, lo, hi: F.hardtanh(x, 0.5, 2), const=["lo", "hi"], differences="none",
           label="at-both-bounds", double=True),
    *cases("Clip", {"x": TIED, "lo": np.float32(0.5), "hi": np.float32(2)}, torch.clamp,
           wrt=["x"], differences="none", label="at-computed-bounds", double=True),
    *cases("Clip", {"x": spread(3, 4), "lo": np.float32(0), "hi": np.finfo(np.float32).max},
           torch.clamp, const=["lo", "hi"], label="largest-float", wrt=["x"]),
    *cases("Clip", {"x": spread(3, 4, low=-9, high=9, avoid=[-7.5]), "lo": np.float32(-7.5),
                    "hi": np.float32(np.inf)}, torch.clamp, const=["lo", "hi"], label="no-upper"),
    *cases("Clip", {"x": spread(3, 4, low=-9, high=9, avoid=[7.5]), "lo": np.float32(-np.inf),
                    "hi": np.float32(7.5)}, torch.clamp, const=["lo", "hi"], label="no-lower"),
    *cases("Clip", {"x": spread(3, 4, avoid=[-1, 1]), "lo": np.float32(-1), "hi": np.float32(1)},
           torch.clamp, label="learnt"),
    # Bounds that crossed: every element is the upper one
    *(case for fed in ((), ("lo",), ("hi",)) for case in
      cases("Clip", {"x": spread(3, 4, avoid=[-1, 1]), "lo": np.float32(1), "hi": np.float32(-1)},
            lambda x, lo, hi: torch.minimum(torch.maximum(x, lo), hi), (12, 17, 24),
            const=fed, label="crossed" + "".join(fed), double=True)),
    *cases("Clip", {"x": spread(3, 4, avoid=[-1, 1]), "lo": np.float32([-1])},
           lambda x, lo: torch.clamp(x, min=lo), label="learnt-vector"),
    # Softmax: one axis from opset 13, all axes from ``axis`` before
    *cases("Softmax", {"x": A}, lambda x: x.softmax(-1), (13, 21, 24), double=True),
    *cases("Softmax", {"x": A}, lambda x: x.softmax(1), (13, 21), axis=1, label="axis1"),
    *cases("Softmax", {"x": A}, lambda x: x.softmax(0), axis=-3, label="axis-3"),
    *cases("Softmax", {"x": A}, lambda x: x.flatten(1).softmax(1).reshape(x.shape), (12,),
           differences="torch"),
    *cases("Softmax", {"x": A}, lambda x: x.softmax(-1), (12,), axis=-1, label="axis-1"),
    *cases("LogSoftmax", {"x": A}, lambda x: x.log_softmax(-1), (13, 21, 24), double=True),
    *cases("LogSoftmax", {"x": A}, lambda x: x.log_softmax(1), axis=1, label="axis1"),
    *cases("LogSoftmax", {"x": A}, lambda x: x.flatten(1).log_softmax(1).reshape(x.shape), (12,),
           differences="torch"),
    *cases("LogSoftmax", {"x": normal(2, 3, scale=9)}, lambda x: x.log_softmax(-1), label="far"),
]  # fmt: skip
