"""Small models that never end: refused at once, or ended by a limit in a process of their own."""

import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes import common as common_passes

from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import InlinePass
from odtpack.model.shared_tensors import weight_array
from odtpack.package import write
from odtpack_runtime.apart import worker
from odtpack_runtime.apart.ort_log import log_lines
from odtpack_runtime.package.checks import graphs_of, load_model
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.model_file import check_model_file
from odtpack_runtime.session.session import open_session
from tests import zoo
from tests.hostile.models import as_if_in_ort_format
from tests.packages.mutations import changed_model
from tests.packaging_tools import open_training
from tests.refused import refused


def model(nodes: str, weights: str = "", functions: str = "") -> bytes:
    """``y`` of nodes that read ``h``, the product of the input and the weight ``w``."""
    own = ', "d": 1' if functions else ""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17{own}]> graph (float[n, 2] x) => (float[n, 2] y) '
        f"<float[2, 2] w = {{0.5, 0, 0, 0.5}} {weights}> {{ h = MatMul(x, w) {nodes} }} {functions}"
    ).SerializeToString()


def definition(name: str, nodes: str) -> str:
    return f'<domain: "d", opset_import: ["": 17, "d": 1]> {name} (x) => (y) {{ {nodes} }}'


def functions(levels: int, calls: int = 2) -> bytes:
    """Functions of which each calls the one below it several times."""
    values = ["x", *(f"v{i}" for i in range(1, calls)), "y"]
    made = [definition("f0", "y = Neg(x)")]
    for below in range(levels - 1):
        nodes = " ".join(f"{to} = d.f{below}({of})" for of, to in itertools.pairwise(values))
        made.append(definition(f"f{below + 1}", nodes))
    return model(f"y = d.f{levels - 1}(h)", functions=" ".join(made))


def loop(trips: int | None, *, computed: bool = False, grows: bool = False) -> bytes:
    """A loop whose condition is always true, said by the graph or computed at run time."""
    goes_on = "c2 = Identity(c)"
    if computed:
        goes_on = "most = ReduceMax <keepdims = 0> (s) c2 = Greater(most, low)"
    results, each, copy = "y", "", ""
    if grows:
        results, each, copy = "y, all", ", float[n, 2] each", "each = Identity(s2)"
    body = f"""body (int64 i, bool c, float[n, 2] s) => (bool c2, float[n, 2] s2 {each})
        {{ s2 = MatMul(s, w) {goes_on} {copy} }}"""
    bound = "" if trips is None else f", int64 trips = {{{trips}}}"
    content = model(
        f"{results} = Loop(true, true, h) <body = {body}>",
        f", bool true = {{1}}, float low = {{-1e30}} {bound}",
    )
    proto = onnx.load_from_string(content)
    proto.graph.node[1].input[0] = "trips" if bound else ""
    return proto.SerializeToString()


@pytest.mark.parametrize(("content", "code"), [
    (functions(40), "functions-too-large"), (functions(12), None),
    (functions(400, calls=9), "functions-too-large"), (loop(None), "endless-loop"),
    (loop(None, grows=True), "endless-loop"), (loop(2**62), "endless-loop"), (loop(10), None),
    (loop(2**62, computed=True), None),
])  # fmt: skip
def test_what_the_graph_says_is_refused_at_once(content, code, tmp_path, run):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    build = "build", "--out", tmp_path / "package", "--loss", "mse"
    for command in (("inspect",), ("ops", "check"), *([build] if code else [])):
        start = time.monotonic()
        shown = run(*command, path, code=2 if code else 0)
        assert time.monotonic() - start < 20
        assert code is None or f"error[{code}]" in shown.err
    assert not (tmp_path / "package").exists()


def test_a_function_that_calls_itself(tmp_path):
    content = model("y = d.f0(h)", functions=definition("f0", "y = d.f0(x)"))
    with pytest.raises(OdtpackError) as caught:
        build_package(onnx.load_from_string(content), tmp_path / "package", loss="mse")
    assert caught.value.code in ("bad-function", "invalid-model")


def test_inlining_gives_the_names_that_onnx_ir_gives():
    ours, theirs = (ir.from_proto(onnx.load_from_string(functions(7, calls=3))) for _ in range(2))
    InlinePass()(ours)
    common_passes.InlinePass()(theirs)
    assert len(ours.graph) > 700
    assert ir.to_proto(ours).SerializeToString() == ir.to_proto(theirs).SerializeToString()


def test_a_loop_whose_condition_is_computed_ends_by_the_limit_of_time(tmp_path, monkeypatch):
    limits = worker.Limits(seconds=2, memory=2**36)
    monkeypatch.setattr(worker.Limits, "of", classmethod(lambda cls, files: limits))
    content = onnx.load_from_string(loop(None, computed=True))
    with refused("models-stall"):
        build_package(content, tmp_path / "package", loss="mse")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("grows", [False, True])
def test_a_loop_whose_condition_is_computed_ends_by_the_limit_of_memory(
    grows, tmp_path, monkeypatch
):
    content = loop(None, computed=True, grows=grows)
    code, most = _built_in_half_a_gibibyte(content, tmp_path / "package")
    assert code == "models-memory"
    assert most < 2**30
    monkeypatch.setattr(write, "checked", lambda manifest, *_, **__: manifest)
    build_package(onnx.load_from_string(content), tmp_path / "package", loss="mse")
    with refused("models-memory"), _half_a_gibibyte():
        verify_package(tmp_path / "package")


def test_constants_that_fill_the_memory(tmp_path):
    """ONNX Runtime computes them when it loads a model: 32 GiB of ones."""
    nodes = "ones = Expand(one, shape) sum = ReduceSum <keepdims = 0> (ones) y = Add(h, sum)"
    content = model(nodes, ", float[1] one = {1}, int64[2] shape = {1048576, 8192}")
    code, most = _built_in_half_a_gibibyte(content, tmp_path / "package")
    assert code == "models-memory"
    assert most < 2**30


@contextmanager
def _half_a_gibibyte() -> Iterator[None]:
    limits = worker.Limits(seconds=300, memory=2**29)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.Limits, "of", classmethod(lambda cls, files: limits))
        yield


def _built_in_half_a_gibibyte(content: bytes, package: Path) -> tuple[str, int]:
    """Why no package was written, and the most memory of a process that ran a model, in bytes.

    The build runs in a process that has no other children: the system counts the largest child of
    a process since it began.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_build_and_measure, content, package).result()


def _build_and_measure(content: bytes, package: Path) -> tuple[str, int]:
    import resource

    with _half_a_gibibyte(), pytest.raises(OdtpackError) as caught:
        build_package(onnx.load_from_string(content), package, loss="mse")
    return caught.value.code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def test_one_process_for_a_build(tmp_path, monkeypatch):
    started = []
    popen = worker.subprocess.Popen

    def start(*arguments: object, **options: object) -> object:
        started.append(arguments)
        return popen(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(worker.subprocess, "Popen", start)
    build_package(onnx.load_from_string(model("y = Relu(h)")), tmp_path / "package", loss="mse")
    assert len(started) == 1


def test_a_stopped_process_is_noticed(monkeypatch):
    monkeypatch.setattr(worker, "STOPPED_SECONDS", 1.0)
    with worker.worker(start=True) as shared:
        threading.Timer(0.5, os.kill, (shared._process.pid, signal.SIGSTOP)).start()
        start = time.monotonic()
        with refused("models-stall", "SIGSTOP"):
            shared.call("tests.trust.test_endless:wait", seconds=60)
    assert time.monotonic() - start < 20


def wait(seconds: float) -> None:
    time.sleep(seconds)


def test_what_is_read_of_the_log():
    text = (
        "\x1b[0;93m2026-11-25 19:06:34.218190539 [W:onnxruntime:, g.cc:1 Clean] \x1b]0;x a\x1b[m\n"
        "2026-11-25 19:06:34.218190539 [I:onnxruntime:, graph.cc:1 Clean] not told\n"
        "terminate called after throwing\n"
    )
    assert [line.endswith("a") for line in log_lines(text)] == [True]


@pytest.mark.parametrize("op_type", ["Tile", "Expand", "ConstantOfShape"])
def test_a_weight_of_any_size_is_not_computed(op_type):
    """An adapter reads how a weight is stored; eight bytes must not become terabytes."""
    size = ir.val("size", const_value=ir.tensor(np.array([2**40], np.int64)))
    one = ir.val("one", const_value=ir.tensor(np.ones(1, np.float32)))
    inputs = [size] if op_type == "ConstantOfShape" else [one, size]
    with refused("unknown-weight"):
        weight_array(ir.node(op_type, inputs).outputs[0])


# A model asks ONNX Runtime for nothing beyond itself: no files, no memory, no options.

FILES = ("training_model", "eval_model", "optimizer_model")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "package"
    build_package(zoo.mlp((6, 5, 3)), folder, loss="cross_entropy", self_check=False)
    return folder


def secret(location: str = "../secret.bin") -> TensorProto:
    """A tensor of what lies in another file."""
    tensor = TensorProto(name="secret", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return tensor


def constant() -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["other"], value=secret())


def branch(model: onnx.ModelProto) -> None:
    out = helper.make_tensor_value_info("other", TensorProto.FLOAT, [4])
    body = helper.make_graph([constant()], "body", [], [out])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "true"))
    model.graph.node.append(
        helper.make_node("If", ["true"], ["which"], then_branch=body, else_branch=body)
    )


def function(model: onnx.ModelProto, node: onnx.NodeProto | None = None) -> None:
    imports = [helper.make_opsetid("", 17)]
    made = helper.make_function("d", "f", [], ["other"], [node or constant()], imports)
    model.functions.append(made)


def without_location(model: onnx.ModelProto) -> None:
    """Marked as external, in a model that names a value so."""
    tensor = secret()
    del tensor.external_data[:]
    model.graph.initializer.append(tensor)
    model.graph.node.append(helper.make_node("Identity", ["location"], ["elsewhere"]))


def default(model: onnx.ModelProto) -> None:
    """The default of a function's attribute."""
    node = helper.make_node("Constant", [], ["other"])
    node.attribute.add(name="value", ref_attr_name="v", type=onnx.AttributeProto.TENSOR)
    function(model, node)
    model.functions[0].attribute_proto.append(helper.make_attribute("v", secret()))


CHANGES: dict[str, Callable[[onnx.ModelProto], object]] = {
    "initializer": lambda model: model.graph.initializer.append(secret()),
    "memory": lambda model: model.graph.initializer.append(secret("*/_ORT_MEM_ADDR_/*")),
    "sparse": lambda model: model.graph.sparse_initializer.add().values.CopyFrom(secret()),
    "attribute": lambda model: model.graph.node.append(constant()),
    "branch": branch, "function": function, "default": default,
    "without_location": without_location,
    "options": lambda model: model.metadata_props.add(
        key="ort_config", value='{"session_options": {}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_without_its_manifest(change, name, built, tmp_path):
    """``Module`` takes models alone: it looks by itself, before ONNX Runtime does."""
    folder = tmp_path / "models"
    shutil.copytree(built, folder, ignore=shutil.ignore_patterns("manifest.json"))
    np.arange(4, dtype=np.float32).tofile(tmp_path / "secret.bin")
    open_training(folder)
    model = onnx.load(folder / f"{name}.onnx")
    CHANGES[change](model)
    (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    with refused("bad-metadata" if change == "options" else "model-external-data"):
        open_training(folder)


@pytest.mark.parametrize("name", ["model.onnx", "model.ORT", "model.ort", "model"])
@pytest.mark.parametrize("change", ["initializer", "default", "options"])
def test_a_model_that_begins_as_one_in_ort_format(change, name, tmp_path):
    """ONNX Runtime goes by the name of the file: any but ``.ort`` is read as ONNX."""
    model = zoo.mlp((6, 5, 3))
    CHANGES[change](model)
    path = tmp_path / name
    path.write_bytes(as_if_in_ort_format(model))
    if path.suffix.lower() == ".ort":
        check_model_file(path)
        with refused("model-not-loadable"):
            open_session(path, onnxruntime.SessionOptions())
    with refused("model-not-readable" if path.suffix.lower() == ".ort" else "model-not-loadable"):
        load_model(path)


def test_a_graph_among_a_function_s_defaults_is_looked_at():
    inner = helper.make_graph([helper.make_node("Strange", [], ["o"], domain="x")], "g", [], [])
    model = zoo.mlp((6, 5, 3))
    function(model)
    model.functions[0].attribute_proto.append(helper.make_attribute("g", inner))
    assert "x" in {node.domain for _, nodes in graphs_of(model) for node in nodes}


def test_verify_refuses_options(built, tmp_path):
    folder = Path(shutil.copytree(built, tmp_path / "package"))
    with changed_model(folder) as model:
        CHANGES["options"](model)
    with refused("bad-metadata"):
        verify_package(folder)


def test_names_alone_are_no_reason(tmp_path):
    model = zoo.mlp((6, 5, 3))
    model.doc_string = "location, ort_config"
    model.graph.node[0].name = "location"
    model.metadata_props.add(key="author", value="ort_config")
    model.metadata_props.add(key="location", value="here")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    check_model_file(tmp_path / "model.onnx")


@pytest.mark.parametrize("more", [b"\x0b\x0c", b"\x08", b"\x7a\xff\xff\x03", b"\x00"])
def test_what_cannot_be_taken_apart_is_refused(more, tmp_path):
    """A group among the fields, which protobuf skips, and fields that are cut off."""
    model = zoo.mlp((6, 5, 3))
    CHANGES["initializer"](model)
    (tmp_path / "model.onnx").write_bytes(more + model.SerializeToString())
    with pytest.raises(OdtpackError) as caught:
        check_model_file(tmp_path / "model.onnx")
    assert caught.value.code in ("model-not-loadable", "model-external-data")
