"""Groups that native kernels compute channel by channel are close to exact, and train so."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.reference
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack.optimizers import SGD
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.package.native import NotAProgramError, channels_program_of
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.native import DOMAIN, ENTRY, VARIABLE
from odtpack_runtime.session.options import default_session_options
from tests import native_library, packaging_tools, zoo
from tests.native_library import kernel_model, session

N = onnx.helper.make_node


def total(value: str, result: str) -> list[onnx.NodeProto]:
    """The sum of a value for each channel."""
    return [
        N("ReduceSum", [value, "space"], [f"{result}.partial"], keepdims=0),
        N("ReduceSum", [f"{result}.partial", "samples"], [result], keepdims=0),
    ]


FORWARD = [
    *total("x", "sum"), N("Div", ["sum", "count"], ["mean"]),
    N("Reshape", ["mean", "spread"], ["m"]), N("Sub", ["x", "m"], ["centered"]),
    N("Mul", ["centered", "centered"], ["q"]), *total("q", "squares"),
    N("Div", ["squares", "count"], ["variance"]),
    N("BatchNormalization", ["centered", "scale", "bias", "zeros", "variance"], ["n"],
      epsilon=1e-3),
    N("Clip", ["n", "low", "high"], ["y"]),
]  # fmt: skip
BACKWARD = [
    N("Less", ["low", "x"], ["inside"]), N("Where", ["inside", "dy", "zero"], ["g"]),
    *total("g", "dbias"), N("Mul", ["g", "centered"], ["p"]), *total("p", "moment"),
    N("Mul", ["moment", "inv"], ["dscale"]), N("Mul", ["scale", "inv"], ["gain"]),
    N("Div", ["gain", "count"], ["share"]), N("Mul", ["share", "dbias"], ["shift"]),
    N("Mul", ["share", "dscale"], ["slope"]), N("Reshape", ["gain", "spread"], ["s"]),
    N("Mul", ["g", "s"], ["straight"]),
    N("BatchNormalization", ["centered", "slope", "shift", "zeros", "ones"], ["along"],
      epsilon=0.0),
    N("Sub", ["straight", "along"], ["dx"]),
]  # fmt: skip
APPLIED = [
    N("BatchNormalization", ["x", "scale", "bias", "zeros", "ones"], ["n"]),
    N("Add", ["n", "dy"], ["r"]), N("Relu", ["r"], ["y"]),
]  # fmt: skip
PROGRAMS = {
    "forward": (
        FORWARD, ["x", "count", "scale", "bias", "zeros", "low", "high"],
        ["y", "centered", "mean", "variance"],
    ),
    "backward": (
        BACKWARD, ["dy", "x", "centered", "inv", "scale", "count", "zeros", "ones", "low", "zero"],
        ["dx", "dbias", "dscale"],
    ),
    "applied": (APPLIED, ["x", "dy", "scale", "bias", "zeros", "ones"], ["y"]),
}  # fmt: skip
SCALARS = {"low": -0.5, "high": 1.5, "zero": 0.0}


def channel_model(name: str, dims: tuple[int, ...], *, fresh: bool) -> onnx.ModelProto:
    """A model of a program; ``fresh``: on values whose memory its results may take."""
    nodes, inputs, outputs = PROGRAMS[name]
    constants = [
        N("Constant", [], [key], value=onnx.numpy_helper.from_array(np.int64(value)))
        for key, value in (
            ("space", [*range(2, len(dims))]), ("samples", [0]),
            ("spread", [-1, *[1] * (len(dims) - 2)]),
        )
        if any(key in node.input for node in nodes)
    ]  # fmt: skip
    kinds = dict.fromkeys(("x", "dy", "centered"), dims) | dict.fromkeys((*SCALARS, "count"), ())
    shapes = {each: kinds.get(each, dims[1:2]) for each in inputs}
    body = [*constants, *nodes]
    program = channels_program_of(body, inputs, outputs)
    model = kernel_model(body, shapes, outputs, kernel="channels", program=program)
    if fresh:
        call = model.graph.node[0]
        for place, each in enumerate(inputs):
            model.graph.node.insert(0, N("Abs", [each], [f"{each}.fresh"]))
            call = model.graph.node[-1]
            call.input[place] = f"{each}.fresh"
    return model


def feeds_of(model: onnx.ModelProto, dims: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Random values; what is divided by, or whose root is taken, is positive."""
    random = np.random.default_rng(sum(dims))
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = np.asarray(random.standard_normal(shape))
        if value.name in SCALARS:
            array = np.asarray(SCALARS[value.name])
        elif value.name == "count":
            array = np.asarray(max(1, math.prod(dims) // max(1, dims[1])))
        elif value.name == "ones":
            array = np.ones(shape)
        feeds[value.name] = array.astype(np.float32)
    return feeds


@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 2, 3, 40]),
    st.sampled_from([1, 2, 17, 70]),
    st.lists(st.sampled_from([1, 3, 8, 33, 50]), min_size=1, max_size=3),
    st.booleans(),
)
@example(0, 3, [4, 4], False)
@example(2, 3, [0, 4], False)
@example(2, 0, [4, 4], False)
@example(3, 2, [1025], True)
def test_results_are_close_to_those_in_float64(
    name: str, samples: int, channels: int, space: list[int], fresh: bool
) -> None:
    """Planes that are gathered, and that are cut; in place or not."""
    dims = (samples, channels, *space)
    if math.prod(dims) > 200_000:
        dims = dims[:3]
    model = channel_model(name, dims, fresh=fresh)
    feeds = feeds_of(model, dims)
    exact = onnx.reference.ReferenceEvaluator(model)
    with np.errstate(all="ignore"):
        wanted = exact.run(None, {key: value.astype(np.float64) for key, value in feeds.items()})
    found = session(model, native=True).run(None, feeds)
    width = math.prod(dims) // max(1, channels)
    for one, other in zip(wanted, found, strict=True):
        assert one.shape == other.shape
        scale = np.abs(one).max(initial=1e-3)
        np.testing.assert_allclose(
            other, one, rtol=0, atol=4e-6 * float(scale) * math.log2(width + 8)
        )


@pytest.mark.kernels
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dims", [(3, 5, 7, 7), (2, 3, 40, 40)])
def test_infinities_and_nan_are_those_of_the_body(name: str, dims: tuple[int, ...]) -> None:
    """Where the body has a number, the kernel has one close to it; else the same."""
    model = channel_model(name, dims, fresh=False)
    feeds = feeds_of(model, dims)
    random = np.random.default_rng(1)
    channel = feeds["x"][:, 1]
    special = random.choice([np.inf, -np.inf, np.nan, 1e30], channel.shape)
    feeds["x"][:, 1] = np.where(random.random(channel.shape) < 0.02, special, channel)
    if "centered" in feeds:
        feeds["centered"] = feeds["x"].copy()
    with np.errstate(all="ignore"):
        wanted, found = (session(model, native=each).run(None, feeds) for each in (False, True))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("of", "other"),
    [("scale", (6,)), ("scale", (1, 5)), ("x", (5, 4, 4)), ("x", (2, 5, 4)), ("x", (2, 5, 4, 1)),
     ("zeros", (5, 1, 1)), ("dy", (5,)), ("dy", (4,)), ("dy", (2, 1, 4, 4))],
)  # fmt: skip
def test_other_shapes_are_an_error(of: str, other: tuple[int, ...]) -> None:
    """Results would have another shape than those of the body, or other values."""
    model = channel_model("backward", (2, 5, 4, 4), fresh=False)
    for value in model.graph.input:
        if value.name == of:
            value.type.CopyFrom(onnx.helper.make_tensor_type_proto(1, other))
    feeds = feeds_of(model, (2, 5, 4, 4))
    with pytest.raises(Exception, match=r"shape|rank|channels"):
        session(model, native=True).run(None, feeds)


@pytest.mark.parametrize(
    "changed",
    [
        (0, N("ReduceSum", ["x", "samples"], ["sum.partial"], keepdims=0)),
        (1, N("ReduceSum", ["sum.partial", "samples"], ["sum"])),
        (1, N("Mul", ["sum.partial", "sum.partial"], ["sum"])),
        (3, N("Mul", ["mean", "count"], ["m"])),  # [C] meets the last axis
        (3, N("Reshape", ["mean", "space"], ["m"])),
        (3, N("Reshape", ["mean", "spread"], ["m"], allowzero=1)),
        (9, N("BatchNormalization", ["centered", "scale", "bias", "zeros"], ["n"])),
        (9, N("BatchNormalization", ["centered", "m", "bias", "zeros", "variance"], ["n"])),
        (9, N("BatchNormalization", ["centered", "scale", "bias", "zeros", "variance"], ["n"],
              training_mode=1)),
        (10, N("Clip", ["n", "scale", "high"], ["y"])),
        (10, N("Softmax", ["n"], ["y"])),
    ],
)  # fmt: skip
def test_what_is_not_a_program(changed: tuple[int, onnx.NodeProto]) -> None:
    """Bodies that compute something else than the kernel could."""
    place, node = changed
    (_, inputs, outputs), nodes = PROGRAMS["forward"], [*FORWARD]
    constants = [
        N("Constant", [], [key], value=onnx.numpy_helper.from_array(np.int64(value)))
        for key, value in (("space", [2, 3]), ("samples", [0]), ("spread", [-1, 1, 1]))
    ]
    channels_program_of([*constants, *nodes], inputs, outputs)
    nodes[place] = node
    with pytest.raises(NotAProgramError):
        channels_program_of([*constants, *nodes], inputs, outputs)


@pytest.mark.kernels
def test_damaged_programs_are_an_error_or_a_result() -> None:
    """Any number of a program may be another."""
    model = channel_model("backward", (2, 5, 4, 4), fresh=False)
    feeds = feeds_of(model, (2, 5, 4, 4))
    (program,) = (each for each in model.graph.node[0].attribute if each.name == "program")
    whole, random = list(program.ints), np.random.default_rng(3)
    ends = {True: 0, False: 0}
    for _ in range(40 if native_library.APART else 400):
        changed = [*whole]
        for place in random.integers(0, len(whole), random.integers(1, 3)):
            changed[place] = int(random.choice([-1, 0, 1, 3, 7, 12, 20, 36, 37, 2**33]))
        program.ints[:] = changed[: random.choice([len(whole), len(whole) - 4])]
        try:
            session(model, native=True).run(None, feeds)
            ends[True] += 1
        except Exception:
            ends[False] += 1
    assert all(ends.values())


def test_a_network_trains_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch normalizations have groups forward and backward, verified as a stranger's."""
    monkeypatch.setenv(VARIABLE, str(native_library.library()))
    model = zoo.mobilenet_v2(batch_norm="train", size=32, width_mult=0.25)
    build_package(
        model, tmp_path, loss="cross_entropy", optimizer=SGD(), native=True,
        train=tuple(packaging_tools.trainable_names(model)),
    )  # fmt: skip
    assert verify_package(tmp_path, limits=Limits()).steps
    made = onnx.load(tmp_path / "training_model.onnx")
    wrapped = {each.op_type for each in made.graph.node if each.domain == DOMAIN}
    inside = [{n.op_type for n in each.node} for each in made.functions if each.name in wrapped]
    assert [each for each in inside if {"ReduceSum", "BatchNormalization", "Clip"} <= each]
    losses = []
    for native in (False, True):
        options = default_session_options(tmp_path / "training_model.onnx", 1)
        if not native:
            options.add_session_config_entry(ENTRY, "0")
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        module = Module(tmp_path / "training_model.onnx", state, session_options=options)
        optimizer = Optimizer(tmp_path / "optimizer_model.onnx", module)
        optimizer.set_learning_rate(1e-4)
        batch = packaging_tools.batch(model, 8)
        losses.append([float(optimizer.step_on(*batch)) for _ in range(2)])
    # Training-mode statistics make rounding grow: the first loss is close, the second is near.
    np.testing.assert_allclose(losses[1][0], losses[0][0], rtol=1e-5)
    np.testing.assert_allclose(losses[1][1], losses[0][1], rtol=1e-3)


@pytest.mark.sweep
def test_threads_give_the_same_bits_without_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's threads are not instrumented: the kernels run on others."""
    monkeypatch.setattr(native_library, "APART", "thread")
    for name in PROGRAMS:
        dims = (4, 301, 20, 20)
        model = channel_model(name, dims, fresh=False)
        session(model, native=True).run(None, feeds_of(model, dims))
