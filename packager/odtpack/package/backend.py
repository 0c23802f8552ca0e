"""What a package is to run on, and how its models are written for it.

:class:`Backend` writes plain operators for stock ONNX Runtime. A subclass writes for another
runtime; the caller that asks for a package chooses one, and what is in between only calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from odtpack import choices
from odtpack.graph.ops import Ops
from odtpack.ort import kernel_needs
from odtpack.passes import aliases
from odtpack.passes.accumulate import accumulate

if TYPE_CHECKING:
    from odtpack.package.optimizer_update import OptimizerStep
    from odtpack.package.parameters import Parameter
    from odtpack.package.training import Graphs

Accumulator = Callable[[ir.Value, ir.Value, ir.Value], ir.Value]
"""Takes a parameter, its gradient and the buffer; returns what the training model returns."""


class Backend:
    """Stock ONNX Runtime, whose callers bind one buffer as input and output.

    Attributes:
        runtime: Its name.
    """

    runtime: ClassVar[choices.Runtime] = choices.STOCK

    @property
    def is_stock(self) -> bool:
        """Whether this ONNX Runtime runs the models, and the runtimes of this project."""
        return self.runtime == choices.STOCK

    def require_opset(self, opset: int) -> None:
        """Check that the runtime loads an opset; stock releases for all of them exist.

        Raises:
            OdtpackError: It does not.
        """

    def oldest_runtime(self, models: Iterable[ir.Model]) -> kernel_needs.Need:
        """The oldest release that runs all of some models."""
        return kernel_needs.oldest_runtime(models)

    def lower_batch_norms(self, op: Ops, graph: ir.Graph) -> None:
        """Replace batch normalizations in training mode by an operator of the runtime's own.

        What is left is written in plain operators.

        Raises:
            OdtpackError: The operator cannot take what a batch normalization reads.
        """

    def accumulator(self, op: Ops, reset: ir.Value) -> Accumulator:
        """How gradients are accumulated, see :mod:`odtpack.passes.accumulate`.

        Args:
            op: Writer for the training graph.
            reset: BOOL[1]; true to start afresh.
        """
        flag = op.squeeze(reset, 0)

        def write(parameter: ir.Value, gradient: ir.Value, buffer: ir.Value) -> ir.Value:
            out = accumulate(op, gradient, buffer, flag)
            out.type, out.shape = parameter.type, parameter.shape
            aliases.verify(op.graph, buffer, out)
            return out

        return write

    def optimizer_model(self, step: OptimizerStep, graphs: Graphs) -> ir.Model:
        """The model that makes an optimizer step.

        Raises:
            OdtpackError: The runtime has no operator for it.
        """
        return step.model(graphs)


STOCK = Backend()


def optimization_level(graph: ir.Graph, parameters: Sequence[Parameter]) -> str:
    """The level of ONNX Runtime that suits a training graph, for the runtime to use."""
    if any(parameter.dtype == ir.DataType.DOUBLE for parameter in parameters):
        # Beyond it scales become attributes of fused products, which are float32.
        return "basic"
    return "all" if any(_has_constant_weight(node) for node in graph) else "extended"


def _has_constant_weight(node: ir.Node) -> bool:
    """Whether ONNX Runtime would repack a convolution's weight at its highest level."""
    if node.op_type != "Conv" or len(node.inputs) < 2:
        return False
    weight = node.inputs[1]
    return weight is not None and weight.is_initializer()
