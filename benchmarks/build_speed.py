"""Time and memory of a build: against the reference, by number of nodes, and by size of the model.

    python -m benchmarks.build_speed
    python -m benchmarks.build_speed --quick

Each figure is from a fresh process, imports and process start apart; ours and the reference's in
turns. Models are narrow transformers of opset 14, which the reference can differentiate; their
nodes are counted without constants. The memory row is a wide one: the highest resident set above
that before the build, over the size of the model's file. That set also counts the pages of the
file itself that are mapped into memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table

from benchmarks.processes import measure
from tests import zoo
from tests.peer import client

COMPARED = 10  # layers: 494 nodes
LAYERS = (10, 20, 50, 100, 204)


def write_model(layers: int, folder: Path) -> tuple[Path, int]:
    """Write a transformer of so many layers; return its file and its number of nodes."""
    model = zoo.transformer_encoder(d=64, layers=layers, heads=4, T=32, ff=128, vocab=200, opset=14)
    path = folder / f"{layers}.onnx"
    onnx.save(model, path)
    return path, sum(node.op_type != "Constant" for node in model.graph.node)


def build(path: Path) -> dict[str, float]:
    """Build a package of the model in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return measure("build", malloc="default", model=path, folder=Path(folder, "package"))


def build_with_reference(path: Path) -> float:
    """Seconds that the reference takes for its artifacts."""
    with tempfile.TemporaryDirectory() as folder:
        return float(client.generate(model=path, folder=Path(folder, "artifacts"))["seconds"])


def compare(console: Console, folder: Path, rounds: int) -> None:
    """Print our time beside the reference's for the same model."""
    missing = client.peer_available()
    if missing:
        console.print(f"not compared with the reference: {missing}")
        return
    path, nodes = write_model(COMPARED, folder)
    ours, reference = [], []
    for _ in range(rounds):
        ours.append(build(path)["seconds"])
        reference.append(build_with_reference(path))
    ratios = [a / b for a, b in zip(ours, reference, strict=True)]
    console.print(
        f"{nodes} nodes: {statistics.median(ours):.2f} s, reference "
        f"{statistics.median(reference):.2f} s, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) over {rounds} rounds"
    )


def cache_key_seconds(model: Path, folder: Path) -> float:
    """Processor time of ``odtpack cache-key``, process start and imports with it."""
    (folder / "recipe.toml").write_text(
        f'model = "{model.name}"\npackage = "package"\n[loss]\nkind = "cross_entropy"\n'
    )
    command = [sys.executable, "-m", "odtpack", "cache-key", "--recipe", folder / "recipe.toml"]
    before = os.times()
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    quick = parser.parse_args().quick
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        compare(console, folder, rounds=1 if quick else 5)
        table = Table("nodes", "seconds", "ms per node")
        for layers in LAYERS[:2] if quick else LAYERS:
            path, nodes = write_model(layers, folder)
            seconds = statistics.median(build(path)["seconds"] for _ in range(1 if quick else 3))
            table.add_row(str(nodes), f"{seconds:.2f}", f"{seconds / nodes * 1e3:.2f}")
        console.print(table)
        small, _ = write_model(2, folder)
        seconds = min(cache_key_seconds(small, folder) for _ in range(3))
        console.print(f"cache-key: {seconds:.2f} s of the processor")
        wide = folder / "wide.onnx"
        onnx.save(zoo.transformer_encoder(d=512, layers=6, heads=8, ff=2048, vocab=20000), wide)
        size = wide.stat().st_size
        peak = build(wide)["peak_bytes"]
        console.print(
            f"model of {size / 1e6:.0f} MB: peak {peak / 1e6:.0f} MB, {peak / size:.2f} times"
        )


if __name__ == "__main__":
    main()
