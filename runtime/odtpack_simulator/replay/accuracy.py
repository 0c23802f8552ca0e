"""The metric of a classifier: the share of labels that the highest score names."""

from __future__ import annotations

import numpy as np

from odtpack_runtime.checkpoint.layout import Array
from odtpack_runtime.package.manifest import Manifest


def accuracy_inputs(manifest: Manifest) -> tuple[int | None, int | None]:
    """Indices of the evaluation's output with a score per class and of the labels, if any."""
    roles = [item.role for item in manifest.inputs]
    classes = manifest.class_count
    if "labels" not in roles or classes is None:
        return None, None
    labels = roles.index("labels")
    rank = len(manifest.inputs[labels].shape)
    for index, output in enumerate(manifest.all_outputs):
        scores = output.dtype.startswith("float") and len(output.shape) == rank + 1
        if output.role != "loss" and scores and output.shape[1] == classes:
            return index, labels
    return None, None


def count_right(scores: Array, labels: Array, ignored_label: int | None) -> tuple[int, int]:
    """Labels that the highest score names, and all that count.

    Args:
        scores: One number per class, ``[N, C, ...]``.
        labels: Class numbers, ``[N, ...]``.
        ignored_label: Label of samples that do not count; None if all do.
    """
    counted = labels != ignored_label
    hits = (scores.argmax(axis=1) == labels) & counted
    return int(np.count_nonzero(hits)), int(np.count_nonzero(counted))
