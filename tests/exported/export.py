"""Exports a module as a file, as users do, by either of PyTorch's exporters."""

import warnings
from typing import Literal

import torch

Exporter = Literal["torchscript", "dynamo"]


def export(module, inputs, path, exporter, *, opset=None, dynamic=None, output="output", **options):
    """Write ``module`` to ``path``; its layers stay in the modes that they are in.

    ``inputs`` are in the order of forward, and ``dynamic`` names the axes of free length.
    """
    arguments = dict(options)
    if exporter == "torchscript":
        mode = torch.onnx.TrainingMode
        arguments |= {
            "dynamic_axes": {name: dict(axes) for name, axes in (dynamic or {}).items()},
            "training": mode.PRESERVE if module.training else mode.EVAL,
        }
    elif dynamic:
        arguments |= {"dynamic_shapes": _dynamic_shapes(list(inputs), dynamic), "verbose": False}
    with warnings.catch_warnings():
        # Both exporters warn about what they do inside, and of their own old age.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(inputs.values()), str(path), input_names=list(inputs),
            output_names=[output], opset_version=opset, dynamo=exporter == "dynamo", **arguments,
        )  # fmt: skip
    return path


def _dynamic_shapes(names, dynamic):
    dims = {name: torch.export.Dim(name) for axes in dynamic.values() for name in axes.values()}
    return tuple(
        {axis: dims[label] for axis, label in dynamic.get(name, {}).items()} for name in names
    )
