"""The models: architectures of Hugging Face's transformers with two blocks and seeded weights.

Read in the environments of the exporters too, which have transformers and PyTorch alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.adapters.written.models import HEADS, KEYS, LONGEST, SIZE, seeded

WIDTH, BATCH, TOKENS, CLASSES = HEADS * SIZE, 3, 10, 4
# genai's builder takes any layer as wide as this for the head.
VOCABULARY = 160
FRAMES = 8  # of a spectrogram of Whisper's, which have 3,000
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KEYS,
    "max_position_embeddings": LONGEST, "tie_word_embeddings": False, **_SPECIAL,
}  # fmt: skip
_GEMMA = {**_LLAMA, "head_dim": SIZE, "query_pre_attn_scalar": SIZE, "tie_word_embeddings": True}
_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_labels": CLASSES,
    "max_position_embeddings": LONGEST, "pad_token_id": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, and which of its layers are adapted."""

    name: str  # its class in transformers begins with it
    head: str  # and ends with it
    config: Mapping[str, Any]
    on: tuple[str, ...] = ("model.*_proj",)
    without: tuple[str, ...] = ()  # exporters whose transformers names the layers otherwise

    @property
    def loss(self) -> str:
        return "cross_entropy" if "Classification" in self.head else "next_token"

    def module(self) -> Any:
        """The model, in float32."""
        import transformers

        kind = getattr(transformers, f"{self.name.removesuffix('Text')}{self.head}")
        config = getattr(transformers, f"{self.name}Config")(**self.config)
        return seeded(kind(config))

    def batch(self, seed: int = 4) -> dict[str, np.ndarray]:
        """Everything that an export of it may take, and labels."""
        random = np.random.default_rng(seed)
        ids = random.integers(3, VOCABULARY, (BATCH, TOKENS))
        counts = (places := np.arange(TOKENS)) >= 3
        counts = counts & (places < TOKENS - np.arange(BATCH)[:, None])
        labels = random.integers(0, CLASSES, BATCH)
        return {
            "input_ids": ids,
            "decoder_input_ids": ids[::-1].copy(),
            "attention_mask": np.ones_like(ids),
            "decoder_attention_mask": np.ones_like(ids),
            "position_ids": np.broadcast_to(places, ids.shape).copy(),
            "token_type_ids": np.zeros_like(ids),
            "pixel_values": random.normal(size=(BATCH, 3, 8, 8)).astype(np.float32),
            "input_features": random.normal(size=(BATCH, 8, FRAMES)).astype(np.float32),
            "labels": labels if self.loss == "cross_entropy" else np.where(counts, ids, -100),
        }

    @property
    def head_size(self) -> int:
        return int(self.config.get("hidden_size", WIDTH)) // HEADS

    @property
    def takes(self) -> tuple[str, ...]:
        """What PyTorch's exporters are given."""
        if self.head == "ForImageClassification":
            return ("pixel_values",)
        if self.head == "ForConditionalGeneration":
            first = "input_features" if self.name == "Whisper" else "input_ids"
            return (first, "decoder_input_ids", "decoder_attention_mask")
        return ("input_ids", "attention_mask")


def _decoder(name: str, config: Mapping[str, Any] = _LLAMA, **more: Any) -> Subject:
    on = more.pop("on", ("model.*_proj",))
    return Subject(name, "ForCausalLM", {**config, **more}, on)


SUBJECTS = {
    subject.name.lower().removesuffix("text"): subject
    for subject in (
        _decoder("Qwen2"),
        _decoder("Qwen3", head_dim=SIZE),
        _decoder("Llama"),
        _decoder("Mistral", sliding_window=None),
        _decoder("Granite"),
        _decoder("Gemma2", _GEMMA, sliding_window=16),
        _decoder("Gemma3Text", _GEMMA, sliding_window=16),
        _decoder("SmolLM3"),
        _decoder("Olmo"),
        _decoder(
            "Phi", on=("model.*_proj", "model.layers.*.dense", "model.*.fc?"),
            hidden_size=2 * WIDTH, partial_rotary_factor=0.5,
            layer_norm_eps=1e-6,  # what genai's builder writes whatever it is
        ),
        _decoder("Phi3", original_max_position_embeddings=LONGEST),
        Subject(
            "GPT2", "LMHeadModel",
            {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
             "n_positions": LONGEST, **_SPECIAL},
            ("transformer.h.*.c_*",),
        ),
        _decoder(
            "OPT", on=("model.*_proj", "model.*.fc?"), ffn_dim=96, word_embed_proj_dim=WIDTH,
        ),
        _decoder(
            "Bloom", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2,
                      "n_head": HEADS, **_SPECIAL},
            on=("transformer.h.*.query_key_value", "transformer.h.*.dense*"),
        ),
        Subject("Bert", "ForSequenceClassification", _BERT,
                ("*.query", "*.key", "*.value", "bert.encoder.*.dense")),
        Subject("DistilBert", "ForSequenceClassification",
                {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 96, "n_layers": 2,
                 "n_heads": HEADS, "num_labels": CLASSES, "max_position_embeddings": LONGEST},
                ("*.?_lin", "*.lin?", "*.out_lin")),
        Subject("ViT", "ForImageClassification",
                {**_BERT, "image_size": 8, "patch_size": 4},
                ("vit.layers.*_proj", "vit.layers.*.fc?"), ("optimum",)),
        Subject("T5", "ForConditionalGeneration",
                {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": SIZE, "d_ff": 96,
                 "num_layers": 2, "num_heads": HEADS, "decoder_start_token_id": 0,
                 "attn_implementation": "eager",  # another takes no view of dynamo's
                 **_SPECIAL},
                ("*coder.*.[qkvo]", "*coder.*.wi", "*coder.*.wo")),
        Subject("Whisper", "ForConditionalGeneration",
                {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_mel_bins": 8,
                 "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
                 "decoder_attention_heads": HEADS, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
                 "max_source_positions": FRAMES // 2, "max_target_positions": LONGEST,
                 "decoder_start_token_id": 1, **_SPECIAL},
                ("model.*_proj", "model.*.fc?")),
    )
}  # fmt: skip
