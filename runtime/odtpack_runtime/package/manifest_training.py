"""How a package is trained, as its manifest says it: optimizer, clipping, groups, schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files.records import InvalidRecordError, Part, Path, read_value
from odtpack_runtime.package.manifest_base import Kind, Name, PositiveInt, Rate
from odtpack_runtime.training.private import Privacy
from odtpack_runtime.training.schedules import ScheduleSpec


@dataclass(frozen=True, kw_only=True)
class OptimizerInfo(Part):
    """Kind and hyperparameters of the optimizer, which stand beside each other in the file.

    The optimizer model holds the formula, so that a runtime needs to know neither. ``custom``
    is an optimizer that is described by its model only.
    """

    kind: Kind
    settings: dict[Name, float | bool | str] = field(default_factory=dict)

    @classmethod
    def read(cls, content: object, path: Path = ()) -> Self:
        """Check what a JSON text held, and return it as a record.

        Raises:
            InvalidRecordError: There is no kind, or a hyperparameter is not a number, true,
                false or text.
        """
        if not isinstance(content, dict):
            raise InvalidRecordError("it must be an object", path)
        kind = {key: value for key, value in content.items() if key == "kind"}
        found = super().read(kind, path)
        settings = {
            read_value(Name, key, path): read_value(
                Rate if key == "learning_rate" else float | bool | str, value, (*path, key)
            )
            for key, value in content.items()
            if key != "kind"
        }
        return dataclasses.replace(found, settings=settings)

    def as_dict(self, *, defaults: bool = True) -> dict[str, Any]:
        """Return the content as JSON has it."""
        return {"kind": self.kind, **self.settings}


@dataclass(frozen=True, kw_only=True)
class ClipInfo(Part):
    """How gradients are clipped: by the norm of all of them, or each element by its value."""

    norm: float | None = None
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class PrivacyInfo(Part):
    """How gradients are made private: each sample's is clipped, and noise is added to their sum.

    Attributes:
        clip_norm: The norm that the gradient of one sample is scaled down to.
        noise_multiplier: Standard deviation of the noise as a multiple of it.
    """

    clip_norm: float
    noise_multiplier: float

    def check(self, path: Path) -> None:
        """Check that both are in their range."""
        if not Privacy(self.clip_norm, self.noise_multiplier).valid:
            raise InvalidRecordError("clip_norm must be above 0, noise_multiplier 0 or more", path)


@dataclass(frozen=True, kw_only=True)
class GroupInfo(Part):
    """Parameters with a learning rate and a weight decay of their own."""

    learning_rate_scale: Rate
    weight_decay: float
    parameters: tuple[Name, ...]


_COUNTS = ("warmup_steps", "total_steps", "period")


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo(Part):
    """The schedule of the learning rate that the recipe proposes.

    ``settings`` are those of the class of this kind in
    :data:`odtpack_runtime.training.schedules.SCHEDULES`; without ``total_steps`` a schedule that
    ends runs over the whole training.
    """

    kind: Name
    settings: dict[str, int | float | tuple[int, ...]] = field(default_factory=dict)
    learning_rate: Rate | None = None

    @classmethod
    def read(cls, content: object, path: Path = ()) -> Self:
        """Check what a JSON text held, and return it as a record.

        Raises:
            InvalidRecordError: It is not a schedule, with settings that it has.
        """
        found = super().read(content, path)
        counts = {
            name: int(value)
            for name, value in found.settings.items()
            if name in _COUNTS and type(value) is float and value.is_integer()
        }
        found = dataclasses.replace(found, settings=found.settings | counts)
        try:
            ScheduleSpec(found.kind, found.settings, found.learning_rate)
        except OdtpackError as error:
            raise InvalidRecordError(error.what.rstrip("."), path) from error
        return found


@dataclass(frozen=True, kw_only=True)
class AdapterInfo(Part):
    """The adapter that is trained in place of the model's parameters.

    Attributes:
        kind: What it is.
        rank: ``lora``, ``dora``: rows of A and columns of B.
        alpha: ``lora``, ``dora``: B A counts ``alpha / rank`` times.
        tokens: ``prompt``: vectors before the tokens of a sequence.
        layers: The layers that it is on, as the exported module names them; of ``prompt`` the
            embedding.
        feedforward: ``ia3``: those of them whose input is scaled.
        parameters: The parameters that are the adapter's; others may be trained besides.
    """

    kind: Literal["lora", "dora", "ia3", "bitfit", "prompt"]
    rank: PositiveInt | None = None
    alpha: float | None = None
    tokens: PositiveInt | None = None
    layers: tuple[Name, ...]
    feedforward: tuple[Name, ...] = ()
    parameters: tuple[Name, ...]
