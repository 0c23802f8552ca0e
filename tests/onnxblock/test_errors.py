"""Blocks that are used wrongly say so in one sentence, as the exception the reference raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from odtpack import onnxblock
from odtpack.errors import OdtpackError
from odtpack.onnxblock import blocks
from tests.onnxblock.nets import mlp, values


def test_one_base_at_a_time() -> None:
    with onnxblock.base(mlp()):
        for nested in (onnxblock.base(mlp()), onnxblock.empty_base()):
            with pytest.raises(RuntimeError, match="open already") as caught, nested:
                pass
            assert caught.value.code == "base-open"  # type: ignore[attr-defined]
    with onnxblock.base(mlp()):
        pass


def test_a_base_is_closed_by_an_error() -> None:
    with pytest.raises(ZeroDivisionError), onnxblock.base(mlp()):
        raise ZeroDivisionError
    with onnxblock.empty_base():
        pass


def test_no_base() -> None:
    with pytest.raises(RuntimeError, match="without a model") as caught:
        blocks.Add()("a", "b")
    assert caught.value.code == "no-base"  # type: ignore[attr-defined]
    with pytest.raises(OdtpackError, match=r"onnxblock\.base\(model\)"):
        onnxblock.loss.MSELoss()("a")


@pytest.mark.parametrize("model", [None, "model.onnx", b""])
def test_base_of_something_else(model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"onnx\.load"), onnxblock.base(model):
        pass


def test_opsets_that_do_not_work() -> None:
    for opset, word in ((11, "opset 12"), (99, "loads at most")):
        with pytest.raises(OdtpackError, match=word), onnxblock.empty_base(opset):
            pass


def test_the_path_of_the_base() -> None:
    with onnxblock.base(mlp()) as accessor:
        assert not accessor.has_path
        with pytest.raises(RuntimeError, match="no path"):
            _ = accessor.path
    with onnxblock.base(mlp(), "some/model.onnx") as accessor:
        assert accessor.has_path
        assert accessor.path == "some/model.onnx"


def test_external_data_beside_the_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, size_threshold=0, location="data")
    model = onnx.load(path, load_external_data=False)
    with onnxblock.base(model, str(path)) as accessor:
        loaded = values(accessor.model)
    for name, array in values(mlp()).items():
        np.testing.assert_array_equal(loaded[name], array)
    with pytest.raises(OdtpackError, match="in memory"), onnxblock.base(model):
        pass


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (blocks.Add(), ("output-0", "nothing")),
        (blocks.InputLike("nothing"), ()),
        (onnxblock.loss.MSELoss(), ("nothing",)),
        (onnxblock.loss.CrossEntropyLoss(), ("nothing",)),
    ],
)
def test_unknown_names(block: onnxblock.Block, names: tuple[str, ...]) -> None:
    with onnxblock.base(mlp()) as accessor:
        before = accessor.model.SerializeToString()
        with pytest.raises(LookupError, match=r"'nothing'.*\n.*'output-0'"):
            block(*names)
        assert accessor.model.SerializeToString() == before


def test_unknown_results() -> None:
    class Wrong(onnxblock.ForwardBlock):
        def __init__(self, result: Any) -> None:
            super().__init__()
            self.result = result

        def build(self) -> Any:
            return self.result

    with onnxblock.base(mlp()):
        with pytest.raises(LookupError, match="'nothing'"):
            Wrong("nothing")()
        for result in (None, (), 3, ("output-0", None)):
            with pytest.raises(OdtpackError, match="must return a name"):
                Wrong(result)()
        with pytest.raises(OdtpackError, match="twice"):
            Wrong(("output-0", "output-0"))()
    with pytest.raises(RuntimeError, match="has not been built"):
        Wrong("output-0").to_model_proto()


def test_names_that_are_taken() -> None:
    with onnxblock.base(mlp()), pytest.raises(OdtpackError, match="already has 'hidden'"):
        blocks.InputLike("output-0")("hidden")


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Add", ["output-0"], ["z"]),
        helper.make_node("Relu", ["output-0"], ["z"], slope=1),
        helper.make_node("Concat", ["output-0", "hidden"], ["z"], axis=0),
        helper.make_node("NoSuchOperator", ["output-0"], ["z"]),
    ],
    ids=lambda node: node.op_type,
)
def test_nodes_that_onnx_refuses(node: onnx.NodeProto) -> None:
    class Own(onnxblock.Block):
        def build(self) -> str:
            self.base.graph.node.append(node)
            return "z"

    with onnxblock.base(mlp()), pytest.raises(OdtpackError, match="what Own wrote") as caught:
        Own()()
    assert caught.value.code == "invalid-block"


def test_losses_that_cannot_be_trained() -> None:
    class Train(onnxblock.TrainingBlock):
        def __init__(self, loss: onnxblock.Block, *wanted: str) -> None:
            super().__init__()
            self.loss = loss
            for name in wanted:
                self.requires_grad(name)

        def build(self, name: str) -> Any:
            return self.loss(name)

    loss = onnxblock.loss.MSELoss("none")
    for block, code in (
        (Train(loss, "fc1.weight"), "loss-not-scalar"),
        (Train(onnxblock.loss.MSELoss(), "zzz"), "unknown-parameter"),
    ):
        with onnxblock.base(mlp()), pytest.raises(RuntimeError) as caught:
            block("output-0")
        assert caught.value.code == code  # type: ignore[attr-defined]
    model = mlp()
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    model.graph.input.append(helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"]))
    with onnxblock.base(model), pytest.raises(OdtpackError, match="only FLOAT inputs"):
        Train(onnxblock.loss.MSELoss(), "ids")("output-0")


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (lambda: onnxblock.loss.MSELoss("max"), RuntimeError, "'mean' or 'sum'"),
        (lambda: onnxblock.loss.CrossEntropyLoss(reduction=1), RuntimeError, "'mean' or 'sum'"),
        (lambda: onnxblock.loss.Loss("hinge"), RuntimeError, "cross_entropy"),
        (lambda: onnxblock.loss.Loss("mse", delta=1), RuntimeError, "'delta'"),
        (lambda: blocks.Linear(0, 3), RuntimeError, "in_features"),
        (lambda: onnxblock.optim.ClipGradNorm(0), RuntimeError, "above 0"),
        (lambda: onnxblock.optim.AdamW(betas=(1, 2)), RuntimeError, "beta1"),
        (lambda: onnxblock.optim.SGD(clip_grad=2.5), TypeError, "ClipGradNorm"),
        (onnxblock.ForwardBlock, TypeError, "abstract"),
    ],
)
def test_arguments_out_of_range(make: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        make()


def test_absolute_temporary_files() -> None:
    class Own(onnxblock.Block):
        def __init__(self, name: str) -> None:
            super().__init__(name)

        def build(self) -> None:
            return None

    Own("part.onnx")
    with pytest.raises(RuntimeError, match="relative"):
        Own("/part.onnx")


def test_custom_op_library(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    with pytest.raises(RuntimeError, match="not a file"), onnxblock.custom_op_library(library):
        pass
    library.write_bytes(b"")
    with onnxblock.custom_op_library(library) as path:
        assert path == library
        with (
            pytest.raises(RuntimeError, match="already"),
            onnxblock.custom_op_library(library),
        ):
            pass
