"""Options that say what to build, laid over a recipe or standing alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from odtpack.errors import OdtpackError
from odtpack.ort.choices import OrtFormat
from odtpack.recipe import BuildSettings
from odtpack.recipe.settings import Group


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """Options of ``odtpack build`` as they were given; None, empty or false if they were not."""

    model: Path | None = None
    loss: str | None = None
    loss_options: Sequence[str] = ()
    loss_inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    no_prediction: bool = False
    train: Sequence[str] = ()
    freeze: Sequence[str] = ()
    untie: Sequence[str] = ()
    optimizer: str | None = None
    optimizer_settings: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    optimizer_options: Sequence[str] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    groups: Sequence[str] = ()
    no_vector_decay: bool = False
    accumulate: int | None = None
    schedule: str | None = None
    runtime: str | None = None
    frozen_storage: str | None = None
    ort_format: OrtFormat | None = None
    nominal: bool = False
    no_self_check: bool = False
    onnxruntime: str | None = None

    def over(self, recipe: BuildSettings | None) -> BuildSettings:
        """What to build: each option that was given takes the place of the recipe's key.

        Another loss or optimizer than the recipe's drops the options of the recipe's.

        Raises:
            OdtpackError: An option cannot be read, is unknown or out of range; or model or loss
                are neither given nor in a recipe.
        """
        if recipe is None:
            for name, value in (("MODEL.onnx", self.model), ("--loss", self.loss)):
                if value is None:
                    raise OdtpackError(
                        "usage",
                        f"{name} is missing, and there is no --recipe to name it",
                        hint="odtpack build --help",
                    )
            recipe = BuildSettings(model=Path(), loss="")
        given: dict[str, Any] = {
            "model": self.model,
            "outputs": tuple(self.outputs),
            "train": tuple(self.train),
            "freeze": tuple(self.freeze),
            "untie": tuple(self.untie),
            "groups": tuple(_read_group(text) for text in self.groups),
            "accumulation_steps": self.accumulate,
            "onnxruntime": self.onnxruntime,
            "runtime": self.runtime,
            "frozen_storage": self.frozen_storage,
            "ort_format": self.ort_format,
        }
        given = {key: value for key, value in given.items() if value not in (None, ())}
        given |= {
            key: turned_on
            for key, given_at_all, turned_on in (
                ("nominal", self.nominal, True),
                ("prediction", self.no_prediction, False),
                ("self_check", self.no_self_check, False),
                ("decay_vectors", self.no_vector_decay, False),
            )
            if given_at_all
        }
        if self.clip_norm is not None or self.clip_value is not None:
            given |= {"clip_norm": self.clip_norm, "clip_value": self.clip_value}
        if self.schedule is not None:
            from odtpack_runtime.training.schedules import ScheduleSpec

            given["schedule"] = ScheduleSpec.parse(self.schedule)
        given |= self._loss(recipe)
        given |= self._optimizer(recipe)
        return dataclasses.replace(recipe, **given)

    def _loss(self, recipe: BuildSettings) -> dict[str, Any]:
        name = self.loss or recipe.loss
        kept = name == recipe.loss
        options = dict(recipe.loss_options) if kept else {}
        if self.loss_options:
            from odtpack.losses import parse_options

            options |= parse_options(name, list(self.loss_options))
        inputs = tuple(self.loss_inputs) or (recipe.loss_inputs if kept else ())
        return {"loss": name, "loss_options": options, "loss_inputs": inputs}

    def _optimizer(self, recipe: BuildSettings) -> dict[str, Any]:
        kind = self.optimizer or recipe.optimizer
        options = dict(recipe.optimizer_options) if kind == recipe.optimizer else {}
        options |= read_optimizer_options(kind, self.optimizer_settings, self.optimizer_options)
        return {"optimizer": kind, "optimizer_options": options}


def read_optimizer_options(
    kind: str, settings: Mapping[str, float | None], options: Iterable[str]
) -> dict[str, str | float]:
    """Read the options about an optimizer.

    Args:
        kind: Its name.
        settings: Settings with an option of their own; None where it was not given.
        options: Texts of ``--optimizer-option``.

    Raises:
        OdtpackError: A setting is given twice, or not of this optimizer.
    """
    given: dict[str, str | float] = {}
    for name, value in settings.items():
        if value is None:
            continue
        from odtpack.optimizers import OPTIMIZERS

        fields = [field.name for field in dataclasses.fields(OPTIMIZERS[kind])]
        if name not in fields:
            option = f"--{name.replace('_', '-')}"
            raise OdtpackError(
                "option-not-used",
                f"{option} is not a setting of the optimizer {kind}",
                hint=f"leave {option} out; {kind} has {', '.join(sorted(fields))}",
            )
        given[name] = value
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or name in given:
            raise OdtpackError(
                "bad-option",
                f"--optimizer-option {option!r} "
                + ("is a second value" if equals else "is not KEY=VALUE"),
            )
        given[name] = text
    return given


def _read_group(text: str) -> Group:
    """Read ``GLOB:lr=X,decay=X``; names may hold colons, so the last one counts."""
    from odtpack.optimizers import GroupRule

    pattern, colon, rest = text.rpartition(":")
    numbers: dict[str, float] = {}
    try:
        for part in rest.split(","):
            key, _, value = part.partition("=")
            if key not in ("lr", "decay") or key in numbers:
                raise ValueError(key)
            numbers[key] = float(value)
        if not pattern or not colon:
            raise ValueError(pattern)
    except ValueError:
        raise OdtpackError("bad-group", f"--group {text!r} is not GLOB:lr=X,decay=X") from None
    rule = GroupRule(pattern, numbers.get("lr", 1.0), numbers.get("decay"))
    return rule.pattern, rule.learning_rate_scale, rule.weight_decay
