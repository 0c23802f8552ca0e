"""Checkpoints of parameters, without going through a package."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import onnx
import onnx.numpy_helper

from odtpack.errors import OdtpackError
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]] | None,
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write a checkpoint.

    Args:
        parameters: Trainable and other parameters, as :meth:`TrainingBlock.parameters
            <odtpack.onnxblock.TrainingBlock.parameters>` returns them.
        path_to_checkpoint: The file.
        nominal_checkpoint: Write names and types only.

    Raises:
        OdtpackError: There are no parameters, two have one name, or the file cannot be
            written.
    """
    if parameters is None:
        raise OdtpackError("no-parameters", "there are no parameters to save")
    trainable, frozen = (
        {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}
        for tensors in parameters
    )
    if len(trainable | frozen) < sum(len(tensors) for tensors in parameters):
        raise OdtpackError("named-twice", "two of the parameters have one name")
    if nominal_checkpoint:
        trainable, frozen = (
            {name: np.empty(0, array.dtype) for name, array in arrays.items()}
            for arrays in (trainable, frozen)
        )
    write_checkpoint(
        path_to_checkpoint, CheckpointData(trainable, frozen, nominal=nominal_checkpoint)
    )


def load_checkpoint_to_model(
    path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto
) -> None:
    """Replace the initializers of a model by the parameters of a checkpoint.

    Args:
        path_to_checkpoint: The checkpoint; names in it that the model does not have are
            passed over.
        model: Model, changed in place.

    Raises:
        OdtpackError: The checkpoint cannot be read, is nominal, or holds a parameter of
            another type or shape; the model is not changed then.
    """
    where = str(path_to_checkpoint)
    data = read_checkpoint(path_to_checkpoint)
    if data.nominal:
        raise OdtpackError(
            "checkpoint-nominal",
            "the checkpoint is nominal: it holds no values",
            where=where,
            hint="pass the complete checkpoint",
        )
    arrays = {**data.trainable, **data.frozen}
    fresh = []
    for tensor in model.graph.initializer:
        array = arrays.get(tensor.name)
        if array is None:
            continue
        new = onnx.numpy_helper.from_array(array, tensor.name)
        if new.data_type != tensor.data_type or list(new.dims) != list(tensor.dims):
            kind = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
            raise OdtpackError(
                "parameter-mismatch",
                f"{tensor.name!r} is {array.dtype}{list(array.shape)} in the checkpoint, and "
                f"{kind}{list(tensor.dims)} in the model",
                where=where,
            )
        fresh.append((tensor, new))
    for tensor, new in fresh:
        tensor.CopyFrom(new)
