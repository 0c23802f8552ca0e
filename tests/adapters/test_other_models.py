"""Adapters on an encoder with pooling, and on convolutions, are PEFT's in training and in files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack_runtime import CheckpointState
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import ALPHA, RANK, config, follow
from tests.cli.conftest import Run, run
from tests.exported.export import export
from tests.packaging_tools import open_training

__all__ = ["run"]

WORDS, WIDTH, HEADS, TOKENS, CLASSES = 23, 16, 2, 7, 4
LOSS = ("cross_entropy", nn.functional.cross_entropy)


class EncoderBlock(nn.Module):
    """As in BERT: normalization after each sum, exact GELU, a mask on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.intermediate, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            each(x).view(len(x), TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5
        scores = scores + (1 - mask[:, None, None].to(x.dtype)) * -1e4
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = self.first(x + self.dense(mixed))
        return self.second(x + self.output(nn.functional.gelu(self.intermediate(x))))


class Encoder(nn.Module):
    """Tokens and their mask to classes, by the mean over tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.ModuleList(EncoderBlock() for _ in range(2))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = attention_mask.cumsum(1) - 1  # of the tokens that count, as in RoBERTa
        x = self.norm(self.words(input_ids) + self.places(places))
        for layer in self.layer:
            x = layer(x, attention_mask)
        counts = attention_mask[:, :, None].to(x.dtype)
        return self.classifier((x * counts).sum(1) / counts.sum(1))


class Convolutions(nn.Module):
    """A wide kernel with a stride between two of one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.wide = nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=False)
        self.last = nn.Conv2d(6, 5, 1)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.wide(torch.relu(self.first(image))))
        return self.head(8 * torch.tanh(self.last(x)).mean((2, 3)))


def encoder(path: Path) -> tuple[nn.Module, Path, tuple[np.ndarray, ...]]:
    torch.manual_seed(3)
    module, random = Encoder().eval(), np.random.default_rng(5)
    ids = random.integers(0, WORDS, (5, TOKENS))
    mask = (np.arange(TOKENS) < np.array([[7], [4], [5], [2], [7]])).astype(np.int64)
    feeds = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    batch = {name: {0: "batch"} for name in feeds}
    export(module, feeds, path, "torchscript", dynamic=batch, output="logits", opset=17)
    return module, path, (ids, mask, random.integers(0, CLASSES, 5))


def convolutions(path: Path) -> tuple[nn.Module, Path, tuple[np.ndarray, ...]]:
    torch.manual_seed(4)
    module, random = Convolutions().eval(), np.random.default_rng(6)
    images = random.normal(size=(4, 3, 6, 6)).astype(np.float32)
    feeds = {"image": torch.from_numpy(images)}
    export(
        module,
        feeds,
        path,
        "torchscript",
        dynamic={"image": {0: "batch"}},
        output="logits",
        opset=17,
    )
    return module, path, (images, random.integers(0, CLASSES, 4))


def spec(kind: Any, on: tuple[str, ...]) -> AdapterSpec:
    return AdapterSpec(kind, on, (), RANK, ALPHA)


CASES = {
    "encoder-lora": (encoder, spec("lora", ("*.query", "*.value", "*.intermediate"))),
    "encoder-dora": (encoder, spec("dora", ("*.dense", "*.output"))),
    "encoder-embeddings": (encoder, spec("lora", ("words", "places", "*.value"))),
    "encoder-pooled": (encoder, spec("lora", ("*.key", "classifier"))),
    "one-by-one-lora": (convolutions, spec("lora", ("first", "last"))),
    "one-by-one-dora": (convolutions, spec("dora", ("first", "last"))),
    "three-by-three-lora": (convolutions, spec("lora", ("wide", "head"))),
}


@needs_peft
@pytest.mark.parametrize("name", CASES)
def test_ten_steps(name: str, tmp_path: Path) -> None:
    make, adapter = CASES[name]
    module, model, data = make(tmp_path / "model.onnx")
    follow(module, model, tmp_path / "package", adapter, LOSS, data)


@needs_peft
@pytest.mark.parametrize("name", CASES)
def test_files_go_there_and_back(name: str, tmp_path: Path, run: Run) -> None:
    import peft

    make, adapter = CASES[name]
    module, model, data = make(tmp_path / "model.onnx")
    package, tensors = tmp_path / "package", [torch.from_numpy(each) for each in data[:-1]]
    manifest = build_package(model, package, loss="cross_entropy", adapter=adapter)
    assert manifest.adapter is not None

    def logits(checkpoint: Path) -> np.ndarray:
        out = tmp_path / "plain.onnx"
        asked = ("--checkpoint", checkpoint, "--outputs", "logits", "--out", out)
        assert run("export", package, *asked).code == 0
        session = onnxruntime.InferenceSession(out)
        names = [each.name for each in session.get_inputs()]
        return np.asarray(session.run(None, dict(zip(names, data[:-1], strict=True)))[0])

    state, trainer, optimizer = open_training(package)
    optimizer.set_learning_rate(0.05)
    for _ in range(3):
        trainer(*data)
        optimizer.step()
        trainer.lazy_reset_grad()
    trained = tmp_path / "trained.ckpt"
    CheckpointState.save_checkpoint(state, trained)
    theirs = tmp_path / "theirs"
    outcome = run("adapter", "export", package, "--checkpoint", trained, "--out", theirs)
    assert outcome.code == 0, outcome.err
    reader = peft.PeftModel.from_pretrained(copy.deepcopy(module), str(theirs)).eval()
    with torch.no_grad():
        np.testing.assert_allclose(reader(*tensors), logits(trained), rtol=1e-4, atol=1e-5)
        before = module(*tensors).numpy()
    assert np.abs(logits(trained) - before).max() > 0.01  # it has learned

    torch.manual_seed(8)
    names = list(manifest.adapter.layers)
    writer = peft.get_peft_model(copy.deepcopy(module), config(adapter, names)).eval()
    with torch.no_grad():
        for parameter in writer.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        expected = writer(*tensors)
    writer.save_pretrained(str(tmp_path / "new"))
    start = tmp_path / "start.ckpt"
    outcome = run("adapter", "import", package, tmp_path / "new", "--out", start)
    assert outcome.code == 0, outcome.err
    np.testing.assert_allclose(logits(start), expected, rtol=1e-4, atol=1e-5)
    merged = tmp_path / "merged.onnx"
    outcome = run("adapter", "merge", model, tmp_path / "new", "--out", merged)
    assert outcome.code == 0, outcome.err
    session = onnxruntime.InferenceSession(merged)
    feeds = {each.name: value for each, value in zip(session.get_inputs(), data[:-1], strict=True)}
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-4, atol=1e-5)
