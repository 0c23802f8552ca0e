"""Vectors before the tokens: against PyTorch, and to and from PEFT's files."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.optimizers import AdamW
from odtpack.package import write
from odtpack_runtime import CheckpointState, Package, load_adapter, save_adapter
from odtpack_runtime.package.adapter import CONFIG
from tests.adapters import llama
from tests.adapters.conftest import needs_peft
from tests.adapters.written.models import HERE
from tests.exported.export import Exporter, export
from tests.model_text import parsed
from tests.model_text import run as computed
from tests.packaging_tools import built_training, losses_of_steps, open_training
from tests.refused import refused

VOCABULARY, WIDTH, LONGEST, TOKENS = 23, 8, 16, 3
SPEC = AdapterSpec("prompt", tokens=TOKENS, seed=5)


class Decoder(nn.Module):
    """Learned positions, one head, a mask; sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        return self.of_vectors(self.embed(input_ids), attention_mask, position_ids)

    def of_vectors(self, x: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        x = x + self.places(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        length = torch.arange(x.shape[1])
        hidden = (length[:, None] < length) | (attention_mask[:, None] == 0)
        scores = (q @ k.transpose(1, 2)).masked_fill(hidden, -1e4)
        return self.head(x + self.out(scores.softmax(-1) @ v))


def exported(folder: Path, exporter: Exporter = "torchscript") -> tuple[Decoder, Path]:
    module = Decoder().eval()
    names = ("input_ids", "attention_mask", "position_ids")
    free = {name: {0: "batch", 1: "tokens"} for name in names}
    inputs = {name: torch.ones(2, 5, dtype=torch.int64) for name in names}
    path = folder / "model.onnx"
    return module, export(module, inputs, path, exporter, dynamic=free, output="logits", opset=18)


def batch(length: int = 7) -> list[np.ndarray]:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (3, length))
    mask = (np.arange(length) < [[length], [length - 2], [length - 1]]).astype(np.int64)
    return [ids, mask, np.tile(np.arange(length), (3, 1)), np.where(mask, ids, -100)]


def by_hand(module: Decoder, vectors: Tensor, data: list[Tensor]) -> Tensor:
    """What PEFT does: vectors and ones before the tokens and the mask; the tokens' logits."""
    ids, mask, places = data
    count = len(vectors)
    x = torch.cat([vectors.expand(len(ids), -1, -1), module.embed(ids)], 1)
    mask = torch.cat([torch.ones(len(ids), count, dtype=mask.dtype), mask], 1)
    first = torch.arange(count).expand(len(ids), -1)
    return module.of_vectors(x, mask, torch.cat([first, places + count], 1))[:, count:]


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_ten_steps_are_pytorch_s(tmp_path, exporter):
    module, model = exported(tmp_path, exporter)
    optimizer = AdamW(epsilon=1e-3, weight_decay=0.01, formula="pytorch")
    manifest = build_package(
        model, tmp_path / "package", loss="next_token", adapter=SPEC, optimizer=optimizer
    )
    assert manifest.adapter.parameters == ("prompt_embeddings",)
    assert (manifest.adapter.kind, manifest.adapter.tokens) == ("prompt", TOKENS)
    state, trainer, ours = open_training(tmp_path / "package")
    parameter = state.parameters["prompt_embeddings"]
    vectors = torch.tensor(parameter.data.astype(np.float64), requires_grad=True)
    theirs = torch.optim.AdamW([vectors], 0.05, eps=1e-3, weight_decay=0.01)
    ours.set_learning_rate(0.05)
    module = module.double()
    losses = []
    for step in range(10):
        data = batch(5 + step % 3)  # of different lengths
        inputs = [torch.from_numpy(each) for each in data]
        logits = by_hand(module, vectors, inputs[:3])
        expected = nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), inputs[3][:, 1:].reshape(-1)
        )
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        losses.append(float(trainer(*data)))
        assert losses[-1] == pytest.approx(expected.item(), rel=2e-5)
        ours.step()
        trainer.lazy_reset_grad()
        np.testing.assert_allclose(parameter.data, vectors.detach().numpy(), rtol=2e-4, atol=2e-5)
    assert losses[-1] < losses[1]


def test_it_is_drawn_from_a_normal_distribution_by_its_seed(tmp_path, monkeypatch):
    _, model = exported(tmp_path)
    # A build runs what it wrote, and so many vectors are more than the model has places for.
    monkeypatch.setattr(write, "checked", lambda manifest, *_, **__: manifest)
    first = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        spec = AdapterSpec("prompt", tokens=400, seed=seed)
        build_package(model, tmp_path / name, loss="next_token", adapter=spec)
        state = CheckpointState.load_checkpoint(Package.open(tmp_path / name).checkpoint)
        first.append(state.parameters["prompt_embeddings"].data.copy())
    np.testing.assert_array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])
    assert first[0].shape == (400, WIDTH)
    assert abs(first[0].mean()) < 0.1
    assert first[0].std() == pytest.approx(1, abs=0.1)


def test_the_exported_model_takes_tokens_as_before(tmp_path, run):
    module, model = exported(tmp_path)
    build_package(model, tmp_path / "package", loss="next_token", adapter=SPEC)
    run("export", tmp_path / "package", "--out", tmp_path / "inference.onnx")
    data = batch()[:3]
    names = ("input_ids", "attention_mask", "position_ids")
    feeds = dict(zip(names, data, strict=True))
    logits = computed(onnx.load(tmp_path / "inference.onnx"), feeds)["logits"]
    state = open_training(tmp_path / "package")[0]
    vectors = torch.from_numpy(state.parameters["prompt_embeddings"].data.copy())
    expected = by_hand(module, vectors, [torch.from_numpy(each) for each in data])
    np.testing.assert_allclose(logits, expected.detach().numpy(), rtol=1e-4, atol=1e-5)


@needs_peft
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about itself
def test_peft_reads_what_is_written_and_the_other_way_round(tmp_path, run):
    import peft
    import transformers

    _, model = exported(tmp_path)
    package = tmp_path / "package"
    build_package(model, package, loss="next_token", adapter=SPEC)
    run("adapter", "export", package, "--out", tmp_path / "ours")
    settings = {"hidden_size": WIDTH, "intermediate_size": 8, "vocab_size": VOCABULARY}
    tiny = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **settings)
    theirs = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(tiny), tmp_path / "ours")
    own = open_training(package)[0].parameters["prompt_embeddings"].data
    found = peft.get_peft_model_state_dict(theirs)["prompt_embeddings"]
    np.testing.assert_array_equal(found.detach().numpy(), own)

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=TOKENS)
    other = peft.get_peft_model(transformers.LlamaForCausalLM(tiny), config)
    other.save_pretrained(tmp_path / "theirs")
    run("adapter", "import", package, tmp_path / "theirs", "--out", tmp_path / "start.ckpt")
    start = CheckpointState.load_checkpoint(tmp_path / "start.ckpt")
    wanted = peft.get_peft_model_state_dict(other)["prompt_embeddings"].detach().numpy()
    np.testing.assert_array_equal(start.parameters["prompt_embeddings"].data, wanted)
    assert json.loads((tmp_path / "ours" / CONFIG).read_text())["num_virtual_tokens"] == TOKENS


def test_an_embedding_that_is_tied_to_the_last_product(tmp_path):
    model = onnx.load(HERE / "genai-llama-tied-fp32" / "model.onnx")
    losses = []
    for options in ({}, {"words": 8}, {"words": 8}):
        manifest = build_package(
            model, tmp_path, loss="next_token", adapter=SPEC, loss_options=options
        )
        assert manifest.adapter.layers == ("model.embed_tokens",)
        _, trainer, optimizer = open_training(tmp_path)
        losses.append(losses_of_steps(trainer, optimizer, [llama.batch()] * 3))
        if options:  # the third time behind the product stands what some exporters write
            (last,) = (node for node in model.graph.node if "logits" in node.output)
            last.output[:] = ["product"]
            model.graph.node.append(onnx.helper.make_node("Identity", ["product"], ["logits"]))
    assert losses[0][2] < losses[0][0]
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_that_takes_no_prompt_is_refused(tmp_path):
    table = "float[3, 2] table = {1, 2, 3, 4, 5, 6}"
    fixed = f"""fixed (int64[batch, 5] input_ids) => (float[batch, 5, 2] y) <{table}>
        {{ y = Gather(table, input_ids) }}"""
    strange = f"""strange (int64[batch, tokens] input_ids, float[batch, tokens] weights)
            => (float[batch, tokens, 2] y) <{table}, int64[1] two = {{2}}>
        {{ rows = Gather(table, input_ids) w = Unsqueeze(weights, two) y = Mul(rows, w) }}"""
    for text, word in ((fixed, "fixed"), (strange, "weights")):
        onnx.save(parsed(text), tmp_path / "model.onnx")
        with refused("no-tokens", word):
            build_package(
                tmp_path / "model.onnx", tmp_path / "out", loss="next_token", adapter=SPEC
            )
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"on": ("*.q_proj",)}])
def test_settings_out_of_range_are_refused(wrong):
    with refused("bad-adapter"):
        AdapterSpec("prompt", **wrong)  # type: ignore[arg-type]


def test_it_cannot_be_merged(tmp_path, run):
    _, model = exported(tmp_path)
    build_package(model, tmp_path / "package", loss="next_token", adapter=SPEC, self_check=False)
    assert run("adapter", "export", tmp_path / "package", "--out", tmp_path / "ours").code == 0
    done = run("adapter", "merge", model, tmp_path / "ours", "--out", tmp_path / "m.onnx", code=2)
    assert "adapter-not-mergeable" in done.err
    assert not (tmp_path / "m.onnx").exists()


def test_what_is_trained_beside_it_has_a_file_of_onnx_runtime_only(tmp_path, run):
    """PEFT's configuration for vectors names no modules to save."""
    _, model = exported(tmp_path)
    package = tmp_path / "package"
    build = {"loss": "next_token", "adapter": SPEC, "train": ["head.bias"]}
    state, module, optimizer = built_training(model, package, **build)
    start = {name: value.data.copy() for name, value in state.parameters if value.requires_grad}
    assert sorted(start) == ["head.bias", "prompt_embeddings"]
    losses_of_steps(module, optimizer, [batch()])
    for name, value in start.items():
        assert (state.parameters[name].data != value).all()
    CheckpointState.save_checkpoint(state, tmp_path / "trained")
    export = "adapter", "export", package, "--checkpoint", tmp_path / "trained", "--out"
    done = run(*export, tmp_path / "peft", code=2)
    assert "peft-without-kind" in done.err
    assert "--onnxruntime" in done.err
    with refused("peft-without-kind"):
        save_adapter(Package.open(package), state, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()
    run(*export, tmp_path / "ours", "--onnxruntime", code=0)
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [
        "adapter.onnx_adapter", "base.onnx",
    ]  # fmt: skip
    again = CheckpointState.load_checkpoint(package / "checkpoint")
    load_adapter(Package.open(package), again, tmp_path / "ours" / "adapter.onnx_adapter")
    for name in start:
        np.testing.assert_array_equal(again.parameters[name].data, state.parameters[name].data)
