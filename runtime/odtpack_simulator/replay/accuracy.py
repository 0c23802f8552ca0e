"""The metric of a classifier: the share of labels that the highest score names."""

from __future__ import annotations

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
