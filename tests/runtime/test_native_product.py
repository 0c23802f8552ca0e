"""Native kernels of products with matrices of few bits, against numpy in float64 and bodies."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx.helper
import onnx.numpy_helper
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack_runtime import Package
from odtpack_runtime.package.checks import graphs_of
from odtpack_runtime.package.native import PRODUCT, TRANSPOSED
from odtpack_runtime.package.trust import Limits, check_operators
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.native import DOMAIN
from tests import native_library
from tests.adapters import llama
from tests.adapters.conftest import llama_file
from tests.adapters.written.models import HERE
from tests.native_library import assert_rounded, kernel_model, of_program, session, spoil, unaligned
from tests.refused import refused

__all__ = ["llama_file"]


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the kernel, and how many rows meet the matrix."""

    transposed: bool
    rows: int
    columns: int
    block: int
    axis: int  # that blocks lie along
    bits: int
    samples: tuple[int, ...]

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        return (1, self.block) if self.axis else (self.block, 1)

    def program(self, signed: bool, zero: int) -> list[int]:
        """The attribute of the call."""
        matrix = [int(self.transposed), self.rows, self.columns, *self.blocks]
        return [*matrix, self.bits, int(signed), zero]


def cases(bits: int) -> st.SearchStrategy[Case]:
    """Matrices of some bits; rows of 4 bits are whole bytes."""
    step = 8 // bits
    return st.builds(
        Case, st.booleans(), st.integers(1, 80), st.integers(1, 80).map(lambda n: n * step),
        st.sampled_from([1, 3, 16, 32, 64, 200]), st.integers(0, 1), st.just(bits),
        st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple),
    )  # fmt: skip


@pytest.mark.kernels
@settings(max_examples=120, deadline=None)
@given(cases(4) | cases(8), st.integers(0, 2**32 - 1), st.booleans())
@example(Case(True, 130, 992, 32, 1, 4, (25,)), 0, False)
@example(Case(False, 992, 160, 32, 1, 4, (257,)), 1, False)
@example(Case(True, 64, 512, 128, 1, 8, (2, 7)), 2, True)
@example(Case(False, 48, 96, 96, 0, 8, ()), 3, True)
@example(Case(True, 32, 64, 32, 0, 4, (0,)), 4, False)
@example(Case(True, 64, 90, 32, 0, 4, (7,)), 5, False)
@example(Case(True, 50, 75, 50, 0, 8, (7,)), 6, True)
def test_kernels_compute_what_numpy_does(case, seed, special):
    random = np.random.default_rng(seed)
    zero = int(random.integers(0, 1 << case.bits))
    signed = case.bits == 8 and bool(random.integers(0, 2))
    codes = random.integers(0, 1 << case.bits, (case.rows, case.columns), np.uint8)
    high, wide = case.blocks
    scales = random.standard_normal((-(-case.rows // high), -(-case.columns // wide)))
    scales = scales.astype(np.float32)
    depth = case.columns if case.transposed else case.rows
    x = random.standard_normal((*case.samples, depth)).astype(np.float32)
    if special:
        spoil(random, x, 0.02)
    wider = scales.repeat(high, 0)[: case.rows].repeat(wide, 1)[:, : case.columns]
    w = (codes.astype(np.float32) - zero) * wider
    w = (w.T if case.transposed else w).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wanted, total = x.astype(np.float64) @ w, np.abs(x).astype(np.float64) @ np.abs(w)
    packed = (codes ^ 0x80).view(np.int8) if signed else codes
    if case.bits == 4:
        packed = codes.reshape(-1)[::2] | codes.reshape(-1)[1::2] << 4
    feeds = {"i0": packed, "i1": unaligned(scales), "i2": unaligned(x)}
    program = case.program(signed, zero)
    model = of_program(PRODUCT, program, feeds, ("Identity", "i2"), [packed.dtype])
    (found,) = session(model, native=True).run(None, feeds)
    assert_rounded(found, wanted, total, depth)


@pytest.mark.kernels
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 9), min_size=7, max_size=9), st.integers(2, 4), st.booleans())
@example([1, 4, 4, 1, 4, 4, 0, 8], 3, True)
@example([1, 1 << 24, 1 << 24, 1, 1, 8, 0, 0], 3, True)
@example([1, 1 << 62, 1 << 62, 1, 1, 8, 0, 0], 3, True)
@example([1, 4, 4, 1, 4, 8, 1, 8], 3, True)
def test_a_program_that_is_not_valid_is_refused(program, inputs, of_bytes):
    """Whatever stands in the attribute and whatever the inputs, there is an answer."""
    shapes = [(8,), (4, 1), (2, 4), (2,)][:inputs]
    types = [np.dtype(np.uint8 if of_bytes else np.float32)] + [np.dtype(np.float32)] * 3
    feeds = {f"i{i}": np.ones(*each) for i, each in enumerate(zip(shapes, types, strict=False))}
    model = of_program(PRODUCT, program, feeds, ("Abs", f"i{inputs - 1}"), types[:1])
    words = ("program", "input", "codes", "scales", "rows", "type")
    native_library.runs_or_says(model, feeds, words)


def gemm(**attributes: Any) -> onnx.NodeProto:
    """The body of a transposed product."""
    return onnx.helper.make_node("Gemm", ["i0", "i1"], ["o"], **{"transA": 1} | attributes)


def transposed(shapes, body, program):
    """A model of one native node of that kernel."""
    return kernel_model([body], shapes, ["o"], kernel=TRANSPOSED, program=program)


@pytest.mark.kernels
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 400), st.integers(0, 200), st.integers(0, 200), st.integers(0, 99),
       st.booleans())  # fmt: skip
@example(385, 157, 1030, 0, False)
@example(193, 313, 129, 1, True)
@example(9, 40, 9, 2, False)
@example(12, 12, 12, 3, False)
def test_transposed_products_are_what_numpy_computes(depth, rows, columns, seed, special):
    random = np.random.default_rng(seed)
    a, b = (random.standard_normal((depth, n)).astype(np.float32) for n in (rows, columns))
    if special:
        for each in (a, b):
            spoil(random, each, 0.001)
    with np.errstate(invalid="ignore"):
        wanted = a.T.astype(np.float64) @ b
        total = np.abs(a.T).astype(np.float64) @ np.abs(b)
    model = transposed({"i0": a.shape, "i1": b.shape}, gemm(), [0])
    feeds = {"i0": unaligned(a), "i1": unaligned(b)}
    (found,) = session(model, native=True).run(None, feeds)
    assert_rounded(found, wanted, total, depth)


@pytest.mark.parametrize("which", [0, 1])
def test_a_result_may_take_the_memory_of_an_operand(which):
    """ONNX Runtime gives it that of an operand which nothing reads afterwards."""
    model = transposed({"i0": (40, 40), "i1": (40, 40)}, gemm(), [0])
    (call,) = model.graph.node
    model.graph.node.insert(0, onnx.helper.make_node("Add", [call.input[which]] * 2, ["twice"]))
    call.input[which] = "twice"
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((40, 40)).astype(np.float32) for name in ("i0", "i1")}
    (found,) = session(model, native=True).run(None, feeds)
    np.testing.assert_allclose(found, 2 * feeds["i0"].T @ feeds["i1"], rtol=1e-4, atol=1e-4)


@pytest.mark.kernels
@pytest.mark.parametrize(("shapes", "program"), [
    ([(4, 3), (5, 2)], [0]), ([(4,), (4, 2)], [0]), ([(2, 4, 3), (4, 2)], [0]), ([(4, 3)], [0]),
    ([(4, 3)] * 3, [0]), ([(4, 3), (4, 2)], [1]), ([(4, 3), (4, 2)], []),
    ([(4, 3), (4, 2)], [0, 0]),
])  # fmt: skip
def test_what_is_not_a_transposed_product_is_refused(shapes, program):
    feeds = {f"i{i}": np.ones(shape, np.float32) for i, shape in enumerate(shapes)}
    model = of_program(TRANSPOSED, program, feeds, ("Abs", "i0"))
    with pytest.raises(Exception, match=r"program|inputs|matri"):
        session(model, native=True).run(None, feeds)


@pytest.mark.parametrize(
    ("body", "program"),
    [(gemm(), [0]), (gemm(alpha=1.0), [0]), (gemm(), [1]), (gemm(transA=0), [0]),
     (gemm(transB=1), [0]), (gemm(alpha=0.5), [0]),
     (onnx.helper.make_node("Gemm", ["i1", "i0"], ["o"], transA=1), [0]),
     (onnx.helper.make_node("Gemm", ["i0", "i1", "i1"], ["o"], transA=1), [0]),
     (onnx.helper.make_node("MatMul", ["i0", "i1"], ["o"]), [0])],
)  # fmt: skip
def test_the_body_of_a_transposed_product_is_one_gemm(body, program):
    model = transposed({"i0": (4, 4), "i1": (4, 4)}, body, program)
    right = body in (gemm(), gemm(alpha=1.0)) and program == [0]
    native_library.refuses_bodies(model, unless=right)


# A decoder that onnxruntime-genai's builder wrote in 4 bits, and training.


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Packages in segments, with native nodes and without."""
    found = {}
    for native in (True, False):
        found[native] = tmp_path_factory.mktemp("package") / "package"
        build_package(
            HERE / "genai-qwen2-int4" / "model.onnx", found[native], loss="next_token",
            adapter=AdapterSpec("lora", ("model.*_proj",), (), 4, 8.0), native=native,
            segments=True, loss_options={"words": 16},
        )  # fmt: skip
    return found


def products(path: Path) -> tuple[int, int]:
    """Native products of a model, and nodes outside of their bodies that unpack a matrix."""
    model = onnx.load(path)
    del model.functions[:]
    nodes = [node for _, each in graphs_of(model) for node in each]
    taken = sum(a.s == PRODUCT.encode() for n in nodes if n.domain == DOMAIN for a in n.attribute)
    return taken, sum(node.op_type == "DequantizeLinear" for node in nodes)


def test_every_product_with_codes_is_native(built):
    """Forward, recomputed, and of the input's gradient; in branches and loops, too."""
    for name in ("training_model", "segment_1_forward", "segment_1_backward"):
        (none, unpacked), (taken, left) = (
            products(built[native] / f"{name}.onnx") for native in (False, True)
        )
        # What unpacks a part of the vocabulary's matrix serves two products, any other one.
        assert (none, taken, left) == (0, unpacked + (name == "training_model"), 0)
        assert unpacked > 0


@pytest.mark.usefixtures("kernels")
def test_a_package_trains_alike_with_kernels_and_without(built, tmp_path):
    """With bodies to the bit as the plain package, with kernels within rounding."""
    batch = llama.batch()
    plain, bodies, kernels = (
        native_library.train(built[name != "plain"], batch, tmp_path / f"{name}-", native=native)
        for name, native in (("plain", False), ("bodies", False), ("kernels", True))
    )
    profiles = {
        name: "".join(path.read_text() for path in tmp_path.glob(f"{name}-*"))
        for name in ("bodies", "kernels")
    }
    assert '"op_name" : "DequantizeLinear"' in profiles["bodies"]
    assert '"op_name" : "DequantizeLinear"' not in profiles["kernels"]
    assert bodies[0] == plain[0]
    for one, other in zip(bodies[1], plain[1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert kernels[0][-1] < kernels[0][0]
    np.testing.assert_allclose(kernels[0], plain[0], rtol=1e-5)
    for one, other in zip(kernels[1], plain[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)  # a step is 0.05


@pytest.fixture(scope="module", params=["int4", "int8"])
def rounded(request: pytest.FixtureRequest, llama_file: Path, tmp_path_factory: Any) -> Path:
    """A package with a base that odtpack rounded: 4 bits in segments, 8 bits in one model."""
    folder: Path = tmp_path_factory.mktemp("rounded") / "package"
    build_package(
        llama_file, folder, loss="next_token", base=request.param, native=True,
        adapter=AdapterSpec("lora", ("*_proj",), (), 4, 8.0), segments=request.param == "int4",
    )  # fmt: skip
    return folder


@pytest.mark.usefixtures("kernels")
def test_a_base_that_odtpack_rounded_is_native(rounded, tmp_path):
    name = "segment_1_backward" if (rounded / "segments.weights").exists() else "training_model"
    taken, left = products(rounded / f"{name}.onnx")
    assert taken > left == 0
    bodies, kernels = (
        native_library.train(rounded, llama.batch(), tmp_path / f"{native}-", native=native)
        for native in (False, True)
    )
    np.testing.assert_allclose(kernels[0], bodies[0], rtol=1e-5)


def test_a_stranger_s_package_is_verified(rounded, built):
    """Each body is run and compared; a decoder's weights lie beside it."""
    assert verify_package(rounded, limits=Limits()).steps
    assert verify_package(built[True], limits=Limits()).steps


def test_a_stranger_s_decoder_reads_no_other_file(built, tmp_path):
    shutil.copytree(built[False], tmp_path / "package")
    package = Package.open(tmp_path / "package")
    model = onnx.load(package.decoder, load_external_data=False)
    outside = next(each for each in model.graph.initializer if each.external_data)
    place = next(each for each in outside.external_data if each.key == "location")
    place.value = package.checkpoint.name
    onnx.save(model, package.decoder)
    with refused("model-external-data"):
        check_operators(package, Limits().domains)


def body_of(model: onnx.ModelProto) -> tuple[onnx.FunctionProto, onnx.NodeProto]:
    """The first native function that unpacks a matrix, and a call of it."""
    body = next(f for f in model.functions if any(n.op_type == "BitShift" for n in f.node))
    nodes = [node for _, each in graphs_of(model) for node in each]
    return body, next(n for n in nodes if n.op_type == body.name and n.domain == DOMAIN)


def changed(body: onnx.FunctionProto, old: int, new: int) -> None:
    """Make the first constant of one value another one."""
    for node in body.node:
        if node.op_type == "Constant":
            array = onnx.numpy_helper.to_array(node.attribute[0].t)
            if array.size == 1 and array.item() == old:
                node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.full_like(array, new)))
                return
    raise AssertionError(f"no constant is {old}")


@pytest.mark.parametrize("change", [
    "nothing", "zero", "shift", "one", "turned", "product", "size", "rounded", "program", "length",
    "many", "type",
])  # fmt: skip
def test_a_body_that_computes_something_else_is_refused(built, change):
    """A package that would compute one thing with the library and another without."""
    model = onnx.load(built[True] / "segment_1_backward.onnx")
    body, call = body_of(model)
    program = next(each for each in call.attribute if each.name == "program").ints
    if change == "zero":
        changed(body, 8, 7)
    elif change == "shift":
        changed(body, 4, 3)
    elif change == "one":  # more than one token would scale the weights
        changed(body, 1, 2)
    elif change == "turned":
        next(n for n in body.node if n.op_type == "Transpose").attribute[0].ints[:] = [0, 1]
    elif change == "product":
        body.node.append(onnx.helper.make_node("Mul", [body.output[0]] * 2, ["squared"]))
        body.output[0] = "squared"
    elif change == "size":  # of x itself, not only whether it is empty
        least = next(n for n in body.node if n.op_type == "Min")
        least.op_type, least.input[1] = "Mul", least.input[0]
    elif change == "rounded":  # scales to 16 bits, which small numbers are not changed by
        reader = next(n for n in body.node if n.op_type == "DequantizeLinear")
        casts = [
            onnx.helper.make_node("Cast", [reader.input[1]], ["half"], to=10),
            onnx.helper.make_node("Cast", ["half"], ["single"], to=1),
        ]
        reader.input[1] = "single"
        place = [*body.node].index(reader)
        nodes = [*body.node[:place], *casts, *body.node[place:]]
        del body.node[:]
        body.node.extend(nodes)
    elif change == "program":
        program[-1] -= 1
    elif change == "length":
        del program[-1]
    elif change == "many":
        program[1] = 1 << 24
    elif change == "type":
        program[5] = 8
    native_library.refuses_bodies(model, unless=change == "nothing")
