"""Configurations of a reduced build: their format, and the check against what sessions run."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import onnxruntime.tools.ort_format_model  # noqa: F401 - completes the next import
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state
from onnxruntime.tools.reduced_build_config_parser import parse_config

from odtpack.choices import Format, Mode, OrtFormat, Types
from odtpack.ort.files import add_ort_files
from odtpack.ort.format import convert_model
from odtpack.ort.operator_config import (
    Operator,
    OperatorConfig,
    check_config,
    config_of,
    count_kernels,
    read_config,
)
from odtpack.ort.session_runs import SampleFeeds, SessionRun, final_graph, runs_of
from odtpack_runtime.package.package import Package
from tests.ort.models import EVERYTHING, MODELS, half, package_of
from tests.refused import refused
from tests.sweep import split_rows


def runs(package, scratch, format_, mode=Mode.TRAIN):
    scratch.mkdir(exist_ok=True)
    return runs_of(package, mode, format_, (), {}, scratch)


def written(ways: list[SessionRun], scratch: Path, types: Types) -> OperatorConfig:
    graphs = [final_graph(run, scratch / f"{index}.ort") for index, run in enumerate(ways)]
    path = scratch / "written.config"
    path.write_text(config_of(graphs, types).text(["made"]))
    return read_config(path)


def checked(config, package, ways, scratch):
    feeds = SampleFeeds(package)
    return check_config(config, ways, lambda run: feeds(run.model, run.source), scratch)


# What is needed is there, and nothing else


CHECKED = [
    *product([name for name in MODELS if name != "mobilenet"], Format, Types),
    ("mobilenet", Format.ORT, Types.OPERATOR),  # many nodes, and much like the cnn
]
# Of each model and format one kind of types; they take turns, so that each meets each format.
TURNS = {
    (name, format_): [*Types][(first + second) % len(Types)]
    for first, name in enumerate(MODELS)
    for second, format_ in enumerate(Format)
}


@pytest.mark.parametrize(
    ("name", "format_", "types"),
    split_rows(
        CHECKED, lambda name, format_, types: name != "mobilenet" and TURNS[name, format_] is types
    ),
)
def test_a_configuration_holds_what_runs_and_nothing_else(
    name, format_, types, tmp_path, shared_package
):
    package = shared_package(name, EVERYTHING if format_ is Format.ORT else None)
    ways = runs(package, tmp_path / "s", format_)
    verdict = checked(written(ways, tmp_path / "s", types), package, ways, tmp_path / "s")
    assert (verdict.missing, verdict.unused) == ((), ())
    assert len(verdict.ran) == len(ways)
    levels = {run.level for run in ways}
    assert levels == ({None} if format_ is Format.ORT else {"disable", "basic", "extended", "all"})


def test_fused_operators_and_those_of_subgraphs_are_there(tmp_path):
    fused = written(
        runs(package_of("cnn", tmp_path / "c"), tmp_path / "s", None), tmp_path / "s", Types.NONE
    )
    assert {"FusedConv", "FusedMatMul"} <= {
        each.name for each in fused.operators if each.domain == "com.microsoft"
    }
    package = package_of("scan", tmp_path / "p")
    ways = [run for run in runs(package, tmp_path / "s", None) if run.model == "eval_model"]
    config = written(ways, tmp_path / "s", Types.OPERATOR)
    assert Operator("ai.onnx", 13, "Tanh") in config.operators  # in the body of the Scan only
    assert config.types["ai.onnx", "Tanh"] == {"inputs": {"0": ["float"]}}


def test_inserted_casts_are_there(tmp_path):
    onnx.save(half(), tmp_path / "m.onnx")
    convert_model(tmp_path / "m.onnx", tmp_path / "m.ort")
    assert "Cast" not in {node.op_type for node in half().graph.node}
    config = config_of([tmp_path / "m.ort"], Types.OPERATOR)
    assert Operator("ai.onnx", 13, "Cast") in config.operators
    both = ["MLFloat16", "float"]
    assert config.types["ai.onnx", "Cast"] == {"inputs": {"0": both}, "outputs": {"0": both}}
    run = SessionRun("inference_model", tmp_path / "m.onnx", None, "all", tmp_path / "m.onnx")
    x = np.ones((2, 6), np.float16)
    verdict = check_config(config, [run], lambda _: {"input": x}, tmp_path)
    assert (verdict.missing, verdict.unused) == ((), ())


def test_folded_nodes_are_not_needed_in_ort_format(tmp_path, shared_package):
    package = shared_package("cnn", OrtFormat())
    scratch = tmp_path / "s"
    onnx = written(runs(package, scratch, Format.ONNX), scratch, Types.NONE)
    ort = written(runs(package, scratch, Format.ORT), scratch, Types.NONE)
    assert ort.operators < onnx.operators


RELU, DOUBLE = r'Relu\{"inputs": \{"0": \["float"\]\}\}', "ai.onnx;Relu: type double of inputs 0"
# What is replaced in the text, what is then missing, and what is unused.
MUTATIONS: dict[str, tuple[Types, str, str, tuple[str, ...], tuple[str, ...]]] = {
    "an operator is removed": (Types.NONE, ",Flatten", "", ("ai.onnx;13;Flatten",), ()),
    "a line is removed": (Types.NONE, r"^com\.microsoft;.*\n", "",
                          ("com.microsoft;1;FusedConv", "com.microsoft;1;FusedMatMul"), ()),
    "an operator is added": (Types.NONE, r"\Z", "ai.onnx;13;Erf\n", (), ("ai.onnx;13;Erf",)),
    "a version is another one": (Types.NONE, "ai.onnx;15;Shape", "ai.onnx;13;Shape",
                                 ("ai.onnx;15;Shape",), ("ai.onnx;13;Shape",)),
    "a type is removed": (Types.OPERATOR, RELU, 'Relu{"inputs": {"0": ["double"]}}',
                          ("ai.onnx;Relu: type float of inputs 0",), (DOUBLE,)),
    "a type is added": (Types.OPERATOR, RELU, 'Relu{"inputs": {"0": ["double", "float"]}}', (),
                        (DOUBLE,)),
    "an allowed type is another one": (Types.GLOBAL, "float,int64_t", "MLFloat16,int64_t",
                                       ("type float",), ("type MLFloat16",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_configuration_fails_by_name(name, tmp_path, shared_package):
    types, old, new, missing, unused = MUTATIONS[name]
    package = shared_package("cnn", OrtFormat())
    ways = [*runs(package, tmp_path / "s", Format.ORT), *runs(package, tmp_path / "s", Format.ONNX)]
    ways = [run for run in ways if run.level in (None, "extended") and run.platform != "arm"]
    graphs = [final_graph(run, tmp_path / f"{index}.ort") for index, run in enumerate(ways)]
    text = config_of(graphs, types).text()
    changed = re.sub(old, new, text, flags=re.M)
    assert changed != text
    (tmp_path / "changed.config").write_text(changed)
    verdict = checked(read_config(tmp_path / "changed.config"), package, ways, tmp_path / "s")
    assert (verdict.missing, verdict.unused) == (missing, unused)
    assert not verdict.passed


def test_another_package_needs_more(tmp_path, shared_package):
    mlp, cnn = shared_package("mlp", OrtFormat()), shared_package("cnn", OrtFormat())
    own, other = runs(mlp, tmp_path / "s", None), runs(cnn, tmp_path / "s", None)
    config = written(own, tmp_path / "s", Types.NONE)
    assert "com.microsoft;1;FusedConv" in checked(config, cnn, other, tmp_path / "s").missing
    union = written([*own, *other], tmp_path / "s", Types.NONE)
    assert (
        union.operators == config.operators | written(other, tmp_path / "s", Types.NONE).operators
    )


# The format


@pytest.mark.parametrize("types", Types)
def test_onnx_runtime_reads_the_same(types, tmp_path, shared_package):
    package = shared_package("cnn", OrtFormat())
    config = written(runs(package, tmp_path / "s", None), tmp_path / "s", types)
    operators, limits = parse_config(str(tmp_path / "s" / "written.config"), True)
    found = {Operator(d, v, n) for d, versions in operators.items()
             for v, names in versions.items() for n in names}  # fmt: skip
    assert found == config.operators
    if types is Types.NONE:
        assert limits is None
    elif types is Types.GLOBAL:
        assert limits.global_type_list() == config.allowed_types
        assert config.allowed_types == {"bool", "float", "int64_t"}
    else:
        lines = limits.get_cpp_entries()
        assert (
            "ORT_SPECIFY_OP_KERNEL_ARG_ALLOWED_TYPES(kOnnxDomain, Conv, Input, 0, float);" in lines
        )
        # A registration per type is dropped if nothing needs that type.
        assert limits.is_typed_registration_needed("ai.onnx", "Relu", "float")
        assert not limits.is_typed_registration_needed("ai.onnx", "Relu", "double")


@pytest.mark.parametrize("name", MODELS)
def test_each_version_is_one_that_kernels_have(name, shared_package):
    """As the build picks them, exactly one range of versions holds each operator."""
    package = shared_package(name, OrtFormat())
    ranges: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for kernel in onnxruntime_pybind11_state.get_all_opkernel_def():
        key = kernel.domain or "ai.onnx", kernel.op_name
        ranges.setdefault(key, set()).add(tuple(kernel.version_range))
    config = read_config(package.path / "required_operators.config")
    assert config.operators
    for each in config.operators:
        holding = [r for r in ranges[each.domain, each.name] if r[0] <= each.version <= r[1]]
        assert len(holding) == 1, each
    kept, of = count_kernels(config) or (0, 0)
    assert len(config.operators) <= kept < of / 5


def test_the_files_of_a_package_are_those_of_its_models(tmp_path):
    package = package_of("cnn", tmp_path / "p")
    add_ort_files(package, EVERYTHING)
    package = Package.open(package.path)
    ways = runs(package, tmp_path / "s", None)
    for file, types in (
        ("required_operators.config", Types.NONE),
        ("required_operators_and_types.config", Types.OPERATOR),
    ):
        assert read_config(package.path / file) == written(ways, tmp_path / "s", types)
    own = [run for run in ways if run.model == "optimizer_model"]
    config = read_config(package.path / "optimizer_model.required_operators.config")
    assert config == written(own, tmp_path / "s", Types.NONE)


TEXTS = {
    "ai.onnx;13": "it is not domain;opset;operators",
    "ai.onnx;x;Add": "invalid literal",
    "ai.onnx;13;Add,": "no operator at ''",
    "ai.onnx;13;Add Sub": "a comma is missing before 'Sub'",
    'ai.onnx;13;Add{"inputs"': "Expecting",
    'ai.onnx;13;Add{"inputs": {"0": "float"}}': "not lists of names",
    'ai.onnx;13;Add{"inputs": ["float"]}': "not lists of names",
    'ai.onnx;13;Add{"other": {}}': "not lists of names",
    "!globally_allowed_types;float\n!globally_allowed_types;bool": "stand there twice",
    '!globally_allowed_types;float\nai.onnx;13;Add{"inputs": {"0": ["float"]}}': "exclude each",
    "ai.onnx;13;Add" + '{"inputs": ' * 100_000: "recursion",
    "\udcff": "codec",
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:30].encode("ascii", "replace"))
def test_a_text_that_is_no_configuration(text, tmp_path):
    (tmp_path / "c").write_bytes(text.encode(errors="surrogateescape"))
    with refused("config-invalid", re.escape(TEXTS[text])):
        read_config(tmp_path / "c")


def test_what_a_configuration_may_hold(tmp_path):
    (tmp_path / "c").write_text(
        '# comment\n\nai.onnx;11,13; Add , Cast{"inputs": {"0": ["float"]}}\n'
        'ai.onnx;11;OneHot{"custom": [["float", "int64_t", "int64_t"]]},Pad\n'
    )
    config = read_config(tmp_path / "c")
    assert {str(each) for each in config.operators} == {
        *("ai.onnx;11;Add", "ai.onnx;13;Add", "ai.onnx;11;Cast", "ai.onnx;13;Cast"),
        *("ai.onnx;11;OneHot", "ai.onnx;11;Pad"),
    }
    assert config.types["ai.onnx", "OneHot"] == {"custom": [["float", "int64_t", "int64_t"]]}
    (tmp_path / "again").write_text(config.text())
    assert read_config(tmp_path / "again") == config


def test_a_file_that_is_not_in_ort_format(tmp_path):
    for data in (b"", b"\0" * 100, b"\x10\0\0\0ORTM" + b"\xff" * 64):
        (tmp_path / "m.ort").write_bytes(data)
        with refused("not-ort-format"):
            config_of([tmp_path / "m.ort"])


def test_data_of_the_user_are_run(tmp_path, shared_package):
    package = shared_package("cnn", OrtFormat())
    arrays = {"input": np.ones((5, 1, 8, 8), np.float32), "labels": np.full(5, 3)}
    np.savez(tmp_path / "d.npz", allow_pickle=False, **arrays)
    feeds = SampleFeeds(package, tmp_path / "d.npz")("eval_model", package.eval_model)
    np.testing.assert_array_equal(feeds["labels"], [3, 3])
    assert feeds["input"].shape == (2, 1, 8, 8)
