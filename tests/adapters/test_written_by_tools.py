"""Models that exporters wrote train as PEFT trains the models they were exported from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor

from odtpack.adapters import AdapterSpec
from odtpack.model.loading import load_model
from tests.adapters import genai, llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import ALPHA, RANK, follow, next_token
from tests.adapters.written.models import GENAI, HERE, KEYS, OPTIMUM, SIZE, causal

# PEFT reads an attribute that transformers renames.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPEC = AdapterSpec("lora", tuple(f"model.*.{name}" for name in LINEARS), (), RANK, ALPHA)


def next_of(output: Any, labels: Tensor) -> Tensor:
    return next_token(output.logits, labels)


LOSS = ("next_token", next_of)


def twin(name: str) -> Any:
    """The model before it was exported, with what the codes in the file stand for."""
    kind, tied, width, precision = GENAI[name]
    module = causal(kind, tied, width)
    products = [
        node
        for node in onnx.load(HERE / name / "model.onnx", load_external_data=False).graph.node
        if node.op_type == "MatMulNBits"
    ]
    assert len(products) == (15 if precision == "int4" else 0)
    proto = onnx.load(HERE / name / "model.onnx")
    for node in products:
        path = node.input[1].split(".MatMul.")[0].replace(".attn.", ".self_attn.")
        weight, values = module.get_submodule(path).weight, genai.numbers(proto, node)
        assert 0 < (weight - values).abs().max() < 0.2 * weight.abs().max()
        with torch.no_grad():
            weight.copy_(values)
    return module


@needs_peft
@pytest.mark.parametrize("name", GENAI)
def test_forward_is_that_of_the_kernels_and_of_pytorch(name: str) -> None:
    path = HERE / name / "model.onnx"
    proto = onnx.load(path)
    for node in proto.graph.node:
        for each in node.attribute:
            if each.name == "accuracy_level":
                each.i = 1  # the data in float32
    kernels = onnxruntime.InferenceSession(proto.SerializeToString())
    ids = llama.batch()[0]
    feeds: dict[str, np.ndarray] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for each in kernels.get_inputs():
        if each.name.startswith("past_key_values"):
            feeds[each.name] = np.zeros((len(ids), KEYS, 0, SIZE), np.float32)
    (expected,) = kernels.run(["logits"], feeds)
    loaded = load_model(path)
    assert {node.domain for node in loaded.graph} == {""}
    assert [value.name for value in loaded.graph.inputs] == ["input_ids"]
    ours = onnxruntime.InferenceSession(ir.to_proto(loaded).SerializeToString())
    (found,) = ours.run(None, {"input_ids": ids})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        wanted = twin(name)(torch.from_numpy(ids)).logits
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@needs_peft
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", GENAI)
def test_ten_steps_agree_with_peft(name: str, segments: bool, tmp_path: Path) -> None:
    model = HERE / name / "model.onnx"
    follow(twin(name), model, tmp_path, SPEC, LOSS, llama.batch(), segments=segments)


@needs_peft
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", OPTIMUM)
def test_ten_steps_with_mask_and_positions_agree_with_peft(
    name: str, segments: bool, tmp_path: Path
) -> None:
    ids, labels = llama.batch()
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    data = (ids, np.ones_like(ids), places, labels)
    module = causal(*OPTIMUM[name][:3])
    follow(module, HERE / name / "model.onnx", tmp_path, SPEC, LOSS, data, segments=segments)
