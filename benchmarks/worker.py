"""Measures one training run or one forward pass, by :mod:`benchmarks.apart` in a fresh process.

The counterpart for the reference is ``tests/peer/peer_worker.py``; both take time and memory alike.
``inputs`` is an ``.npz`` with one batch. The inputs, the interpreter and the libraries are in
memory before the count begins.
"""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime import CheckpointState, Module, Optimizer, default_session_options
from odtpack_runtime.session.native import ENTRY
from odtpack_simulator.memory.process_memory import memory_status
from scripts.harness import scratch

RATE = 1e-4


def _settings(training: Path, threads: int) -> onnxruntime.SessionOptions:
    """The session options of a package whose training model is at a path."""
    settings = default_session_options(training, threads)
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    return settings


def open_training(
    folder: Path, threads: int = 1, *, step_model: bool = True, native: bool = True
) -> tuple[Module, Optimizer]:
    """A package for training, with the kernels that it is built for or without."""
    training, step = folder / "training_model.onnx", folder / "step_model.onnx"
    settings = _settings(training, threads)
    if not native:
        settings.add_session_config_entry(ENTRY, "0")
    module = Module(
        training, CheckpointState.load_checkpoint(folder / "checkpoint"),
        session_options=settings, step_model_uri=step if step_model and step.is_file() else None,
    )  # fmt: skip
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    return module, optimizer


def train(
    *, folder: str, inputs: str, steps: int, warm_up: int, threads: int, step_model: bool
) -> dict[str, Any]:
    """Time training steps and take the peak of the resident set.

    A step is the step model, or where the package in ``folder`` has none (or without
    ``step_model``) the training model, the optimizer and ``lazy_reset_grad``.
    """
    feeds = dict(np.load(inputs))
    by_step_model = step_model and Path(folder, "step_model.onnx").is_file()
    before = _start_count()
    module, optimizer = open_training(Path(folder), threads, step_model=by_step_model)
    batch = [feeds[name] for name in module.input_names()]

    def step() -> None:
        if by_step_model:
            float(optimizer.step_on(*batch))
            return
        float(module(*batch))
        optimizer.step()
        module.lazy_reset_grad()

    return _measured(step, steps, warm_up, before)


def pytorch(
    *, model: str, inputs: str, optimizer: str, steps: int, warm_up: int, threads: int
) -> dict[str, Any]:
    """The same with PyTorch, for the twin of a zoo model with its weights, channels last.

    With AdamW a step of MobileNetV2 then takes 0.6 of the time of PyTorch's default layout.
    """
    import onnx
    import torch

    from tests.torch_twins import twin

    feeds = {name: torch.from_numpy(array) for name, array in np.load(inputs).items()}
    torch.set_num_threads(threads)
    before = _start_count()
    last = torch.channels_last
    module = twin(onnx.load(model)).train().to(memory_format=last)
    step = torch_step(module, optimizer, RATE)
    batch = (feeds["input"].to(memory_format=last), feeds["labels"])
    return _measured(lambda: step(*batch), steps, warm_up, before)


def torch_step(module: Any, optimizer: str, rate: float = 1e-3) -> Callable[..., float]:
    """What makes a step of a module in PyTorch on a batch and its labels, and returns the loss."""
    import torch

    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    chosen = kinds[optimizer](module.parameters(), lr=rate)

    def step(x: Any, labels: Any) -> float:
        loss = torch.nn.functional.cross_entropy(module(x), labels)
        loss.backward()
        found = float(loss)
        chosen.step()
        chosen.zero_grad()
        return found

    return step


def profile(
    *, folder: str, inputs: str, steps: int, warm_up: int, optimized: str
) -> list[list[dict[str, Any]]]:
    """Events of the training and of the optimizer model on one thread, warming up included.

    Writes the training model as ONNX Runtime executes it to ``optimized``.
    """
    feeds, root = dict(np.load(inputs)), Path(folder)
    settings = _settings(root / "training_model.onnx", 1)
    settings.enable_profiling = True
    settings.optimized_model_filepath = optimized
    with scratch() as profiles:
        settings.profile_file_prefix = f"{profiles}/training"
        state = CheckpointState.load_checkpoint(root / "checkpoint")
        module = Module(root / "training_model.onnx", state, session_options=settings)
        settings.profile_file_prefix = f"{profiles}/optimizer"
        settings.optimized_model_filepath = ""
        optimizer = Optimizer(root / "optimizer_model.onnx", module)
        batch = [feeds[name] for name in module.input_names()]
        for _ in range(warm_up + steps):
            module(*batch)
            optimizer.step()
            module.lazy_reset_grad()
        del optimizer, module  # a profile is written when its session ends
        gc.collect()
        written = (next(profiles.glob(f"{name}*.json")) for name in ("training", "optimizer"))
        return [json.loads(path.read_text()) for path in written]


def forward(*, model: str, inputs: str, steps: int, warm_up: int, threads: int) -> list[float]:
    """Milliseconds of each pass of the forward model, weights inside it."""
    feeds = dict(np.load(inputs))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    given = {node.name: feeds[node.name] for node in session.get_inputs()}
    return _times(lambda: session.run(None, given), steps, warm_up)


def _times(run: Callable[[], object], steps: int, warm_up: int) -> list[float]:
    times = []
    for _ in range(warm_up + steps):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return times[warm_up:]


def _start_count() -> int:
    """Set the kernel's high-water mark back (clear_refs in proc(5)); return the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_status()["VmRSS"]


def _measured(step: Callable[[], object], steps: int, warm_up: int, before: int) -> dict[str, Any]:
    times = _times(step, steps, warm_up)
    return {"step_ms": times, "peak_bytes": memory_status()["VmHWM"] - before}
