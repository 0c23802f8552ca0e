"""Blocks that make forward and training models, and checkpoints without a package."""

from __future__ import annotations

import abc
import os
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import onnx
import onnx.numpy_helper
import onnx_ir as ir

from odtpack import targets
from odtpack.autodiff import stop_gradient
from odtpack.errors import OdtpackError
from odtpack.model.loading import load_model
from odtpack.model.shared_tensors import copies_of
from odtpack.onnxblock.accessor import ModelAccessor
from odtpack.onnxblock.blocks import Block, base, current
from odtpack.onnxblock.loss import Loss
from odtpack.package.task import Graphs, LossInfo, Task
from odtpack.package.training import build_graphs
from odtpack.spec import BuildSpec
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint

_T = TypeVar("_T")
Parameters = tuple[list[onnx.TensorProto], list[onnx.TensorProto]]


class ForwardBlock(Block):
    """A block whose results become the outputs of a model."""

    _model: onnx.ModelProto | None = None

    @abc.abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model; return the names of its outputs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model into the open base.

        Returns:
            What :meth:`build` returns.

        Raises:
            OdtpackError: There is no open base, the model is invalid, or a result does not
                exist.
        """
        output = super().__call__(*args, **kwargs)
        who = type(self).__name__
        accessor = current(who)
        set_outputs(accessor, result_names(output, who), who)
        model = ir.from_proto(accessor.model)
        stop_gradient.lower(model.graph)
        if accessor.finish is not None:
            accessor.finish(model)
        targets.stamp(model)
        self._model = ir.to_proto(model)
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """The model.

        Raises:
            OdtpackError: The block has not been called yet.
        """
        return _built(self._model, "model")


class TrainingBlock(Block):
    """A block whose first result is a loss; its gradients are taken when it is called."""

    _requires_grad: dict[str, bool]
    _graphs: Graphs | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make the block; its state is there even if a subclass forgets ``super().__init__()``."""
        block = super().__new__(cls)
        block._requires_grad, block._graphs = {}, None
        return block

    @abc.abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write the forward model and its loss.

        Returns:
            Name of the loss, a scalar; or a tuple of it and the names of further values
            that the training and evaluation models return.
        """

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Ask for the gradient of a parameter or input, or freeze a parameter.

        Args:
            argument_name: Name of an initializer, or of a float32 graph input.
            value: False for a parameter that becomes an input without a gradient.
                Initializers of the model that are never named stay constants inside the
                models; those that a block created to be trained are trained.
        """
        self._requires_grad[argument_name] = bool(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model into the open base and differentiate it.

        The base then holds the training model.

        Returns:
            What :meth:`build` returns.

        Raises:
            OdtpackError: There is no open base; the model is invalid; the loss is not a scalar;
                a parameter does not exist or is not reached; an operator has no gradient.
        """
        output = super().__call__(*args, **kwargs)
        who = type(self).__name__
        accessor = current(who)
        results = result_names(output, who)
        set_outputs(accessor, results, who)
        model = load_model(accessor.model, named=accessor.created)
        inputs = {value.name for value in model.graph.inputs}
        chosen = {
            wanted: tuple(n for n, value in self._requires_grad.items() if value is wanted)
            for wanted in (True, False)
        }
        created = (name for name in accessor.created if name not in self._requires_grad)
        task = Task(
            model,
            (*copies_of(model.graph, [n for n in chosen[True] if n not in inputs]), *created),
            copies_of(model.graph, chosen[False]),
            None,
            BuildSpec(loss_inputs=results[:1], outputs=results[1:], prediction=False),
            attached=loss_info(accessor, self),
            input_gradients=tuple(name for name in chosen[True] if name in inputs),
        )
        self._graphs = build_graphs(task)
        accessor.replace(ir.to_proto(self._graphs.training))
        return output

    def parameters(self) -> Parameters:
        """Trainable parameters and all others that became inputs.

        Raises:
            OdtpackError: The block has not been called yet.
        """
        return parameters(_built(self._graphs, "training model"))

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the evaluation model.

        Raises:
            OdtpackError: The block has not been called yet.
        """
        graphs = _built(self._graphs, "training model")
        return ir.to_proto(graphs.training), ir.to_proto(graphs.evaluation)


def parameters(graphs: Graphs) -> Parameters:
    """Trainable parameters of a training model, and all others that became inputs."""
    found: Parameters = ([], [])
    for parameter in graphs.parameters:
        proto = ir.serde.serialize_tensor(parameter.tensor)
        proto.name = parameter.name
        found[parameter.role != "trainable"].append(proto)
    return found


def attach_block(
    model: ir.Model, block: Block, names: Sequence[str]
) -> tuple[ir.Model, tuple[str, ...], LossInfo, tuple[str, ...]]:
    """Let a block, which is called with some values of a model, append a loss to it."""
    # Returns the model with the loss; names of the results; what is known of the loss; names of the
    # initializers that blocks created to be trained.
    who = type(block).__name__
    with base(ir.to_proto(model)) as accessor:
        results = result_names(block(*names), who)
        kept = [output.name for output in accessor.model.graph.output]
        set_outputs(accessor, [*results, *(name for name in kept if name not in results)], who)
        model = load_model(accessor.model, named=accessor.created)
        return model, results, loss_info(accessor, block), tuple(accessor.created)


def loss_info(accessor: ModelAccessor, block: Block) -> LossInfo:
    """What a package says of a loss that blocks wrote."""
    name, options = "custom", {}
    if isinstance(block, Loss):
        name, options = block.loss.name, block.loss.settings()
    return LossInfo(name, options, dict(accessor.targets), accessor.labels)


def result_names(output: Any, who: str) -> tuple[str, ...]:
    """Names that a block returned."""
    names = (output,) if isinstance(output, str) else output
    texts = isinstance(names, list | tuple) and all(isinstance(n, str) and n for n in names)
    if not texts or not names:
        raise OdtpackError(
            "bad-block-result",
            f"{who} returned {output!r}; build must return a name, or a tuple of names",
            hint="return what the last block returned",
        )
    if len(set(names)) < len(names):
        raise OdtpackError("named-twice", f"{who} returned a name twice: {', '.join(names)}")
    return tuple(names)


def set_outputs(accessor: ModelAccessor, names: Sequence[str], who: str) -> None:
    """Make values the outputs of the base model."""
    outputs = [accessor.info(name, who) for name in names]
    graph = accessor.model.graph
    del graph.output[:]
    graph.output.extend(outputs)


def _built(made: _T | None, what: str) -> _T:
    if made is None:
        raise OdtpackError("not-built", f"the {what} has not been built yet")
    return made


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
    data = CheckpointData(trainable, frozen)
    write_checkpoint(path_to_checkpoint, data.without_values() if nominal_checkpoint else data)


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
