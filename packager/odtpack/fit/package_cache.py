"""Builds the packages of candidates, each once, and predicts memory and work from the graph."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from odtpack.build import build
from odtpack.errors import OdtpackError
from odtpack.fit.space import Candidate
from odtpack.recipe import BuildSpec
from odtpack_runtime.package.package import Package
from odtpack_simulator.device.app import most_for_training
from odtpack_simulator.device.kits import Kit, kit_of
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.figures.limits import Budgets
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory, step_graphs
from odtpack_simulator.memory.planning import held_weights
from odtpack_simulator.memory.runtime_graph import Node, RuntimeGraph
from odtpack_simulator.replay.executor import Executor, OnDone
from odtpack_simulator.values.units import format_bytes

_FLOPS_PER_BYTE: Final = 8.0
"""Balance of a small core: about 8 single-precision operations for each byte it can move."""

_VECTORS: Final = 6.0
"""Reads and writes of a parameter's four bytes by an optimizer with two moments."""


def step_work(package: Package, shapes: Mapping[str, Sequence[int]]) -> float:
    """The work of an optimizer step, in bytes: moved ones, and arithmetic in their place."""
    # Matrix products and convolutions count two operations for each multiplication and addition.
    # The bodies of loops count once. `shapes`: shape of one batch of each user input.
    graphs = step_graphs(package, shapes, package.manifest.threads)
    manifest = package.manifest
    work = sum(_graph_work(graph, {}) for graph in graphs)
    trained = sum(math.prod(p.shape) for p in manifest.parameters if p.role == "trainable")
    return manifest.accumulation_steps * work + 4 * _VECTORS * trained


def _graph_work(graph: RuntimeGraph, outer: Mapping[str, tuple[tuple[int, ...], float]]) -> float:
    """Bytes and operations of every node; ``outer`` are shapes and sizes around the graph."""
    known = dict(outer)
    for value in graph.values.values():
        if value.shape is not None:
            known[value.name] = value.shape, value.itemsize
    total = 0.0
    for node in graph.nodes:
        names = [name for name in (*node.inputs, *node.outputs) if name in known]
        moved = sum(math.prod(known[name][0]) * known[name][1] for name in names)
        total += moved + _flops(node, known) / _FLOPS_PER_BYTE
        total += sum(_graph_work(inner, known) for inner in node.subgraphs.values())
    return total


def _flops(node: Node, known: Mapping[str, tuple[tuple[int, ...], float]]) -> float:
    """Operations of a product; 0 for other operators, and where a shape is unknown."""
    used = [known.get(name, (None, 0))[0] for name in (*node.inputs[:2], *node.outputs[:1])]
    if len(used) < 3 or any(shape is None for shape in used):
        return 0.0
    left, right, out = (tuple(shape or ()) for shape in used)
    kind = node.op_type.removeprefix("Fused")
    if kind in ("MatMul", "Gemm") and left:
        transposed = node.attributes.get("transA", 0)
        return 2.0 * math.prod(out) * (left[-2] if transposed and len(left) > 1 else left[-1])
    if kind == "Conv" and right:
        return 2.0 * math.prod(out) * math.prod(right[1:])
    if kind == "ConvTranspose" and right:
        return 2.0 * math.prod(left) * math.prod(right[1:])
    return 0.0


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """A limit in bytes."""

    limit: float  # most bytes allowed
    of: str  # what sets it, for people

    def excess(self, count: float) -> float:
        """By which share of the limit a number of bytes is over it; 0 or less within it."""
        return count / self.limit - 1.0 if self.limit > 0 else float("inf")

    def describe(self, what: str, count: float) -> str:
        """A sentence about a figure that is over it."""
        limit = format_bytes(self.limit)
        return f"{what} {format_bytes(count)} is over the {limit} of {self.of}"


def memory_ceiling(profiles: Sequence[DeviceProfile], budgets: Budgets) -> Ceiling | None:
    """The lowest limit on peak memory that is an error to exceed; None if there is none."""
    found = []
    for profile in profiles:
        granted = profile.memory_limit_bytes()
        app = budgets.footprint_of(profile).nbytes
        left = functools.partial(most_for_training, kit_of(profile.os), profile.os)
        if granted is not None:
            found.append(Ceiling(left(granted - app), profile.title))
        for limit, where in error_limits(profile, budgets, "peak_memory"):
            found.append(Ceiling(limit, where))
        for share, where in error_limits(profile, budgets, "memory_headroom"):
            if granted is not None:
                found.append(Ceiling(left(granted * (1 - share / 100) - app), where))
    return min(found, key=lambda each: each.limit, default=None)


def size_ceiling(profiles: Sequence[DeviceProfile], budgets: Budgets) -> Ceiling | None:
    """The lowest limit on a package's size that is an error to exceed; None if there is none."""
    found = [
        Ceiling(limit, where)
        for profile in profiles
        for limit, where in error_limits(profile, budgets, "package_size")
    ]
    return min(found, key=lambda each: each.limit, default=None)


def error_limits(profile: DeviceProfile, budgets: Budgets, key: str) -> Iterator[tuple[float, str]]:
    """Limits of one metric on a device that are errors to exceed, and where they stand."""
    for placed in budgets.for_device(profile.name, profile.os).get(key, ()):
        if placed.level == "error" and placed.kind == "absolute":
            yield placed.figure, placed.location


@dataclasses.dataclass(frozen=True)
class Order:
    """A package to build and to plan."""

    settings: BuildSpec  # what to build
    folder: str  # where the package goes; built already if it holds one
    batch: int  # samples of a batch
    shapes: Mapping[str, tuple[int, ...]]  # shape of one sample of each input
    evaluated: int | None = None  # samples that are evaluated; None for a batch at least
    # what the apps train with: the one that needs most memory counts
    kits: tuple[Kit, ...] = ("python",)
    samples: tuple[int, ...] = ()  # samples of a pass; none for whole batches

    @property
    def key(self) -> tuple[str, int]:
        """Equal for orders of the same."""
        return self.folder, self.batch


@dataclasses.dataclass(frozen=True)
class Planned:
    """What is known of a package before it is trained."""

    folder: str
    peak_bytes: int = 0  # predicted peak memory of training it
    package_bytes: int = 0  # bytes of its files
    work: float = 0.0  # work of an optimizer step, see package_cache
    problem: str | None = None  # why it could not be built; the figures are 0 then


@dataclasses.dataclass
class PackageCache:
    """Packages by what decides them."""

    base: BuildSpec  # what all candidates share
    folder: Path  # where the packages go
    shapes: Mapping[str, tuple[int, ...]]  # shape of one sample of each input
    largest: int  # the most samples that a batch can have
    evaluated: int | None = None  # samples that are evaluated; None for a batch at least
    kits: tuple[Kit, ...] = ("python",)  # what the apps train with
    planned: dict[tuple[str, int], Planned] = dataclasses.field(default_factory=dict)

    def plan(
        self, candidates: Sequence[Candidate], executor: Executor, *, on_done: OnDone | None = None
    ) -> list[Planned]:
        """Build and plan what was not built and planned before."""
        # `executor`: one of this machine: packages stay in the folder.
        orders = []
        for candidate in candidates:
            settings = candidate.package_settings(self.base)
            name = hashlib.sha256(settings.canonical_json().encode()).hexdigest()[:16]
            size = min(candidate.micro_batch, self.largest)
            path = str(self.folder / name)
            samples = (self.largest,)
            orders.append(
                Order(settings, path, size, self.shapes, self.evaluated, self.kits, samples)
            )
        # A package serves several sizes of a batch, and one worker alone may build it.
        rounds: list[dict[str, Order]] = []
        for order in {order.key: order for order in orders}.values():
            if order.key in self.planned:
                continue
            place = next((r for r in rounds if order.folder not in r), None)
            if place is None:
                rounds.append(place := {})
            place[order.folder] = order
        for each in rounds:
            wanted = list(each.values())
            made = executor.map(build_and_plan, wanted, on_done=on_done)
            self.planned.update({o.key: planned for o, planned in zip(wanted, made, strict=True)})
        return [self.planned[order.key] for order in orders]


def build_and_plan(order: Order) -> Planned:
    """Build a package unless it is there, predict its peak and count its work."""
    # A package that cannot be built is a result: another candidate may well be.
    folder = Path(order.folder)
    shapes = {name: (order.batch, *shape) for name, shape in order.shapes.items()}
    try:
        if not (folder / "manifest.json").is_file():
            build(order.settings, folder)
        package = Package.open(folder)
        uses = {
            session_use(package.manifest, kit)._replace(
                weights_bytes=held_weights(package, kit, fetched=kit == "js")  # a page's
            )
            for kit in order.kits
        }
        peak = max(
            plan_memory(package, shapes, use, evaluated=order.evaluated, samples=order.samples)
            .bounded()
            .peak.nbytes
            for use in uses
        )
        work = step_work(package, shapes)
    except OdtpackError as error:
        if error.code == "no-native-kernels":  # it is this machine that lacks something
            raise
        return Planned(order.folder, problem=f"{error.code}: {error.what}")
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Planned(order.folder, peak, size, work)
