"""What the kernel ``depthwise`` computes, and whether a body computes the same.

A body is a gradient rule's nodes: slices, products, sums, in one of several forms.
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from odtpack_runtime.package import native_trial
from odtpack_runtime.package.native_trial import MOST_ELEMENTS, ONES, RefusedError

if TYPE_CHECKING:
    import onnx

DEPTHWISE: Final = "depthwise"
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)
LENGTH: Final = 18
"""Numbers of a program: what is computed; whether the input's planes and the output's lie
[C, N, P] or [N, C, H, W]; how the weight lies, see :func:`weight_dims`; C; for both axes size,
kernel, step of windows, distance of taps, zeros before, windows; and whether there is a bias."""

_LONGEST = 64
"""Taps of an axis, and steps between windows and taps, that the library has a kernel for."""


def computes(
    function: onnx.FunctionProto, program: Sequence[int], constants: Sequence[np.ndarray]
) -> bool:
    """Whether a body computes what a program of the kernel says."""
    # `constants`: values of the function's inputs after the kernel's.
    trial = functools.partial(Depthwise, program)
    return native_trial.computes(function, trial, native_trial.SUMS, constants)


def weight_dims(channels: int, kernel: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The shapes that a weight may have."""
    height, width = kernel
    return (channels, 1, height, width), (channels, height * width), (channels * height, width)


def inputs_of(program: Sequence[int]) -> int:
    """Number of tensors that the kernel reads; what its body reads besides is constant."""
    return 3 if len(program) == LENGTH and program[0] == FORWARD and program[-1] else 2


class Depthwise:
    """Inputs of the kernel, and its result, as of a :class:`~native_trial.Trial`."""

    def __init__(self, program: Sequence[int], samples: int) -> None:
        if len(program) != LENGTH or min(program) < 0 or max(program) > 1 << 16:
            raise RefusedError
        kind, x_first, y_first, lies, channels, *axes, bias = program
        sizes, kernel, steps, apart, before, out = zip(axes[:6], axes[6:], strict=True)
        planes = samples * channels * (math.prod(sizes) + math.prod(out))
        if kind > WEIGHT_GRADIENT or 0 in (channels, *sizes, *kernel, *steps, *out) or lies > 2:
            raise RefusedError
        if max(*kernel, *steps, *apart) > _LONGEST:
            raise RefusedError
        padded = [
            max((o - 1) * step + (k - 1) * d + 1, zeros + size)
            for size, k, step, d, zeros, o in (axes[:6], axes[6:])
        ]
        if max(planes, samples * channels * math.prod(padded)) > MOST_ELEMENTS:
            raise RefusedError
        random = np.random.default_rng(secrets.randbits(64))

        def draw(*shape: int) -> np.ndarray:
            return random.choice(ONES, shape).astype(np.float32)

        x, y = draw(samples, channels, *sizes), draw(samples, channels, *out)
        w, b = draw(channels, 1, *kernel), draw(channels)
        plane = np.zeros((samples, channels, *padded), np.float32)
        inner = plane[:, :, before[0] : before[0] + sizes[0], before[1] : before[1] + sizes[1]]
        if kind != INPUT_GRADIENT:
            inner[...] = x
        total, dw = np.zeros_like(y), np.zeros_like(w)
        for i, j in itertools.product(*map(range, kernel)):
            starts = i * apart[0], j * apart[1]
            rows, columns = (
                slice(start, start + (o - 1) * step + 1, step)
                for start, o, step in zip(starts, out, steps, strict=True)
            )
            read, weight = plane[:, :, rows, columns], w[:, :, i, j, None]
            if kind == FORWARD:
                total += weight * read
            elif kind == INPUT_GRADIENT:
                read += weight * y
            else:
                dw[:, 0, i, j] = (read * y).sum((0, 2, 3))
        total += b.reshape(-1, 1, 1) if bias else 0
        x, y, inner, total = (
            each.swapaxes(0, 1).reshape(channels, samples, -1) if first else each
            for each, first in ((x, x_first), (y, y_first), (inner, x_first), (total, y_first))
        )
        w = w.reshape(weight_dims(channels, kernel)[lies])
        self.inputs: list[np.ndarray] = [
            [w, x, b] if bias else [w, x], [w, y], [x, y],
        ][kind]  # fmt: skip
        self.result: np.ndarray = (total, inner, dw)[kind]
