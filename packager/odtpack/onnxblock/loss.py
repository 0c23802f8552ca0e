"""Blocks that write the losses of :mod:`odtpack.losses`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from odtpack import losses
from odtpack.errors import OdtpackError
from odtpack.losses.common.base import Classes
from odtpack.onnxblock.blocks import Block, current

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "Loss", "MSELoss"]


class Loss(Block):
    """Any loss by name, with its options (docs/losses.md).

    A target that the model does not have becomes a graph input.

    Args:
        name: Name of the loss, for example ``"huber"``.
        options: Its options.

    Raises:
        OdtpackError: There is no such loss or option, or a value is out of range.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.loss = losses.make_loss(name, options)

    def build(self, *names: str) -> str:
        """Write the loss.

        Args:
            names: Names of what it reads, as many as it takes, then of its targets; those
                left out are ``labels`` or ``target``.

        Raises:
            OdtpackError: A prediction does not exist, or one does not fit the loss.
        """
        return self._build(names)

    def _build(self, names: Sequence[str]) -> str:
        loss, count = self.loss, len(self.loss.reads)
        accessor, who = current(type(self).__name__), type(self).__name__
        if len(names) < count:
            raise OdtpackError(
                "too-few-loss-inputs",
                f"{who} reads {count} values, {', '.join(loss.reads)}; {len(names)} are named",
            )
        predictions = [accessor.value(name, who) for name in names[:count]]
        known = [accessor.value(name, who) for name in names if accessor.knows(name)]
        loss = loss.settled(known)
        if isinstance(loss, Classes) and (remark := loss.not_as_the_reference(predictions)):
            warnings.warn(remark, stacklevel=4)
        targets = loss.targets(predictions)
        if len(names) > count + len(targets):
            wanted = ", ".join([*loss.reads, *(target.name for target in targets)])
            raise OdtpackError(
                "too-many-loss-inputs",
                f"{who} reads at most {count + len(targets)} values: {wanted}",
            )
        given = [*names[count:], *(target.name for target in targets[len(names) - count :])]
        for target, name in zip(targets, given, strict=True):
            if not accessor.knows(name):
                accessor.add_input(target.value(name))
            if any(info.name == name for info in accessor.model.graph.input):
                accessor.targets[name] = target.role
                if target.role == "labels":
                    accessor.labels[name] = loss.label_facts(predictions)
        read = [*names[:count], *given]
        return accessor.write(who, read, lambda op, values: [loss.write(op, *values)])[0]


class _OfTarget(Loss):
    """A loss of a prediction and a target."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:  # type: ignore[override]
        """Write the loss."""
        return self._build([loss_input_name, target_name])


class MSELoss(_OfTarget):
    """Mean of (prediction - target)^2.

    Args:
        reduction: "mean", "sum", or "none" for one number an element.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__("mse", reduction=reduction)


class L1Loss(_OfTarget):
    """Mean of |prediction - target|.

    Args:
        reduction: "mean", "sum", or "none" for one number an element.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__("l1", reduction=reduction)


class CrossEntropyLoss(Loss):
    """Mean of -w[label] log softmax(scores)[label], scores [N, C, ...], labels [N, ...].

    The classes may be on the last axis: see ``layout`` in docs/losses.md.

    Args:
        weight: w, one number a class: an array or a list.
        reduction: "mean", which divides by the sum of w[label], "sum", or "none" for one
            number a sample.
        ignore_index: Label of samples that do not count.
        layout: "NC", "NLC", or None to infer it.
    """

    def __init__(
        self,
        weight: Any = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        layout: str | None = None,
    ) -> None:
        super().__init__(
            "cross_entropy", weight=weight, reduction=reduction, ignore_index=ignore_index,
            layout=layout,
        )  # fmt: skip

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:  # type: ignore[override]
        """Write the loss."""
        return self._build([scores_input_name, labels_name])


class BCEWithLogitsLoss(_OfTarget):
    """Mean of -w (p t log s(x) + (1 - t) log(1 - s(x))), s the sigmoid.

    Args:
        weight: w, a number or an array that broadcasts to the shape of x.
        reduction: "mean", "sum", or "none" for one number an element.
        pos_weight: p, likewise.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(
            "bce_with_logits", weight=weight, reduction=reduction, pos_weight=pos_weight
        )
