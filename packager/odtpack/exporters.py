"""What PyTorch's exporters do to the names of parameters."""

from __future__ import annotations

import re

# Names of what they compute from parameters and constants while they export.
_GENERATED = re.compile(r"(val|tmp)(_\d+)?|onnx::\w+_\d+")


def is_generated(name: str | None) -> bool:
    """Whether an exporter made a name up, so that it says nothing about the model."""
    return name is not None and _GENERATED.fullmatch(name) is not None
