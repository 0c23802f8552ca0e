"""A model asks ONNX Runtime for nothing beyond itself: no files, no memory, no options."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.package.verify import verify_package
from odtpack_runtime.session.model_file import check_model_file
from tests import zoo

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


def initializer(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(secret())


def memory(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(secret("*/_ORT_MEM_ADDR_/*"))


def sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add().values.CopyFrom(secret())


def attribute(model: onnx.ModelProto) -> None:
    model.graph.node.append(constant())


def branch(model: onnx.ModelProto) -> None:
    true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
    out = helper.make_tensor_value_info("other", TensorProto.FLOAT, [4])
    body = helper.make_graph([constant()], "body", [], [out])
    model.graph.initializer.append(true)
    model.graph.node.append(
        helper.make_node("If", ["true"], ["which"], then_branch=body, else_branch=body)
    )


def function(model: onnx.ModelProto) -> None:
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("d", "f", [], ["other"], [constant()], opsets))


def without_location(model: onnx.ModelProto) -> None:
    """Marked as external, in a model that names a value so."""
    tensor = secret()
    del tensor.external_data[:]
    model.graph.initializer.append(tensor)
    model.graph.node.append(helper.make_node("Identity", ["location"], ["elsewhere"]))


def options(model: onnx.ModelProto) -> None:
    model.metadata_props.add(key="ort_config", value='{"session_options": {}}')


EXTERNAL = [initializer, memory, sparse, attribute, branch, function, without_location]


def train(folder: Path) -> None:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    paths = [folder / f"{name}.onnx" for name in FILES]
    module = Module(paths[0], state, paths[1])
    Optimizer(paths[2], module)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [*EXTERNAL, options], ids=lambda change: change.__name__)
def test_a_model_without_its_manifest(
    change: Callable[[onnx.ModelProto], None], name: str, built: Path, tmp_path: Path
) -> None:
    """``Module`` takes models alone: it looks by itself, before ONNX Runtime does."""
    folder = tmp_path / "models"
    shutil.copytree(built, folder, ignore=shutil.ignore_patterns("manifest.json"))
    np.arange(4, dtype=np.float32).tofile(tmp_path / "secret.bin")
    train(folder)
    model = onnx.load(folder / f"{name}.onnx")
    change(model)
    (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(OdtpackError) as caught:
        train(folder)
    assert caught.value.code == ("bad-metadata" if change is options else "model-external-data")


def test_verify_refuses_options(built: Path, tmp_path: Path) -> None:
    from tests.packages.mutations import rehash

    folder = Path(shutil.copytree(built, tmp_path / "package"))
    model = onnx.load(folder / "eval_model.onnx")
    options(model)
    (folder / "eval_model.onnx").write_bytes(model.SerializeToString())
    rehash(folder, "eval_model.onnx")
    with pytest.raises(OdtpackError) as caught:
        verify_package(folder)
    assert caught.value.code == "bad-metadata"


def test_names_alone_are_no_reason(tmp_path: Path) -> None:
    model = zoo.mlp((6, 5, 3))
    model.doc_string = "location, ort_config"
    model.graph.node[0].name = "location"
    model.metadata_props.add(key="author", value="ort_config")
    model.metadata_props.add(key="location", value="here")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    check_model_file(tmp_path / "model.onnx")


@pytest.mark.parametrize("more", [b"\x0b\x0c", b"\x08", b"\x7a\xff\xff\x03", b"\x00"])
def test_what_cannot_be_taken_apart_is_refused(more: bytes, tmp_path: Path) -> None:
    """A group among the fields, which protobuf skips, and fields that are cut off."""
    model = zoo.mlp((6, 5, 3))
    initializer(model)
    (tmp_path / "model.onnx").write_bytes(more + model.SerializeToString())
    with pytest.raises(OdtpackError) as caught:
        check_model_file(tmp_path / "model.onnx")
    assert caught.value.code in ("model-not-loadable", "model-external-data")
