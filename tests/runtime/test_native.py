"""Native kernels compute what their bodies do, to the bit, and a package trains without them."""

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx.helper
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack.optimizers import SGD, Adam, AdamW, Lion
from odtpack.optimizers.common.model import optimizer_model
from odtpack.passes import native as wrapping
from odtpack_runtime import CheckpointState, Module
from odtpack_runtime.package.checks import graphs_of
from odtpack_runtime.package.native import ELEMENTWISE_OPERATORS, OPERATORS
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.self_check import self_check
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.native import (
    COUNTS,
    DOMAIN,
    ENTRY,
    VARIABLE,
    choose_kernels,
    count_operators,
)
from odtpack_runtime.session.options import default_session_options
from odtpack_simulator.memory.memory_plan import plan_memory
from tests import native_library, packaging_tools, zoo
from tests.native_library import kernel_model, same_bits, session
from tests.refused import refused

APPROXIMATE = ("Exp", "Erf", "Tanh", "Sigmoid", "Log")
EXACT = [kind for kind in ELEMENTWISE_OPERATORS if kind not in APPROXIMATE]
UNARY = {"Sqrt", "Neg", "Abs", "Relu", "Reciprocal", "HardSigmoid", "Identity", "Sign"}
TRUTH = ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"]
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e38, 1], np.float32)


def random_array(random: np.random.Generator, dims: tuple[int, ...]) -> np.ndarray:
    """Numbers of all sizes, with zeros, infinities and NaN among them."""
    values = random.standard_normal(dims) * 10.0 ** random.integers(-20, 20, dims)
    special = random.choice(SPECIAL, dims)
    return np.where(random.random(dims) < 0.1, special, values).astype(np.float32)


def random_nodes(random, inputs):
    """Nodes of a program, and what it computes that may be an output."""
    numbers, truths, nodes = list(inputs), list[str](), list[onnx.NodeProto]()
    for place in range(int(random.integers(1, 14))):
        kind, result = str(random.choice(EXACT)), f"v{place}"
        needs_truth = kind in ("Not", "And", "Or", "Where", "Cast")
        if kind == "Gemm" or (needs_truth and not truths):
            kind, needs_truth = str(random.choice(TRUTH)), False
        settings = {"to": 1} if kind == "Cast" else {}
        if kind == "HardSigmoid":
            settings = {"alpha": float(random.random()), "beta": float(random.random())}
        count = 1 if kind in UNARY | {"Not", "Cast"} else 3 if kind in ("Where", "Clip") else 2
        read = [str(random.choice(numbers)) for _ in range(count)]
        if kind == "Clip":  # bounds are scalars
            read[1:] = [inputs[-1]] * 2
        if needs_truth:
            of_truth = range(1) if kind == "Where" else range(count)
            read = [str(random.choice(truths)) if i in of_truth else n for i, n in enumerate(read)]
        nodes.append(onnx.helper.make_node(kind, read, [result], **settings))
        (truths if kind in (*TRUTH, "Not", "And", "Or") else numbers).append(result)
    return nodes, [name for name in numbers if name not in inputs]


@pytest.mark.kernels
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
@example(0)
def test_programs_compute_what_their_bodies_do(seed):
    """Random programs on random shapes, with inputs that repeat along some axes."""
    random = np.random.default_rng(seed)
    dims = tuple(
        int(each) for each in random.choice([0, 1, 2, 3, 5, 31, 600], random.integers(1, 4))
    )
    if np.prod(dims) > 40_000:
        dims = (*dims[:1], 7)
    shapes = {"a": dims}
    for name in "bcd"[: random.integers(0, 4)]:
        kept = random.random(len(dims)) < 0.6
        own = tuple(dim if keep else 1 for dim, keep in zip(dims, kept, strict=True))
        shapes[name] = own[int(random.integers(0, len(dims) + 1)) :]
    shapes["e"] = ()
    nodes, made = random_nodes(random, list(shapes))
    if not made:
        return
    # All outputs have the shape of the whole: each is added to an input that has it.
    outputs = []
    for name in dict.fromkeys(random.choice(made, min(3, len(made)))):
        nodes.append(onnx.helper.make_node("Where", ["all", str(name), "a"], [f"{name}_out"]))
        outputs.append(f"{name}_out")
    nodes.insert(0, onnx.helper.make_node("Equal", ["a", "a"], ["all"]))
    model = kernel_model(nodes, shapes, outputs)
    feeds = {name: random_array(random, dims) for name, dims in shapes.items()}
    wanted, found = (session(model, native=each).run(None, feeds) for each in (False, True))
    for one, other in zip(wanted, found, strict=True):
        assert same_bits(one, other), onnx.printer.to_text(model)


def case_name(optimizer: Any) -> str:
    """Settings of an optimizer, as the name of a case."""
    return json.dumps(optimizer.settings())[1:-1]


OPTIMIZERS = [
    AdamW(), AdamW(weight_decay=0.1), AdamW(weight_decay=0.1, formula="pytorch"), Adam(),
    Adam(weight_decay=0.1), SGD(), SGD(momentum=0.9), SGD(momentum=0.9, nesterov=True), Lion(),
]  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=case_name)
@pytest.mark.parametrize("length", [0, 1, 511, 513, 100_003])
def test_updates_compute_what_their_bodies_do(optimizer, length):
    """A single node of each, which also runs apart from ONNX Runtime."""
    wrapped = ir.to_proto(wrapping.wrap(optimizer_model(optimizer, native_library.OPSET)))
    call = next(node for node in wrapped.graph.node if node.domain == DOMAIN)
    (body,) = (each for each in wrapped.functions if each.name == call.op_type)
    vectors = {v.name for v in wrapped.graph.input} - {"learning_rate", "step"}
    shapes = {
        own: (length,) if name in vectors else ()
        for own, name in zip(body.input, call.input, strict=True)
    }
    model = kernel_model(list(body.node), shapes, list(body.output))
    random = np.random.default_rng(length)
    feeds = {name: np.asarray(random.random(dims), "f") for name, dims in shapes.items()}
    wanted, found = (session(model, native=each).run(None, feeds) for each in (False, True))
    for one, other in zip(wanted, found, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=case_name)
def test_updates_in_place_are_those_of_the_plain_optimizer_model(optimizer):
    """Each vector is bound as input and output; three steps, of lengths around those of blocks."""
    plain = optimizer_model(optimizer, native_library.OPSET)
    model = ir.to_proto(wrapping.wrap(plain))
    assert len([node for node in model.graph.node if node.domain == DOMAIN]) == 1
    sessions = session(ir.to_proto(plain), native=False), session(model, native=True)
    for length in (0, 1, 511, 513, 100_003):
        results = []
        for each in sessions:
            random = np.random.default_rng(length)
            arrays = {  # a binding does not keep what it is given
                value.name: np.abs(random.standard_normal(length, np.float32))
                for value in each.get_inputs()
                if value.type == "tensor(float)" and value.name != "learning_rate"
            }
            from_numpy = onnxruntime.OrtValue.ortvalue_from_numpy
            values = {name: from_numpy(array) for name, array in arrays.items()}
            for step in range(1, 4):
                binding = each.io_binding()
                rate, number = np.float32([0.1]), np.int64([step])
                binding.bind_cpu_input("learning_rate", rate)
                if any(value.name == "step" for value in each.get_inputs()):
                    binding.bind_cpu_input("step", number)
                for name, value in values.items():
                    binding.bind_ortvalue_input(name, value)
                for output in each.get_outputs():
                    name = output.name.removesuffix(".out")
                    binding.bind_ortvalue_output(output.name, values[name])
                each.run_with_iobinding(binding)
            results.append({name: array.copy() for name, array in arrays.items()})
        for name, wanted in results[0].items():
            assert same_bits(wanted, results[1][name]), (length, name)


@pytest.mark.kernels
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-3, 40), max_size=24), st.integers(1, 3))
def test_a_program_that_is_not_valid_is_refused(program, outputs):
    """Whatever stands in the attribute, the library answers, with an error or with a result."""
    names = [f"o{index}" for index in range(outputs)]
    nodes = [onnx.helper.make_node("Neg", ["a"], [name]) for name in names]
    model = kernel_model(nodes, {"a": (3,), "b": (2, 1)}, names, program=program)
    feeds = {"a": np.ones(3, np.float32), "b": np.ones((2, 1), np.float32)}
    found, problem = [], "program"
    try:
        found = session(model, native=True).run(None, feeds)
    except Exception as error:
        problem = str(error)
    assert any(word in problem for word in ("program", "inputs", "outputs", "shapes"))
    assert all(each.shape == (2, 3) for each in found)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """An MLP with AdamW whose larger matrix is updated in parts, native and not."""
    folders = {native: tmp_path_factory.mktemp("package") for native in (False, True)}
    for native, folder in folders.items():
        build_package(
            zoo.mlp((784, 400, 10)), folder, loss="cross_entropy", optimizer=AdamW(), native=native
        )
    return folders


def test_a_stranger_s_native_package_is_verified(packages):
    """With the limits for strangers, its models are held against their bodies."""
    assert verify_package(packages[True], limits=Limits()).steps


def trained(folder: Path, options: onnxruntime.SessionOptions) -> tuple[list[float], bytes]:
    """Losses of a few steps, and the parameters after them."""
    step = folder / "step_model.onnx"
    state, _, optimizer = packaging_tools.open_training(folder, options, step_model_uri=step)
    batch = packaging_tools.batch(zoo.mlp((784, 400, 10)), 16)
    losses = [float(optimizer.step_on(*batch)) for _ in range(4)]
    return losses, b"".join(np.asarray(value.data).tobytes() for _, value in state.parameters)


def options_for(folder: Path) -> onnxruntime.SessionOptions:
    """Those of a package."""
    return default_session_options(folder / "training_model.onnx", 1)


def test_a_package_trains_alike_with_kernels_without_and_plain(packages, monkeypatch, tmp_path):
    """The kernels are taken where they are not turned off, by a variable or an option."""
    monkeypatch.setenv(VARIABLE, "0")
    wanted = trained(packages[False], options_for(packages[False]))
    assert trained(packages[True], options_for(packages[True])) == wanted
    monkeypatch.setenv(VARIABLE, str(native_library.library()))
    for turned_off in (True, False):
        options = options_for(packages[True])
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / f"{turned_off}-")
        if turned_off:
            options.add_session_config_entry(ENTRY, "0")
        assert trained(packages[True], options) == wanted
        profiles = "".join(p.read_text() for p in tmp_path.glob(f"{turned_off}-*"))
        assert profiles
        assert ('"op_name" : "Kernel0"' in profiles) is not turned_off


@pytest.mark.usefixtures("kernels")
def test_a_plan_is_that_of_the_bodies(packages):
    """With the library or without, a native package is planned as the plain one."""
    sizes = {"input": (16, 784), "labels": (16,)}
    plain, native = (plan_memory(Package.open(packages[each]), sizes) for each in (False, True))
    assert [p.name for p in native.phases] == [p.name for p in plain.phases]
    # Names of nodes have other lengths, and these are in all phases.
    names = native.phases[0].nbytes - plain.phases[0].nbytes
    both = zip(native.phases, plain.phases, strict=True)
    assert {n.nbytes - p.nbytes for n, p in both} == {names}
    assert abs(names) < 5000


def test_a_library_that_cannot_be_registered_is_said_once(packages, monkeypatch, tmp_path):
    """A file that is no library: one warning, and the training goes on."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "broken.so"))
    (tmp_path / "broken.so").write_bytes(b"not a library")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, _ = trained(packages[True], options_for(packages[True]))
    assert np.isfinite(losses).all()
    assert len([each for each in caught if "Native kernels are not used" in str(each.message)]) == 1


def test_the_self_check_compares_kernels_with_their_bodies(packages, monkeypatch, tmp_path):
    package = Package.open(packages[True])
    assert package.step_model is not None
    model = onnx.load(package.step_model)
    changed = 0
    for _, nodes in graphs_of(model):
        for program in (a for n in nodes if n.domain == DOMAIN for a in n.attribute if a.ints):
            if program.ints[-4] == OPERATORS.index("Gemm"):  # k x + y, where y is the parameter
                program.ints[-1] = program.ints[-2]
                changed += 1
    assert changed
    onnx.save(model, tmp_path / "step_model.onnx")
    wrong = dataclasses.replace(package, step_model=tmp_path / "step_model.onnx")
    for library in ("0", str(native_library.library())):
        monkeypatch.setenv(VARIABLE, library)
        assert self_check(package).largest_part <= 1
        if library == "0":
            assert self_check(wrong).largest_part <= 1
    with refused("self-check-failed", "differently from their bodies"):
        self_check(wrong)


@pytest.mark.parametrize("change", ["nothing", "body", "program", "kernel", "no body", "attribute"])
def test_a_body_that_is_not_the_kernels_is_refused(packages, change):
    """A package that would compute one thing with the library and another without."""
    model = onnx.load(packages[True] / "optimizer_model.onnx")
    (node,) = (each for each in model.graph.node if each.domain == DOMAIN)
    attributes = {each.name: each for each in node.attribute}
    body = model.functions[0]
    if change == "body":
        next(each for each in body.node if each.op_type == "Add").op_type = "Sub"
    elif change == "program":
        attributes["program"].ints[-4] = OPERATORS.index("Add")
    elif change == "kernel":
        attributes["kernel"].s = b"another"
    elif change == "no body":
        del model.functions[:]
    elif change == "attribute":
        node.attribute.append(onnx.helper.make_attribute("more", 1))
    native_library.refuses_bodies(model, unless=change == "nothing")


def test_a_library_registers_what_a_package_names():
    """Whatever is not registered runs its body; what cannot be a count registers all."""
    node = onnx.helper.make_node("Sqrt", ["a"], ["b"])
    model = native_library.kernel_model([node], {"a": (8,)}, ["b"]).SerializeToString()
    feeds = {"a": np.arange(8, dtype=np.float32)}
    counted = "1 0 0", "0 0 0", "64 20 4", "65 0 0", "1 0", "1 0 0 0", "-1 0 0", "x", "9" * 99
    for counts in counted:
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry(COUNTS, counts)
        choose_kernels(options, str(native_library.library()))
        session = onnxruntime.InferenceSession(model, options)
        np.testing.assert_array_equal(session.run(None, feeds)[0], np.sqrt(feeds["a"]))


def test_counts_are_those_of_all_models():
    operators = {
        "training_model": {"ai.onnx": {"Add": 14}, DOMAIN: {"Kernel3": 1, "Codes0": 1}},
        "step_model": {DOMAIN: {"Kernel10": 1, "SignedCodes1": 1, "Other7": 1, "Kernel99999": 1}},
        "eval_model": {"ai.onnx": {"Kernel20": 1}},
    }
    assert count_operators(operators) == (11, 1, 2)
    assert count_operators({}) == (0, 0, 0)


def test_options_of_a_caller_are_not_those_of_one_package(tmp_path):
    """Another package may have other operators."""
    package = packaging_tools.built_package(zoo.mlp((8, 4, 3)), tmp_path, native=True)
    theirs = onnxruntime.SessionOptions()
    state = CheckpointState.load_checkpoint(package.checkpoint)
    counts = count_operators(package.manifest.operators.by_model())
    for own in (
        Module(package.training_model, state).session_options,
        default_session_options(package.training_model, 1),
    ):
        assert own.get_session_config_entry(COUNTS) == " ".join(map(str, counts))
    Module(package.training_model, state, session_options=theirs)
    with pytest.raises(RuntimeError):
        theirs.get_session_config_entry(COUNTS)
