"""Trains one file beside PEFT, which trains the model that was exported."""

from __future__ import annotations

import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import nn

from benchmarks.exporters.subjects import BATCH, Subject
from benchmarks.exporters.write import Exporter
from odtpack.adapters import AdapterSpec
from odtpack.errors import OdtpackError
from tests.adapters import genai
from tests.adapters.test_follow_peft import ALPHA, RANK, follow, next_token
from tests.adapters.written.models import HEADS

SHARE, HALF, UNLIKE, ROUNDED = 3e-4, 3e-2, 2e-3, 0.1
_LINEAR = ("Conv1D", "Linear")


def loss_of(subject: Subject) -> tuple[str, Any]:
    """The loss by its name, and PyTorch's."""
    own = next_token if subject.loss == "next_token" else nn.functional.cross_entropy
    return subject.loss, lambda output, labels: own(output.logits, labels)


def matrices(proto: onnx.ModelProto) -> list[tuple[torch.Tensor, bool]]:
    """What codes of few bits stand for, [out, in] or rows, and whether data are rounded too."""
    stored = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    found = []

    def by_tensor(name: str, codes: str) -> np.ndarray:
        scale, zero = (
            stored[f"{name}_{end}"].astype(np.float32) for end in ("scale", "zero_point")
        )
        return (stored[codes].astype(np.float32) - zero) * scale

    for node in proto.graph.node:
        first, *others = *node.input, ""
        if node.op_type == "MatMulNBits":
            found.append((genai.numbers(proto, node), False))
        elif node.op_type == "GatherBlockQuantized" and first in stored:  # not tied
            codes, scales = stored[first], stored[others[1]]
            rows = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1) - 8.0
            wide = scales.repeat(-(-rows.shape[1] // scales.shape[1]), 1)[:, : rows.shape[1]]
            found.append((torch.from_numpy((rows * wide).astype(np.float32)), False))
        elif node.op_type == "DequantizeLinear" and first in stored:
            codes, scales, *zero = (stored[name].astype(np.float32) for name in node.input)
            if codes.ndim == 2 and scales.ndim == 2:  # by blocks of rows
                scales = np.repeat(scales, len(codes) // len(scales), 0)
                zeros = np.repeat(zero[0], len(codes) // len(zero[0]), 0) if zero else 0
                found.append((torch.from_numpy(((codes - zeros) * scales).T.copy()), False))
        elif node.op_type == "MatMulInteger" and others[0] in stored:
            values = by_tensor(others[0].removesuffix("_quantized"), others[0])
            found.append((torch.from_numpy(values.T.copy()), True))
        elif node.op_type == "Gather" and first.endswith("_quantized") and first in stored:
            values = by_tensor(first.removesuffix("_quantized"), first)
            found.append((torch.from_numpy(values), False))
    return found


def in_bytes(_: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Round what a layer reads as DynamicQuantizeLinear does; gradients pass."""
    x = given[0].detach()
    least, most = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (most - least) / 255
    zero = (-least / scale).round()
    rounded = ((x / scale).round() + zero).clamp(0, 255).sub(zero).mul(scale)
    return (given[0] + (rounded - x),)


def take_over(module: nn.Module, weights: list[tuple[torch.Tensor, bool]]) -> None:
    """Give a module's layers the values of the rows that are nearest, by value and not by name."""
    layers = [each for each in module.modules() if type(each).__name__ in (*_LINEAR, "Embedding")]
    for values, rounds in weights:
        count = 0
        for layer in layers:
            weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
            if weight.shape[1] != values.shape[1]:
                continue
            with torch.no_grad():
                whole = len(weight) <= len(values)
                inner, outer = (weight, values) if whole else (values, weight)
                first = int((outer - inner[0]).norm(dim=1).argmin())
                rows = outer[first : first + len(inner)]
                if rows.shape != inner.shape or (rows - inner).norm() > 0.2 * inner.norm():
                    continue
                (weight if whole else rows).copy_(rows if whole else values)
                count += 1
            if rounds and not layer._forward_pre_hooks:
                layer.register_forward_pre_hook(in_bytes)
        assert count, f"the {tuple(values.shape)} of a quantized tensor are no layer's"


def unlike(model: Path, module: nn.Module, subject: Subject) -> float:
    """How far ONNX Runtime's logits of a file are from the module's, with an empty cache."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    batch, feeds, known = subject.batch(), {}, {}
    for each in session.get_inputs():
        if each.name in batch:
            feeds[each.name] = known[each.name] = batch[each.name]
        else:
            heads = each.shape[1] if isinstance(each.shape[1], int) else HEADS
            sizes = [BATCH, heads, 0, subject.head_size]
            kind = np.float16 if "float16" in each.type else np.float32
            feeds[each.name] = np.zeros(sizes, kind)
    try:
        found = session.run(["logits"], feeds)[0].astype(np.float32)
    except Exception:
        return 0.0
    with torch.no_grad():
        wanted = module(**{name: torch.from_numpy(value) for name, value in known.items()}).logits
    return float(np.linalg.norm(found - wanted.numpy()) / wanted.norm())


def compare(subject: Subject, exporter: Exporter, folder: Path, **build: Any) -> dict[str, Any]:
    """What becomes of ten steps: the error, a refusal, or what is wrong."""
    if (said := folder / "error.txt").exists():
        return {"kind": "not written", "said": said.read_text()}
    model, module = folder / "model.onnx", subject.module()
    half = exporter.precision == "fp16"
    if half:
        module = module.half().float()
    take_over(module, matrices(onnx.load(model)))
    rounds = exporter.precision not in ("fp32", "fp16")  # data too, while ONNX Runtime computes
    if (off := unlike(model, module, subject)) > (ROUNDED if rounds else UNLIKE):
        return {"kind": "other", "said": f"the file's logits are {off:.1%} off the module's"}
    spec = AdapterSpec("lora", subject.on, (), RANK, ALPHA)
    try:
        with tempfile.TemporaryDirectory() as place:
            share = HALF if half else SHARE
            error = follow(
                module, model, Path(place) / "package", spec, loss_of(subject), subject.batch(),
                share=share, **build,
            )  # fmt: skip
            names = {
                name
                for name, each in module.named_modules()
                if type(each).__name__ in _LINEAR
                and any(fnmatchcase(name, pattern) for pattern in subject.on)
            }
            manifest = (Path(place) / "package" / "manifest.json").read_text()
            missing = [name for name in names if f'"{name}"' not in manifest]
            assert not missing, f"{min(missing)} is not adapted"
    except OdtpackError as refusal:
        return {"kind": "refused", "said": f"{refusal.code}: {refusal}"}
    except Exception as problem:
        text = (str(problem).strip().splitlines() or [""])[0]
        return {"kind": "wrong", "said": f"{type(problem).__name__}: {text:.200}"}
    return {"kind": "right", "error": error}
