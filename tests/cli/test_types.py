"""The commands on a float16 model, from its file to an inference model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import zoo
from tests.cli.conftest import Run
from tests.packaging_tools import batch
from tests.training.test_types import retyped


@pytest.mark.parametrize(("dtype", "kept"), [(np.float16, "float32"), (np.float64, "float64")])
def test_build_inspect_train_and_export(run: Run, dtype: type, kept: str, tmp_path: Path) -> None:
    model = zoo.mlp((20, 30, 10))
    onnx.save(retyped(model, dtype), tmp_path / "model.onnx")
    x, labels = batch(model, 64)
    np.savez(tmp_path / "data.npz", input=x.astype(dtype), labels=labels)

    def done(*arguments: object) -> str:
        outcome = run(*arguments)
        assert outcome.code == 0, outcome.err
        return outcome.out + outcome.err

    package = tmp_path / "package"
    done("build", tmp_path / "model.onnx", "--out", package, "--loss", "cross_entropy")
    text = done("inspect", package)
    assert f"{kept}[30, 20]" in text
    assert ("4 of them are float16 in the model" in text) == (dtype is np.float16)
    trained = tmp_path / "trained.ckpt"
    done("train", package, "--data", tmp_path / "data.npz", "--epochs", "2", "--out", trained)
    exported = tmp_path / "inference.onnx"
    done("export", package, "--checkpoint", trained, "--out", exported)
    graph = onnx.load(exported).graph
    types = {tensor.data_type for tensor in graph.initializer}
    assert types == {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}
    assert [output.name for output in graph.output] == ["output"]
