"""Count the networks of the published trainings, and simulate their training by profile.

    python -m benchmarks.published [--time] [--networks Lenet ...]

The networks are as the engine's own sources build them, in ``tools/train/source/models`` of
UbiquitousLearning/Benchmark-On-Device-Training@752659f. They differ from the papers of the same
names. Their dropouts are left out.

Writes ``counts.json`` and, with ``--time``, ``simulated.json``. docs/published-phones.md is made of
them.
"""

import dataclasses
import platform
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.fidelity.models import Case, build, inverted
from benchmarks.published.engine import DEVICE, FOLDER, Counts
from odtpack.optimizers import SGD
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.latency import carry, measure_host
from odtpack_simulator.measure.host import processor_name
from odtpack_simulator.memory.memory_plan import plan_memory
from scripts.harness import keep, options, scratch
from tests.exported.vision import conv_norm


def _conv(fan_in: int, fan_out: int, size: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, size, stride, padding)


def lenet() -> nn.Module:
    """``Lenet.cpp``: maxima, and one rectifier."""
    return nn.Sequential(
        _conv(1, 20, 5), nn.MaxPool2d(2), _conv(20, 50, 5), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 400), nn.ReLU(), nn.Linear(400, 10),
    )  # fmt: skip


def alexnet() -> nn.Module:
    """``Alexnet.cpp``: one wide layer instead of two."""
    return nn.Sequential(
        _conv(3, 96, 11, 4), nn.ReLU(), nn.MaxPool2d(3, 2),
        _conv(96, 256, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        _conv(256, 384, 3, 1, 1), nn.ReLU(), _conv(384, 384, 3, 1, 1), nn.ReLU(),
        _conv(384, 256, 3, 1, 1), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(6400, 4096), nn.ReLU(), nn.Linear(4096, 10),
    )  # fmt: skip


class Beside(nn.ModuleList):
    """Branches side by side."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def fire(fan_in: int, squeeze: int, expand: int) -> nn.Module:
    """Squeeze, and expand in two sizes."""
    both = Beside([_conv(squeeze, expand, 1), _conv(squeeze, expand, 3, 1, 1)])
    return nn.Sequential(_conv(fan_in, squeeze, 1), both)


def squeezenet() -> nn.Module:
    """``SqueezeNet.cpp``: no rectifiers."""
    return nn.Sequential(
        _conv(3, 96, 7, 2, 3), nn.MaxPool2d(3, 2, ceil_mode=True), fire(96, 16, 64),
        fire(128, 16, 64), fire(128, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(256, 32, 128), fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256),
        nn.MaxPool2d(3, 2, ceil_mode=True), fire(512, 64, 256), _conv(512, 10, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def inception(
    fan_in: int, one: int, less: int, three: int, least: int, five: int, pooled: int
) -> nn.Module:
    """Four branches side by side."""
    return Beside([
        _conv(fan_in, one, 1),
        nn.Sequential(_conv(fan_in, less, 1), _conv(less, three, 3, 1, 1)),
        nn.Sequential(_conv(fan_in, least, 1), _conv(least, five, 5, 1, 2)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(fan_in, pooled, 1)),
    ])  # fmt: skip


def googlenet() -> nn.Module:
    """``GoogLeNet.cpp``: no rectifiers and no auxiliary classifiers."""
    return nn.Sequential(
        _conv(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, ceil_mode=True), _conv(64, 192, 3, 1, 1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        inception(192, 64, 96, 128, 16, 32, 32), inception(256, 128, 128, 192, 32, 96, 64),
        nn.MaxPool2d(3, 2, ceil_mode=True), inception(480, 192, 96, 208, 16, 48, 64),
        inception(512, 160, 112, 224, 24, 64, 64), inception(512, 128, 128, 256, 24, 64, 64),
        inception(512, 112, 144, 288, 32, 64, 64), inception(528, 256, 160, 320, 32, 128, 128),
        nn.MaxPool2d(3, 2, ceil_mode=True), inception(832, 256, 160, 320, 32, 128, 128),
        inception(832, 384, 192, 384, 48, 128, 128), nn.AdaptiveAvgPool2d(1),
        _conv(1024, 10, 1), nn.Flatten(),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    """``MobilenetV2.cpp``, as in arXiv 1801.04381, table 2."""
    plan = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
            (6, 160, 3, 2), (6, 320, 1, 1)]  # fmt: skip
    return nn.Sequential(
        conv_norm(3, 32, 3, nn.ReLU6, stride=2), *inverted(plan, 32),
        conv_norm(320, 1280, 1, nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(1280, 1001),
    )  # fmt: skip


_IMAGE = {"x": (3, 224, 224)}
_ALL = (
    ("Lenet", lenet, {"x": (1, 28, 28)}),
    ("Squeezenet", squeezenet, _IMAGE),
    ("GoogLenet", googlenet, _IMAGE),
    ("Alexnet", alexnet, _IMAGE),
    ("Mobilenet", mobilenet, _IMAGE),
)
NETWORKS = {
    name: Case(
        f"published-{name.lower()}", name, module, inputs, (1, 2, 4, 8, 16),
        optimizer=SGD(momentum=0.9), norms=name == "Mobilenet",
    )
    for name, module, inputs in _ALL
}  # fmt: skip
"""By their names in ``training.csv``."""


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
