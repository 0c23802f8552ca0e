"""Jobs for the reference system, ONNX Runtime training 1.19.2.

Run by the interpreter of ``.venv-peer``, which has no odtpack:

    .venv-peer/bin/python tests/peer/peer_worker.py WORK.json
    .venv-peer/bin/python tests/peer/peer_worker.py fork

With ``fork`` it reads names of such files from standard input, does the work of each in a process
that it forks, and answers with that process's exit code.

``WORK.json`` is ``{"result": PATH, "jobs": [{"command": NAME, ...}, ...]}``. A command is
``generate``, ``train``, ``load`` or ``bench``, and the rest of a job holds the keyword arguments
of the function of that name below. Arrays travel as ``.npz`` files. The file ``result`` becomes a
JSON list with one result per job; where the reference raises, the list ends with
``{"error": {"type", "message"}}`` and the exit code is 1. A crash leaves no result.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.training import artifacts, onnxblock
from onnxruntime.training.api import CheckpointState, Module, Optimizer

Feeds = dict[str, np.ndarray]


def generate(
    *, model: str, folder: str, requires_grad: list[str] | None = None,
    frozen: list[str] | None = None, loss: str | None = "cross_entropy",
    optimizer: str | dict[str, Any] | None = "adamw", **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Calls ``generate_artifacts`` on a model file.

    Without ``requires_grad`` every initializer that is not in ``frozen`` is trained. ``optimizer``
    is a name or ``{"kind": "adamw", "eps": 1e-8, "clip_grad": 1.0}`` with the arguments of
    the block of that name. ``options`` go to ``generate_artifacts`` as they are.
    """
    names = [tensor.name for tensor in onnx.load(model).graph.initializer]
    frozen = frozen or []
    if requires_grad is None:
        requires_grad = [name for name in names if name not in frozen]
    losses = {
        None: None,
        "none": None,  # as a job says it: what is None there stays at its default
        "mse": artifacts.LossType.MSELoss,
        "cross_entropy": artifacts.LossType.CrossEntropyLoss,
        "bce_with_logits": artifacts.LossType.BCEWithLogitsLoss,
        "l1": artifacts.LossType.L1Loss,
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    started, used = time.perf_counter(), time.process_time()
    artifacts.generate_artifacts(
        model, requires_grad=requires_grad, frozen_params=frozen, loss=losses[loss],
        optimizer=_optimizer_block(optimizer), artifact_directory=folder, **options,
    )  # fmt: skip
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - used,
        "peak_bytes": _status_bytes("VmHWM") - before,
        "requires_grad": requires_grad,
        "files": {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())},
    }


def _optimizer_block(optimizer: str | dict[str, Any] | None) -> Any:
    if optimizer is None:
        return None
    arguments = {"kind": optimizer} if isinstance(optimizer, str) else dict(optimizer)
    kind = arguments.pop("kind")
    if not arguments:
        return {"adamw": artifacts.OptimType.AdamW, "sgd": artifacts.OptimType.SGD}[kind]
    if "clip_grad" in arguments:
        arguments["clip_grad"] = onnxblock.optim.ClipGradNorm(arguments["clip_grad"])
    return {"adamw": onnxblock.optim.AdamW, "sgd": onnxblock.optim.SGD}[kind](**arguments)


def train(
    *, folder: str, inputs: str, steps: int, learning_rate: float, batch: int | None = None,
    accumulate: int = 1, checkpoint: str | None = None, gradients: str | None = None,
    parameters: str | None = None, save: str | None = None, optimizer_state: bool = False,
    properties: dict[str, Any] | None = None, with_eval: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Makes ``steps`` steps with the artifacts in ``folder``.

    ``inputs`` is an ``.npz`` with an array for each user input of the training model. Each
    (micro-)batch takes the next ``batch`` samples of it, from the start again at the end; without
    ``batch`` it takes all. A step is ``accumulate`` train steps, ``optimizer.step()`` and
    ``lazy_reset_grad()``. ``checkpoint`` replaces the one in the folder.

    Written when asked for: ``gradients`` (``.npz``, before the first optimizer step),
    ``parameters`` (``.npz``, after the last) and the checkpoint ``save``. ``eval_loss`` is that of
    the first batch after the last step; with batch normalization in training mode the reference
    cannot load its own evaluation model, and ``with_eval`` must be false.
    """
    state = CheckpointState.load_checkpoint(checkpoint or str(Path(folder) / "checkpoint"))
    module, optimizer = _open(folder, state, with_eval=with_eval)
    optimizer.set_learning_rate(learning_rate)
    feeds = _load_feeds(inputs)
    names = module.input_names()
    samples = len(feeds[names[0]])
    losses, position = [], 0
    for step in range(steps):
        for _ in range(accumulate):
            rows = np.arange(position, position + (batch or samples)) % samples
            position += batch or samples
            losses.append(_scalar(module(*(feeds[name][rows] for name in names))))
        if step == 0 and gradients:
            trained = {name: p.grad for name, p in state.parameters if p.requires_grad}
            np.savez(gradients, **trained)
        optimizer.step()
        module.lazy_reset_grad()
    result: dict[str, Any] = {"losses": losses, "input_names": names}
    if with_eval:
        module.eval()
        rows = np.arange(batch or samples) % samples
        result["eval_loss"] = _scalar(module(*(feeds[name][rows] for name in names)))
        module.train()
    for name, value in (properties or {}).items():
        state.properties[name] = value
    if parameters:
        np.savez(parameters, **{name: p.data for name, p in state.parameters})
    if save:
        CheckpointState.save_checkpoint(state, save, include_optimizer_state=optimizer_state)
    return result


def load(*, checkpoint: str, parameters: str | None = None) -> dict[str, Any]:
    """Loads a checkpoint and says what the reference read in it."""
    state = CheckpointState.load_checkpoint(checkpoint)
    described, values = {}, {}
    for name, parameter in state.parameters:
        values[name] = parameter.data
        described[name] = {
            "shape": list(parameter.data.shape),
            "dtype": str(parameter.data.dtype),
            "requires_grad": parameter.requires_grad,
        }
    if parameters:
        np.savez(parameters, **values)
    return {"parameters": described, "properties": dict(state.properties)}


def bench(
    *, folder: str, inputs: str, steps: int = 30, warm_up: int = 5, learning_rate: float = 1e-4,
    with_eval: bool = False, threads: int = 1, profile: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Times steps and takes the peak of the resident set.

    The inputs, the interpreter and the libraries are in memory before the count begins; the
    kernel's high-water mark is set back (``clear_refs(5)`` in proc(5)) just before the model is
    loaded. The evaluation model costs memory too and is loaded ``with_eval`` only. ``profile`` is
    a folder for ONNX Runtime's profiles, which are written when the process ends.
    """
    feeds = _load_feeds(inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(profile) / "profile")
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")

    state = CheckpointState.load_checkpoint(str(Path(folder) / "checkpoint"))
    module, optimizer = _open(
        folder, state, options, with_eval=with_eval, pause_seconds=1.1 if profile else 0
    )
    optimizer.set_learning_rate(learning_rate)
    batch = [feeds[name] for name in module.input_names()]
    losses, train_ms, optimizer_ms = [], [], []
    for _ in range(warm_up + steps):
        started = time.perf_counter()
        loss = module(*batch)
        trained = time.perf_counter()
        optimizer.step()
        module.lazy_reset_grad()
        ended = time.perf_counter()
        losses.append(_scalar(loss))
        train_ms.append((trained - started) * 1e3)
        optimizer_ms.append((ended - trained) * 1e3)
    peak = _status_bytes("VmHWM")
    return {
        "train_ms": train_ms[warm_up:], "optimizer_ms": optimizer_ms[warm_up:], "losses": losses,
        "peak_bytes": peak - before,
    }  # fmt: skip


def _open(
    folder: str, state: CheckpointState, options: onnxruntime.SessionOptions | None = None, *,
    with_eval: bool = True, pause_seconds: float = 0,
) -> tuple[Module, Optimizer]:  # fmt: skip
    """``pause_seconds`` pass between the two: a profile's file is named after the second."""
    training, evaluation, update = (
        str(Path(folder) / f"{name}_model.onnx") for name in ("training", "eval", "optimizer")
    )
    module = Module(training, state, evaluation if with_eval else None, session_options=options)
    time.sleep(pause_seconds)
    return module, Optimizer(update, module)


def _load_feeds(path: str) -> Feeds:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _scalar(output: Any) -> float:
    """The loss, which is the first output where there are several."""
    return float(output[0] if isinstance(output, tuple) else output)


def _status_bytes(field: str) -> int:
    """A size in /proc/self/status."""
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(kib) * 1024


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "generate": generate, "train": train, "load": load, "bench": bench,
}  # fmt: skip


def main(path: str) -> int:
    """Does the jobs in the file, in order, and writes their results."""
    work = json.loads(Path(path).read_text())
    # The reference leaves temp.onnx where it runs, and workers run side by side.
    os.chdir(Path(path).parent)
    results: list[dict[str, Any]] = []
    code = 0
    for job in work["jobs"]:
        try:
            results.append(COMMANDS[job.pop("command")](**job))
        except Exception as error:  # whatever the reference raises is the answer
            results.append({"error": {"type": type(error).__name__, "message": str(error)}})
            code = 1
            break
    Path(work["result"]).write_text(json.dumps(results))
    return code


def fork() -> int:
    """Does the work of every file that is named on standard input."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.dup2(2, 1)  # standard output is for answers
            os._exit(main(line.rstrip("\n")))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(fork() if sys.argv[1] == "fork" else main(sys.argv[1]))
