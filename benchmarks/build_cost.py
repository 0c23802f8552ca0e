"""What a build costs: processor time and memory for ten networks, beside the reference's.

    python -m benchmarks.build_cost

The networks have random weights and are exported by PyTorch; docs/benchmarks.md#building says what
is counted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import onnx
from torch import nn

from benchmarks.fidelity import models
from benchmarks.fidelity.models import Case
from benchmarks.published.__main__ import googlenet, mobilenet
from scripts.harness import head, row, scratch
from tests.exported.sequence import Bert, CausalLanguageModel
from tests.exported.vision import InvertedResidual, VisionTransformer, conv_norm
from tests.peer import client


def bottleneck(fan_in: int, width: int, stride: int) -> nn.Module:
    """Narrow, filter, widen, and a shortcut (K. He and others, arXiv 1512.03385)."""
    body = nn.Sequential(
        conv_norm(fan_in, width, 1, nn.ReLU),
        conv_norm(width, width, 3, nn.ReLU, stride=stride),
        conv_norm(width, 4 * width, 1, nn.Identity),
    )
    return models.Residual(body, fan_in, 4 * width, stride)


def resnet50() -> nn.Module:
    """ResNet-50 of the same paper, table 1, with the stride in the 3x3 convolution."""
    layers, fan_in = [conv_norm(3, 64, 7, nn.ReLU, stride=2), nn.MaxPool2d(3, 2, 1)], 64
    for level, depth in enumerate((3, 4, 6, 3)):
        for index in range(depth):
            stride = 2 if level and not index else 1
            layers.append(bottleneck(fan_in, 64 << level, stride))
            fan_in = 256 << level
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


# Of each block the kernel, the channels between, those of its result, 1 with a gate, whether its
# activation is the smooth one, and its stride.
_V3 = [
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2),
    (5, 120, 40, 1, 0, 1), (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1),
    (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1),
    (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1), (5, 960, 160, 1, 1, 1),
]  # fmt: skip


def mobilenet_v3() -> nn.Module:
    """MobileNetV3-Large: A. Howard and others, arXiv 1905.02244, table 1."""
    layers, fan_in = [conv_norm(3, 16, 3, nn.Hardswish, stride=2)], 16
    for size, hidden, fan_out, gated, smooth, stride in _V3:
        block = InvertedResidual(
            fan_in, fan_out, size=size, stride=stride, hidden=hidden,
            activation=nn.Hardswish if smooth else nn.ReLU, gate=nn.Hardsigmoid,
            squeezed=gated * hidden // 4,
        )  # fmt: skip
        layers.append(block)
        fan_in = fan_out
    return nn.Sequential(
        *layers, conv_norm(160, 960, 1, nn.Hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(960, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, 1000),
    )  # fmt: skip


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0: M. Tan and Q. Le, arXiv 1905.11946, table 1."""
    plan = [(1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
            (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3)]  # fmt: skip
    return nn.Sequential(
        conv_norm(3, 32, 3, nn.SiLU, stride=2),
        *models.inverted(plan, 32, nn.SiLU, nn.Sigmoid, squeeze=4),
        conv_norm(320, 1280, 1, nn.SiLU), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(1280, 1000),
    )  # fmt: skip


_vit = partial(VisionTransformer, 20, 192, 12, size=224, patch=16, heads=3, ratio=4)
_case = partial(
    Case, "", inputs={"x": (3, 224, 224)}, batches=(1,),
    ranges={"tokens": 8000, "segments": 2, "mask": 2},
)  # fmt: skip
CASES: Sequence[Case] = (
    _case("MobileNetV2", mobilenet),
    _case("MobileNetV2, training mode", mobilenet, norms=True),
    _case("MobileNetV3-large", mobilenet_v3),
    _case("EfficientNet-B0", efficientnet_b0),
    _case("ResNet-50", resnet50),
    _case("GoogLeNet", googlenet),
    _case("ConvNeXt-tiny", partial(models.convnext, 96, (3, 3, 9, 3))),
    _case("ViT-tiny", _vit),
    _case("BERT, 12 layers", partial(Bert, 8000, 256, 12, 128),
          inputs={"tokens": (128,), "segments": (128,), "mask": (128,)}),
    _case("language model, 12 layers", partial(CausalLanguageModel, 8000, 256, 12, 64, "masked"),
          inputs={"tokens": (64,)}),
)  # fmt: skip


# A process starts with the memory of the one that it is forked from, so that one is small.
_SMALL = """
import os, subprocess, sys
with open("out", "wb") as out:
    process = subprocess.Popen(sys.argv[1:], stdout=out, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
assert not status, sys.argv
print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
"""


def _run(*arguments: str | Path) -> tuple[float, int, str]:
    """Processor time of a command and the child that it waits for, the larger's memory, output."""
    command = [sys.executable, "-c", _SMALL, sys.executable, "-m", "odtpack", *arguments]
    environment = {key: v for key, v in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with scratch() as folder:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=folder
        )
        seconds, peak = done.stdout.split()
        return float(seconds), int(peak), (folder / "out").read_text()


def main() -> None:
    missing = client.peer_available()
    _run("--version")  # which stores the bytecode
    started, held, _ = min(_run("--version") for _ in range(3))
    print(head("network", "nodes:", "model, MB:", "seconds:", "running them:", "memory, MB:",
               "reference, s:", "MB:"))  # fmt: skip
    for case in CASES:
        with scratch() as folder:
            path, proto = folder / "model.onnx", case.model()
            onnx.save(proto, path)
            build = ("build", path, "--loss", "cross_entropy", "--no-self-check", "--json")
            seconds, peak, said = _run(*build, "--out", folder / "plain")
            run = json.loads(said)["check_seconds"]
            reference = [missing or "", ""]
            if missing is None:
                try:
                    found = client.generate(model=path, folder=folder / "reference")
                    reference = [f"{found['cpu_seconds']:.1f}", f"{found['peak_bytes'] / 1e6:.0f}"]
                except client.PeerError as error:
                    reference = [f"fails: {error.kind}", ""]
            nodes = sum(node.op_type != "Constant" for node in proto.graph.node)
            print(row(case.title, nodes, f"{path.stat().st_size / 1e6:.0f}",
                      f"{seconds - started - run:.1f}", f"{run:.1f}", f"{(peak - held) / 1e6:.0f}",
                      *reference), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
