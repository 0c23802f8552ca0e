"""Models that exporters wrote train as PEFT trains the models they were exported from."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from odtpack import optimizers
from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack_runtime import Package, load_adapter
from tests.adapters import genai, llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import ALPHA, RANK, config, follow, next_token
from tests.adapters.written.models import GENAI, HERE, KEYS, OPTIMUM, SIZE, causal
from tests.adapters.written.values import matrices, take_over
from tests.model_text import run
from tests.packaging_tools import losses_of_steps, open_training

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
    found = matrices(onnx.load(HERE / name / "model.onnx"))
    assert len(found) == (15 if precision == "int4" else 0)
    take_over(module, found)
    return module


@needs_peft
@pytest.mark.parametrize("name", GENAI)
def test_forward_is_that_of_the_kernels_and_of_pytorch(name):
    path = HERE / name / "model.onnx"
    proto = onnx.load(path)
    for node in proto.graph.node:
        for each in node.attribute:
            if each.name == "accuracy_level":
                each.i = 1  # the data in float32
    ids = llama.batch()[0]
    feeds: dict[str, np.ndarray] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for each in proto.graph.input:
        if each.name.startswith("past_key_values"):
            feeds[each.name] = np.zeros((len(ids), KEYS, 0, SIZE), np.float32)
    expected = run(proto, feeds)["logits"]
    loaded = load_model(path)
    assert {node.domain for node in loaded.graph} == {""}
    assert [value.name for value in loaded.graph.inputs] == ["input_ids"]
    (found,) = run(loaded, {"input_ids": ids}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        wanted = twin(name)(torch.from_numpy(ids)).logits
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@needs_peft
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", GENAI)
def test_ten_steps_agree_with_peft(name, segments, tmp_path):
    model = HERE / name / "model.onnx"
    follow(twin(name), model, tmp_path, SPEC, LOSS, llama.batch(), segments=segments)


@needs_peft
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", ["genai-llama-tied-int4", "genai-llama-tied-fp32"])
def test_adapter_on_a_tied_embedding_agrees_with_peft(name, segments, tmp_path):
    spec = AdapterSpec("lora", ("*embed_tokens", "*.q_proj"), (), RANK, ALPHA)
    model = HERE / name / "model.onnx"
    follow(twin(name), model, tmp_path, spec, LOSS, llama.batch(), segments=segments)


@needs_peft
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", OPTIMUM)
def test_ten_steps_with_mask_and_positions_agree_with_peft(name, segments, tmp_path):
    ids, labels = llama.batch()
    places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    data = (ids, np.ones_like(ids), places, labels)
    module = causal(*OPTIMUM[name][:3])
    follow(module, HERE / name / "model.onnx", tmp_path, SPEC, LOSS, data, segments=segments)


def test_float16_within_a_budget_follows_what_has_none(tmp_path):
    """ONNX Runtime computes much of it in float32, under names of its own."""
    model = tmp_path / "half.onnx"
    onnx.save(onnx.load(HERE / "genai-llama-tied-fp32" / "model.onnx"), model)
    genai.to_float16(model)
    ends: list[dict[str, np.ndarray]] = []
    counts, losses = [], []
    budget: dict[str, Any] = {"memory_budget": "65 MB", "memory_batch": 64}
    for given in ({}, budget):
        folder = tmp_path / str(len(ends))
        build_package(
            model, folder, loss="next_token", optimizer=optimizers.SGD(), adapter=SPEC, **given
        )
        nodes = onnx.load(folder / "training_model.onnx", load_external_data=False).graph.node
        counts.append(len(nodes))
        state, trainer, optimizer = open_training(folder)
        optimizer.set_learning_rate(1.0)
        losses += losses_of_steps(trainer, optimizer, [llama.batch()] * 3)
        ends.append({n: p.data.copy() for n, p in state.parameters if p.requires_grad})
    assert counts[1] > counts[0]  # more of it is computed again
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-4)
    assert losses[2] < 0.9 * losses[0]
    for name, value in ends[0].items():
        assert np.abs(ends[1][name] - value).max() < 3e-3 * np.abs(value).max(), name


@needs_peft
@pytest.mark.parametrize("name", ["genai-qwen3-int4", "genai-phi3-int4"])
def test_what_peft_trained_is_imported(name, tmp_path):
    from peft import get_peft_model

    package = tmp_path / "package"
    manifest = build_package(
        HERE / name / "model.onnx", package, loss="next_token", adapter=SPEC,
        optimizer=optimizers.SGD(),
    )  # fmt: skip
    theirs = get_peft_model(twin(name), config(SPEC, [*manifest.adapter.layers]))
    ids, labels = llama.batch()
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], 1.0)
    for _ in range(3):
        optimizer.zero_grad()
        next_of(theirs(torch.from_numpy(ids)), torch.from_numpy(labels)).backward()
        optimizer.step()
    theirs.save_pretrained(tmp_path / "theirs")
    state, trainer, _ = open_training(package)
    before = float(trainer(ids, labels))
    load_adapter(Package.open(package), state, tmp_path / "theirs")
    with torch.no_grad():
        wanted = next_of(theirs(torch.from_numpy(ids)), torch.from_numpy(labels)).item()
    assert float(trainer(ids, labels)) == pytest.approx(wanted, rel=1e-5)
    assert wanted < 0.97 * before
