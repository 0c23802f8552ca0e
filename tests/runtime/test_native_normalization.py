"""Native kernels of batch normalization in training mode, against float64 and their bodies."""

import dataclasses
import math
import struct
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack_runtime.package import native
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.native import DOMAIN
from tests import native_library
from tests.model_text import parsed
from tests.native_library import kernel_model, of_program, same_bits, session, spoil, unaligned

EPSILON = struct.unpack("<I", struct.pack("<f", 1e-5))[0]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the kernel, and sizes."""

    kind: int
    first: bool  # [C, N, P]
    activation: int
    samples: int
    channels: int
    size: list[int]

    @property
    def dims(self) -> tuple[int, ...]:
        """Of planes."""
        planes = (self.channels, self.samples, math.prod(self.size))
        return planes if self.first else (self.samples, self.channels, *self.size)

    def program(self) -> list[int]:
        """The attribute of the call."""
        rank = 0 if self.first else len(self.dims)
        return [self.kind, rank, self.activation, EPSILON]

    def feeds(self, random: np.random.Generator) -> dict[str, np.ndarray]:
        """Inputs of the kernel, by the names of the body."""
        count = np.float32(self.samples * math.prod(self.size))
        given = {
            "count": count, "epsilon": np.float32(1e-5), "low": np.float32(0),
            "high": np.float32(2), "variance": random.random(self.channels) + 0.1,
            "zeros": np.zeros(self.channels), "ones": np.ones(self.channels),
        }  # fmt: skip
        names = native.normalization_body(self.program()).input
        for name in names:
            planes = name in ("x", "centered", "dy", "y")
            drawn = random.standard_normal(self.dims if planes else self.channels)
            given.setdefault(name, np.maximum(drawn, 0) if name == "y" else drawn)
        if "y" in given:
            given["y"] = np.minimum(given["y"], given["high"])
        return {name: unaligned(np.asarray(given[name], np.float32)) for name in names}

    def model(self, feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
        """A model of one native node."""
        body = native.normalization_body(self.program())
        shapes = {name: each.shape for name, each in feeds.items()}
        given = {"kernel": native.NORMALIZATION, "program": self.program()}
        return kernel_model(list(body.node), shapes, list(body.output), **given)

    def sums(self) -> tuple[int, ...]:
        """The axes that are summed over."""
        return tuple(axis for axis in range(len(self.dims)) if axis != int(not self.first))

    def exact(self, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """What a program computes, in float64."""
        one = [1] * len(self.dims)
        one[int(not self.first)] = -1
        wide = {
            name: each.astype(np.float64).reshape(one if each.ndim == 1 else each.shape)
            for name, each in feeds.items()
        }
        if self.kind == native.NORMALIZATION_GRADIENT:
            g, y = wide["dy"], wide.get("y")
            if self.activation == native.CLIP:
                g = g * ((y != 0) & (y < wide["high"]))
            elif self.activation == native.RELU:
                g = g * np.clip(y * 2.0**126, 0, 1)
            inverse = 1 / np.sqrt(wide["variance"] + wide["epsilon"])
            dbias = g.sum(self.sums(), keepdims=True)
            dscale = (g * wide["centered"]).sum(self.sums(), keepdims=True) * inverse
            share = wide["scale"] * inverse / wide["count"]
            along = wide["centered"] * (share * inverse * dscale) + share * dbias
            return [wide["scale"] * inverse * g - along, dscale.reshape(-1), dbias.reshape(-1)]
        if self.kind == native.FORWARD_NORMALIZATION:
            mean = wide["x"].sum(self.sums(), keepdims=True) / wide["count"]
            wide["centered"] = wide["x"] - mean
            squares = (wide["centered"] ** 2).sum(self.sums(), keepdims=True)
            wide["variance"] = squares / wide["count"]
        y = wide["centered"] / np.sqrt(wide["variance"] + 1e-5) * wide["scale"] + wide["bias"]
        if self.activation:
            y = np.clip(y, 0, wide["high"] if self.activation == native.CLIP else None)
        if self.kind == native.ACTIVATED:
            return [y]
        return [wide["centered"], y, mean.reshape(-1), wide["variance"].reshape(-1)]


CASES = st.builds(
    Case, st.integers(0, 2), st.booleans(), st.integers(0, 2), st.integers(1, 9),
    st.integers(1, 40), st.lists(st.integers(1, 14), min_size=1, max_size=3),
)  # fmt: skip


@pytest.mark.kernels
@settings(max_examples=120, deadline=None)
@given(CASES, st.integers(0, 2**32 - 1), st.booleans())
@example(Case(0, False, 1, 2, 3, [50, 51]), 0, False)
@example(Case(2, False, 1, 2, 3, [50, 51]), 0, False)
@example(Case(0, True, 1, 8, 70, [6, 6]), 0, True)
@example(Case(2, True, 2, 8, 70, [6, 6]), 0, True)
@example(Case(2, False, 2, 64, 80, [3, 3]), 0, True)
@example(Case(0, False, 0, 1, 1, [1]), 0, True)
def test_kernels_compute_what_is_exact(case, seed, in_place):
    """Any shape and activation; on the memory of an input that ends there as well."""
    feeds = case.feeds(np.random.default_rng(seed))
    model = case.model(feeds)
    first = model.graph.node[0].input[0]
    if in_place:  # the planes are of a node, and end in the kernel
        feeds[first] = np.abs(feeds[first])
        model.graph.node.insert(0, onnx.helper.make_node("Abs", [first], ["fresh"]))
        model.graph.node[1].input[0] = "fresh"
    found = session(model, native=True).run(None, feeds)
    for one, other in zip(found, case.exact(feeds), strict=True):
        assert one.shape == other.shape
        size = max(1.0, float(np.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5 * size)


@settings(max_examples=80, deadline=None)
@given(CASES, st.integers(0, 2**32 - 1), st.booleans())
@example(Case(0, False, 1, 0, 3, [4, 4]), 0, False)
@example(Case(2, True, 1, 0, 3, [4, 4]), 0, False)
@example(Case(2, False, 2, 3, 4, [0, 4]), 0, False)
def test_kernels_compute_what_their_bodies_do(case, seed, special):
    """Also with NaN and infinities, which spoil a channel alike, and without elements."""
    random = np.random.default_rng(seed)
    feeds = case.feeds(random)
    if special:
        for name in {"x", "centered", "dy", "y"} & feeds.keys():
            spoil(random, feeds[name], 0.02)
    model = case.model(feeds)
    native.check_functions(model, "here")
    plain = session(model, native=False).run(None, feeds)
    own = session(model, native=True).run(None, feeds)
    for one, other in zip(own, plain, strict=True):
        assert one.shape == other.shape
        numbers = np.isfinite(one) & np.isfinite(other)
        # What Clip and Relu make of a NaN is not the same in every build of ONNX Runtime.
        if not special:
            assert numbers.all() or case.samples * math.prod(case.size) == 0
        size = max(1.0, float(np.abs(other[numbers]).max(initial=0)))
        np.testing.assert_allclose(one[numbers], other[numbers], rtol=1e-4, atol=1e-4 * size)


@pytest.mark.kernels
@pytest.mark.parametrize("kind", [0, 2])
@pytest.mark.parametrize("dims", [(2, 5, 9, 70), (3, 40, 3, 3)])
def test_a_nan_stays_in_its_channel(kind, dims):
    """One spoils what is computed of its channel, and nothing else."""
    samples, channels, *size = dims
    case = Case(kind, False, native.CLIP, samples, channels, size)
    feeds = case.feeds(np.random.default_rng(0))
    model = case.model(feeds)
    before = session(model, native=True).run(None, feeds)
    planes = feeds["x" if kind == 0 else "centered"]
    planes[1, 3, 1, 1] = np.nan
    after = session(model, native=True).run(None, feeds)
    for one, other in zip(before, after, strict=True):
        axis = 1 if one.ndim > 1 else 0
        if kind == 0:
            assert np.isnan(other.take(3, axis)).all()
        others = [channel for channel in range(channels) if channel != 3]
        assert same_bits(*(np.ascontiguousarray(e.take(others, axis)) for e in (one, other)))


@pytest.mark.kernels
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 9), min_size=3, max_size=5), st.integers(1, 10), st.integers(0, 4))
@example([0, 4, 1, EPSILON], 7, 0)
@example([2, 0, 1, 1 << 32], 10, 0)
def test_a_program_that_is_not_valid_is_refused(program, inputs, odd):
    """Whatever stands in the attribute and whatever the inputs, there is an answer."""
    shapes = [(2, 3, 4, 4), (3,), (3,), (3,), (), (), (), (2, 3, 4, 4), (2, 3, 4, 4), ()][:inputs]
    shapes[min(odd, inputs - 1)] = (2, 3, 4)
    feeds = {f"i{i}": np.ones(shape, np.float32) for i, shape in enumerate(shapes)}
    model = of_program(native.NORMALIZATION, program, feeds)
    words = ("program", "number", "outputs", "shape", "axes", "planes", "channel")
    native_library.runs_or_says(model, feeds, words)


# A network with each activation, on planes of all sizes, and training.


def network(activations: tuple[str, ...] = ("Relu", "Clip", "", "Clip", "Relu")) -> onnx.ModelProto:
    """Convolutions of 40x40 to 3x3 with normalizations; small planes lie channels first."""
    random = np.random.default_rng(0)
    value, nodes, weights, channels = "input", [], {}, 3
    bounds = {"low": np.float32(0), "high": np.float32(6)}
    for place, activation in enumerate(activations):
        weights[f"w{place}"] = random.standard_normal((8, channels, 3, 3)).astype(np.float32) * 0.3
        for letter in "pq":
            points = random.standard_normal((8, 8, 1, 1)).astype(np.float32)
            weights[f"{letter}{place}"] = points * 0.3
        for layer in (f"{place}", f"{place}.p", f"{place}.q"):
            for name, number in (("scale", 1), ("bias", 0), ("mean", 0), ("var", 1)):
                weights[f"{name}{layer}"] = np.full(8, number, np.float32)
        after = {"Relu": "Relu(n)", "Clip": "Clip(n, low, high)", "": "Identity(n)"}[activation]
        for layer, node in (
            (f"{place}", f'Conv <strides = [2, 2], pads = [1, 1, 1, 1]> ("{value}", w{place})'),
            (f"{place}.p", f'Conv ("a{place}", p{place})'),
            (f"{place}.q", f'Conv ("a{place}.p", q{place})'),
        ):
            read = ", ".join(f'"{each}{layer}"' for each in ("scale", "bias", "mean", "var"))
            nodes.append(
                f'"c{layer}" = {node} "n{layer}", "m{layer}", "v{layer}" ='
                f' BatchNormalization <training_mode = 1> ("c{layer}", {read})'
                f' "a{layer}" = {after.replace("(n", f"({chr(34)}n{layer}{chr(34)}")}'
            )
        value, channels = f"a{place}.q", 8
    nodes.append(f'pool = GlobalAveragePool("{value}") output = Flatten(pool)')
    head = "(float[batch, 3, 40, 40] input) => (float[batch, 8] output)"
    text = f"{head} {{ {' '.join(nodes)} }}"
    return parsed(text, native_library.OPSET, **weights, **bounds)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network as a native package."""
    folder = tmp_path_factory.mktemp("package")
    trained = tuple(each.name for each in network().graph.initializer if each.name[:1] in "wpqsb")
    build_package(
        network(), folder, loss="cross_entropy", optimizer="sgd", native=True, train=trained
    )
    return folder


def test_normalizations_are_native_nodes(package):
    """Each, forward and backward, with its activation, and in both orders of axes."""
    nodes = onnx.load(package / "training_model.onnx").graph.node
    programs = [list(n.attribute[1].ints) for n in nodes if n.domain == DOMAIN]
    kinds = [tuple(p[:3]) for p in programs if len(p) == 4]
    assert {rank for _, rank, _ in kinds} == {0, 4}
    assert {activation for _, _, activation in kinds} == {0, 1, 2}
    assert all([kind for kind, _, _ in kinds].count(each) >= 8 for each in (0, 2))


@pytest.mark.usefixtures("kernels")
def test_a_package_trains_alike_with_kernels_and_without(package, tmp_path):
    data = np.random.default_rng(1).standard_normal((6, 3, 40, 40)).astype(np.float32)
    bounds = {"losses": 1e-3, "rtol": 1e-2, "atol": 1e-3}
    native_library.trains_alike(package, (data, np.arange(6) % 8), tmp_path, **bounds)


def test_a_stranger_s_package_is_verified(package):
    """Each body is compared."""
    assert verify_package(package, limits=Limits()).steps


@pytest.mark.parametrize("change", [
    "nothing", "operator", "operand", "place", "attribute", "program", "epsilon", "length",
    "outputs", "rank",
])  # fmt: skip
def test_a_body_that_computes_something_else_is_refused(package, change):
    """A package that would compute one thing with the library and another without."""
    model = onnx.load(package / "training_model.onnx")
    call = next(n for n in model.graph.node if n.domain == DOMAIN and len(n.attribute[1].ints) == 4)
    body = next(each for each in model.functions if each.name == call.op_type)
    program = call.attribute[1].ints
    last = body.node[-1]
    if change == "operator":
        last.op_type = "Add" if last.op_type == "Sub" else "Abs"
    elif change == "operand":
        last.input[0] = body.input[0]
    elif change == "place":
        tensor = next(n for n in body.node if n.op_type == "Constant").attribute[0].t
        tensor.int64_data[0] += 1
    elif change == "attribute":
        next(n for n in body.node if n.op_type == "ReduceSum").attribute[0].i = 1
    elif change == "program":
        program[2] = (program[2] + 1) % 3
    elif change == "epsilon":
        program[3] += 1
    elif change == "length":
        del program[-1]
    elif change == "rank":
        program[1] = 0 if program[1] else 3
    elif change == "outputs":
        body.output[:] = [*body.output][::-1]
    native_library.refuses_bodies(model, unless=change == "nothing")
