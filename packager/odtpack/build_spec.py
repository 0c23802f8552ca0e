"""What a build is asked for, declared once.

A field of :class:`BuildSpec` says its type, its default, its place in a recipe and its option
on the command line. The tables of ``recipe.toml`` (:mod:`odtpack.recipe.schema`), the options of
``odtpack build``, what options change in a recipe, the text of a recipe, the cache key and the
call of :func:`odtpack.build.build_package` follow from that.

This module imports nothing large, for the command line; its annotations are types, not text.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from odtpack.choices import STOCK, Pool, Runtime, Sessions, Storage
from odtpack.ort.choices import OrtFormat, Platform, Style

if TYPE_CHECKING:
    import onnx

    from odtpack_runtime.package.manifest import Manifest
    from odtpack_runtime.training.schedules import ScheduleSpec

Group = tuple[str, float, float | None]
"""Pattern, factor of the learning rate, and weight decay or None for the optimizer's."""


@dataclasses.dataclass(frozen=True)
class Head:
    """A classification head for an encoder, see :func:`odtpack.model.head.add_head`."""

    pool: Pool
    classes: int
    seed: int = 0
    input: str | None = None


_VERSION = re.compile(r"\d{1,4}\.\d{1,4}(\.\d{1,4})?")


@dataclasses.dataclass(frozen=True)
class Option:
    """How people give a field.

    Attributes:
        key: Its key in a recipe, below its tables: ``"formats.nominal"``.
        flag: Its option on the command line; of a switch that one that turns the default.
            Empty if it is made of several, see :mod:`odtpack.cli._spec_options`, or of none.
        help: What the command line says of it.
        doc: What the reference of recipes says of it.
        metavar: What stands for its value on the command line.
        check: Raises ``ValueError`` for a text that is none of its values.
        read: Makes the field of what a recipe has there, where that is not the field itself.
    """

    key: str
    flag: str = ""
    help: str = ""
    doc: str = ""
    metavar: str | None = None
    check: Callable[[str], str] | None = None
    read: Callable[[Any], Any] | None = None


def _given(*texts: Any, **more: Any) -> dict[str, Option]:
    """Metadata of a field: the attributes of :class:`Option`, key, flag, help and doc first."""
    return {"option": Option(*texts, **more)}


def _version(text: str) -> str:
    if not _VERSION.fullmatch(text):
        msg = f'must be a version such as "1.20", found {text[:40]!r}'
        raise ValueError(msg)
    return text


def _options(table: Any) -> dict[str, Any]:
    given = table.model_dump(exclude_defaults=True)
    return {k: v for k, v in given.items() if k not in ("kind", "inputs", "decay_vectors")}


def _groups(tables: Any) -> tuple[Group, ...]:
    return tuple((each.parameters, each.learning_rate_scale, each.weight_decay) for each in tables)


def _schedule(table: Any) -> Any:
    if table is None:
        return None
    from odtpack_runtime.training.schedules import ScheduleSpec

    settings = table.model_dump(exclude_defaults=True, exclude={"kind", "learning_rate"})
    return ScheduleSpec(table.kind, settings, table.learning_rate)


def _head(table: Any) -> Head | None:
    return None if table is None else Head(**table.model_dump())


def _ort_format(table: Any) -> OrtFormat | None:
    if not table.ort:
        return None
    styles = tuple(Style(name) for name in table.ort_styles)
    return OrtFormat(styles, tuple(Platform(name) for name in table.ort_platforms) or (None,))


class ReadRecipe(Protocol):
    """A recipe as :func:`odtpack.recipe.read_recipe` returns it."""

    @property
    def model(self) -> Path:
        """Path of the forward model."""

    @property
    def table(self) -> Any:
        """What stands in it."""


@dataclasses.dataclass(frozen=True)
class BuildSpec:
    """Everything that decides a package, in plain values; the options' order is that of --help."""

    model: Path
    """Path of the forward model: of it, its content decides."""
    loss: str = dataclasses.field(metadata=_given("loss.kind"))
    """Name of the loss; ``none`` if the first output is the loss."""
    head: Head | None = dataclasses.field(default=None, metadata=_given("head", read=_head))
    """The head that the model is given first."""
    loss_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata=_given("loss", read=_options)
    )
    """Its options that are not the defaults."""
    optimizer: str = dataclasses.field(default="adamw", metadata=_given("optimizer.kind"))
    """Name of the optimizer."""
    train: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_given(
            "parameters.train",
            "--train",
            "Parameters to train; may be repeated. Default: all that are not frozen.",
            "Patterns of the parameters to train.",
            metavar="GLOB",
        ),
    )
    freeze: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_given(
            "parameters.freeze",
            "--freeze",
            "Parameters to freeze; may be repeated. Default: all that are not trained. With both, "
            "what neither matches stays a constant inside the models.",
            "Patterns of the parameters to freeze.",
            metavar="GLOB",
        ),
    )
    untie: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_given(
            "parameters.untie",
            "--untie",
            "Tensors that several places of the model read, to give each place its own; may be "
            "repeated. odtpack inspect lists them.",
            "Patterns of tensors that several places read, to give each place its own.",
            metavar="GLOB",
        ),
    )
    loss_inputs: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_given(
            "loss.inputs",
            "--loss-input",
            "Value that the loss reads: predictions, then values in the place of its target "
            "inputs; may be repeated. Default: the first outputs.",
            metavar="NAME",
        ),
    )
    outputs: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_given(
            "outputs",
            "--output",
            "Further value that the models return; may be repeated.",
            "Further values that the training and evaluation models return.",
            metavar="NAME",
        ),
    )
    prediction: bool = dataclasses.field(
        default=True,
        metadata=_given(
            "prediction",
            "--no-prediction",
            "Let the evaluation model return the loss only, and not the prediction that it "
            "compares with labels: no accuracy then.",
            "Whether the evaluation model returns what the loss compares with labels: for "
            "accuracy.",
        ),
    )
    optimizer_options: Mapping[str, Any] = dataclasses.field(
        default_factory=dict, metadata=_given("optimizer", read=_options)
    )
    """Settings of the optimizer that are not the defaults."""
    clip_norm: float | None = dataclasses.field(
        default=None,
        metadata=_given(
            "clip.norm",
            "--clip-norm",
            "Clip gradients by the norm of all of them together.",
            metavar="X",
        ),
    )
    clip_value: float | None = dataclasses.field(
        default=None,
        metadata=_given(
            "clip.value", "--clip-value", "Clip each element of the gradients.", metavar="X"
        ),
    )
    groups: tuple[Group, ...] = dataclasses.field(
        default=(),
        metadata=_given(
            "groups",
            "--group",
            "Parameters with a learning rate times X, or a weight decay of X; may be repeated, the "
            "first pattern that matches counts.",
            metavar="GLOB:lr=X,decay=X",
            read=_groups,
        ),
    )
    decay_vectors: bool = dataclasses.field(
        default=True,
        metadata=_given(
            "optimizer.decay_vectors",
            "--no-vector-decay",
            "No weight decay for biases, scales of normalizations and other vectors.",
        ),
    )
    accumulation_steps: int = dataclasses.field(
        default=1,
        metadata=_given(
            "batch.accumulation_steps",
            "--accumulate",
            "Batches whose gradients make one optimizer step.  [default: 1]",
            metavar="K",
        ),
    )
    schedule: "ScheduleSpec | None" = dataclasses.field(
        default=None,
        metadata=_given(
            "schedule",
            "--schedule",
            "Schedule of the learning rate that training uses: constant, linear, cosine, step or "
            "multistep, as in cosine:warmup=100,total=1000,floor=0.1,lr=0.003. Without total it "
            "runs over the whole training.",
            metavar="KIND[:KEY=X,...]",
            read=_schedule,
        ),
    )
    runtime: Runtime = dataclasses.field(
        default=STOCK,
        metadata=_given(
            "target.runtime",
            "--target",
            "What runs the package: ONNX Runtime as it is, or onnxruntime-training 1.19 with its "
            "own operators.  [default: onnxruntime]",
            "What runs the package: ONNX Runtime as it is, or onnxruntime-training 1.19.",
        ),
    )
    sessions: Sessions = dataclasses.field(
        default="fast",
        metadata=_given(
            "target.sessions",
            "--sessions",
            "How sessions come by their memory: one arena for all of them, or no arena, which "
            "takes about a tenth less and twice the time.  [default: fast]",
            "How sessions come by their memory: one arena for all of them (`fast`), or no arena "
            "(`small`), which takes about a tenth less and twice the time.",
        ),
    )
    frozen_storage: Storage | None = dataclasses.field(
        default=None,
        metadata=_given(
            "formats.frozen_dtype",
            "--frozen-dtype",
            "Store large frozen weights in fewer bytes; the models compute in float32.",
            "Store large frozen weights in fewer bytes; the models compute in float32.",
        ),
    )
    ort_format: OrtFormat | None = dataclasses.field(
        default=None, metadata=_given("formats", read=_ort_format)
    )
    """Which files in ORT format to write too."""
    nominal: bool = dataclasses.field(
        default=False,
        metadata=_given(
            "formats.nominal",
            "--nominal",
            "Also write a checkpoint without values.",
            "A checkpoint without values too.",
        ),
    )
    self_check: bool = dataclasses.field(
        default=True,
        metadata=_given(
            "formats.self_check",
            "--no-self-check",
            "Do not run the first steps, whose losses a device can compare with its own.",
            "Run the first steps, and note their losses for devices to compare theirs with.",
        ),
    )
    onnxruntime: str | None = dataclasses.field(
        default=None,
        metadata=_given(
            "target.onnxruntime",
            "--onnxruntime",
            "Oldest ONNX Runtime that must load the package, as in 1.20. Default: the oldest that "
            "loads the model's opset.",
            'Oldest version of ONNX Runtime that must load the package, `"1.20"`. Without it, the '
            "oldest that has the kernels of the models; the manifest names it.",
            metavar="VERSION",
            check=_version,
        ),
    )

    @classmethod
    def of(cls, recipe: ReadRecipe) -> Self:
        """What a recipe asks for."""
        values: dict[str, Any] = {"model": recipe.model}
        for field, option in options():
            value = recipe.table
            for part in option.key.split("."):
                value = getattr(value, part, None)
            if option.read is not None:
                value = option.read(value)
            if value is not None:
                values[field.name] = value
        return cls(**values)

    def said(self, table: str) -> dict[str, Any]:
        """The keys of a recipe's table with their values, but for those that are the defaults."""
        values = {key: (getattr(self, field.name), field.default) for key, field in keys_of(table)}
        return {key: value for key, (value, default) in values.items() if value != default}

    def canonical_json(self) -> str:
        """The values as text: equal ones give equal text, wherever the model lies."""
        content = dataclasses.asdict(self)
        del content["model"]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def forward_model(self) -> "Path | onnx.ModelProto":
        """The model to build from: the file, or its content with the head that is asked for.

        Raises:
            OdtpackError: The head does not fit the model, see
                :func:`odtpack.model.head.add_head`.
        """
        if self.head is None:
            return self.model
        import onnx

        from odtpack.model.head import add_head

        asked = self.head
        return onnx.load_from_string(
            add_head(self.model, asked.pool, asked.classes, seed=asked.seed, name=asked.input)
        )

    def build(
        self, folder: str | os.PathLike[str], *, remark: Callable[[str], None] | None = None
    ) -> "Manifest":
        """Build the package.

        Args:
            folder: Where it goes, see :func:`odtpack.build.build_package`.
            remark: Takes sentences about parameters that will not train.

        Raises:
            OdtpackError: Bad input; nothing has been written then.
        """
        from odtpack.build import build_package
        from odtpack.optimizers import Clip, GroupRule, make_optimizer
        from odtpack.package.optimizer_update import Update

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["model"] = self.forward_model()
        del values["head"]
        groups = tuple(GroupRule(*group) for group in values.pop("groups"))
        clip = Clip(values.pop("clip_norm"), values.pop("clip_value"))
        update = Update(clip, groups, values.pop("decay_vectors"), values.pop("schedule"))
        optimizer = make_optimizer(values.pop("optimizer"), values.pop("optimizer_options"))
        loss = values.pop("loss")
        return build_package(
            **values,
            folder=folder,
            loss=None if loss == "none" else loss,
            optimizer=optimizer,
            update=update,
            remark=remark,
        )


def options() -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """The fields that have a key in a recipe, with how they are given."""
    for field in dataclasses.fields(BuildSpec):
        if "option" in field.metadata:
            yield field, field.metadata["option"]


def keys_of(table: str) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """The keys of a recipe's table that are fields as they stand; ``""`` is above all tables."""
    for field, option in options():
        above, _, key = option.key.rpartition(".")
        if above == table and option.doc:
            yield key, field
