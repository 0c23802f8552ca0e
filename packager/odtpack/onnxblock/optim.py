"""Blocks that write optimizer models, over flat vectors.

Unlike in the reference, where an optimizer takes sequences of tensors, all parameters are
one vector ``params``, and so are ``gradients`` and each moment; see
docs/formats/package.md. An optimizer block writes a model with those inputs, and with the
new value of each vector X as its output ``X.out``.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from odtpack import optimizers, targets
from odtpack.errors import OdtpackError, WrongTypeError
from odtpack.graph.graphs import Ops
from odtpack.onnxblock.blocks import Block, current, empty_base
from odtpack.onnxblock.models import ForwardBlock, Parameters, parameters
from odtpack.optimizers.common.model import NORM_EPSILON
from odtpack.package.task import Graphs
from odtpack.passes import aliases

__all__ = ["SGD", "AdamW", "AdamWOptimizer", "ClipGradNorm", "Optimizer", "SGDOptimizer"]

# Operators that keep each element to itself: only then may a vector be cut into chunks.
_ELEMENTWISE = {
    *("Abs", "Add", "And", "Cast", "Clip", "Constant", "Div", "Equal", "Exp", "Greater"),
    *("Identity", "Less", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal"),
    *("Relu", "Sigmoid", "Sign", "Sqrt", "Sub", "Tanh", "Where"),
}  # fmt: skip


class ClipGradNorm(Block):
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), norm that of all of them together.

    Source: ``torch.nn.utils.clip_grad_norm_``.

    Args:
        max_norm: Norm that they keep.

    Raises:
        OdtpackError: It is not above 0.
    """

    def __init__(self, max_norm: float) -> None:
        if not 0 < max_norm < float("inf"):
            raise OdtpackError("bad-hyperparameter", f"max_norm is {max_norm}; it must be above 0")
        self.max_norm = float(max_norm)

    def build(self, gradients_name: str) -> str:
        """Write the nodes; the gradients themselves remain as they are."""

        def clipped(op: Ops, values: list[ir.Value]) -> list[ir.Value]:
            norm = op.ReduceL2(values[0], keepdims=1)
            scale = op.Div(self.max_norm, op.Add(norm, NORM_EPSILON))
            return [op.Mul(values[0], op.Min(scale, 1.0))]

        return self._write([gradients_name], clipped)


class SGDOptimizer(Block):
    """The update of SGD: p - lr g."""

    def build(self, learning_rate_name: str, gradients_name: str, params_name: str) -> str:
        """Write the nodes; return the name of the new parameters."""
        names = {
            "learning_rate": learning_rate_name,
            "gradients": gradients_name,
            "params": params_name,
        }
        return _write_formula(self, optimizers.SGD(), names)[0]


class AdamWOptimizer(Block):
    """The update of AdamW, see :class:`odtpack.optimizers.AdamW`.

    Args:
        bias_correction: Divide the moments by 1 - b^t.
        betas: Decay of the first and of the second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.

    Raises:
        OdtpackError: A number is out of range.
    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__()
        if len(betas) != 2:
            raise OdtpackError("bad-hyperparameter", f"betas is {betas!r}; it must be two numbers")
        self.formula = optimizers.AdamW(
            beta1=betas[0],
            beta2=betas[1],
            epsilon=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
        )

    def build(
        self,
        learning_rate_name: str,
        step_name: str,
        parameter_sequence_name: str,
        gradient_sequence_name: str,
        first_order_moment_sequence_name: str,
        second_order_moment_sequence_name: str,
    ) -> tuple[str, ...]:
        """Write the nodes; return the names of the new parameters and moments."""
        names = {
            "learning_rate": learning_rate_name,
            "step": step_name,
            "params": parameter_sequence_name,
            "gradients": gradient_sequence_name,
            optimizers.FIRST: first_order_moment_sequence_name,
            optimizers.SECOND: second_order_moment_sequence_name,
        }
        return _write_formula(self, self.formula, names)


def _write_formula(
    block: Block, formula: optimizers.Optimizer, names: dict[str, str]
) -> tuple[str, ...]:
    order = ("params", *(vector.name for vector in formula.state))

    def update(op: Ops, values: list[ir.Value]) -> list[ir.Value]:
        results = formula.write(op, dict(zip(names, values, strict=True)), formula.weight_decay)
        return [results[name] for name in order]

    return current(type(block).__name__).write(type(block).__name__, [*names.values()], update)


class Optimizer(ForwardBlock):
    """An optimizer model; a subclass writes :meth:`update`.

    Args:
        clip_grad: Block that is given the gradients first, for example
            :class:`ClipGradNorm`.

    Attributes:
        moments: Vectors that are kept from step to step, ``first_order_moments`` and
            ``second_order_moments`` or the first of them.
        clip_grad: As given.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    clip_grad: Block | None = None

    def __init__(self, clip_grad: Block | None = None) -> None:
        super().__init__()
        if clip_grad is not None and not isinstance(clip_grad, Block):
            raise WrongTypeError(
                "bad-clip", f"clip_grad is a {type(clip_grad).__name__}; it must be a block"
            )
        self.clip_grad = clip_grad

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Write the model into the open base, as any :class:`ForwardBlock`."""
        who = type(self).__name__
        current(who).finish = lambda model: _finish(model, who)
        return super().__call__(*args, **kwargs)

    def build(self, parameters: Parameters) -> tuple[str, ...]:
        """Write the model.

        Args:
            parameters: Trainable and other parameters, as :meth:`TrainingBlock.parameters
                <odtpack.onnxblock.TrainingBlock.parameters>` returns them.

        Returns:
            Names of the outputs.

        Raises:
            OdtpackError: No parameter is trainable.
        """
        if not parameters[0]:
            raise OdtpackError(
                "nothing-to-train",
                "the optimizer is given no trainable parameter",
                hint="name parameters with training_block.requires_grad(name)",
            )
        accessor = current(type(self).__name__)
        accessor.add_input(ir.val("learning_rate", dtype=ir.DataType.FLOAT, shape=[1]))
        accessor.add_input(ir.val("step", dtype=ir.DataType.INT64, shape=[1]))
        for name in ("params", "gradients", *self.moments):
            accessor.add_input(ir.val(name, dtype=ir.DataType.FLOAT, shape=["n"]))
        gradients = "gradients" if self.clip_grad is None else self.clip_grad("gradients")
        updated = self.update("learning_rate", "step", "params", gradients, *self.moments)
        results = (updated,) if isinstance(updated, str) else tuple(updated)
        vectors = ("params", *self.moments)
        if len(results) != len(vectors):
            raise OdtpackError(
                "bad-block-result",
                f"update of {type(self).__name__} returned {len(results)} names; it must return "
                f"the new {', '.join(vectors)}",
            )
        for result, vector in zip(results, vectors, strict=True):
            accessor.rename(result, f"{vector}.out")
        return tuple(f"{vector}.out" for vector in vectors)

    @abc.abstractmethod
    def update(
        self, learning_rate: str, step: str, params: str, gradients: str, *moments: str
    ) -> str | Sequence[str]:
        """Write one step; return the names of the new parameters and moments."""


class AdamW(Optimizer):
    """AdamW.

    Args:
        bias_correction: Divide the moments by 1 - b^t.
        betas: Decay of the first and of the second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled decay.
        clip_grad: Block that is given the gradients first.

    Raises:
        OdtpackError: A number is out of range.
    """

    moments = (optimizers.FIRST, optimizers.SECOND)

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: Block | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._adamw = AdamWOptimizer(bias_correction, betas, eps, weight_decay)
        self.formula: optimizers.Optimizer = self._adamw.formula

    def update(
        self, learning_rate: str, step: str, params: str, gradients: str, *moments: str
    ) -> Sequence[str]:
        """Write one step."""
        names: Sequence[str] = self._adamw(learning_rate, step, params, gradients, *moments)
        return names


class SGD(Optimizer):
    """SGD without momentum.

    Args:
        clip_grad: Block that is given the gradients first.
    """

    def __init__(self, clip_grad: Block | None = None) -> None:
        super().__init__(clip_grad)
        self._sgd = SGDOptimizer()
        self.formula: optimizers.Optimizer = optimizers.SGD()

    def update(
        self, learning_rate: str, step: str, params: str, gradients: str, *moments: str
    ) -> str:
        """Write one step."""
        name: str = self._sgd(learning_rate, gradients, params)
        return name


class BlockOptimizer:
    """An optimizer that a block writes, where the packager takes an optimizer."""

    # block: A :class:`ForwardBlock`, called with the parameters.

    def __init__(self, block: Block) -> None:
        if not isinstance(block, ForwardBlock):
            raise WrongTypeError(
                "bad-optimizer",
                f"optimizer {type(block).__name__} makes no model; it must be a ForwardBlock",
            )
        self._block = block
        # The packager's own optimizer that a block of this module stands for, and how gradients are
        # clipped before it; None if the block's graph is all that is known.
        self.formula: optimizers.Optimizer | None = None
        self.clip = optimizers.Clip()
        if isinstance(block, AdamW | SGD) and type(block) in (AdamW, SGD):
            clip = block.clip_grad
            if clip is None or type(clip) is ClipGradNorm:
                self.formula = block.formula
                self.clip = optimizers.Clip(norm=None if clip is None else clip.max_norm)

    def describe(self) -> dict[str, Any]:
        """The parts of a manifest that describe a user's block."""
        return {"optimizer": {"kind": "custom"}, "groups": []}

    def step_model(self, graphs: Graphs) -> ir.Model | None:
        """None: what a block does with a parameter's gradient alone is not known."""
        return None

    def model(self, graphs: Graphs) -> ir.Model:
        """Let the block write the model, and check that a runtime can run it."""
        with empty_base(graphs.opset):
            self._block(parameters(graphs))
        model = ir.from_proto(self._block.to_model_proto())
        _finish(model, type(self._block).__name__)
        targets.stamp(model)
        return model


def _finish(model: ir.Model, who: str) -> None:
    """Say in a model what a runtime must know of it; checks that a runtime can run it."""
    moments = _check_model(model.graph, who)
    model.graph.name = "optimizer"
    model.producer_name, model.producer_version = "odtpack", None
    model.metadata_props["odtpack.optimizer"] = "custom"
    model.metadata_props["odtpack.moments"] = str(len(moments))
    model.metadata_props["odtpack.state"] = json.dumps([{"name": name} for name in moments])
    if not {node.op_type for node in model.graph} <= _ELEMENTWISE:
        model.metadata_props["odtpack.elementwise"] = "false"


def _check_model(graph: ir.Graph, who: str) -> list[str]:
    """Check an optimizer model; return the names of its moments."""
    inputs = {value.name or "": value for value in graph.inputs}
    moments = [n for n in (optimizers.FIRST, optimizers.SECOND) if n in inputs]
    vectors = ["params", *moments]
    outputs = {value.name or "": value for value in graph.outputs}
    odd = inputs.keys() ^ {"learning_rate", "step", "gradients", *vectors}
    odd |= outputs.keys() ^ {f"{name}.out" for name in vectors}
    odd |= {n for n, value in inputs.items() if not isinstance(value.type, ir.TensorType)}
    if odd:
        raise OdtpackError(
            "not-an-optimizer",
            f"{who} wrote no optimizer model over flat vectors: {min(odd)!r} is missing, not "
            "expected, or no tensor",
        )
    for name in vectors:
        output = outputs[f"{name}.out"]
        output.shape = inputs[name].shape
        try:
            aliases.verify(graph, inputs[name], output)
        except aliases.UnsafeAliasError as error:
            raise OdtpackError(
                "not-in-place",
                f"{who} wrote a model that cannot update {name!r} in place: {error}",
                hint=f"let the last node of {name}.out be elementwise, and read {name!r} nowhere "
                "after it",
            ) from None
    return moments
