"""Measures one training run or one forward pass, in a process of its own.

    python -m benchmarks.worker JOB.json

``JOB.json`` holds the keyword arguments of one of the functions in ``COMMANDS`` below,
``command`` to choose between them, and ``result``, the file to write the answer to, as JSON. The
counterpart for the reference is ``tests/peer/peer_worker.py``; both take time and memory alike.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from odtpack_runtime import CheckpointState, Module, Optimizer, default_session_options


def train(
    *,
    folder: str,
    inputs: str,
    steps: int,
    warm_up: int,
    learning_rate: float = 1e-4,
    threads: int = 1,
    step_model: bool = True,
) -> dict[str, Any]:
    """Time training steps and take the peak of the resident set.

    The inputs, the interpreter and the libraries are in memory before the count begins. A step
    is the step model, or where the package in ``folder`` has none (or without ``step_model``) the
    training model, the optimizer and ``lazy_reset_grad``. ``inputs`` is an ``.npz`` with one batch.

    Returns:
        ``train_ms`` and ``optimizer_ms``, a figure per timed step, the second 0 with a step model;
        ``peak_bytes``: the highest resident set above that before the model was loaded; ``losses``.
    """
    feeds = _load(inputs)
    root = Path(folder)
    settings = default_session_options(root / "training_model.onnx", threads)
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    before = _start_count()

    state = CheckpointState.load_checkpoint(root / "checkpoint")
    whole = root / "step_model.onnx"
    if not (step_model and whole.is_file()):
        whole = None
    module = Module(
        root / "training_model.onnx", state, session_options=settings, step_model_uri=whole
    )
    optimizer = Optimizer(root / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(learning_rate)
    batch = [feeds[name] for name in module.input_names()]
    if whole is not None:
        return _timed_steps(
            lambda: float(optimizer.step_on(*batch)), lambda: None, steps, warm_up, before
        )

    def update() -> None:
        optimizer.step()
        module.lazy_reset_grad()

    return _timed_steps(lambda: float(module(*batch)), update, steps, warm_up, before)


def pytorch(
    *,
    model: str,
    inputs: str,
    optimizer: str,
    steps: int,
    warm_up: int,
    threads: int = 1,
    learning_rate: float = 1e-4,
) -> dict[str, Any]:
    """The same with PyTorch, for the twin of a zoo model with its weights, channels last.

    With AdamW a step of MobileNetV2 then takes 0.6 of the time of PyTorch's default layout.
    """
    import onnx
    import torch

    from tests.torch_twins import twin

    feeds = {name: torch.from_numpy(array) for name, array in _load(inputs).items()}
    torch.set_num_threads(threads)
    before = _start_count()

    last = torch.channels_last
    module = twin(onnx.load(model)).train().to(memory_format=last)
    images = feeds["input"].to(memory_format=last)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    chosen = kinds[optimizer](module.parameters(), lr=learning_rate)

    def train() -> float:
        loss = torch.nn.functional.cross_entropy(module(images), feeds["labels"])
        loss.backward()
        return float(loss)

    def update() -> None:
        chosen.step()
        chosen.zero_grad()

    return _timed_steps(train, update, steps, warm_up, before)


def _timed_steps(
    train: Callable[[], float], update: Callable[[], None], steps: int, warm_up: int, before: int
) -> dict[str, Any]:
    losses, train_ms, optimizer_ms = [], [], []
    for _ in range(warm_up + steps):
        started = time.perf_counter()
        loss = train()
        trained = time.perf_counter()
        update()
        ended = time.perf_counter()
        losses.append(loss)
        train_ms.append((trained - started) * 1e3)
        optimizer_ms.append((ended - trained) * 1e3)
    return {
        "train_ms": train_ms[warm_up:],
        "optimizer_ms": optimizer_ms[warm_up:],
        "losses": losses,
        "peak_bytes": status_bytes("VmHWM") - before,
    }


def profile(
    *, folder: str, inputs: str, steps: int, warm_up: int, optimized: str
) -> dict[str, Any]:
    """ONNX Runtime's profiles of training steps on one thread, those to warm up included.

    Writes the training model as ONNX Runtime executes it to ``optimized``, and returns ``events``:
    for the training and the optimizer model the events of its profile.
    """
    feeds = _load(inputs)
    root = Path(folder)
    settings = default_session_options(root / "training_model.onnx", 1)
    settings.log_severity_level = 3
    settings.enable_profiling = True
    settings.optimized_model_filepath = optimized
    with tempfile.TemporaryDirectory() as scratch:
        settings.profile_file_prefix = f"{scratch}/training"
        state = CheckpointState.load_checkpoint(root / "checkpoint")
        module = Module(root / "training_model.onnx", state, session_options=settings)
        settings.profile_file_prefix = f"{scratch}/optimizer"
        settings.optimized_model_filepath = ""
        optimizer = Optimizer(root / "optimizer_model.onnx", module)
        batch = [feeds[name] for name in module.input_names()]
        for _ in range(warm_up + steps):
            module(*batch)
            optimizer.step()
            module.lazy_reset_grad()
        del optimizer, module  # a profile is written when its session ends
        gc.collect()
        events = {
            name: json.loads(next(Path(scratch).glob(f"{name}*.json")).read_text())
            for name in ("training", "optimizer")
        }
    return {"events": events}


def forward(
    *, model: str, inputs: str, steps: int, warm_up: int, threads: int = 1
) -> dict[str, Any]:
    """Time the forward model, weights inside it: ``forward_ms``, one per pass."""
    feeds = _load(inputs)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    given = {node.name: feeds[node.name] for node in session.get_inputs()}
    times = []
    for _ in range(warm_up + steps):
        started = time.perf_counter()
        session.run(None, given)
        times.append((time.perf_counter() - started) * 1e3)
    return {"forward_ms": times[warm_up:]}


def _load(path: str) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _start_count() -> int:
    """Set the kernel's high-water mark back (clear_refs in proc(5)); return the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    """A size in /proc/self/status."""
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(kib) * 1024


COMMANDS = {each.__name__: each for each in (train, pytorch, profile, forward)}


def main(path: str) -> None:
    """Do the job in the file and write its result."""
    job = json.loads(Path(path).read_text())
    command = COMMANDS[job.pop("command")]
    result = Path(job.pop("result"))
    result.write_text(json.dumps(command(**job)))


if __name__ == "__main__":
    main(sys.argv[1])
