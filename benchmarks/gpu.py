"""Training on a GPU beside the processor: the same gradients, and the time of a step.

    python -m benchmarks.gpu build FOLDER [--small]     builds the packages; needs odtpack
    python -m benchmarks.gpu run FOLDER                 needs numpy, onnxruntime and its plug-in
    python -m benchmarks.gpu copies FOLDER --software   writes the table of docs/guides/gpu.md

First gradients are held against the processor's and those in float64, then five steps of AdamW and
of SGD, and a batch with a NaN must change nothing: where one fails, the exit code is 1. A time is
the median of all steps, in turns; PyTorch's takes torch with CUDA, and onnx. `--small` builds
shapes for an adapter in software, and `--software` runs on Chromium's Vulkan driver.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer, Package
from odtpack_runtime import default_session_options as session_options
from odtpack_runtime.session.device import Device
from odtpack_runtime.training.loop import loss_of
from scripts.harness import DOCS, filled, in_turns, options, scratch, table

BAR = 1e-5
"""Of each gradient's largest element, or twice what the processor is off from float64."""
NOISE = 1e-6
"""Of the largest of all: a gradient that is zero but for rounding has no digits to compare."""
STEPS = 5
SETTLED = 0.1
"""Of a parameter's largest gradient: AdamW divides each element by its own size, and makes a whole
step of one that is only rounding."""
LARGE_RATE = 1000.0  # at which the rounding of parameters does not show in a step of SGD
EXACT = "float64.npz"
TARGETS = ("onnxruntime", "webgpu", "webgpu-sgd")
LORA = {"loss": "next_token", "adapter": "lora", "adapter_on": ("*proj*",), "base": "int4"}
Batch = Sequence[np.ndarray]


def networks(small: bool) -> dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[int, int]]]:
    """What makes the model of each network, its arguments, and batch sizes."""
    from benchmarks.decoder.model import SHAPES, Shape, write_model
    from benchmarks.workloads import vit_tiny
    from tests import zoo

    tiny = {"vocab": 50, "d": 32, "layers": 2, "heads": 4, "T": 16, "ff": 64}
    fold, train, quarter = {"batch_norm": "fold"}, {"batch_norm": "train"}, {"width_mult": 0.25}
    vit = {"size": 32, "d": 48, "depth": 2, "patch": 8}
    decoder = Shape("tiny", 2, 64, 4, 2, 96, 200) if small else SHAPES["small"]
    return {
        "mlp": (zoo.mlp, {"sizes": (16, 24, 10)} if small else {}, (64, 1024)),
        "big-mlp": (zoo.mlp, {"sizes": (64, 96, 10) if small else (4096, 4096, 1000)}, (1, 256)),
        "cnn": (zoo.cnn, {"size": 8, "width": (4, 8)} if small else {"hidden": 128}, (32, 256)),
        "mobilenet": (zoo.mobilenet_v2, fold | (quarter | {"size": 32} if small else {}), (8, 64)),
        "mobilenet-bn": (
            zoo.mobilenet_v2, train | (quarter | {"size": 64} if small else {}), (8, 64),
        ),
        "vit": (vit_tiny, {"opset": 17} | (vit if small else {}), (8, 64)),
        "transformer": (zoo.transformer_encoder, tiny if small else {}, (8, 64)),
        "decoder": (write_model, {"shape": decoder}, (1, 8)),
    }  # fmt: skip


def build(
    folder: Path, small: bool, names: Sequence[str], targets: Sequence[str] = TARGETS
) -> None:
    from odtpack.build import build_package

    for name, (make, arguments, sizes) in networks(small).items():
        if names and name not in names:
            continue
        with scratch() as place:
            where = {"folder": place} if name == "decoder" else {}
            model = make(**arguments, **where)
            settings = LORA if name == "decoder" else {"loss": "cross_entropy"}
            for target in targets:
                runtime, _, optimizer = target.partition("-")
                build_package(
                    model, folder / name / target, runtime=runtime, step_model="always",
                    optimizer=optimizer or "adamw", **settings,
                )  # fmt: skip
        found = {"batches": (min(sizes[0], 4),) if small else sizes, "other": 8 if small else 128}
        (folder / name / "sizes.json").write_text(json.dumps(found))
        if TARGETS[0] in targets:
            batch = first_batch(folder / name)
            np.savez(folder / name / EXACT, **in_float64(folder / name / TARGETS[0], batch))
        print(name, "built", flush=True)


def in_float64(folder: Path, batch: Batch) -> dict[str, np.ndarray]:
    """Gradients of a batch by name, which PyTorch computes from the training model."""
    import onnx

    from tests.onnx_torch import Interpreter

    package = Package.open(folder)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    end, trained = "_grad.accumulation", [n for n, p in state.parameters if p.requires_grad]
    names = [each.name for each in package.manifest.inputs]
    values = Interpreter(onnx.load(package.training_model))(
        dict(zip(names, batch, strict=True))
        | {name: each.data for name, each in state.parameters}
        | {f"{name}{end}.buffer": np.zeros_like(state.parameters[name].data) for name in trained}
        | {"lazy_reset_grad": np.ones(1, np.bool_)}
    )
    found = {name: values[f"{name}{end}.out"] for name in trained}
    return {name: each.detach().numpy() for name, each in found.items() if each is not None}


def batch_of(package: Package, size: int, other: int) -> Batch:
    """Numbers of the shapes that a package takes; `other` is for open axes but the first."""
    random = np.random.default_rng(0)
    arrays = []
    for item in package.manifest.inputs:
        open_sizes = [size] + [other] * len(item.shape)
        shape = [d if isinstance(d, int) else open_sizes[i] for i, d in enumerate(item.shape)]
        if np.dtype(item.dtype).kind == "f":
            arrays.append(random.standard_normal(shape).astype(item.dtype))
        else:
            arrays.append(random.integers(0, item.class_count or 50, shape, item.dtype))
    return arrays


class Subject:
    """A package on a device."""

    def __init__(
        self, folder: Path, device: str, threads: int = 1, *, step_model: bool = True
    ) -> None:
        self.package = package = Package.open(folder)
        self.state = CheckpointState.load_checkpoint(package.checkpoint)
        self.module = Module(
            package.training_model, self.state, package.eval_model, device=device,
            session_options=session_options(package.training_model, threads),
            step_model_uri=package.step_model if step_model else None,
        )  # fmt: skip
        self.optimizer = Optimizer(package.optimizer_model, self.module)
        self.step = self.optimizer.step_on

    def gradients(self, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
        """Loss and gradients of a batch."""
        loss = self.module(*batch)
        trained = [(name, each) for name, each in self.state.parameters if each.requires_grad]
        found = {name: each.grad.copy() for name, each in trained}
        self.module.lazy_reset_grad()
        return loss_of(loss), found

    def trained(self) -> np.ndarray:
        """A copy of the trained parameters."""
        return self.module.get_contiguous_parameters(True).numpy().copy()


def first_batch(folder: Path) -> Batch:
    """The batch whose gradients are known in float64."""
    sizes = json.loads((folder / "sizes.json").read_text())
    return batch_of(Package.open(folder / "onnxruntime"), sizes["batches"][0], sizes["other"])


def distance(one: np.ndarray, other: np.ndarray | float = 0.0) -> float:
    """The largest difference, or the largest element."""
    return float(np.abs(np.subtract(one, other, dtype=np.float64)).max(initial=0))


def steps(folder: Path, device: str, batch: Batch, gradients: Mapping[str, np.ndarray]) -> float:
    """Compare whole steps with the processor's: the largest relative difference after them.

    Of losses and of parameters, each by its largest element, where their gradients are large.
    """
    here, there = (Subject(folder, each) for each in ("cpu", device))
    # Training-mode batch normalization amplifies any difference from step to step.
    normed = any(parameter.role == "state" for parameter in here.package.manifest.parameters)
    count = 1 if normed else STEPS
    losses = [[loss_of(each.step(*batch)) for each in (here, there)] for _ in range(count)]
    worst = max(abs(found / right - 1) for right, found in losses)
    for name, gradient in gradients.items():
        right, found = (each.state.parameters[name].data for each in (here, there))
        worst = max(worst, settled(right, found, gradient))
    return worst


def settled(right: np.ndarray, found: np.ndarray, gradient: np.ndarray) -> float:
    """How far a parameter is off, of its largest element, where its gradient is large."""
    chosen = np.abs(gradient) > SETTLED * distance(gradient)
    return distance(right[chosen], found[chosen]) / (distance(right) or 1.0)


def is_known(gradient: np.ndarray, exact: np.ndarray) -> bool:
    """Whether the processor's gradient is more than rounding."""
    return distance(gradient, exact) <= 1e-2 * distance(exact)


def compared(
    expected: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    exact: Mapping[str, np.ndarray],
) -> tuple[dict[str, float], list[str]]:
    """How far gradients are off, of each one's largest element, and the names of wrong ones."""
    largest = max(map(distance, expected.values()))
    off, bad = {}, []
    for name, gradient in expected.items():
        off[name] = distance(gradient, found[name]) / (distance(gradient) or 1)
        allowed = 2 * distance(gradient, exact[name]) + NOISE * largest
        if off[name] > BAR and distance(found[name], exact[name]) > allowed:
            bad.append(name)
    return off, bad


def check(folder: Path, device: str, batch: Batch, *, thorough: bool = True) -> dict[str, Any]:
    """Compare gradients with the processor's, and, if `thorough`, steps, also not finite ones."""
    right, wrong = (Subject(folder, each, step_model=False) for each in ("cpu", device))
    expected, found = right.gradients(batch), wrong.gradients(batch)
    exact = np.load(folder.parent / EXACT)
    off, bad_gradients = compared(expected[1], found[1], exact)
    worst = max(off, key=lambda name: off[name])
    known = {n: g for n, g in expected[1].items() if is_known(g, exact[n])}
    stepped = {
        name: steps(each, device, batch, known)
        for name, each in (("adamw", folder), ("sgd", folder.with_name("webgpu-sgd")))
        if thorough
    }
    bad = [np.full_like(a, np.nan) if a.dtype.kind == "f" else a for a in batch]
    undone, floats = True, any(a.dtype.kind == "f" for a in batch)
    for step_model in (False, True) if thorough and floats else ():
        subject = Subject(folder, device, step_model=step_model)
        before = subject.trained()
        moved, after = ((subject.step(*each), subject.trained())[1] for each in (batch, bad))
        # A step model keeps what has a bad gradient, and updates the rest.
        undone &= not np.array_equal(before, moved) and bool(np.isfinite(after).all())
        undone &= step_model or np.array_equal(moved, after)
        undone &= subject.module.skipped_steps == 1
    return {
        "loss": [expected[0], found[0]], "gradient": worst, "off": off[worst],
        "nan_changes_nothing": bool(undone), "bad_gradients": bad_gradients, "steps": stepped,
        "passed": bool(undone) and not bad_gradients and max(stepped.values(), default=0) <= BAR,
    }  # fmt: skip


def card() -> list[str]:
    """What is known of the devices."""
    found = []
    for each in onnxruntime.get_ep_devices():
        if each.ep_name != "CPUExecutionProvider":
            known = {**each.device.metadata, **each.ep_metadata}
            known.pop("library_path", None)
            found.append(f"{each.ep_name}: {each.device.type.name}, {each.device.vendor}, {known}")
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        found += done.stdout.splitlines()
    return found


def in_torch(name: str) -> Callable[..., float]:
    """A step of the same network in PyTorch on CUDA, in float32 without TF32: its time alone."""
    import torch

    from benchmarks.worker import torch_step
    from tests.exported.vision import VisionTransformer
    from tests.torch_twins import twin

    if name == "decoder" or not torch.cuda.is_available():
        raise ImportError("it is not written in PyTorch, or that has no CUDA here")
    if name == "vit":
        model = VisionTransformer(20, 192, 12, size=96, patch=16, heads=3, ratio=4)
    else:
        make, arguments, _ = networks(small=False)[name]
        model = twin(make(**arguments))
    step = torch_step(model.cuda().train(), "adamw")
    return lambda *batch: step(*(torch.from_numpy(each).cuda() for each in batch))


def turn(step: Callable[..., object], batch: Batch, seconds: float) -> list[float]:
    """The milliseconds of each step of some time, of one at least."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        step(*batch)
        times.append(1000 * (time.perf_counter() - start))
    return times


def timed(
    folder: Path, devices: Sequence[str], batch: Batch, given: argparse.Namespace
) -> dict[str, float]:
    """The median time of a step on everything that makes one, in milliseconds."""
    plain, forms, cores = folder / "onnxruntime", folder / "webgpu", os.cpu_count() or 1
    subjects = {
        "processor, 1 thread": (plain, "cpu", 1),
        f"processor, {cores} threads": (plain, "cpu", cores),
        "processor, forms for webgpu, 1 thread": (forms, "cpu", 1),
        **{each: (forms if "webgpu" in each else plain, each, 1) for each in devices},
        "PyTorch CUDA": None,
    }
    steps: dict[str, Callable[..., object]] = {}
    with contextlib.ExitStack() as opened:
        for name, where in subjects.items():
            try:
                if where is None:
                    step: Callable[..., object] = in_torch(folder.name)
                else:
                    subject = Subject(*where)
                    opened.callback(subject.module.close)
                    step = subject.step
                turn(step, batch, 0)  # the first step compiles
                turn(step, batch, given.seconds)
                steps[name] = step
            except ImportError:
                pass  # PyTorch is not there
            except (OdtpackError, MemoryError) as error:
                print(f"{folder.name} {len(batch[0])} {name}: {error}", flush=True)
        ways = {name: partial(turn, step, batch, given.seconds) for name, step in steps.items()}
        times = in_turns(given.rounds, ways)
    return {name: statistics.median(chain(*each)) for name, each in times.items()}


COPIES = ("MemcpyToHost", "MemcpyFromHost")
GUIDE = DOCS / "guides" / "gpu.md"


def copies(folder: Path) -> int:
    """Write the guide's table of copies inside one training step, and of nodes on the processor."""
    rows = []
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        counts = [_copies(Package.open(each / target)) for target in TARGETS[:2]]
        rows.append((each.name, *(count[i] for i in range(3) for count in counts)))
    before = ("to the processor before", "from it before", "on it before")
    titles = ("network", *(title for each in before for title in (each, "with the target")))
    write_table("copies", table(titles, rows))
    return 0


def write_table(name: str, text: str) -> None:
    GUIDE.write_text(filled(GUIDE, {name: text}), "utf-8")
    print(text)


def _copies(package: Package) -> list[int]:
    """Copies to the processor and from it, and the nodes there."""
    import onnx

    with scratch() as place:
        options = session_options(package.training_model, 1)
        options.optimized_model_filepath = str(place / "model.onnx")
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        session = Device("webgpu").session(str(package.training_model), options)
        model = onnx.load(options.optimized_model_filepath, load_external_data=False)
    made = [node.op_type for node in model.graph.node]
    parts = session.get_provider_graph_assignment_info()
    here = sum(len(e.get_nodes()) for e in parts if e.ep_name == "CPUExecutionProvider")
    return [*(made.count(name) for name in COPIES), here]


def run(given: argparse.Namespace) -> int:
    onnxruntime.set_default_logger_severity(3)
    devices, passed = list(given.devices), True
    for folder in sorted(path for path in given.folder.iterdir() if path.is_dir()):
        if given.networks and folder.name not in given.networks:
            continue
        for device in list(devices):
            own = folder / ("webgpu" if device.startswith("webgpu") else "onnxruntime")
            try:
                result = check(own, device, first_batch(folder))
            except OdtpackError as error:
                result = {"error": str(error), "passed": error.code == "unsupported-device"}
                if result["passed"]:
                    devices.remove(device)
            passed &= result["passed"]
            print(f"{folder.name} {device}: {json.dumps(result)}", flush=True)
        sizes = json.loads((folder / "sizes.json").read_text())
        for size in sizes["batches"] if not given.check_only else ():
            batch = batch_of(Package.open(folder / "onnxruntime"), size, sizes["other"])
            times = timed(folder, devices, batch, given)
            shown = "; ".join(f"{name} {value:.2f} ms" for name, value in times.items())
            print(f"{folder.name}, batch {size}: {shown}", flush=True)
    print(*card(), sep="\n")
    return int(not passed)


def main() -> int:
    given = options(
        __doc__, "task", "folder", task=("build", "run", "copies"), folder=Path, small=False,
        networks=[str], devices=["webgpu", "cuda"], check_only=False, software=False, rounds=5,
        seconds=0.5,
    )  # fmt: skip
    if given.task == "build":
        build(given.folder, given.small, given.networks)
        return 0
    if given.software:
        from tests.software_gpu import reason_without

        if reason := reason_without():
            print(reason)
            return 1
    return copies(given.folder) if given.task == "copies" else run(given)


if __name__ == "__main__":
    sys.exit(main())
