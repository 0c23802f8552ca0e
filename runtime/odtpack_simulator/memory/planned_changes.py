"""Plan the memory of a package again as it would be with other settings: what advice rests on.

Changed are the three things that decide a training's peak and that need no other model: how
many samples are in memory at once, whether the optimizer keeps state, and how many of the
trained layers stay frozen. A smaller micro-batch is planned with the package's own models, a
frozen layer with the training model without its gradients, and the optimizer without state with
a model of plain SGD.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import onnx
import onnx.parser
from onnx import helper

from odtpack_runtime.files.scratch import scratch_folder
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.arena import SessionUse
from odtpack_simulator.memory.execution_order import Layer, drop_gradients, trained_layers
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.runtime_graph import RuntimeGraph, load_runtime_graph
from odtpack_simulator.result import PlannedChange

MEMORY_CHECKS: Final = frozenset(
    {"memory_limit", "peak_memory", "memory_headroom", "low_memory_warning", "steps_done"}
)
"""Checks that say that a training takes too much memory."""

_MOST_SIZES: Final = 6
_LARGE_SHARE: Final = 0.5
"""Of the trained elements: a parameter above it may be worth freezing by itself."""


@dataclasses.dataclass(frozen=True)
class _Freeze:
    title: str
    names: frozenset[str]


def plan_changes(
    package: Package,
    shapes: Mapping[str, Sequence[int]],
    use: SessionUse,
    threads: int | None = None,
) -> list[PlannedChange]:
    """The peak of a package with each change that is open to it, and with several at once."""
    # What is frozen already is not among them, nor is a micro-batch where the models fix their
    # batch, nor SGD where the optimizer keeps nothing.
    # `use`: Packages with fewer gradients or another optimizer are planned without the step model
    # all the same.
    # Returns: Single changes first, those of a kind from the least to the most; then combinations.
    # The last one is the most that can be done.
    with scratch_folder("changes") as folder:
        variants = _Variants(package, shapes, Path(folder), use, threads)
        sizes = list(_micro_batches(package.manifest, shapes))
        # Whether the optimizer keeps something for each parameter.
        model = onnx.load(str(package.optimizer_model), load_external_data=False)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        stateless = metadata.get("odtpack.state") != "[]"
        freezes = list(variants.freezes())
        size, freeze = sizes[-1] if sizes else None, freezes[-1] if freezes else None
        wanted: list[tuple[int | None, _Freeze | None, bool]] = [
            *((each, None, False) for each in sizes),
            *((None, each, False) for each in freezes),
            (None, None, stateless),
            # Two of the three to the full, then all of them.
            (size, freeze, False),
            (size, None, stateless),
            (None, freeze, stateless),
            (size, freeze, stateless),
        ]
        return [variants.planned(*each) for each in dict.fromkeys(wanted) if any(each)]


@dataclasses.dataclass
class _Variants:
    """The package with changes, planned; models that several of them share are read once."""

    package: Package
    shapes: Mapping[str, Sequence[int]]
    folder: Path
    use: SessionUse
    threads: int | None
    graphs: dict[object, RuntimeGraph] = dataclasses.field(default_factory=dict)
    without: dict[frozenset[str], Path] = dataclasses.field(default_factory=dict)

    @cached_property
    def training(self) -> onnx.ModelProto:
        """The training model."""
        return onnx.load(str(self.package.training_model), load_external_data=False)

    def freezes(self) -> Iterator[_Freeze]:
        """What could be frozen besides what is: the first layers, up to all but the last."""
        if self.package.manifest.segments is not None:
            return  # each has its own gradients
        graph = self.training.graph
        external = onnx.TensorProto.EXTERNAL
        if any(tensor.data_location == external for tensor in graph.initializer):
            return  # what is written elsewhere would not find its data
        layers = trained_layers(graph, self.package.manifest)
        count = len(layers)
        if count < 2:
            return
        largest = max((p for layer in layers for p in layer), key=lambda p: _elements((p,)))
        prefixes = sorted({1, count // 3, 2 * count // 3, count - 1} - {0})
        large = _elements((largest,)) >= _LARGE_SHARE * sum(map(_elements, layers))
        if large and largest not in layers[0]:
            yield _Freeze(f"'{largest.name}'", frozenset({largest.name}))
        for length in prefixes:
            names = frozenset(p.name for layer in layers[:length] for p in layer)
            last = layers[length - 1][0].name
            title = f"the first {length} of {count} trained layers (up to '{last}')"
            yield _Freeze(title if length > 1 else f"the first trained layer ('{last}')", names)

    def planned(self, size: int | None, freeze: _Freeze | None, stateless: bool) -> PlannedChange:
        """The peak with these changes."""
        package, shapes = self.package, dict(self.shapes)
        manifest = package.manifest
        if size is not None:
            batch = _batch(manifest, shapes)
            shapes = {name: (size, *shape[1:]) for name, shape in shapes.items()}
            steps = manifest.accumulation_steps * batch // size
            manifest = dataclasses.replace(manifest, accumulation_steps=steps)
        if freeze is not None:
            parameters = tuple(
                dataclasses.replace(p, role="frozen", offset=None) if p.name in freeze.names else p
                for p in manifest.parameters
            )
            manifest = dataclasses.replace(manifest, parameters=parameters, groups=())
            if freeze.names not in self.without:
                model = onnx.ModelProto()
                model.CopyFrom(self.training)
                drop_gradients(model.graph, freeze.names)
                path = self.folder / f"{len(self.without)}.onnx"
                onnx.save(model, str(path))
                self.without[freeze.names] = path
            package = dataclasses.replace(package, training_model=self.without[freeze.names])
        if stateless:
            package = dataclasses.replace(package, optimizer_model=self._plain_sgd(manifest))
        use = self.use
        if freeze is not None or stateless or manifest.accumulation_steps != 1:
            use = use._replace(step_model=False, switches=False)
        plan = plan_memory(
            dataclasses.replace(package, manifest=manifest),
            shapes,
            threads=self.threads,
            load=self._load,
            **use._asdict(),
        )
        return PlannedChange(
            micro_batch=size,
            freeze=None if freeze is None else freeze.title[:1000],
            stateless_optimizer=stateless,
            peak_bytes=plan.peak.nbytes,
        )

    def _load(
        self, model: Path, shapes: Mapping[str, Sequence[int]], **settings: Any
    ) -> RuntimeGraph:
        key = model, tuple((name, tuple(shape)) for name, shape in sorted(shapes.items()))
        if key not in self.graphs:
            self.graphs[key] = load_runtime_graph(model, shapes, **settings)
        return self.graphs[key]

    def _plain_sgd(self, manifest: Manifest) -> Path:
        """A model of ``p - rate * g`` over flat vectors."""
        trained = [p.dtype for p in manifest.parameters if p.role == "trainable"]
        dtype = "double" if trained[:1] == ["float64"] else "float"
        path = self.folder / f"sgd-{dtype}.onnx"
        if path.exists():
            return path
        rate = "learning_rate" if dtype == "float" else "rate"
        cast = "" if dtype == "float" else "rate = Cast <to = 11> (learning_rate)"
        model = onnx.parser.parse_model(
            f"""<ir_version: {manifest.ir_version}, opset_import: ["": {manifest.opsets[""]}]>
            optimizer (float[1] learning_rate, int64[1] step, {dtype}[n] params,
                       {dtype}[n] gradients) => ({dtype}[n] "params.out") {{
                {cast}
                change = Mul (gradients, {rate})
                "params.out" = Sub (params, change)
            }}"""
        )
        helper.set_model_props(model, {"odtpack.optimizer": "sgd", "odtpack.state": "[]"})
        onnx.save(model, str(path))
        return path


def _elements(layer: Layer) -> int:
    return sum(math.prod(p.shape) for p in layer)


def _batch(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> int:
    """Samples in one batch."""
    return next((shapes[item.name][0] for item in manifest.inputs if shapes[item.name]), 1)


def _micro_batches(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> Iterator[int]:
    """Smaller batches that make up the same one, each about half of the one before, down to 1."""
    if any(isinstance(item.shape[0], int) for item in manifest.inputs if item.shape):
        return  # the models fix it
    batch = _batch(manifest, shapes)
    divisors = [size for size in range(1, batch) if batch % size == 0]
    left = batch
    for number in range(_MOST_SIZES):
        smaller = [size for size in divisors if size <= left // 2]
        if not smaller:
            return
        left = smaller[-1] if number < _MOST_SIZES - 1 else 1
        yield left
