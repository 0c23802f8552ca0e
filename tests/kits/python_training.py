"""Trains as ``js/training.mjs`` does, in a process whose ONNX Runtime the caller chooses.

A task's ``batches`` take the place of ``data``, one after the other; ``accumulate`` makes a step of
several, ``linear`` has the arguments of a schedule, and ``evaluate`` asks for the losses of all.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.session.options import default_session_options
from odtpack_runtime.training.loop import train_step
from odtpack_runtime.training.lr_scheduler import LinearLRScheduler

if TYPE_CHECKING:
    from tests.kits.harness import Task


def run(task: Task) -> dict[str, Any]:
    folder = Path(task["package"])
    state = CheckpointState.load_checkpoint(task.get("checkpoint") or folder / "checkpoint")
    model = folder / "training_model.onnx"
    options = default_session_options(model, threads=task.get("threads", 1))
    whole = folder / "step_model.onnx"
    module = Module(
        model, state, folder / "eval_model.onnx", session_options=options,
        step_model_uri=whole if task.get("step_model") and whole.is_file() else None,
    )  # fmt: skip
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    if task.get("rate"):
        optimizer.set_learning_rate(task["rate"])
    scheduler = LinearLRScheduler(optimizer, *task["linear"]) if task.get("linear") else None
    batches = [_read(each, module) for each in task.get("batches") or [task["data"]]]
    losses: list[float] = []
    times = []
    count = task.get("accumulate", 1)
    for step in range(task["steps"]):
        some = [batches[part % len(batches)] for part in range(step * count, (step + 1) * count)]
        before = time.process_time()
        train_step(module, optimizer, some, scheduler, on_loss=losses.append)
        times.append((time.process_time() - before) * 1e3)
    if task.get("save"):
        CheckpointState.save_checkpoint(state, task["save"], include_optimizer_state=True)
    found = {"losses": losses, "times": times, "onnxruntime": onnxruntime.__version__}
    if task.get("evaluate"):
        module.eval()
        results = [module(*batch) for batch in batches]
        found["evaluation"] = [float(r[0] if isinstance(r, tuple) else r) for r in results]
    return found


def _read(data: dict[str, Any], module: Module) -> list[np.ndarray[Any, Any]]:
    arrays = {
        name: np.fromfile(each["file"], each["dtype"]).reshape(each["shape"])
        for name, each in data.items()
    }
    return [arrays[name] for name in module.input_names()]


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
