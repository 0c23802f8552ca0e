"""What faults are made in: each action, and how to see what it left."""

import atexit
import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np

from odtpack.build import build_package
from odtpack.optimizers import AdamW
from odtpack_runtime import CheckpointState, Module, Optimizer
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.packages import killing
from tests.powercut.paths import PATHS, BrokenError

STEPS, SAVE_EVERY = 6, 2


@dataclass(frozen=True)
class Action:
    """An action of a user or an app.

    Attributes:
        prepare: Makes what it starts from in a folder.
        act: The action; whatever a fault left there is no hindrance.
        look: What the folder holds, as text that two equal contents share.
        between: What else than the start and the end a fault may leave; made by hand.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    look: Callable[[Path], str] = killing.state
    between: Callable[[Path], Iterable[str]] = lambda folder: ()


@cache
def _built(beta1: float) -> Path:
    """A package to copy; building it each time takes longer than all else."""
    folder = Path(tempfile.mkdtemp(prefix="odtpack-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = zoo.mlp((6, 4, 3))
    build_package(model, folder / "package", loss="cross_entropy", optimizer=AdamW(beta1=beta1))
    return folder / "package"


def _package(folder: Path) -> None:
    shutil.copytree(_built(0.8), folder / "package")


def _state(path: Path) -> str:
    """A digest of what a checkpoint, or the save before it, loads as."""
    if not path.exists():
        return "nothing saved"
    data = CheckpointState.load_checkpoint(path).snapshot(include_optimizer_state=True)
    seen = hashlib.sha256(repr(sorted(data.properties.items())).encode())
    arrays = {**data.trainable, **data.frozen}
    if data.optimizer is not None:
        seen.update(f"{data.optimizer.step} {data.optimizer.learning_rate}".encode())
        for name, moments in data.optimizer.moments.items():
            arrays |= {f"{name}/{index}": moment for index, moment in enumerate(moments)}
    for name, array in sorted(arrays.items()):
        seen.update(name.encode() + array.tobytes())
    return seen.hexdigest()


def _trained(folder: Path) -> str:
    return _state(folder / "trained.ckpt")


def _train(folder: Path, steps: int = STEPS) -> None:
    """Six steps, saved after every second, from wherever the last training came to."""
    package = Package.open(folder / "package")
    saved = folder / "trained.ckpt"
    started = saved.exists() or Path(f"{saved}.previous").exists()
    state = CheckpointState.load_checkpoint(saved if started else package.checkpoint)
    module = Module(package.training_model, state)
    optimizer = Optimizer(package.optimizer_model, module)
    while optimizer.step_count < steps:
        random = np.random.default_rng(optimizer.step_count)
        batch = random.standard_normal((4, 6), np.float32), random.integers(0, 3, 4)
        module(*batch)
        optimizer.step()
        module.lazy_reset_grad()
        if optimizer.step_count % SAVE_EVERY == 0:
            CheckpointState.save_checkpoint(state, saved, True, keep_previous=True)


def _train_outside(folder: Path, steps: int = STEPS) -> None:
    """The same, with the elements in a second file, as those of a large checkpoint."""
    with mock.patch.object(writer, "EXTERNAL_DATA_THRESHOLD", 64):
        _train(folder, steps)


def _milestones(folder: Path) -> list[str]:
    """What an undisturbed training has saved after every second step."""
    found = []
    for steps in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY):
        _train(folder, steps)
        found.append(_trained(folder))
    return found


def _resume_old(folder: Path) -> None:
    _package(folder)
    _train(folder, SAVE_EVERY)


def _export(folder: Path) -> None:
    package = Package.open(folder / "package")
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = Module(package.training_model, state, package.eval_model)
    module.export_model_for_inferencing(folder / "personal.onnx", ["output"])


def _saves(name: str) -> Action:
    """One of the save paths that power cuts are replayed for."""
    path = PATHS[name]

    def act(folder: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            path.act(folder)

    def look(folder: Path) -> str:
        try:
            return str(path.look(folder))
        except BrokenError as error:
            return str(error)

    return Action(path.prepare, act, look)


ACTIONS: dict[str, Action] = {
    **{name: Action(*both) for name, both in killing.ACTIONS.items()},
    "train and save": Action(_package, _train, _trained, _milestones),
    "train, data outside": Action(_package, _train_outside, _trained, _milestones),
    "resume": Action(_resume_old, _train, _trained, _milestones),
    "export": Action(_package, _export),
    **{
        name: _saves(name)
        for name in ("export with ORT format", "adapter export", "install", "carry over")
    },
}
