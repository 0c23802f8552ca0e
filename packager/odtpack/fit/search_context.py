"""What a search stands on: the package that the recipe builds as it is, and the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from odtpack.build import build, forward_model
from odtpack.fit.depth import Freeze, freezes
from odtpack.model.loading import load_model
from odtpack.package.parameters import resolve
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_simulator.replay.job import SamplePlan, make_sample_plan
from odtpack_simulator.replay.replay import write_data

if TYPE_CHECKING:
    from odtpack.recipe import BuildSpec


@dataclasses.dataclass(frozen=True)
class SearchContext:
    """What all candidates share.

    Attributes:
        base: What recipe and options say.
        inputs: What the models take.
        files: For each input, the path of an ``.npy`` file that children map.
        shapes: Shape of one sample of each input.
        samples: Number of samples.
        seed: Seed of the split and of the order.
        fixed_batch: Size of every batch if the model fixes it.
        freezes: Choices of what to freeze.
    """

    base: BuildSpec
    inputs: tuple[TensorSpec, ...]
    files: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    samples: int
    seed: int
    fixed_batch: int | None
    freezes: tuple[Freeze, ...]

    def schedule(self, micro_batch: int, accumulation_steps: int, epochs: int) -> SamplePlan:
        """Which samples make which batch.

        Raises:
            OdtpackError: There are too few samples.
        """
        return make_sample_plan(
            self.inputs,
            self.samples,
            batch_size=micro_batch,
            epochs=epochs,
            seed=self.seed,
            accumulation_steps=accumulation_steps,
        )

    def open_sizes(self) -> tuple[str, ...]:
        """The data's sizes of axes that the model leaves open, ``"tokens=128"``."""
        sizes = {
            dim: size
            for spec in self.inputs
            for dim, size in zip(spec.shape[1:], self.shapes[spec.name], strict=True)
            if isinstance(dim, str)
        }
        return tuple(f"{dim}={size}" for dim, size in sizes.items())

    @property
    def whole(self) -> SamplePlan:
        """One epoch in the smallest batches, for the numbers of samples."""
        return self.schedule(self.fixed_batch or 1, 1, 1)


def make_search_context(settings: BuildSpec, data: Path, folder: Path, seed: int) -> SearchContext:
    """Build what the recipe says, so that its errors show, and read the data.

    Args:
        settings: What recipe and options say.
        data: The user's ``.npz`` file.
        folder: Where the package and the data go.
        seed: Seed of the split and of the order.

    Raises:
        OdtpackError: The model, the recipe or the data are wrong.
    """
    build(settings, folder / "recipe")
    package = Package.open(folder / "recipe")
    inputs = tuple(package.manifest.input_specs())
    arrays = package.load_data(data)
    (folder / "data").mkdir()
    files = write_data(arrays, folder / "data")
    sizes = [spec.shape[0] for spec in inputs if spec.shape]
    return SearchContext(
        settings,
        inputs,
        files,
        {name: array.shape[1:] for name, array in arrays.items()},
        len(next(iter(arrays.values()))),
        seed,
        next((size for size in sizes if isinstance(size, int)), None),
        tuple(_freezes(settings)),
    )


def _freezes(base: BuildSpec) -> Sequence[Freeze]:
    """What may be frozen; nothing more where the recipe says what is trained, or an adapter is."""
    model = load_model(forward_model(base), named=(*base.train, *base.freeze), untie=base.untie)
    read = base.loss_inputs or tuple(str(value.name) for value in model.graph.outputs)
    trained, frozen = resolve(model, base.train, base.freeze, read)
    found = freezes(model, trained, frozen)
    return found[:1] if base.train or base.adapter is not None else found
