"""Builds the packages of candidates, each once, and predicts memory and work from the graph."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from odtpack.build import build
from odtpack.errors import OdtpackError
from odtpack.fit.candidates import Candidate
from odtpack.fit.work import step_work
from odtpack_runtime.package.package import Package
from odtpack_simulator.device.kits import Kit
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.planning import held_weights

if TYPE_CHECKING:
    from odtpack.recipe import BuildSpec
    from odtpack_simulator.replay.executor import Executor, OnDone


@dataclasses.dataclass(frozen=True)
class Order:
    """A package to build and to plan.

    Attributes:
        settings: What to build.
        folder: Where the package goes; built already if it holds one.
        batch: Samples of a batch.
        shapes: Shape of one sample of each input.
        threads: Threads of the sessions.
        kits: What the apps train with: the one that needs most memory counts.
    """

    settings: BuildSpec
    folder: str
    batch: int
    shapes: Mapping[str, tuple[int, ...]]
    threads: int
    kits: tuple[Kit, ...] = ("python",)

    @property
    def key(self) -> tuple[str, int]:
        """Equal for orders of the same."""
        return self.folder, self.batch


@dataclasses.dataclass(frozen=True)
class Planned:
    """What is known of a package before it is trained.

    Attributes:
        folder: Its folder.
        peak_bytes: Predicted peak memory of training it.
        package_bytes: Bytes of its files.
        work: Work of an optimizer step, see :mod:`odtpack.fit.work`.
        problem: Why it could not be built; the figures are 0 then.
    """

    folder: str
    peak_bytes: int = 0
    package_bytes: int = 0
    work: float = 0.0
    problem: str | None = None


class PackageCache:
    """Packages by what decides them.

    Args:
        base: What recipe and options say.
        folder: Where packages go.
        shapes: Shape of one sample of each input.
        largest: The most samples that a batch can have.
        threads: Threads of the sessions.
        kits: What the apps train with.
    """

    def __init__(
        self,
        base: BuildSpec,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        largest: int,
        threads: int,
        kits: tuple[Kit, ...] = ("python",),
    ) -> None:
        self._base = base
        self._folder = folder
        self._shapes = shapes
        self._largest = largest
        self._threads = threads
        self._kits = kits
        self._planned: dict[tuple[str, int], Planned] = {}

    def plan(
        self,
        candidates: Sequence[Candidate],
        executor: Executor,
        *,
        on_done: OnDone | None = None,
    ) -> list[Planned]:
        """Build and plan what was not built and planned before.

        Args:
            candidates: Whose packages.
            executor: One of this machine: packages stay in the folder.
            on_done: Called as they are planned.
        """
        orders = [self._order(candidate) for candidate in candidates]
        # A package serves several sizes of a batch, and one worker alone may build it.
        rounds: list[dict[str, Order]] = []
        for order in {order.key: order for order in orders}.values():
            if order.key in self._planned:
                continue
            place = next((r for r in rounds if order.folder not in r), None)
            if place is None:
                rounds.append(place := {})
            place[order.folder] = order
        for each in rounds:
            wanted = list(each.values())
            made = executor.map(build_and_plan, wanted, on_done=on_done)
            self._planned.update({o.key: planned for o, planned in zip(wanted, made, strict=True)})
        return [self._planned[order.key] for order in orders]

    def _order(self, candidate: Candidate) -> Order:
        settings = candidate.package_settings(self._base)
        name = hashlib.sha256(settings.canonical_json().encode()).hexdigest()[:16]
        size = min(candidate.micro_batch, self._largest)
        folder = str(self._folder / name)
        return Order(settings, folder, size, self._shapes, self._threads, self._kits)


def build_and_plan(order: Order) -> Planned:
    """Build a package unless it is there, predict its peak and count its work.

    A package that cannot be built is a result: another candidate may well be.
    """
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
            plan_memory(package, shapes, threads=order.threads, **use._asdict()).peak.nbytes
            for use in uses
        )
        work = step_work(package, shapes, threads=order.threads)
    except OdtpackError as error:
        return Planned(order.folder, problem=f"{error.code}: {error.what}")
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Planned(order.folder, peak, size, work)
