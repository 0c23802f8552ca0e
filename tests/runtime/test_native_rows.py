"""Groups that native kernels compute row by row are close to exact, and train as their bodies."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx.helper
import onnx.numpy_helper
import onnx.reference
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack.optimizers import SGD
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.native import DOMAIN
from tests import native_library, packaging_tools, zoo
from tests.native_library import kernel_model, session, unaligned

N = onnx.helper.make_node
GELU_GRADIENT = [
    N("Mul", ["x", "k"], ["u"]), N("Erf", ["u"], ["e"]), N("HardSigmoid", ["e"], ["h"], alpha=0.5),
    N("Mul", ["u", "u"], ["q"]), N("Sub", ["n", "q"], ["d"]), N("Exp", ["d"], ["p"]),
    N("Mul", ["u", "p"], ["t"]), N("Add", ["h", "t"], ["s"]), N("Mul", ["g", "s"], ["dx"]),
    N("ReduceSum", ["dx", "leading"], ["db"], keepdims=0),
]  # fmt: skip
NORMALIZATION_GRADIENT = [
    N("Mul", ["g", "w"], ["a"]), N("ReduceMean", ["a"], ["m"], axes=[-1]),
    N("Sub", ["a", "m"], ["c"]), N("Sub", ["x", "mean"], ["y"]), N("Mul", ["y", "scale"], ["z"]),
    N("Mul", ["a", "z"], ["b"]), N("ReduceMean", ["b"], ["o"], axes=[-1]),
    N("Mul", ["z", "o"], ["f"]), N("Sub", ["c", "f"], ["h"]), N("Mul", ["h", "scale"], ["dx"]),
    N("Mul", ["g", "z"], ["j"]), N("ReduceSum", ["j", "leading"], ["dw"], keepdims=0),
    N("ReduceSum", ["g", "leading"], ["db"], keepdims=0),
]  # fmt: skip
SOFTMAX_GRADIENT = [
    N("Mul", ["x", "g"], ["a"]), N("ReduceSum", ["a", "last"], ["b"]), N("Sub", ["g", "b"], ["c"]),
    N("Mul", ["x", "c"], ["d"]), N("Div", ["d", "k"], ["dx"]),
]  # fmt: skip
LOG_SUM = [
    N("ReduceMax", ["x"], ["m"], axes=[-1]), N("Sub", ["x", "m"], ["c"]), N("Exp", ["c"], ["e"]),
    N("ReduceSum", ["e", "last"], ["s"]), N("Log", ["s"], ["l"]), N("Add", ["l", "m"], ["rows"]),
    N("Div", ["e", "s"], ["dx"]),
]  # fmt: skip
GATES = [
    N("Sigmoid", ["x"], ["s"]), N("Tanh", ["g"], ["t"]), N("Mul", ["s", "t"], ["p"]),
    N("Sub", ["p", "scale"], ["q"]), N("Less", ["n", "q"], ["positive"]),
    N("Where", ["positive", "q", "w"], ["dx"]),
    N("ReduceSum", ["p", "last"], ["rows"]), N("ReduceSum", ["q", "leading"], ["db"], keepdims=0),
]  # fmt: skip
PROGRAMS = {
    "GELU": (GELU_GRADIENT, ["g", "x", "k", "n"], ["dx", "db"]),
    "normalization": (NORMALIZATION_GRADIENT, ["g", "x", "mean", "scale", "w"], ["dx", "dw", "db"]),
    "softmax": (SOFTMAX_GRADIENT, ["g", "x", "k"], ["dx"]),
    "logarithm of a sum": (LOG_SUM, ["x"], ["dx", "rows"]),
    "gates": (GATES, ["g", "x", "scale", "w", "n"], ["dx", "rows", "db"]),
}  # fmt: skip


def row_model(name: str, dims: tuple[int, ...], *, fresh: bool) -> onnx.ModelProto:
    """A model of a program; ``fresh``: on values whose memory its results may take."""
    nodes, inputs, outputs = PROGRAMS[name]
    kinds = {"k": (), "n": (), "w": dims[-1:], "mean": (*dims[:-1], 1), "scale": (*dims[:-1], 1)}
    axes = {"leading": [*range(len(dims) - 1)], "last": [len(dims) - 1]}
    read = {each for node in nodes for each in node.input}
    constants = [
        N("Constant", [], [key], value=onnx.numpy_helper.from_array(np.int64(value)))
        for key, value in axes.items()
        if key in read
    ]
    shapes = {each: kinds.get(each, dims) for each in inputs}
    model = kernel_model([*constants, *nodes], shapes, outputs)
    if fresh:
        call = model.graph.node[0]
        for place, each in enumerate(inputs):
            model.graph.node.insert(0, N("Abs", [each], [f"{each}.fresh"]))
            call = model.graph.node[-1]
            call.input[place] = f"{each}.fresh"
    return model


@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3, 40]), min_size=1, max_size=2),
    st.sampled_from([1, 5, 16, 31, 128, 513, 1100]),
    st.booleans(),
)
@example([0, 2], 7, False)
def test_results_are_close_to_those_in_float64(
    name: str, leading: list[int], width: int, fresh: bool
) -> None:
    """Random lengths, on memory that is not aligned, in place or not."""
    dims = (*leading, width)
    model = row_model(name, dims, fresh=fresh)
    random = np.random.default_rng(width)
    feeds = {
        value.name: unaligned(
            random.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim])
        ).astype(np.float32)
        for value in model.graph.input
    }
    exact = onnx.reference.ReferenceEvaluator(model)
    wanted = exact.run(None, {key: value.astype(np.float64) for key, value in feeds.items()})
    found = session(model, native=True).run(None, feeds)
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape
        scale = np.abs(one).max(initial=1e-3)
        np.testing.assert_allclose(
            other, one, rtol=0, atol=2e-6 * float(scale) * math.log2(width + 8)
        )


@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
def test_infinities_and_nan_are_those_of_the_body(name: str) -> None:
    """Where the body has a number, the kernel has one close to it; else the same."""
    model = row_model(name, (64, 33), fresh=False)
    random = np.random.default_rng(1)
    feeds = {}
    for value in model.graph.input:
        array = random.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim])
        special = random.choice([np.inf, -np.inf, np.nan, 0.0, 1e30], array.shape)
        feeds[value.name] = np.where(random.random(array.shape) < 0.01, special, array).astype("f")
    with np.errstate(all="ignore"):
        wanted, found = (session(model, native=each).run(None, feeds) for each in (False, True))
    assert not np.isfinite(wanted[0]).all()
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize(("operator", "exact", "low", "high"), [
    ("Exp", np.exp, -87, 88.7),
    ("Erf", np.vectorize(math.erf), -5, 5),
    ("Tanh", np.tanh, -12, 12),
    ("Sigmoid", lambda x: 1 / (1 + np.exp(-x)), -85, 80),
    ("Log", np.log, 1e-30, 10),
])  # fmt: skip
def test_functions_are_within_two_units_in_the_last_place(
    operator: str, exact: object, low: float, high: float
) -> None:
    """Over the range where they are neither 0 nor infinite."""
    values = np.concatenate([np.linspace(low, high, 200_001), np.linspace(0.01, 1.5, 100_000)])
    values = values.astype(np.float32)
    model = kernel_model([N(operator, ["a"], ["b"])], {"a": values.shape}, ["b"])
    (found,) = session(model, native=True).run(None, {"a": values})
    wanted = exact(values.astype(np.float64))  # type: ignore[operator]
    unit = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    assert (np.abs(found - wanted) / unit).max() < 2.1


@pytest.mark.kernels
@pytest.mark.parametrize("other", [(1, 16), (8, 1, 16), (1, 1)])
def test_what_is_repeated_where_the_model_does_not_say_so_is_an_error(other: tuple[int]) -> None:
    """Results would have another shape than those of the body."""
    nodes = [N("Exp", ["x"], ["y"]), N("Mul", ["y", "g"], ["z"])]
    model = kernel_model(nodes, {"x": other, "g": (8, 16)}, ["y", "z"])
    feeds = {"x": np.ones(other, np.float32), "g": np.ones((8, 16), np.float32)}
    with pytest.raises(Exception, match="not those of rows"):
        session(model, native=True).run(None, feeds)


@pytest.mark.usefixtures("kernels")
def test_a_transformer_trains_as_without(tmp_path: Path) -> None:
    """Its backward pass has groups of GELU and LayerNormalization, verified as a stranger's."""
    model = zoo.transformer_encoder(vocab=50, d=32, layers=1, heads=2, T=16, ff=64)
    build_package(model, tmp_path, loss="cross_entropy", optimizer=SGD(), native=True)
    assert verify_package(tmp_path, limits=Limits()).steps
    made = onnx.load(tmp_path / "training_model.onnx")
    wrapped = {each.op_type for each in made.graph.node if each.domain == DOMAIN}
    inside = [{n.op_type for n in each.node} for each in made.functions if each.name in wrapped]
    assert [each for each in inside if {"Exp", "Erf", "HardSigmoid"} <= each]
    assert [each for each in inside if {"ReduceMean", "ReduceSum"} <= each]
    batch = packaging_tools.batch(model, 4)
    plain, kernels = (
        native_library.train(tmp_path, batch, tmp_path / f"{native}-", native=native, steps=5)[0]
        for native in (False, True)
    )
    np.testing.assert_allclose(kernels, plain, rtol=1e-5)
    assert plain[-1] < plain[0]


@pytest.mark.sweep
def test_threads_give_the_same_bits_without_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's threads are not instrumented: the kernels run on others."""
    monkeypatch.setattr(native_library, "APART", "thread")
    for name in PROGRAMS:
        model = row_model(name, (3001, 100), fresh=False)
        feeds = {}
        for value in model.graph.input:
            dims = [each.dim_value for each in value.type.tensor_type.shape.dim]
            counted = np.arange(np.prod(dims, dtype=int)).reshape(dims)
            feeds[value.name] = (0.25 + counted * 7 % 31 / 16).astype(np.float32)
        session(model, native=True).run(None, feeds)
