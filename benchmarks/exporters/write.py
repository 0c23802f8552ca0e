"""The models, and their export by each exporter, in the environment that it needs.

Models are architectures of Hugging Face's transformers with two blocks and seeded weights. The
environments of the exporters have transformers and PyTorch alone.
"""

import contextlib
import dataclasses
import json
import runpy
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import apart
from tests.adapters.written.models import HEADS, KEYS, LONGEST, SIZE, save, seeded

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


def genai(
    subject: Subject, model: Path, out: Path, precision: str, device: str, joined: bool = False
) -> None:
    """The builder of onnxruntime-genai; by default it joins queries, keys and values."""
    apart = [] if joined else ["--extra_options", "disable_qkv_fusion=true"]
    sys.argv = ["builder", "-i", str(model), "-o", str(out), "-p", precision, "-e", device,
                "-c", str(out / "cache"), *apart]  # fmt: skip
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")


def optimum(subject: Subject, model: Path, out: Path, suffix: str) -> None:
    """optimum-onnx; encoder and decoder in one file."""
    from optimum.exporters.onnx import main_export

    one_file = subject.head == "ForConditionalGeneration"
    task = "text-generation" if subject.loss == "next_token" else "text-classification"
    if subject.head == "ForImageClassification":
        task = "image-classification"
    elif one_file:
        whisper = subject.name == "Whisper"
        task = "automatic-speech-recognition" if whisper else "text2text-generation"
    else:
        task += suffix
    main_export(str(model), out, task=task, device="cpu", do_validation=False, monolith=one_file,
                nb_max_frames=FRAMES)  # fmt: skip


def olive(subject: Subject, model: Path, out: Path, kind: str) -> None:
    """A pass of Olive over a file."""
    from olive.workflows import run

    given = {"type": "ONNXModel", "model_path": str(model / "model.onnx")}
    passes = {"quantize": {"type": kind}}
    run({"input_model": given, "passes": passes, "output_dir": str(out),
         "cache_dir": str(out / "cache")})  # fmt: skip


def nbits(subject: Subject, model: Path, out: Path, bits: int, form: str) -> None:
    """ONNX Runtime's quantizer of products, in its operator or in standard ones."""
    from onnxruntime.quantization import QuantFormat, matmul_nbits_quantizer

    settings = matmul_nbits_quantizer.DefaultWeightOnlyQuantConfig(
        block_size=32, bits=bits, is_symmetric=True, quant_format=QuantFormat[form]
    )
    source = str(model / "model.onnx")
    tool = matmul_nbits_quantizer.MatMulNBitsQuantizer(source, algo_config=settings)
    tool.process()
    tool.model.save_model_to_file(str(out / "model.onnx"))


def dynamic(subject: Subject, model: Path, out: Path, seven: bool = False) -> None:
    """ONNX Runtime's quantizer to 8 bits, data included; weights of 7 bits never saturate."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(model / "model.onnx", out / "model.onnx", reduce_range=seven)


def torch(subject: Subject, model: Path, out: Path, exporter: Any) -> None:
    """PyTorch's own exporters."""
    import torch

    from tests.exported.export import export

    module = subject.module()
    cache = {} if subject.loss == "cross_entropy" else {"use_cache": False}

    def forward(self: Any, *given: torch.Tensor) -> torch.Tensor:
        named = dict(zip(subject.takes, given, strict=True))
        return super(type(self), self).forward(**named, **cache).logits

    # The layers keep their names: the module is no part of another.
    module.__class__ = type(subject.name, (type(module),), {"forward": forward})
    batch = subject.batch()
    feeds = {name: torch.from_numpy(batch[name]) for name in subject.takes}
    export(module, feeds, out / "model.onnx", exporter, output="logits")


@dataclasses.dataclass(frozen=True)
class Exporter:
    """How a file is written."""

    write: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    environment: str | None = None  # that of the requirements of this name; that of the tests
    over: str | None = None  # the exporter whose file it takes; a model of transformers otherwise
    precision: str = "fp32"
    only: str = ""  # what it is for: the end of a model's class


FIVE, FOUR = "transformers-5", "transformers-4"
EXPORTERS = {
    **{
        f"genai-{version}-{precision}-{device}": Exporter(
            genai, (precision, device), environment, None, precision, "ForCausalLM"
        )
        for version, environment, kinds in (
            ("0.18", FIVE, ("fp32-cpu", "fp16-cuda", "int4-cpu", "int4-webgpu", "int8-cpu")),
            ("0.11", FOUR, ("fp32-cpu", "fp16-cuda", "int4-cpu")),
        )
        for precision, device in (kind.split("-") for kind in kinds)
    },
    "genai-0.18-joined-int4-cpu": Exporter(
        genai, ("int4", "cpu", True), FIVE, None, "int4", "ForCausalLM"
    ),
    "optimum": Exporter(optimum, ("",), FOUR),
    "optimum-with-past": Exporter(optimum, ("-with-past",), FOUR, only="ForCausalLM"),
    "olive-4": Exporter(olive, ("OnnxBlockWiseRtnQuantization",), FOUR, "optimum", "int4"),
    "ort-4": Exporter(nbits, (4, "QOperator"), None, "optimum", "int4"),
    "ort-4-qdq": Exporter(nbits, (4, "QDQ"), None, "optimum", "int4"),
    "ort-8": Exporter(nbits, (8, "QOperator"), None, "optimum", "int8"),
    "ort-dynamic": Exporter(dynamic, (), None, "optimum", "dynamic"),
    "ort-dynamic-7": Exporter(dynamic, (True,), None, "optimum", "dynamic"),
    "torchscript": Exporter(torch, ("torchscript",)),
    "dynamo": Exporter(torch, ("dynamo",)),
}


def write_all(*, label: str, root: str, subjects: list[str]) -> None:
    """Write ROOT/LABEL/SUBJECT/model.onnx, or say in error.txt why the exporter does not."""
    exporter = EXPORTERS[label]
    for name in subjects:
        if exporter.only and SUBJECTS[name].head != exporter.only:
            continue
        if {label, exporter.over} & {*SUBJECTS[name].without}:
            continue
        subject, out, model = SUBJECTS[name], Path(root, label, name), Path(root, "models", name)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        try:
            if exporter.over:
                model = Path(root, exporter.over, name)
            elif exporter.environment:
                model = model.with_name(f"{name}-{exporter.environment}")
                save(subject.module(), model)
            exporter.write(subject, model, out, *exporter.arguments)
            assert (out / "model.onnx").exists(), f"wrote {[p.name for p in out.rglob('*.onnx')]}"
        except (Exception, SystemExit) as error:
            text = (str(error).replace(f"{model}", name).strip().splitlines() or [""])[0]
            (out / "error.txt").write_text(f"{type(error).__name__}: {text:.200}")


PROMPT, COUNT = [3, 4, 5], 6


def hand_over(written: Path, work: Path, interpreter: str) -> str:
    """Whether onnxruntime-genai draws odtpack's tokens: equal, other, or none without a decoder."""
    from odtpack.adapters import AdapterSpec
    from odtpack.build import build_package
    from odtpack_runtime import CheckpointState, Generator, Package, save_adapter

    spec = AdapterSpec("lora", ("model.*_proj",))
    build_package(
        written / "model.onnx", work / "package", loss="next_token", adapter=spec, segments=True
    )
    package = Package.open(work / "package")
    state = CheckpointState.load_checkpoint(package.checkpoint)
    random = np.random.default_rng(0)
    for array in state.arrays(trainable=True).values():
        np.add(array, 0.3 * random.normal(size=array.shape), out=array, casting="same_kind")
    save_adapter(package, state, work / "mine.onnx_adapter")
    if "decoder_model" not in [file.role for file in package.manifest.files.extra]:
        return "none"
    generator = Generator(package)
    generator.add_adapter("mine", work / "mine.onnx_adapter")
    ours = [
        [*generator.generate(PROMPT, adapter=name, max_tokens=COUNT, temperature=0)]
        for name in (None, "mine")
    ]
    for name in ("decoder.onnx", "decoder.weights", "segments.weights"):
        shutil.copy(work / "package" / name, work)
    for path in written.glob("*.json"):
        shutil.copy(path, work)
    settings = json.loads((written / "genai_config.json").read_text())
    settings["model"]["decoder"]["filename"] = "decoder.onnx"
    settings["model"]["eos_token_id"] = settings["model"]["vocab_size"] - 1
    (work / "genai_config.json").write_text(json.dumps(settings))
    with contextlib.suppress(RuntimeError):
        return "equal" if apart.call(drawn, python=interpreter, work=work) == ours else "other"
    return "other"


def drawn(*, work: str) -> list[list[int]]:
    """The tokens that its generator draws, without and with the adapter; in its environment."""
    import onnxruntime_genai as genai

    found: list[list[int]] = []
    model = genai.Model(work)
    adapters = genai.Adapters(model)
    adapters.load(str(Path(work, "mine.onnx_adapter")), "mine")
    for used in (False, True):
        settings = genai.GeneratorParams(model)
        settings.set_search_options(max_length=len(PROMPT) + COUNT, do_sample=False)
        generator = genai.Generator(model, settings)
        if used:
            generator.set_active_adapter(adapters, "mine")
        generator.append_tokens(PROMPT)
        found.append([])
        while not generator.is_done():
            generator.generate_next_token()
            found[-1].append(int(generator.get_next_tokens()[0]))
    return found
