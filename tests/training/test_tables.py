"""Gradients of embedding tables: right, and without zeros as large as the table."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

from odtpack.model.loading import load_model
from tests.packaging_tools import batch, generate, open_training
from tests.training.tables import ROWS, WIDTH, predict, tables
from tests.training.test_execution import LEVELS
from tests.training.test_types import retyped

LEAST = min(rows for rows in ROWS.values() if rows > 1000) * WIDTH * 2  # bytes in float16


def _graph_size(model: Path, level: str, folder: Path, kind: str) -> int:
    """Bytes of what a session executes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimized")
    options.add_session_config_entry("session.save_model_format", kind)
    onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return (folder / "optimized").stat().st_size


@pytest.mark.parametrize("form", ["float32", "float16", "float64", "opset 13"])
def test_no_session_holds_zeros(form: str, tmp_path: Path) -> None:
    """Neither the file nor what ONNX Runtime makes of it grows with the tables."""
    model = tables(13 if form == "opset 13" else 17)
    if form in ("float16", "float64"):
        model = retyped(model, np.dtype(form).type)
    training = generate(model, tmp_path) / "training_model.onnx"
    assert training.stat().st_size < LEAST / 2
    for level, kind in itertools.product(LEVELS, ("ONNX", "ORT")):
        assert _graph_size(training, level, tmp_path, kind) < LEAST, (level, kind)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_pytorchs(level: str, threads: int, tmp_path: Path) -> None:
    """Of one batch, and of three that are added up, twice over."""
    model = tables()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.intra_op_num_threads = threads
    state, module, _ = open_training(generate(model, tmp_path), options)
    for first in (0, 3):
        tensors = {
            name: torch.from_numpy(p.data.copy()).double().requires_grad_()
            for name, p in state.parameters
        }
        for seed in range(first, first + 3):
            tokens, labels = batch(model, 40, seed)
            loss = F.cross_entropy(
                predict(torch.from_numpy(tokens), tensors), torch.from_numpy(labels)
            )
            loss.backward()
            assert float(module(tokens, labels)) == pytest.approx(loss.item(), rel=1e-5)
            for name, parameter in state.parameters:
                grad = tensors[name].grad
                assert grad is not None
                expected = grad.numpy()
                atol = 1e-6 * np.abs(expected).max()
                np.testing.assert_allclose(
                    parameter.grad, expected, rtol=1e-4, atol=atol, err_msg=name
                )
                # What no token meant is zero, not nearly.
                if name != "tied.embed":
                    assert not parameter.grad[expected == 0].any(), name
        module.lazy_reset_grad()


def test_float16(tmp_path: Path) -> None:
    """The same in a model of float16 numbers, each right to 2^-11 and sums to a few times that."""
    model = retyped(tables(), np.float16)
    state, module, _ = open_training(generate(model, tmp_path))
    tensors = {
        name: torch.from_numpy(p.data.astype(np.float16)).double().requires_grad_()
        for name, p in state.parameters
    }
    for seed in range(3):
        tokens, labels = batch(model, 40, seed)
        logits = predict(torch.from_numpy(tokens), tensors)
        F.cross_entropy(logits, torch.from_numpy(labels)).backward()
        module(tokens, labels)
        for name, parameter in state.parameters:
            grad = tensors[name].grad
            assert grad is not None
            expected = grad.numpy()
            assert parameter.grad.dtype == np.float32
            error = np.linalg.norm(parameter.grad - expected)
            assert error < 2e-3 * np.linalg.norm(expected), name


def test_how_each_table_accumulates(tmp_path: Path) -> None:
    """Each in the way that the model was made for: the other tests rely on it."""
    graph = load_model(onnx.load(generate(tables(), tmp_path) / "training_model.onnx")).graph
    found = {}
    for node in graph:
        if node.op_type == "If":
            name = str(node.outputs[0].name).removesuffix("_grad.accumulation.out")
            found[name] = [
                [inner.op_type for inner in node.attributes[branch].as_graph()]
                for branch in ("then_branch", "else_branch")
            ]
    for name, (fresh, added) in found.items():
        scattered = name not in ("tied.embed", "scaled.embed")
        assert (added[-1] == "ScatterElements") == scattered, name
        assert (fresh[-1] == "Gather") == (name in ("large.embed", "twice.embed")), name
    assert set(found) == set(ROWS)
    # Onto the gradient of the head, onto zeros for the table that is scaled, and onto zeros of
    # the size of the batch, of which the loss makes its gradient.
    outside = [node for node in graph if node.op_type == "ScatterElements"]
    starts = sorted(node.inputs[0].producer().op_type for node in outside)
    assert starts == ["ConstantOfShape", "Expand", "Gemm"]
