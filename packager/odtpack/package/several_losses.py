"""Several losses at once: a model that ends in their weighted sum, and says each."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from odtpack.errors import OdtpackError
from odtpack.graph.ops import Ops
from odtpack.losses import make_loss
from odtpack.losses.common.base import Classes, dims, rank, shaped
from odtpack.package.task import LossInfo
from odtpack.package.training import find_value, value_names, write_loss
from odtpack.spec import LossPart


def attach_losses(graph: ir.Graph, parts: Sequence[LossPart]) -> tuple[LossInfo, list[str]]:
    """Write losses, and let their weighted sum be the first output."""
    # Targets that the model does not have are inputs: ``labels.NAME``, ``target.NAME``.
    # Returns what is known of the loss, and names of the scalars that say it in parts: each loss,
    # ``loss.NAME``, and ``accuracy.NAME`` where it compares classes with labels.
    names = [name for name, *_ in parts]
    if again := [name for name in names if names.count(name) > 1]:
        raise OdtpackError("named-twice", f"two losses have the name {again[0]!r}")
    outputs, said, total = list(graph.outputs), list[str](), None
    info = LossInfo("several")
    for name, kind, weight, inputs, options in parts:
        loss = make_loss(kind, options)
        read = [find_value(graph, each, f"the loss {name!r}") for each in inputs]
        value, found, read = write_loss(graph, loss, read or outputs[: len(loss.reads)], f".{name}")
        op = Ops(graph, "loss/")
        values = {f"loss.{name}": value}
        if isinstance(loss, Classes) and "labels" in found.roles.values():
            loss = loss.settled(read)
            assert isinstance(loss, Classes)  # noqa: S101 - as it was
            values[f"accuracy.{name}"] = _accuracy(op, loss, read[0], read[len(loss.reads)])
        for stem, each in values.items():
            if stem in value_names(graph):
                raise OdtpackError(
                    "reserved-name",
                    f"the model already has {stem!r}, the name of one of its losses",
                )
            each.name = stem
            said.append(stem)
        part = op.Mul(value, weight)
        total = part if total is None else op.Add(total, part)
        total.shape = ir.Shape(())
        labels = [*info.roles.values(), *found.roles.values()].count("labels")
        info = LossInfo(
            info.name,
            {**info.options, name: {"kind": kind, "weight": weight, **found.options}},
            {**info.roles, **found.roles},
            {} if labels > 1 else {**info.metadata, **found.metadata},  # of all labels alike
            (*info.fixed, *found.fixed),
        )
    assert total is not None  # noqa: S101 - there is a part
    total.name = op.fresh_name("loss")
    graph.outputs[:] = [total, *outputs]
    return info, said


def _accuracy(op: Ops, loss: Classes, scores: ir.Value, labels: ir.Value) -> ir.Value:
    """Share of the labels that count which the highest score names."""
    axes = range(rank(labels))
    named = op.ArgMax(scores, axis=loss.class_axis(scores), keepdims=0)
    right = op.cast(op.Equal(shaped(named, dims(labels)), labels), ir.DataType.FLOAT)
    ignored = getattr(loss, "ignore_index", None)
    if ignored is None:
        return shaped(op.reduce_mean(right, axes, keepdims=False), ())
    counted = op.cast(op.Not(op.Equal(labels, op.constant(ignored))), ir.DataType.FLOAT)
    total = op.Max(op.reduce_sum(counted, axes, keepdims=False), 1.0)
    hits = op.reduce_sum(op.Mul(right, counted), axes, keepdims=False)
    return shaped(op.Div(hits, total), ())
