"""The optimizer model: a formula, its clipping and its groups as one small graph.

All vectors are flat and every node is elementwise, so a runtime may run the model over the
whole vector or chunk by chunk, and may bind each ``X.out`` to the memory of ``X``. An
optimizer that needs the shape of a parameter is run parameter by parameter instead.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from odtpack.errors import OdtpackError
from odtpack.optimizers.common.base import Group, Optimizer
from odtpack.option import LARGEST_FLOAT, is_too_large
from odtpack_runtime.training.optimizer_contract import PRIVACY

if TYPE_CHECKING:
    import onnx_ir as ir

    from odtpack.graph.graphs import Ops
    from odtpack_runtime.training.optimizer_contract import Privacy

NORM_EPSILON = 1e-6  # of ``torch.nn.utils.clip_grad_norm_``
AXES = ("rows", "columns")


@dataclasses.dataclass(frozen=True)
class Clip:
    """How gradients are clipped before the step; the gradients themselves remain.

    Attributes:
        norm: Scale all gradients by min(1, norm / (n + 1e-6)), where n is the norm of all of
            them together: ``torch.nn.utils.clip_grad_norm_``.
        value: Limit every element to this magnitude: ``torch.nn.utils.clip_grad_value_``.

    Raises:
        OdtpackError: A number is not above 0, or both are given.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, bound in (("norm", self.norm), ("value", self.value)):
            if bound is not None and not 0 < bound <= LARGEST_FLOAT:
                raise OdtpackError(
                    "bad-hyperparameter",
                    f"clip-{name} is {bound:g}; it must be above 0"
                    + (" and a number that float32 holds" if is_too_large(bound) else ""),
                    hint=f"write for example: --clip-{name} 1",
                )
        if self.norm is not None and self.value is not None:
            raise OdtpackError(
                "clipped-twice", "gradients can be clipped by norm or by value, not by both"
            )


NO_CLIP = Clip()


def optimizer_model(
    optimizer: Optimizer,
    opset: int,
    *,
    clip: Clip = NO_CLIP,
    groups: tuple[Group, ...] = (),
    privacy: Privacy | None = None,
    dtype: ir.DataType | None = None,
) -> ir.Model:
    """Build the optimizer model."""
    # Its inputs are ``learning_rate`` FLOAT[1]; ``step`` INT64[1] (from 1); if clipped by norm
    # ``gradient_norm`` dtype[1], that of all gradients; if groups differ in it ``weight_decay``
    # dtype[1]; ``params``, ``gradients`` and the state, each dtype[n]. An optimizer that is run
    # parameter by parameter has ``factored`` BOOL[1], true for parameters with two axes or more,
    # and dtype[rows, columns] in place of dtype[n].
    # opset: Of the training model, so that one runtime loads both. groups: Their decays take the
    # place of the optimizer's. dtype: Of parameters, gradients and state, FLOAT or DOUBLE.
    # Here, so that recipes can read the declarations of optimizers without onnx_ir.
    import onnx_ir as ir

    from odtpack import targets
    from odtpack.graph.graphs import Ops
    from odtpack.passes import aliases
    from odtpack.passes.compact import compact

    dtype = dtype or ir.DataType.FLOAT
    shaped = any(vector.axes is not None for vector in optimizer.state)
    decays = {group.weight_decay for group in groups} or {optimizer.weight_decay}
    shapes: dict[str, list[int | str]] = {}
    for name, axes in (
        *((name, (0, 1)) for name in ("params", "gradients")),
        *((vector.name, vector.axes or ()) for vector in optimizer.state),
    ):
        kept: list[int | str] = [AXES[axis] if axis in axes else 1 for axis in range(2)]
        shapes[name] = kept if shaped else ["n"]
    values = {
        "learning_rate": ir.val("learning_rate", dtype=ir.DataType.FLOAT, shape=[1]),
        "step": ir.val("step", dtype=ir.DataType.INT64, shape=[1]),
    }
    if shaped:
        values["factored"] = ir.val("factored", dtype=ir.DataType.BOOL, shape=[1])
    for name, wanted in (("gradient_norm", clip.norm), ("weight_decay", len(decays) > 1 or None)):
        if wanted is not None:
            values[name] = ir.val(name, dtype=dtype, shape=[1])
    values.update((name, ir.val(name, dtype=dtype, shape=shape)) for name, shape in shapes.items())
    graph = ir.Graph(
        list(values.values()), [], nodes=[], opset_imports={"": opset}, name="optimizer"
    )
    op = Ops(graph)
    given = {
        **values,
        "learning_rate": op.cast(values["learning_rate"], dtype),
        "gradients": clipped(op, values, clip),
    }
    results = optimizer.write(op, given, values.get("weight_decay", next(iter(decays))))
    for name in ("params", *(vector.name for vector in optimizer.state)):
        value = results[name]
        value.name = f"{name}.out"
        value.shape = ir.Shape(shapes[name])
        graph.outputs.append(value)
        aliases.verify(graph, values[name], value)
    model = ir.Model(graph, ir_version=8, producer_name="odtpack")
    # What a runtime must know of it; see docs/formats/package.md.
    state: list[dict[str, Any]] = [
        {"name": vector.name} | ({} if vector.axes is None else {"axes": list(vector.axes)})
        for vector in optimizer.state
    ]
    model.metadata_props["odtpack.optimizer"] = optimizer.kind
    model.metadata_props["odtpack.moments"] = str(len(state))
    model.metadata_props["odtpack.state"] = json.dumps(state)
    if len(groups) > 1 or any(group.learning_rate_scale != 1 for group in groups):
        given_groups = [dataclasses.asdict(group) for group in groups]
        model.metadata_props["odtpack.groups"] = json.dumps(given_groups)
    if privacy is not None:
        model.metadata_props[PRIVACY] = json.dumps(dataclasses.asdict(privacy))
    targets.stamp(model)
    return compact(model, keep_names=False)


def clipped(op: Ops, values: Mapping[str, ir.Value], clip: Clip) -> ir.Value:
    """Write the gradients as the formula takes them; ``values`` as in an optimizer model."""
    gradients = values["gradients"]
    if clip.value is not None:
        dtype = op.type_of(gradients).numpy()
        bounds = [op.constant(dtype.type(bound)) for bound in (-clip.value, clip.value)]
        return op.Clip(gradients, *bounds)
    if clip.norm is not None:
        scale = op.Div(clip.norm, op.Add(values["gradient_norm"], NORM_EPSILON))
        return op.Mul(gradients, op.Min(scale, 1.0))
    return gradients
