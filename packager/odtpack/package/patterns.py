"""Which initializers ``--train`` and ``--freeze`` mean."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from odtpack.errors import OdtpackError, UnknownNameError
from odtpack.model.exporters import matching, module_names
from odtpack.package.candidates import look_alikes, reached

_FREEZE = "--freeze"


def resolve(
    model: ir.Model, train: Sequence[str], freeze: Sequence[str], read: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Turn patterns into the names to train and the names to freeze.

    Without ``train`` everything is trained that is not frozen; without ``freeze``
    everything is frozen that is not trained. With both, what neither matches stays a
    constant inside the models. A pattern may also match the name that a parameter had in
    its PyTorch module, see :func:`odtpack.model.exporters.module_names`.

    Args:
        model: As :func:`odtpack.model.loading.load_model` returns it.
        train: Patterns of the parameters to train.
        freeze: Patterns of the parameters to freeze.
        read: Names of the values that the loss reads; all outputs if empty. What reaches
            none of them is neither trained nor frozen unless its very name is given.

    Raises:
        OdtpackError: A pattern matches nothing, or an initializer is matched by both; or
            ``train`` asks for parameters that the loss does not depend on (``not-reached``).
    """
    alike = look_alikes(model)
    names = reached(model, alike, read)
    _check_reached(model, alike, names, train)
    trained = _matched(model, alike, names, train, "--train")
    frozen = _matched(model, alike, names, freeze, _FREEZE)
    both = [name for name in trained if name in frozen]
    if both:
        raise OdtpackError(
            "trained-and-frozen",
            f"{both[0]!r} matches --train {trained[both[0]]!r} and --freeze {frozen[both[0]]!r}",
        )
    if not train:
        trained = {name: "*" for name in names if name not in frozen}
    elif not freeze:
        frozen = {name: "*" for name in names if name not in trained}
    order = {name: place for place, name in enumerate(model.graph.initializers)}
    return tuple(sorted(trained, key=order.__getitem__)), tuple(
        sorted(frozen, key=order.__getitem__)
    )


def unreached(model: ir.Model, read: Sequence[str] = ()) -> list[str]:
    """Initializers that look like parameters, and that no gradient reaches."""
    alike = look_alikes(model)
    names = set(reached(model, alike, read))
    return [name for name in alike if name not in names]


def _check_reached(
    model: ir.Model, alike: Sequence[str], names: Sequence[str], train: Sequence[str]
) -> None:
    """Nothing that is asked to train may stand still in silence."""
    known, original = set(names), module_names(model.graph)
    for name in alike:
        for pattern in train:
            if name not in known and matching(pattern, [name], original):
                raise OdtpackError(
                    "not-reached",
                    f"--train {pattern!r} asks to train {name!r}, but the loss does not depend on "
                    "it: it would never change",
                )


def _matched(
    model: ir.Model,
    alike: Sequence[str],
    names: Sequence[str],
    patterns: Sequence[str],
    option: str,
) -> dict[str, str]:
    """Names that match, each with its first pattern."""
    found: dict[str, str] = {}
    original = module_names(model.graph)
    for pattern in patterns:
        hits = matching(pattern, names, original)
        if not hits and pattern in model.graph.initializers:
            hits = [pattern]
        if not hits and option == _FREEZE and matching(pattern, alike, original):
            continue  # no gradient reaches them: they stay as they are anyway
        if not hits:
            near = ", ".join(repr(original.get(name, name)) for name in names[:4])
            raise UnknownNameError(
                "unknown-parameter",
                f"{option} {pattern!r} matches no parameter of the model",
                hint=f"its parameters are {near}{', ...' if names[4:] else ''}; "
                "odtpack inspect MODEL.onnx lists them all",
            )
        for name in hits:
            found.setdefault(name, pattern)
    return found
