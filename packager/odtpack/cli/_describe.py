"""Words, figures and warnings that several commands share, and where the bytes of a package go."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from odtpack.cli import _console
from odtpack.errors import some
from odtpack_simulator.values.text import clean, counted
from odtpack_simulator.values.units import format_bytes, format_percent

if TYPE_CHECKING:
    from rich.tree import Tree

    from odtpack_runtime.package.manifest import Manifest
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.fleet.result import FleetResult
    from odtpack_simulator.reports.sizes import Piece
    from odtpack_simulator.result import SimulationResult


_OWN = "odtpack."


def of_simulation(result: SimulationResult) -> Iterator[str]:
    """Yield a sentence for each figure of a result that is of one sample."""
    data = result.data
    if data.batch_size == 1:
        yield (
            "Batches have one sample, so the result contains losses of single samples. Protect "
            "it like the data, or simulate larger batches."
        )
    if data.held_out_samples == 1:
        yield "Only one sample is held out, and the result contains its evaluation."


def of_fleet(result: FleetResult) -> Iterator[str]:
    """Yield a sentence for each figure that is of one client, or follows from disturbed times."""
    if result.disturbed is not None:
        yield (
            "Days, energy and late clients depend on step times that cannot be judged: "
            f"{result.disturbed}."
        )
    clients = result.fairness.clients if result.fairness is not None else 0
    if 0 < clients < 20:
        yield (
            f"The worst tenth of {clients} clients is a single client. Protect the "
            "result like the clients' data, or simulate more clients."
        )


def of_properties(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on the properties that an app attached to a checkpoint."""
    own = sorted(name for name in names if not name.startswith(_OWN))
    if own:
        shown = some([f"'{name[:40]}'" for name in own], 5)
        yield (
            f"The package carries what the app attached to the checkpoint: {shown}. "
            "Whoever receives the package can read them; if they are personal, use a checkpoint"
            " without them."
        )


ROLES = ("trainable", "frozen", "state")


def byte_size(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; text counts as nothing."""
    return 0 if dtype == "string" else math.prod(shape) * np.dtype(dtype).itemsize


def shape_text(dtype: str, shape: Iterable[int | str | None]) -> str:
    """``float32[batch, 1, 8, 8]``."""
    return f"{dtype}[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"


def parameter_summary(manifest: Manifest) -> list[str]:
    """A line for each role that occurs: how many parameters, elements and bytes."""
    rows = [(item.role, (item.dtype, item.shape)) for item in manifest.parameters]
    found = {role: [tensor for kind, tensor in rows if kind == role] for role in ROLES}
    return [count_line(role, tensors) for role, tensors in found.items() if tensors]


_TRAINED_LINES = 5


def trained_lines(manifest: Manifest) -> list[str]:
    """What trains, by name and group, in at most five lines."""
    shown = {p.name: p.module or p.name for p in manifest.parameters if p.role == "trainable"}
    groups = [
        (f"lr x{each.learning_rate_scale:g}, decay {each.weight_decay:g}: ", each.parameters)
        for each in manifest.groups
    ] or [("", tuple(shown))]
    lines: list[str] = []
    for index, (title, names) in enumerate(groups[:_TRAINED_LINES]):
        room = (_TRAINED_LINES - len(lines)) // (min(len(groups), _TRAINED_LINES) - index)
        lines += _filled(title, [shown.get(name, name) for name in names], room)
    return [f"{'' if i else 'trains':<10} {line}" for i, line in enumerate(lines)]


def _filled(title: str, names: Sequence[str], room: int) -> list[str]:
    """Names in a few lines: those of a module together where there are too many."""
    wrap = textwrap.TextWrapper(84, break_long_words=False, break_on_hyphens=False)
    for depth in (None, 4, 3, 2, 1):
        counts = Counter(".".join(name.split(".")[:depth]) for name in names)
        together = [key if n == 1 else f"{key}.* ({n})" for key, n in counts.items()]
        if len(lines := wrap.wrap(title + ", ".join(together))) <= room:
            return lines
    rest = f" and {len(together)} in all"
    return [*lines[: room - 1], lines[room - 1][: 84 - len(rest)].rpartition(",")[0] + rest]


def runtime_text(manifest: Manifest) -> str:
    """What runs a package: ``ONNX Runtime 1.12 and newer``."""
    if manifest.target is not None:
        return f"onnxruntime-training {manifest.minimum_onnxruntime}"
    return f"ONNX Runtime {manifest.minimum_onnxruntime} and newer"


def update_lines(manifest: Manifest) -> list[str]:
    """A line for each thing that happens around the optimizer."""
    lines = []
    if manifest.clip is not None:
        kind, bound = next((k, v) for k, v in manifest.clip.as_dict().items() if v is not None)
        lines.append(f"clip        gradients by {kind}, {bound:g}")
    if (privacy := manifest.privacy) is not None:
        lines.append(
            f"private     samples' gradients clipped to {privacy.clip_norm:g}, noise of "
            f"{privacy.noise_multiplier:g} times that"
        )
    if manifest.accumulation_steps > 1:
        lines.append(f"accumulate  {manifest.accumulation_steps} batches per optimizer step")
    for group in manifest.groups:
        what = counted(len(group.parameters), "parameter")
        lines.append(
            f"group       {what}, learning rate x {group.learning_rate_scale:g}, "
            f"weight decay {group.weight_decay:g}"
        )
    if manifest.schedule is not None:
        settings = ", ".join(f"{k} {v}" for k, v in manifest.schedule.settings.items())
        lines.append(f"schedule    {manifest.schedule.kind}{f' ({settings})' if settings else ''}")
    return lines


def count_line(role: str, tensors: Sequence[tuple[str, Sequence[int]]]) -> str:
    """``trainable   6 parameters, 6,250 elements, 25 kB``."""
    elements = sum(math.prod(shape) for _, shape in tensors)
    size = format_bytes(sum(byte_size(*tensor) for tensor in tensors))
    number, what = counted(len(tensors), "parameter").split()
    return f"{role:<10} {number:>4} {what}, {elements:,} elements, {size}"


_LEAST_SHARE = 0.01  # of a file, below which a part is not shown by itself
_MOST_PARTS = 8
_DEPTH = 2
_WIDTH = 44


def show_sizes(package: Package, reports: Sequence[str]) -> dict[str, Any]:
    """Print the sizes of a package's files and of what is in them, and write reports."""
    from rich.tree import Tree

    from odtpack_simulator.reports.sizes import package_anatomy, write_size_report

    root = package_anatomy(package, package.path / package.manifest_name)
    tree = Tree(_line(root, root.nbytes, 0))
    for part in root.parts:
        _grow(
            tree,
            part.collapsed(int(part.nbytes * _LEAST_SHARE), _MOST_PARTS, _DEPTH),
            root.nbytes,
            1,
        )
    _console.console().print(tree, soft_wrap=True)
    for destination in reports:
        _console.wrote(write_size_report(root, destination))
    return root.as_dict()


def _grow(tree: Tree, part: Piece, total: int, depth: int) -> None:
    branch = tree.add(_line(part, total, depth))
    for inner in part.parts:
        _grow(branch, inner, total, depth + 1)


def _line(part: Piece, total: int, depth: int) -> str:
    """Name, size and share, in columns whatever the depth."""
    name = clean(part.name)
    width = max(0, _WIDTH - 4 * depth)
    share = format_percent(part.nbytes / total)
    return f"{name:<{width}} {format_bytes(part.nbytes):>10} {share:>8}"
