"""Packages for onnxruntime-training, whose own operators accumulate and update in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Final, Literal

import numpy as np
import onnx_ir as ir

from odtpack import choices, targets
from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.errors import OdtpackError
from odtpack.graph import graphs
from odtpack.graph.graphs import Ops
from odtpack.model.loading import load_source
from odtpack.model.source import Source
from odtpack.optimizers import FIRST, SECOND, SGD, AdamW, Clip, Optimizer
from odtpack.optimizers.adamw import PYTORCH, REFERENCE
from odtpack.optimizers.common.model import NO_CLIP
from odtpack.ort.kernel_needs import Need
from odtpack.package.task import (
    STOCK,
    Accumulator,
    Backend,
    Graphs,
    OptimizerStep,
    ResolvedUpdate,
    WebGpu,
)
from odtpack.passes.batch_norm import OP_TYPE as BATCH_NORM
from odtpack.passes.batch_norm import count_per_channel
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState
from odtpack_runtime.checkpoint.parameters import Array

# What onnxruntime-training's runtime needs in place of plain operators.
#
# Two of its operators write where a plain one cannot, since its runtime reads no other outputs of a
# step than the user's:
#
# - ``InPlaceAccumulatorV2(buffer, gradient, reset) -> BOOL[1]`` adds a gradient to its buffer;
# - ``BatchNormInternal(x, scale, bias, mean, variance) -> y, mean, variance, batch mean, batch 1 /
#   std`` replaces the running statistics. Its running variance takes the biased variance of the
#   batch, as the ONNX text has it.
#
# Everything else, the gradients above all, stays plain.

DOMAIN: Final = "com.microsoft"
ACCUMULATOR: Final = "InPlaceAccumulatorV2"
INTERNAL_BATCH_NORM: Final = "BatchNormInternal"


def check_float(value: ir.Value | None) -> None:
    """Refuse what the operators cannot take."""
    if value is not None and value.dtype not in (None, ir.DataType.FLOAT):
        raise OdtpackError(
            "target-cannot",
            f"{value.name!r} is of type {value.dtype.name}, and onnxruntime-training trains "
            "FLOAT models only",
            hint="leave --target out to run on stock ONNX Runtime",
        )


# The optimizer models of onnxruntime-training, read and written.
#
# Such a model updates lists of tensors in place, with one operator of its own::
#
# [InplaceClipGradNorm(gradients)] -> AdamWOptimizer or SGDOptimizerV2 -> BOOL[1]

ADAMW, PLAIN_SGD, CLIP_NORM = "AdamWOptimizer", "SGDOptimizerV2", "InplaceClipGradNorm"
_FORMULAS: Final[dict[int, Literal["reference", "pytorch"]]] = {0: PYTORCH, 1: REFERENCE}


def read_optimizer(source: Source) -> tuple[Optimizer, Clip]:
    """Return the optimizer that a model is, and how it clips."""
    graph = load_source(source).graph
    nodes = {node.op_type: node for node in graph if node.domain == DOMAIN}
    steps = [nodes[name] for name in (ADAMW, PLAIN_SGD) if name in nodes]
    others = sorted({node.op_type for node in graph} - {ADAMW, PLAIN_SGD, CLIP_NORM})
    if len(steps) != 1 or len(nodes) != len(list(graph)) or others:
        raise OdtpackError(
            "unknown-optimizer",
            "the optimizer model is neither AdamW nor SGD of onnxruntime-training"
            + (f": it has a node {others[0]}" if others else ""),
            where=source.where,
        )
    clip = NO_CLIP
    if CLIP_NORM in nodes:
        clip = Clip(norm=_number(nodes[CLIP_NORM], "max_norm", 1.0))
    step = steps[0]
    if step.op_type == PLAIN_SGD:
        return SGD(), clip
    mode = step.attributes.get_int("adam_mode", 0)
    if mode not in _FORMULAS:
        raise OdtpackError(
            "unknown-optimizer",
            f"AdamWOptimizer has adam_mode {mode}; there are 0 and 1",
            where=source.where,
            hint="generate the artifacts again",
        )
    return AdamW(
        beta1=_number(step, "alpha", 0.9),
        beta2=_number(step, "beta", 0.999),
        epsilon=_number(step, "epsilon", 1e-8),
        weight_decay=_number(step, "weight_decay", 1e-2),
        formula=_FORMULAS[mode],
        bias_correction=bool(step.attributes.get_int("correct_bias", 1)),
    ), clip


def _number(node: ir.Node, name: str, default: float) -> float:
    """An attribute, a float32, as the shortest decimal number that is the same float32."""
    return float(str(np.float32(node.attributes.get_float(name, default))))


def carried_state(data: CheckpointData, optimizer: Optimizer, where: str) -> OptimizerState | None:
    """The optimizer's state in a checkpoint, for the package's optimizer."""
    # SGD's unused moment is left out.
    state = data.optimizer
    if state is None or not state.moments:
        return state
    wanted = len(optimizer.state)
    moments: dict[str, list[Array]] = {}
    for name, parameter in data.trainable.items():
        found = state.moments.get(name, [])
        if not wanted and len(found) == 1 and not found[0].any():
            continue
        if len(found) != wanted or any(moment.shape != parameter.shape for moment in found):
            raise OdtpackError(
                "optimizer-mismatch",
                f"the checkpoint holds {len(found)} moments of {name!r}, and the optimizer, "
                f"{optimizer.kind}, keeps {wanted} of its shape",
                where=where,
            )
        moments[name] = found
    return OptimizerState(state.step, state.learning_rate, moments if wanted else {})


def optimizer_model(update: ResolvedUpdate, opset: int) -> ir.Model:
    """Build an optimizer model that onnxruntime-training runs."""
    # Returns a model with inputs `learning_rate` FLOAT[1], `step` INT64[1], and as sequences of
    # tensors `params`, `gradients` and the moments; returns BOOL[1].
    optimizer = update.optimizer
    for given, what in (
        (update.groups, "parameter groups"),
        (update.clip.value, "clipping by value"),
        (update.schedule, "a schedule of the learning rate"),
    ):
        if given:
            raise inexpressible(what)
    adam = isinstance(optimizer, AdamW)
    if not adam and optimizer != SGD():
        raise inexpressible(
            "momentum and weight decay of SGD"
            if isinstance(optimizer, SGD)
            else f"the optimizer {optimizer.kind}"
        )
    lists = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    # The runtime keeps one moment for SGD too, which nothing reads.
    names = ["params", "gradients", FIRST, *([SECOND] if adam else [])]
    values = [
        ir.val("learning_rate", dtype=ir.DataType.FLOAT, shape=[1]),
        ir.val("step", dtype=ir.DataType.INT64, shape=[1]),
        *(ir.Value(name=name, type=lists) for name in names),
    ]
    rate, count, parameters, gradients, *moments = values
    nodes = []
    if update.clip.norm is not None:
        clip = ir.node(CLIP_NORM, [gradients], {"max_norm": update.clip.norm}, domain=DOMAIN)
        gradients = clip.outputs[0]
        gradients.name, gradients.type = "gradients.clipped", lists
        nodes.append(clip)
    if isinstance(optimizer, AdamW):
        attributes = {
            "alpha": optimizer.beta1,
            "beta": optimizer.beta2,
            "epsilon": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay,
            "correct_bias": int(optimizer.bias_correction),
            "adam_mode": next(k for k, v in _FORMULAS.items() if v == optimizer.formula),
        }
        inputs = [rate, count, parameters, gradients, *moments]
        step = ir.node(ADAMW, inputs, attributes, domain=DOMAIN)
    else:
        step = ir.node(PLAIN_SGD, [rate, parameters, gradients], domain=DOMAIN)
    nodes.append(step)
    for node in nodes:
        node.name = node.op_type
    done = step.outputs[0]
    done.name, done.dtype, done.shape = "updated", ir.DataType.BOOL, ir.Shape([1])
    graph = ir.Graph(
        values, [done], nodes=nodes,
        opset_imports={"": opset, DOMAIN: 1}, name="optimizer",
    )  # fmt: skip
    model = ir.Model(graph, ir_version=8, producer_name="odtpack")
    model.metadata_props["odtpack.optimizer"] = optimizer.kind
    targets.stamp(model)
    return model


def inexpressible(what: str) -> OdtpackError:
    """The error for an update that onnxruntime-training cannot make."""
    return OdtpackError(
        "target-cannot",
        f"onnxruntime-training has no operator for {what}",
        hint="it has AdamW and plain SGD, both with --clip-norm; leave --target out to run on "
        "stock ONNX Runtime",
    )


NEWEST = targets.Target((1, 19), ir_version=10, opset=21)
"""The last release of onnxruntime-training."""


def _lower_batch_norms(op: Ops, graph: ir.Graph) -> None:
    """Write batch normalizations in training mode as the operator that updates in place."""
    latest: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type != BATCH_NORM or node.domain != INTERNAL_DOMAIN:
            continue
        x, mean, variance = (
            value for value in (node.inputs[0], *node.inputs[3:5]) if value is not None
        )
        check_float(x)
        with op.before(node):
            results = op.emit(
                INTERNAL_BATCH_NORM,
                [*node.inputs[:3], latest.get(mean, mean), latest.get(variance, variance)],
                outputs=5,
                domain=DOMAIN,
                epsilon=node.attributes.get_float("epsilon"),
                momentum=node.attributes.get_float("momentum"),
                training_mode=1,
            )
            count = count_per_channel(op, x, ir.DataType.FLOAT)
        # A layer that is used twice updates its statistics twice, in this order.
        latest[mean], latest[variance] = results[1:3]
        for old, new in zip(node.outputs, (*results, count), strict=True):
            graphs.replace(old, new, [])
        graph.remove(node, safe=True)


class _Update(ResolvedUpdate):
    """An update that onnxruntime-training's operators make."""

    def model(self, graphs: Graphs) -> ir.Model:
        """The model of AdamW or SGD over lists of tensors."""
        return optimizer_model(self, graphs.opset)


class OrtTraining(Backend):
    """onnxruntime-training 1.19."""

    runtime: ClassVar[choices.Runtime] = choices.ORT_TRAINING
    passes = (_lower_batch_norms,)

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

    def accumulator(self, op: Ops, reset: ir.Value) -> Accumulator:
        """Accumulate by the operator that writes into the buffer; it returns BOOL[1]."""

        def write(parameter: ir.Value, gradient: ir.Value, buffer: ir.Value) -> ir.Value:
            check_float(parameter)
            (done,) = op.emit(ACCUMULATOR, [buffer, gradient, reset], domain=DOMAIN)
            done.type, done.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([1])
            return done

        return write

    def step(self, update: OptimizerStep) -> OptimizerStep:
        """The step of a formula, by the runtime's operators."""
        if not isinstance(update, ResolvedUpdate):
            raise inexpressible("an optimizer that blocks write")
        return _Update(**vars(update))


def backend_for(runtime: choices.Runtime) -> Backend:
    """The backend of a runtime that a recipe, an option or an argument names."""
    backends = {choices.ORT_TRAINING: OrtTraining, choices.WEBGPU: WebGpu}
    return backends[runtime]() if runtime in backends else STOCK
