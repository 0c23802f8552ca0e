"""Ten steps of AdamW on an adapter agree with PEFT on PyTorch, which runs in float64."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from odtpack import optimizers
from odtpack.adapters import AdapterSpec
from odtpack.adapters.layers import find_layers
from odtpack.build import build_package
from odtpack.model.loading import load_model
from odtpack.model.shared_tensors import weight_array
from odtpack.quantized import quantize_base
from odtpack_runtime import CheckpointState
from tests.adapters import llama
from tests.adapters.conftest import needs_peft
from tests.exported.export import export
from tests.packaging_tools import losses_of_steps, open_training

STEPS, EPSILON = 10, 1e-3
RATES = {"lora": 0.01, "dora": 0.01, "ia3": 0.05}
RANK, ALPHA = 3, 5.0

Loss = Callable[[Tensor, Tensor], Tensor]


def config(spec: AdapterSpec, names: list[str]) -> Any:
    """The same adapter as PEFT configures it."""
    import peft

    if spec.kind == "ia3":
        feedforward = [name for name in names if name.endswith("down_proj")]
        return peft.IA3Config(target_modules=names, feedforward_modules=feedforward)
    return peft.LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=names, use_dora=spec.kind == "dora"
    )


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1))


NEXT_TOKEN = ("next_token", next_token)


def follow(module, model, folder, spec, loss=NEXT_TOKEN, data=None, share=3e-4, **build):
    """Losses, and every parameter of the adapter after every step, agree with PEFT's.

    Data are tokens if not given. Returns by what share of its way a parameter is off, at most.
    """
    import peft

    data = llama.batch() if data is None else data
    formula = optimizers.AdamW(epsilon=EPSILON, weight_decay=0.01, formula="pytorch")
    manifest = build_package(model, folder, loss=loss[0], optimizer=formula, adapter=spec, **build)
    theirs = peft.get_peft_model(copy.deepcopy(module), config(spec, list(manifest.adapter.layers)))
    state, trainer, optimizer = open_training(folder)
    start = {n: p.data.copy() for n, p in state.parameters if p.requires_grad}
    assert set(start) == set(manifest.adapter.parameters)
    loaded = {name: torch.from_numpy(value) for name, value in start.items()}
    outcome = peft.set_peft_model_state_dict(theirs, loaded)
    assert not outcome.unexpected_keys, outcome.unexpected_keys
    assert not [key for key in outcome.missing_keys if "lora" in key or "ia3" in key]
    theirs = theirs.double().eval()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(v.size for v in start.values())
    rate = RATES[spec.kind]
    torch_optimizer = torch.optim.AdamW(trained, rate, eps=EPSILON, weight_decay=0.01)
    optimizer.set_learning_rate(rate)
    taken = trainer.input_names()
    given, data = data, tuple(data[n] for n in taken) if isinstance(data, dict) else data
    tensors = [torch.from_numpy(each) for each in data]
    inputs = [t.double() if t.is_floating_point() else t for t in tensors[:-1]]
    by_name = dict(zip(taken, inputs, strict=False)) if isinstance(given, dict) else {}
    losses, worst = [], 0.0
    for _ in range(STEPS):
        ours = float(trainer(*data))
        torch_optimizer.zero_grad()
        expected = loss[1](theirs(**by_name) if by_name else theirs(*inputs), tensors[-1])
        expected.backward()
        torch_optimizer.step()
        optimizer.step()
        trainer.lazy_reset_grad()
        losses.append(expected.item())
        assert ours == pytest.approx(losses[-1], rel=share / 15), f"loss {ours}, {losses[-1]}"
        values = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
        for name, first in start.items():
            value = values[name].numpy()
            error = np.linalg.norm(state.parameters[name].data - value)
            way = np.linalg.norm(value - first)
            assert way > 0, name
            rounded = 1e-6 * np.linalg.norm(value) + 1e-7
            assert error < share * way + rounded, f"{name}: {error:.1e} of {way:.1e}"
            worst = max(worst, share * float(error / (share * way + rounded)))
    assert losses[-1] < 0.97 * losses[0]  # ten steps that change nothing would agree too
    return worst


SPECS = {
    "lora": AdapterSpec("lora", tuple(f"*.{name}" for name in llama.LINEARS), (), RANK, ALPHA),
    "dora": AdapterSpec("dora", tuple(f"*.{name}" for name in llama.LINEARS), (), RANK, ALPHA),
    "ia3": AdapterSpec("ia3", ("*.k_proj", "*.v_proj", "*.down_proj"), ("*.down_proj",)),
}


def unpacked(module: nn.Module, model: Path, base: Any) -> nn.Module:
    """The module with the weights that a base of few bits stands for, by onnx.reference."""
    loaded = quantize_base(load_model(model), base)
    count = 0
    for layer in find_layers(loaded.graph):
        use = layer.uses[0]
        if use.weight is layer.source:
            continue
        array = weight_array(use.weight)
        weight = module.get_submodule(layer.name).weight
        found = torch.from_numpy(array if use.outputs_first else array.T.copy())
        error = (found - weight).abs().max() / weight.abs().max()
        assert 0 < error < {"int8": 0.005, "int4": 0.13, "nf4": 0.16}[base]
        with torch.no_grad():
            weight.copy_(found)
        count += 1
    stored = loaded.graph.initializers
    table = module.get_submodule("embed_tokens").weight
    if "embed_tokens.weight_quantized" in stored and count:
        codes, scales = (
            stored[f"embed_tokens.weight_{each}"].const_value.numpy()
            for each in ("quantized", "scale")
        )
        with torch.no_grad():
            table.copy_(torch.from_numpy(codes * scales[:, None]))
    assert count > 10
    return module


def with_its_own_matrix(base: Any, path: Path) -> tuple[nn.Module, Path]:
    """A decoder whose output is no tied table, and its file; weights are the base's."""
    module: nn.Module = llama.llama()
    module.lm_head.weight = nn.Parameter(0.5 * module.lm_head.weight.detach().flip(0))
    model = llama.exported(module, path)
    return module if base is None else unpacked(module, model, base), model


@needs_peft
@pytest.mark.parametrize(("base", "kind", "segments"), [
    *itertools.product((None, "int8", "int4", "nf4"), ("lora", "dora"), (False, True)),
    (None, "ia3", False),
])  # fmt: skip
def test_a_language_model(base, kind, segments, llama_file, tmp_path):
    """As one model, and segment by segment."""
    module = llama.llama() if base is None else unpacked(llama.llama(), llama_file, base)
    follow(module, llama_file, tmp_path, SPECS[kind], base=base, segments=segments)


# Adapters on an encoder with pooling, and on convolutions, are PEFT's in training and in files.


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
        module, feeds, path, "torchscript", dynamic={"image": {0: "batch"}}, output="logits",
        opset=17,
    )  # fmt: skip
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
def test_ten_steps(name, tmp_path):
    make, adapter = CASES[name]
    module, model, data = make(tmp_path / "model.onnx")
    follow(module, model, tmp_path / "package", adapter, LOSS, data)


@needs_peft
@pytest.mark.parametrize("name", CASES)
def test_files_go_there_and_back(name, tmp_path, run):
    import peft

    make, adapter = CASES[name]
    module, model, data = make(tmp_path / "model.onnx")
    package, tensors = tmp_path / "package", [torch.from_numpy(each) for each in data[:-1]]
    manifest = build_package(model, package, loss="cross_entropy", adapter=adapter)
    assert manifest.adapter is not None

    def computed(path: Path) -> np.ndarray:
        session = onnxruntime.InferenceSession(path)
        names = [each.name for each in session.get_inputs()]
        return np.asarray(session.run(None, dict(zip(names, data[:-1], strict=True)))[0])

    def logits(checkpoint: Path) -> np.ndarray:
        out = tmp_path / "plain.onnx"
        asked = ("--checkpoint", checkpoint, "--outputs", "logits", "--out", out)
        assert run("export", package, *asked).code == 0
        return computed(out)

    state, trainer, optimizer = open_training(package)
    optimizer.set_learning_rate(0.05)
    losses_of_steps(trainer, optimizer, [data] * 3)
    trained = tmp_path / "trained.ckpt"
    CheckpointState.save_checkpoint(state, trained)
    theirs = tmp_path / "theirs"
    run("adapter", "export", package, "--checkpoint", trained, "--out", theirs, code=0)
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
    run("adapter", "import", package, tmp_path / "new", "--out", start, code=0)
    np.testing.assert_allclose(logits(start), expected, rtol=1e-4, atol=1e-5)
    merged = tmp_path / "merged.onnx"
    run("adapter", "merge", model, tmp_path / "new", "--out", merged, code=0)
    np.testing.assert_allclose(computed(merged), expected, rtol=1e-4, atol=1e-5)
