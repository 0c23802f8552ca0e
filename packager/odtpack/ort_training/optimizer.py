"""The optimizer models of onnxruntime-training, read and written.

Such a model updates lists of tensors in place, with one operator of its own::

    [InplaceClipGradNorm(gradients)] -> AdamWOptimizer or SGDOptimizerV2 -> BOOL[1]
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import onnx_ir as ir

from odtpack import targets
from odtpack.errors import OdtpackError
from odtpack.model.loading import load_source
from odtpack.model.source import Source
from odtpack.optimizers import FIRST, SECOND, SGD, AdamW, Clip, Optimizer
from odtpack.optimizers.adamw import PYTORCH, REFERENCE
from odtpack.optimizers.common.model import NO_CLIP
from odtpack.ort_training.in_place import DOMAIN
from odtpack.package.optimizer_update import ResolvedUpdate
from odtpack_runtime.checkpoint.format import CheckpointData, OptimizerState
from odtpack_runtime.checkpoint.parameters import Array

ADAMW, PLAIN_SGD, CLIP_NORM = "AdamWOptimizer", "SGDOptimizerV2", "InplaceClipGradNorm"
_FORMULAS: Final[dict[int, Literal["reference", "pytorch"]]] = {0: PYTORCH, 1: REFERENCE}


def read_optimizer(source: Source) -> tuple[Optimizer, Clip]:
    """Return the optimizer that a model is, and how it clips."""
    graph = load_source(source).graph
    nodes = {node.op_type: node for node in graph if node.domain == DOMAIN}
    steps = [nodes[name] for name in (ADAMW, PLAIN_SGD) if name in nodes]
    known = {ADAMW, PLAIN_SGD, CLIP_NORM}
    others = sorted({node.op_type for node in graph} - known)
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
    values = {
        "learning_rate": ir.val("learning_rate", dtype=ir.DataType.FLOAT, shape=[1]),
        "step": ir.val("step", dtype=ir.DataType.INT64, shape=[1]),
        **{name: ir.Value(name=name, type=lists) for name in names},
    }
    nodes = []
    gradients = values["gradients"]
    if update.clip.norm is not None:
        clip = ir.node(CLIP_NORM, [gradients], {"max_norm": update.clip.norm}, domain=DOMAIN)
        gradients = clip.outputs[0]
        gradients.name, gradients.type = "gradients.clipped", lists
        nodes.append(clip)
    if isinstance(optimizer, AdamW):
        inputs = [values["learning_rate"], values["step"], values["params"], gradients,
                  values[FIRST], values[SECOND]]  # fmt: skip
        attributes = {
            "alpha": optimizer.beta1,
            "beta": optimizer.beta2,
            "epsilon": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay,
            "correct_bias": int(optimizer.bias_correction),
            "adam_mode": next(k for k, v in _FORMULAS.items() if v == optimizer.formula),
        }
        step = ir.node(ADAMW, inputs, attributes, domain=DOMAIN)
    else:
        inputs = [values["learning_rate"], values["params"], gradients]
        step = ir.node(PLAIN_SGD, inputs, domain=DOMAIN)
    nodes.append(step)
    for node in nodes:
        node.name = node.op_type
    done = step.outputs[0]
    done.name, done.dtype, done.shape = "updated", ir.DataType.BOOL, ir.Shape([1])
    graph = ir.Graph(
        list(values.values()), [done], nodes=nodes,
        opset_imports={"": opset, DOMAIN: 1}, name="optimizer",
    )  # fmt: skip
    model = ir.Model(graph, ir_version=8, producer_name="odtpack")
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
