"""The exporters, and the export of models by one of them, in the environment that it needs."""

from __future__ import annotations

import dataclasses
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.exporters.subjects import FRAMES, SUBJECTS, Subject
from tests.adapters.written.models import save


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
