"""Which initializers ``--train`` and ``--freeze`` mean."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from odtpack.autodiff.backward import influences
from odtpack.errors import OdtpackError, UnknownNameError
from odtpack.passes import batch_norm
from odtpack.training import TRAINABLE_TYPES


def candidates(model: ir.Model) -> list[str]:
    """Initializers that look like parameters: float vectors and larger, with a gradient.

    Scalars are left out, since exporters write constants so; a pattern that is the very
    name of one still finds it. Running statistics are no parameters.
    """
    graph = model.graph
    state = set(batch_norm.state_names(graph))
    reaching = influences(graph, graph.outputs)
    return [
        name
        for name, value in graph.initializers.items()
        if value.dtype in TRAINABLE_TYPES
        and value.shape is not None
        and value.shape.rank() > 0
        and name not in state
        and value in reaching
    ]


def resolve(
    model: ir.Model, train: Sequence[str], freeze: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Turn patterns into the names to train and the names to freeze.

    Without ``train`` everything is trained that is not frozen; without ``freeze``
    everything is frozen that is not trained. With both, what neither matches stays a
    constant inside the models.

    Raises:
        OdtpackError: A pattern matches nothing, or an initializer is matched by both.
    """
    names = candidates(model)
    trained = _matched(model, names, train, "--train")
    frozen = _matched(model, names, freeze, "--freeze")
    both = [name for name in trained if name in frozen]
    if both:
        raise OdtpackError(
            "trained-and-frozen",
            f"{both[0]!r} matches --train {trained[both[0]]!r} and --freeze {frozen[both[0]]!r}",
            hint="narrow one of the two patterns",
        )
    if not train:
        trained = {name: "*" for name in names if name not in frozen}
    elif not freeze:
        frozen = {name: "*" for name in names if name not in trained}
    order = list(model.graph.initializers)
    return tuple(sorted(trained, key=order.index)), tuple(sorted(frozen, key=order.index))


def _matched(
    model: ir.Model, names: Sequence[str], patterns: Sequence[str], option: str
) -> dict[str, str]:
    """Names that match, each with its first pattern."""
    found: dict[str, str] = {}
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits and pattern in model.graph.initializers:
            hits = [pattern]
        if not hits:
            near = ", ".join(repr(name) for name in names[:4])
            raise UnknownNameError(
                "unknown-parameter",
                f"{option} {pattern!r} matches no parameter of the model",
                hint=f"its parameters are {near}{', ...' if names[4:] else ''}; "
                "odtpack inspect MODEL.onnx lists them all",
            )
        for name in hits:
            found.setdefault(name, pattern)
    return found
