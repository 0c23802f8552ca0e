"""Training that hides each sample: gradients are clipped one by one, and noise is added (DP-SGD).

A step over a batch B of expected size L, with the clipping norm C and the noise multiplier s::

    g = 1/L (sum over i in B of g_i min(1, C / |g_i|)  +  s C N(0, I))

is that of Abadi et al., Deep Learning with Differential Privacy, 2016, algorithm 1: g_i is the
gradient of sample i alone, of all trainable parameters together. What that promises depends on how
batches are drawn; the accountants that there are assume that each sample is in a batch with the
same probability, independently of the others (:func:`poisson_batches`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from odtpack_runtime.checkpoint.parameters import Array, view
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.training.module import Module
from odtpack_runtime.training.optimizer_contract import Privacy
from odtpack_runtime.training.parameter_vector import gradient_norm

Normal = Callable[[int], npt.NDArray[np.float64]]
"""Draws so many numbers from the standard normal distribution."""

Uniform = Callable[[int], npt.NDArray[np.float64]]
"""Draws so many numbers, evenly from 0 up to but not including 1."""

_CHUNK = 2**16
_BITS = 53


def secure_uniform(count: int) -> npt.NDArray[np.float64]:
    """Draw numbers evenly from 0 up to 1 from the system's secure generator."""
    drawn = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(64 - _BITS)
    return np.asarray(drawn * 2.0**-_BITS)


def secure_normal(count: int) -> npt.NDArray[np.float64]:
    """Draw standard normal numbers from the system's secure generator."""
    # By the formula of Box and Muller. Each is half the sum of four, so that what floating-point
    # numbers can be tells less of the sum that it is added to (Holohan and Braghin, Secure Random
    # Sampling in Differential Privacy, 2021).
    first, second = 1 - secure_uniform(4 * count).reshape(2, -1)  # above 0, at most 1
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    pairs = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
    return np.asarray(pairs.reshape(4, count).sum(axis=0) / 2)


def poisson_batches(
    indices: npt.NDArray[np.int64], rate: float, steps: int, uniform: Uniform = secure_uniform
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield a batch for each step: every sample with the same probability, independently."""
    # Batches differ in size and may be empty. Privacy holds only if the draw stays secret.
    for _ in range(steps):
        yield indices[uniform(len(indices)) < rate]


def private_gradient(
    module: Module,
    batch: Sequence[Array],
    privacy: Privacy,
    expected: int | None = None,
    normal: Normal = secure_normal,
) -> list[float]:
    """Compute the private gradient of a batch, in place of the accumulated one."""
    # A sample whose loss or gradient is not finite counts as one without a gradient; each is one of
    # the module's `skipped_steps`.
    # `batch`: Its inputs; the first axis of each counts samples. None are allowed.
    # `expected`: L, the expected number of samples; those of the batch if None.
    # Returns the loss of each sample, which is not private.
    sizes = {len(array) if np.ndim(array) else None for array in batch}
    if len(sizes) != 1 or None in sizes:
        what = "Inputs of a private step are arrays whose first axis counts the same samples."
        raise OdtpackError("private-batch", what)
    flat = module.flat
    gradients = flat.gradients.view(flat.dtype)
    with module.state.lock, ExitStack() as broken_off:
        broken_off.callback(_give_back, module, module.accumulated_batches)
        total = np.zeros_like(gradients)
        losses = []
        for index in range(len(batch[0])):
            module.lazy_reset_grad()
            skipped = module.skipped_steps
            results: Any = module(*(array[index : index + 1] for array in batch))
            if not index:  # until then nothing was written
                broken_off.callback(module.spoil_gradients)
            losses.append(float(np.ravel(results[0] if isinstance(results, tuple) else results)[0]))
            if module.skipped_steps == skipped:
                norm = gradient_norm(gradients)
                total += gradients * flat.dtype.type(
                    min(1.0, privacy.clip_norm / norm) if norm else 1.0
                )
        if not losses:
            broken_off.callback(module.spoil_gradients)
        deviation = privacy.clip_norm * privacy.noise_multiplier
        sums = total.view(np.uint8)
        for slot in flat.trainable.slots:
            place, own = (view(memory, slot).reshape(-1) for memory in (flat.gradients, sums))
            for start in range(0, own.size, _CHUNK):
                part = own[start : start + _CHUNK].astype(np.float64)
                if deviation:
                    part += deviation * normal(part.size)
                place[start : start + _CHUNK] = part / (expected or max(len(batch[0]), 1))
        broken_off.pop_all()
        module.gradients_given()
    return losses


def _give_back(module: Module, batches: int) -> None:
    """Let the gradients of some batches be those that are accumulated, if they are still there."""
    if batches and not module.state.spoilt:
        module.gradients_given(batches)
