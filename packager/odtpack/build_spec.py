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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from odtpack.choices import STOCK, BaseKind, Runtime, Sessions, StepModel, Storage
from odtpack.ort.choices import OrtFormat
from odtpack.spec.option import Option, check_size, check_version, given, read_ort_format
from odtpack.spec.steps import StepsSpec

if TYPE_CHECKING:
    import onnx

    from odtpack_runtime.package.manifest import Manifest

_ADAPTER_SETTINGS = ("on", "feedforward", "rank", "alpha", "dropout", "seed", "tokens")


class ReadRecipe(Protocol):
    """A recipe as :func:`odtpack.recipe.read_recipe` returns it."""

    @property
    def model(self) -> Path:
        """Path of the forward model."""

    @property
    def table(self) -> Any:
        """What stands in it."""


@dataclasses.dataclass(frozen=True)
class BuildSpec(StepsSpec):
    """Everything that decides a package, in plain values: what, how, and in which form."""

    runtime: Runtime = dataclasses.field(
        default=STOCK,
        metadata=given(
            "target.runtime",
            "--target",
            "What runs the package: ONNX Runtime as it is, or onnxruntime-training 1.19 with its "
            "own operators.  [default: onnxruntime]",
            "What runs the package: ONNX Runtime as it is, or onnxruntime-training 1.19.",
        ),
    )
    sessions: Sessions = dataclasses.field(
        default="fast",
        metadata=given(
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
        metadata=given(
            "formats.frozen_dtype",
            "--frozen-dtype",
            "Store large frozen weights in fewer bytes; the models compute in float32.",
            "Store large frozen weights in fewer bytes; the models compute in float32.",
        ),
    )
    base: BaseKind | None = dataclasses.field(
        default=None,
        metadata=given(
            "formats.base",
            "--base",
            "Store frozen matrices inside the models in 8 or 4 bits, which each step unpacks where "
            "it reads them; for adapters.",
            "Store frozen matrices inside the models in 8 or 4 bits, which each step unpacks where "
            "it reads them; for adapters.",
        ),
    )
    segments: bool = dataclasses.field(
        default=False,
        metadata=given(
            "memory.segments",
            "--segments",
            "Cut the model into segments that run one after the other and are computed a second "
            "time on the way back, so that memory does not grow with depth; for adapters on large "
            "models.",
            "Cut the model into segments that run one after the other and are computed a second "
            "time on the way back, so that memory does not grow with depth.",
        ),
    )
    ort_format: OrtFormat | None = dataclasses.field(
        default=None, metadata=given("formats", read=read_ort_format)
    )
    """Which files in ORT format to write too."""
    nominal: bool = dataclasses.field(
        default=False,
        metadata=given(
            "formats.nominal",
            "--nominal",
            "Also write a checkpoint without values.",
            "A checkpoint without values too.",
        ),
    )
    self_check: bool = dataclasses.field(
        default=True,
        metadata=given(
            "formats.self_check",
            "--no-self-check",
            "Do not run the first steps, whose losses a device can compare with its own.",
            "Run the first steps, and note their losses for devices to compare theirs with.",
        ),
    )
    memory_budget: str | None = dataclasses.field(
        default=None,
        metadata=given(
            "memory.budget",
            "--memory-budget",
            "Memory that training may take at its peak, as in '60 MB': what a step keeps is "
            "computed again as far as that needs.",
            "Memory that training may take at its peak, with a unit. Without it, only what costs "
            "next to no time is computed again.",
            metavar="SIZE",
            check=check_size,
        ),
    )
    step_model: StepModel = dataclasses.field(
        default="auto",
        metadata=given(
            "memory.step_model",
            "--step-model",
            "Also write a training model that updates each parameter with its gradient, for less "
            "memory and time; auto: where gradients take a megabyte or more.  [default: auto]",
            "Whether the package has a training model that also updates the parameters: where "
            "gradients take a megabyte or more (`auto`), wherever the optimizer allows it "
            "(`always`), or not (`never`).",
        ),
    )
    memory_batch: int | None = dataclasses.field(
        default=None,
        metadata=given(
            "memory.batch",
            "--memory-batch",
            "Samples at once that --memory-budget is for.  [default: 8, or those of the recipe]",
            "Samples at once that the budget is for. Without it, those of `[batch]`, or 8.",
            metavar="N",
        ),
    )
    memory_sizes: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=given(
            "memory.sizes",
            "--memory-size",
            "Size of another open axis that it is for, as in tokens=128; may be repeated. Default: "
            "64.",
            'Sizes of other open axes that the budget is for, `["tokens=128"]`; 64 without it.',
            metavar="NAME=N",
        ),
    )
    onnxruntime: str | None = dataclasses.field(
        default=None,
        metadata=given(
            "target.onnxruntime",
            "--onnxruntime",
            "Oldest ONNX Runtime that must load the package, as in 1.20. Default: the oldest that "
            "loads the model's opset.",
            'Oldest version of ONNX Runtime that must load the package, `"1.20"`. Without it, the '
            "oldest that has the kernels of the models; the manifest names it.",
            metavar="VERSION",
            check=check_version,
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
        if "memory_budget" in values and "batch" in recipe.table.model_fields_set:
            values.setdefault("memory_batch", recipe.table.batch.at_once)
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
        from odtpack.adapters import adapter_spec
        from odtpack.build import build_package
        from odtpack.errors import OdtpackError
        from odtpack.optimizers import Clip, GroupRule, make_optimizer
        from odtpack.package.optimizer_update import Update
        from odtpack_runtime.training.private import Privacy

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["model"] = self.forward_model()
        del values["head"]
        own = {name: values.pop(f"adapter_{name}") for name in _ADAPTER_SETTINGS}
        adapter = adapter_spec(values.pop("adapter"), own)
        groups = tuple(GroupRule(*group) for group in values.pop("groups"))
        clip = Clip(values.pop("clip_norm"), values.pop("clip_value"))
        norm, noise = values.pop("privacy_clip"), values.pop("privacy_noise")
        if norm is None and noise != type(self).privacy_noise:
            raise OdtpackError(
                "option-not-used",
                "noise is given for private gradients, and they are not asked for",
                hint="add --privacy-clip, as in --privacy-clip 1",
            )
        privacy = None if norm is None else Privacy(norm, noise)
        update = Update(clip, groups, values.pop("decay_vectors"), values.pop("schedule"), privacy)
        optimizer = make_optimizer(values.pop("optimizer"), values.pop("optimizer_options"))
        loss = values.pop("loss")
        return build_package(
            **values,
            folder=folder,
            loss=None if loss == "none" else loss,
            optimizer=optimizer,
            update=update,
            adapter=adapter,
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
