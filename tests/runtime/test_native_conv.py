"""Native kernels of convolutions against PyTorch in float64, and against their bodies."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack.passes import native as wrapping
from odtpack_runtime.package import native
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.native import DOMAIN
from tests import native_library
from tests.model_text import parsed
from tests.native_library import assert_rounded, of_program, session, spoil, unaligned


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the kernel; one entry of each list for each axis of the plane."""

    kind: int
    samples: int
    channels: int
    size: list[int]
    kernel: list[int]
    steps: list[int]
    apart: list[int]
    before: list[int]
    beyond: list[int]  # windows more than fit the plane without zeros after it
    lies: tuple[int, int, int]
    bias: bool

    @property
    def out(self) -> list[int]:
        """Windows; at least one, which may lie on zeros alone."""
        spans = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.apart, strict=True)]
        each = zip(self.size, self.before, spans, self.steps, self.beyond, strict=True)
        return [max(1, (n + b - span) // s + 1 + more) for n, b, span, s, more in each]

    def program(self) -> list[int]:
        """The attribute of the call."""
        given = (self.size, self.kernel, self.steps, self.apart, self.before, self.out)
        axes = zip(*given, strict=True)
        weight = self.lies[2] if self.kind != native.WEIGHT_GRADIENT else 0
        bias = self.bias and self.kind == native.FORWARD
        return [
            self.kind, *self.lies[:2], weight, self.channels, *itertools.chain(*axes), int(bias),
        ]  # fmt: skip


def axis(least: int, most: int) -> st.SearchStrategy[list[int]]:
    """A number for each axis of a plane."""
    return st.lists(st.integers(least, most), min_size=2, max_size=2)


CASES = st.builds(
    Case, st.integers(0, 2), st.integers(0, 3), st.integers(1, 5), axis(1, 40), axis(1, 7),
    axis(1, 3), axis(1, 2), axis(0, 4), axis(0, 2),
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 2)), st.booleans(),
)  # fmt: skip


def torch_result(case: Case, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What the kernel computes, in the precision of its operands."""
    tensors = [torch.from_numpy(each).requires_grad_() for each in (x, w)]
    pads = []
    axes = (case.size, case.kernel, case.steps, case.apart, case.before, case.out)
    for n, k, s, d, b, o in reversed(list(zip(*axes, strict=True))):
        pads += [b, (o - 1) * s + (k - 1) * d + 1 - b - n]
    # Zeros first: what is cut off may be more than the plane has without them.
    padded = torch.nn.functional.pad(tensors[0], [max(0, pad) for pad in pads])
    padded = torch.nn.functional.pad(padded, [min(0, pad) for pad in pads])
    result = torch.nn.functional.conv2d(
        padded, tensors[1], stride=case.steps, dilation=case.apart, groups=case.channels
    )
    if case.kind == native.FORWARD:
        return result.detach().numpy()
    result.backward(torch.from_numpy(y))
    return tensors[case.kind - 1].grad.numpy()


@pytest.mark.kernels
@settings(max_examples=80, deadline=None)
@given(CASES, st.integers(0, 2**32 - 1), st.booleans())
@example(Case(0, 2, 3, [9, 7], [3, 3], [1, 1], [1, 1], [1, 1], [1, 1], (0, 0, 0), True), 0, False)
@example(Case(1, 2, 3, [9, 8], [3, 3], [2, 2], [1, 1], [1, 1], [1, 0], (0, 0, 0), True), 0, True)
@example(Case(2, 0, 3, [9, 7], [5, 5], [2, 1], [1, 1], [2, 2], [1, 1], (1, 1, 0), True), 0, True)
@example(Case(0, 1, 1, [1, 1], [1, 2], [1, 3], [1, 1], [0, 3], [0, 0], (0, 0, 0), False), 0, False)
def test_kernels_compute_what_pytorch_does(case, seed, special):
    """Any kernel, stride, dilation and padding; the bound is the one of docs/native.md."""
    random = np.random.default_rng(seed)
    shapes = [
        (case.samples, case.channels, *case.size), (case.channels, 1, *case.kernel),
        (case.samples, case.channels, *case.out), (case.channels,),
    ]  # fmt: skip
    x, w, y, b = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    if special:
        for each in (x, y):
            spoil(random, each, 0.02)
    wide = [each.astype(np.float64) for each in (x, w, y)]
    with np.errstate(invalid="ignore"):
        wanted = torch_result(case, *wide)
        total = torch_result(case, *map(np.abs, wide))
    program = case.program()
    if case.kind == native.FORWARD and case.bias:
        wanted, total = wanted + b.reshape(-1, 1, 1), total + np.abs(b).reshape(-1, 1, 1)

    def laid(array: np.ndarray, first: int) -> np.ndarray:
        flat = array.reshape(*array.shape[:2], math.prod(array.shape[2:]))
        return flat.swapaxes(0, 1) if first else array

    w = w.reshape(native.weight_dims(case.channels, case.kernel)[program[3]])
    x, y = laid(x, case.lies[0]), laid(y, case.lies[1])
    inputs = [[w, x, b] if program[-1] else [w, x], [w, y], [x, y]][case.kind]
    if case.kind != native.WEIGHT_GRADIENT:
        wanted, total = (laid(each, case.lies[1 - case.kind]) for each in (wanted, total))
    feeds = {f"i{place}": unaligned(each) for place, each in enumerate(inputs)}
    (found,) = session(of_program("depthwise", program, feeds), native=True).run(None, feeds)
    terms = math.prod(case.kernel)
    if case.kind == native.WEIGHT_GRADIENT:
        terms = case.samples * math.prod(case.out)
    assert_rounded(found, wanted, total, terms)


@pytest.mark.kernels
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-2, 5), min_size=15, max_size=19), st.integers(0, 2), st.integers(2, 3))
@example([0, 0, 0, 0, 2, 65536, 64, 1, 64, 9, 65536, 65536, 64, 1, 64, 9, 65536, 0], 0, 2)
def test_a_program_that_is_not_valid_is_refused(program, kind, inputs):
    """Whatever stands in the attribute and whatever the inputs, there is an answer."""
    shapes = [(2, 1, 3, 3), (2, 2, 4, 4), (2,)][:inputs]
    feeds = {f"i{i}": np.ones(shape, np.float32) for i, shape in enumerate(shapes)}
    model = of_program("depthwise", [kind, *program[1:]], feeds)
    words = ("program", "inputs", "outputs", "shape", "axes", "samples")
    native_library.runs_or_says(model, feeds, words)


# A network of one depthwise convolution for each form that the gradient rule has, and training.

SIZE = 66
LAYERS = [  # kernel, stride, dilation
    (3, 1, 1), (5, 1, 1), (3, 2, 1), (3, 1, 2), (3, 2, 1), (5, 1, 1), (3, 2, 1), (3, 1, 1),
    (3, 2, 1), (3, 1, 1),
]  # fmt: skip


def network() -> onnx.ModelProto:
    """Depthwise convolutions from 66x66 to 5x5, one transposed, and means."""
    random = np.random.default_rng(0)
    value, nodes, weights = "input", [], {"wider": np.full((4, 1, 2, 2), 0.7, np.float32)}
    for place, (kernel, stride, apart) in enumerate(LAYERS):
        weight = random.standard_normal((4, 1, kernel, kernel)) * (1.4 / kernel)
        weights[f"w{place}"] = weight.astype(np.float32)
        bias = f", b{place}" if place % 3 else ""
        if bias:
            weights[f"b{place}"] = np.full(4, 0.1, np.float32)
        nodes.append(
            f"y{place} = Conv <group = 4, kernel_shape = {[kernel] * 2}, strides = {[stride] * 2},"
            f" dilations = {[apart] * 2}, pads = {[kernel // 2] * 4}> ({value}, w{place}{bias})"
            f" a{place} = Relu(y{place})"
        )
        value = f"a{place}"
    nodes.append(
        f"wide = ConvTranspose <group = 4, strides = [2, 2]> ({value}, wider)"
        " pool = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (wide)"
        " mean = GlobalAveragePool(pool) output = Flatten(mean)"
    )
    head = f"(float[batch, 4, {SIZE}, {SIZE}] input) => (float[batch, 4] output)"
    return parsed(f"{head} {{ {' '.join(nodes)} }}", native_library.OPSET, **weights)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network as a native package."""
    folder = tmp_path_factory.mktemp("package")
    build_package(network(), folder, loss="cross_entropy", optimizer="sgd", native=True)
    return folder


def calls(path: Path) -> list[onnx.NodeProto]:
    """The native nodes of convolutions of a model."""
    nodes = [node for node in onnx.load(path).graph.node if node.domain == DOMAIN]
    return [n for n in nodes if any(each.s == b"depthwise" for each in n.attribute)]


def test_every_form_of_the_rules_is_a_native_node(package):
    """Each forward pass and gradient of each layer; the first has no gradient of its input."""
    found = [node.attribute[1].ints[0] for node in calls(package / "training_model.onnx")]
    # A transposed convolution is the gradient of one, and has a forward pass as its own gradient; a
    # mean of windows has one as gradient. Two weight gradients are left: a view in them takes its
    # shape from a node, so that it runs later.
    layers = len(LAYERS)
    assert [found.count(kind) for kind in range(3)] == [layers + 1, layers + 1, layers - 1]


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize(("dims", "kernel", "known"), [
    ("", 1, False), ("n, c, h, w", 1, False), ("n, 2, 4, 4", 1, True), ("n, 2, 99, 99", 65, False),
])  # fmt: skip
def test_a_convolution_is_native_where_its_sizes_are_known(operator, dims, kernel, known):
    """Not where the library would refuse it, nor where a rank is unknown."""
    text = f"""(float[{dims}] x, float[2, 1, {kernel}, {kernel}] w) => (float[{dims}] y) {{
        y = {operator} <group = 2, pads = {[kernel // 2] * 4}> (x, w)
    }}"""
    (found,) = wrapping.wrap(ir.from_proto(parsed(text, native_library.OPSET))).graph
    assert (found.domain == DOMAIN) is known


@pytest.mark.usefixtures("kernels")
def test_a_package_trains_alike_with_kernels_and_without(package, tmp_path):
    data = np.random.default_rng(1).standard_normal((5, 4, SIZE, SIZE)).astype(np.float32)
    bounds = {"losses": 1e-5, "rtol": 1e-4, "atol": 1e-6}
    native_library.trains_alike(package, (data, np.arange(5) % 4), tmp_path, **bounds)


def test_a_stranger_s_package_is_verified(package):
    """Each body is run and compared."""
    assert verify_package(package, limits=Limits()).steps


def function_of(model: onnx.ModelProto, operator: str) -> tuple[onnx.FunctionProto, onnx.NodeProto]:
    """The first native function with an operator, and a call of it."""
    body = next(f for f in model.functions if any(n.op_type == operator for n in f.node))
    return body, next(n for n in model.graph.node if n.op_type == body.name)


def zeros(tensor: onnx.TensorProto) -> None:
    """Make a constant 0."""
    empty = np.zeros_like(onnx.numpy_helper.to_array(tensor))
    tensor.CopyFrom(onnx.numpy_helper.from_array(empty, tensor.name))


@pytest.mark.parametrize("change", [
    "nothing", "operator", "operand", "place", "pattern", "program", "length", "outputs", "many",
    "samples",
])  # fmt: skip
def test_a_body_that_computes_something_else_is_refused(package, change):
    """A package that would compute one thing with the library and another without."""
    model = onnx.load(package / "training_model.onnx")
    body, call = function_of(model, "Conv")
    program = call.attribute[1].ints
    if change == "operator":
        body.node[-1].op_type = "ConvTranspose"
    elif change == "operand":
        body.node.append(onnx.helper.make_node("Mul", ["o", "o"], ["squared"]))
        body.node[-1].input[:] = [body.output[0]] * 2
        body.output[0] = "squared"
    elif change == "place":
        body, _ = function_of(model, "Gather")
        zeros(next(n for n in body.node if n.op_type == "Constant").attribute[0].t)
    elif change == "pattern":
        body, call = function_of(model, "Gemm")
        found = {n.output[0]: n.input for n in model.graph.node}
        name = call.input[-1]
        while name in found:
            name = found[name][0]
        zeros(next(tensor for tensor in model.graph.initializer if tensor.name == name))
    elif change == "program":
        program[-2] += 1
    elif change == "length":
        del program[-1]
    elif change == "outputs":
        body.output.append(body.node[-1].input[0])
        call.output.append("more")
    elif change == "many":
        program[4] = 1 << 16
    elif change == "samples":  # the same for up to a million samples
        places = {"start": 0, "end": 1_000_000, "axis": 0}
        make = onnx.helper.make_node
        nodes = [make("Constant", [], [n], value_ints=[each]) for n, each in places.items()]
        nodes.append(make("Slice", [body.node[-1].input[0], *places], ["cut"]))
        body.node[-1].input[0] = "cut"
        nodes += body.node
        del body.node[:]
        body.node.extend(nodes)
    native_library.refuses_bodies(model, unless=change == "nothing")
