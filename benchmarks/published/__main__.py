"""Count the networks of the published trainings, and simulate their training by profile.

    python -m benchmarks.published [--time] [--networks Lenet ...]

writes ``counts.json`` and, with ``--time``, ``simulated.json``, of which docs/published-phones.md
is made.
"""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.fidelity.models import build
from benchmarks.published.engine import DEVICE, FOLDER, Counts
from benchmarks.published.networks import NETWORKS
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.latency import carry, measure_host
from odtpack_simulator.measure.host import processor_name
from odtpack_simulator.memory.memory_plan import plan_memory
from scripts.harness import keep, options, scratch


def count(name: str) -> Counts:
    """Run one sample through a network, and count what its layers do."""
    case, flops, activations = NETWORKS[name], 0.0, 0.0

    def add(module: nn.Module, _given: object, made: Tensor) -> None:
        nonlocal flops, activations
        activations += 4 * made.numel()
        if isinstance(module, nn.Conv2d | nn.Linear):
            flops += 2 * made.numel() * module.weight[0].numel()

    network = case.module().eval()
    for module in network.modules():
        if not list(module.children()) and not isinstance(module, nn.Identity):
            module.register_forward_hook(add)
    with torch.no_grad():
        network(*(torch.zeros(1, *shape) for shape in case.inputs.values()))
    return Counts(flops, activations, 4.0 * sum(p.numel() for p in network.parameters()))


def simulate(name: str) -> dict[str, Any]:
    """Time a network here at every batch size, carry it to the device, and plan its memory."""
    case, profile = NETWORKS[name], load_profile(DEVICE)
    built, steps = build(case), dict[int, dict[str, float] | None]()
    for batch_size in case.batches:
        with scratch() as folder:
            host = measure_host(built.job(folder, batch_size, task="time"))
        found = carry(host, profile).step_ms
        steps[batch_size] = found.model_dump(mode="json") if found else None
        print(name, batch_size, f"here {host.median_ms:.1f} ms", found or host.steady.busy)
    peaks = {size: plan_memory(built.package, built.shapes(size)).peak.nbytes for size in (1, 16)}
    where = f"{processor_name() or platform.machine()}, ONNX Runtime {onnxruntime.__version__}"
    return {"host": where, "step_ms": steps, "peak_bytes": peaks}


def main() -> None:
    given = options(__doc__, networks=list(NETWORKS), time=False)
    counts = {name: dataclasses.asdict(count(name)) for name in given.networks}
    keep(FOLDER / "counts.json", counts)
    for name in given.networks if given.time else ():
        keep(FOLDER / "simulated.json", {name: simulate(name)})


if __name__ == "__main__":
    main()
