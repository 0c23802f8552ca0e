"""Packages for onnxruntime-training, whose own operators accumulate and update in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import onnx_ir as ir

from odtpack import choices, targets
from odtpack.errors import OdtpackError
from odtpack.graph.ops import Ops
from odtpack.ort.kernel_needs import Need
from odtpack.ort_training import in_place
from odtpack.ort_training.optimizer import inexpressible, optimizer_model
from odtpack.package.optimizer_update import ResolvedUpdate
from odtpack.package.task import STOCK, Accumulator, Backend, Graphs, OptimizerStep, WebGpu

NEWEST = targets.Target((1, 19), ir_version=10, opset=21)
"""The last release of onnxruntime-training."""


class OrtTraining(Backend):
    """onnxruntime-training 1.19."""

    runtime: ClassVar[choices.Runtime] = choices.ORT_TRAINING

    def require_opset(self, opset: int) -> None:
        """Check that the last release loads an opset."""
        if opset > NEWEST.opset:
            raise OdtpackError(
                "opset-too-new",
                f"the model uses opset {opset}; onnxruntime-training {NEWEST.name} loads at most "
                f"{NEWEST.opset}",
                hint=f"export it again with opset {NEWEST.opset} or older, or leave --target out",
            )

    def oldest_runtime(self, models: Iterable[ir.Model]) -> Need:
        """The last release: its operators are those of no other."""
        return Need(NEWEST.version, "its training operators")

    def lower_batch_norms(self, op: Ops, graph: ir.Graph) -> None:
        """Write batch normalizations as the operator that updates in place."""
        in_place.lower_batch_norms(op, graph)

    def accumulator(self, op: Ops, reset: ir.Value) -> Accumulator:
        """Accumulate by the operator that writes into the buffer; it returns BOOL[1]."""

        def write(parameter: ir.Value, gradient: ir.Value, buffer: ir.Value) -> ir.Value:
            in_place.check_float(parameter)
            return in_place.accumulate(op, gradient, buffer, reset)

        return write

    def optimizer_model(self, step: OptimizerStep, graphs: Graphs) -> ir.Model:
        """The model of AdamW or SGD over lists of tensors."""
        if not isinstance(step, ResolvedUpdate):
            raise inexpressible("an optimizer that blocks write")
        return optimizer_model(step, graphs.opset)


def backend_for(runtime: choices.Runtime) -> Backend:
    """The backend of a runtime that a recipe, an option or an argument names."""
    backends = {choices.ORT_TRAINING: OrtTraining, choices.WEBGPU: WebGpu}
    return backends[runtime]() if runtime in backends else STOCK
