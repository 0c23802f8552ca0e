"""Small models of Hugging Face's transformers with seeded weights, and their export by real tools.

    python -m tests.adapters.written.models genai|optimum WORK

writes the models of `GENAI` into this folder with onnxruntime-genai's builder,
or those of `OPTIMUM`; WORK is a directory for what is not kept. README.md says what was installed.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
VOCABULARY, LONGEST, HEADS, KEYS, SIZE = 128, 32, 4, 2, 16

# Name of the folder: architecture, whether embedding and head are one, width, precision.
GENAI: dict[str, tuple[str, bool, int, str]] = {
    "genai-qwen2-int4": ("Qwen2", False, 64, "int4"),
    "genai-llama-tied-int4": ("Llama", True, 64, "int4"),
    "genai-llama-tied-fp32": ("Llama", True, 32, "fp32"),
    "genai-qwen3-int4": ("Qwen3", False, 64, "int4"),
    "genai-phi3-int4": ("Phi3", False, 64, "int4"),
}
OPTIMUM = {"optimum-llama-tied-past": ("Llama", True, 32, "fp32")}


def causal(kind: str, tied: bool, width: int) -> Any:
    """Two blocks."""
    import transformers

    # The builder takes a layer as wide as the vocabulary, such as Phi-3's qkv_proj, for the head.
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY + (kind == "Phi3"),
        hidden_size=width, intermediate_size=width * 3 // 2,
        num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KEYS, head_dim=SIZE,
        max_position_embeddings=LONGEST, original_max_position_embeddings=LONGEST,
        tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return seeded(getattr(transformers, f"{kind}ForCausalLM")(config))


def seeded(model: Any) -> Any:
    """A model in float32 with weights that no version of a library changes."""
    model, random = model.float().eval(), np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            values = 0.1 * random.normal(size=weight.shape) + (
                "norm" in name.lower() or "ln_" in name
            )
            weight.copy_(torch.from_numpy(values))
    return model


def save(model: Any, folder: Path) -> None:
    """The model and a tokenizer of numbered words, as exporters read them."""
    import tokenizers
    import transformers

    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    special = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), words, strict=False))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, special["unk_token"]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )


def run_builder(python: str | Path, model: Path, out: Path, precision: str) -> None:
    """Let the builder of an environment's onnxruntime-genai write a saved model."""
    tool = [python, "-m", "onnxruntime_genai.models.builder"]
    subprocess.run(
        [*tool, "-i", model, "-o", out, "-p", precision, "-e", "cpu",
         "-c", out.parent / "cache", "--extra_options", "disable_qkv_fusion=true"],
        check=True,
    )  # fmt: skip


def export_genai(work: Path) -> None:
    for name, (kind, tied, width, precision) in GENAI.items():
        save(causal(kind, tied, width), work / name)
        run_builder(sys.executable, work / name, work / f"{name}-out", precision)
        (HERE / name).mkdir(exist_ok=True)
        for file in ("model.onnx", "model.onnx.data", "genai_config.json"):
            shutil.copy(work / f"{name}-out" / file, HERE / name)


def export_optimum(work: Path) -> None:
    from optimum.exporters.onnx import main_export

    for name, (kind, tied, width, _) in OPTIMUM.items():
        save(causal(kind, tied, width), work / name)
        main_export(
            str(work / name), work / f"{name}-out", task="text-generation-with-past",
            device="cpu", do_validation=False,
        )  # fmt: skip
        (HERE / name).mkdir(exist_ok=True)
        shutil.copy(work / f"{name}-out" / "model.onnx", HERE / name)


if __name__ == "__main__":
    {"genai": export_genai, "optimum": export_optimum}[sys.argv[1]](Path(sys.argv[2]))
