"""Words and figures that several commands share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from odtpack_runtime.package.manifest import Manifest

ROLES = ("trainable", "frozen", "state")


def byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; text counts as nothing."""
    return 0 if dtype == "string" else math.prod(shape) * np.dtype(dtype).itemsize


def shape_text(dtype: str, shape: Iterable[int | str | None]) -> str:
    """``float32[batch, 1, 8, 8]``."""
    return f"{dtype}[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def parameter_summary(manifest: Manifest) -> list[str]:
    """A line for each role that occurs: how many parameters, elements and bytes."""
    lines = []
    for role in ROLES:
        found = [item for item in manifest.parameters if item.role == role]
        if found:
            lines.append(count_line(role, [(item.dtype, item.shape) for item in found]))
    return lines


def runtime_text(manifest: Manifest) -> str:
    """What runs a package: ``ONNX Runtime 1.12 and newer``."""
    if manifest.target is not None:
        return f"onnxruntime-training {manifest.minimum_onnxruntime}"
    return f"ONNX Runtime {manifest.minimum_onnxruntime} and newer"


def update_lines(manifest: Manifest) -> list[str]:
    """A line for each thing that happens around the optimizer."""
    lines = []
    if manifest.clip is not None:
        kind, bound = next((k, v) for k, v in manifest.clip.as_dict().items() if v is not None)
        lines.append(f"clip        gradients by {kind}, {bound:g}")
    if (privacy := manifest.privacy) is not None:
        lines.append(
            f"private     samples' gradients clipped to {privacy.clip_norm:g}, noise of "
            f"{privacy.noise_multiplier:g} times that"
        )
    if manifest.accumulation_steps > 1:
        lines.append(f"accumulate  {manifest.accumulation_steps} batches per optimizer step")
    for group in manifest.groups:
        count = len(group.parameters)
        what = "parameter" if count == 1 else "parameters"
        lines.append(
            f"group       {count} {what}, learning rate x {group.learning_rate_scale:g}, "
            f"weight decay {group.weight_decay:g}"
        )
    if manifest.schedule is not None:
        settings = ", ".join(f"{k} {v}" for k, v in manifest.schedule.settings.items())
        lines.append(f"schedule    {manifest.schedule.kind}{f' ({settings})' if settings else ''}")
    return lines


def count_line(role: str, tensors: Sequence[tuple[str, Sequence[int]]]) -> str:
    """``trainable   6 parameters, 6,250 elements, 25 kB``."""
    from odtpack_simulator.values.units import format_bytes

    elements = sum(math.prod(shape) for _, shape in tensors)
    size = format_bytes(sum(byte_size(*tensor) for tensor in tensors))
    what = "parameter" if len(tensors) == 1 else "parameters"
    return f"{role:<10} {len(tensors):>4} {what}, {elements:,} elements, {size}"
