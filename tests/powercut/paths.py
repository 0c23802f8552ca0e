"""The ways in which Python saves: how each starts, what it does, and how to see what is there.

``python -m tests.powercut.paths NAME FOLDER`` does one, and prints a number after each save.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.cli import main as odtpack
from odtpack.optimizers import AdamW
from odtpack.update.release import install
from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.state import carry_over
from odtpack_runtime.errors import OdtpackError
from odtpack_runtime.files import folder_update
from odtpack_runtime.files.folder_update import finish_update
from odtpack_runtime.package.adapter import read_peft
from odtpack_runtime.package.package import Package
from tests import zoo

SAVES = 3


class BrokenError(Exception):
    """What a power cut left is neither the save before nor the one that was made."""


@dataclass(frozen=True)
class SavePath:
    """One way to save.

    Attributes:
        prepare: Makes what is there before, save number 0.
        act: Saves; yields after each.
        look: Number of the save that a folder holds.
    """

    prepare: Callable[[Path], object]
    act: Callable[[Path], None]
    look: Callable[[Path], int]


def _content(number: int) -> CheckpointData:
    values = np.full(500, number, np.float32)
    return CheckpointData({"w": values}, {"f": values + 1}, properties={"number": number})


def _save(folder: Path, number: int, *, keep: bool) -> None:
    state = CheckpointState(_content(number))
    CheckpointState.save_checkpoint(state, folder / "ck", keep_previous=keep)


def look_at_checkpoint(folder: Path) -> int:
    """Number of the save that a folder's checkpoint holds; it must not need the one before."""
    data = read_checkpoint(folder / "ck")
    number = data.properties["number"]
    assert isinstance(number, int)
    for array in (*data.trainable.values(), *data.frozen.values()):
        if not set(array.ravel()) <= {number, number + 1}:
            raise BrokenError(f"values of another save than {number}")
    return number


def _checkpoint(*, keep: bool, outside: bool) -> SavePath:
    def act(folder: Path) -> None:
        writer.EXTERNAL_DATA_THRESHOLD = 64 if outside else 2**30
        for number in range(1, SAVES + 1):
            _save(folder, number, keep=keep)
            _done(number)

    def prepare(folder: Path) -> None:
        with mock.patch.object(writer, "EXTERNAL_DATA_THRESHOLD", 64 if outside else 2**30):
            _save(folder, 0, keep=keep)

    return SavePath(prepare, act, look_at_checkpoint)


def _from_inside_to_outside(folder: Path) -> None:
    for number, threshold in ((1, 64), (2, 2**30), (3, 64)):
        writer.EXTERNAL_DATA_THRESHOLD = threshold
        _save(folder, number, keep=True)
        _done(number)


def _build(folder: Path, name: str = "package", beta1: float = 0.8) -> None:
    options = {"loss": "cross_entropy", "optimizer": AdamW(beta1=beta1), "self_check": False}
    build_package(zoo.mlp((6, 4, 3)), folder / name, **options)


def _look_at_package(folder: Path, name: str = "package") -> int:
    """1 for the package of another beta, 0 for the first or none."""
    try:
        package = Package.open(folder / name)
    except OdtpackError as error:
        if error.code == "package-not-found" and not (folder / "package").exists():
            return 0
        if error.code != "update-unfinished":
            raise
        finish_update(folder / name)
        package = Package.open(folder / name)
    return 1 if "0.7" in str(package.manifest.optimizer) else 0


def _act_once(call: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        call(folder)
        _done(1)

    return act


def _build_without_swap(folder: Path) -> None:
    folder_update._exchange = lambda first, second: False
    _build(folder, beta1=0.7)


def _train(package: Path, factor: float, out: Path) -> None:
    """A checkpoint of other values, as after a training."""
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    for name in state.arrays(trainable=True):
        state.parameters[name].data[:] = factor
    CheckpointState.save_checkpoint(state, out)


def _export_start(folder: Path) -> None:
    _build(folder)
    for number in (0, 1):
        _train(folder / "package", number + 1, folder / f"{number}.ckpt")


def _command(*words: object) -> None:
    code = odtpack([str(word) for word in words])
    if code == 2:  # it said why
        raise OdtpackError("file-not-written", f"{words[0]} was refused")
    if code:
        raise RuntimeError(f"{words}: {code}")


def _export(folder: Path, number: int, *, ort: bool) -> None:
    options = ["--ort-format", "--ort-style", "fixed"] if ort else []
    _command("export", folder / "package", "--checkpoint", folder / f"{number}.ckpt", "--out",
             folder / "m.onnx", *options)  # fmt: skip


def _export_path(*, ort: bool) -> SavePath:
    def prepare(folder: Path) -> None:
        _export_start(folder)
        _export(folder, 0, ort=ort)

    return SavePath(prepare, _act_once(lambda folder: _export(folder, 1, ort=ort)), _look_at_export)


def _look_at_export(folder: Path) -> int:
    """Which training a model is of: the parameters are all 1, or all 2. The .ort must agree."""
    import onnxruntime

    found = set()
    for name in ("m.onnx", "m.ort"):
        if name == "m.ort" and not (folder / name).exists():
            continue
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(
            (folder / name).read_bytes(), options, providers=["CPUExecutionProvider"]
        )
        given = {session.get_inputs()[0].name: np.ones((2, 6), np.float32)}
        found.add(float(session.run(None, given)[0][0, 0]))
    if len(found) != 1:
        raise BrokenError(f"a model and its ORT format are of two trainings: {found}")
    # Six inputs of 1 and a bias of 1 give 7, of which four and a bias 29; twice that weighs more.
    return 0 if found.pop() < 40 else 1


def _adapter_start(folder: Path) -> None:
    spec = AdapterSpec("lora", ("*",), rank=2)
    build_package(zoo.mlp((6, 4, 3)), folder / "package", loss="cross_entropy", adapter=spec,
                  self_check=False)  # fmt: skip
    for number in (0, 1):
        _train(folder / "package", number + 1, folder / f"{number}.ckpt")
    _adapter(folder, 0)
    # As if it had been of another alpha: the two files must go together.
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(re.sub('"lora_alpha": [0-9.]+', '"lora_alpha": 1000.0', config.read_text()))


def _adapter(folder: Path, number: int) -> None:
    _command("adapter", "export", folder / "package", "--checkpoint", folder / f"{number}.ckpt",
             "--out", folder / "adapter")  # fmt: skip


def _look_at_adapter(folder: Path) -> int:
    try:
        adapter = read_peft(folder / "adapter")
    except OdtpackError as error:
        if error.code != "update-unfinished":
            raise
        finish_update(folder / "adapter")
        adapter = read_peft(folder / "adapter")
    values = {float(value) for array in adapter.tensors.values() for value in array.ravel()}
    if values not in ({1.0}, {2.0}) or (values == {1.0}) != (adapter.scaling == 500):
        raise BrokenError(f"weights {values} with a scaling of {adapter.scaling}")
    return 0 if values == {1.0} else 1


def _carry_start(folder: Path) -> None:
    _build(folder)
    _build(folder, "new", 0.7)
    _train(folder / "package", 1, folder / "trained.ckpt")
    _train(folder / "package", 2, folder / "ck")


def _carry(folder: Path) -> None:
    trained = CheckpointState.load_checkpoint(folder / "trained.ckpt")
    fresh = CheckpointState.load_checkpoint(folder / "new" / "checkpoint")
    CheckpointState.save_checkpoint(carry_over(trained, fresh), folder / "ck", True)


def _look_at_carried(folder: Path) -> int:
    arrays = read_checkpoint(folder / "ck").trainable.values()
    (value,) = {float(value) for array in arrays for value in array.ravel()}
    return 2 - int(value)


def _install_start(folder: Path) -> None:
    _build(folder, "old")
    _build(folder, "new", 0.7)
    install(folder / "old", folder / "package")


PATHS: dict[str, SavePath] = {
    "checkpoint": _checkpoint(keep=False, outside=False),
    "checkpoint, the one before kept": _checkpoint(keep=True, outside=False),
    "checkpoint, data outside": _checkpoint(keep=False, outside=True),
    "checkpoint, data outside, the one before kept": _checkpoint(keep=True, outside=True),
    "checkpoint, data in and out": SavePath(lambda folder: _save(folder, 0, keep=True),
                                            _from_inside_to_outside, look_at_checkpoint),
    "build": SavePath(lambda folder: None,
                      _act_once(lambda folder: _build(folder, "a/b/package", 0.7)),
                      lambda folder: _look_at_package(folder, "a/b/package")),
    "build over a package": SavePath(_build, _act_once(lambda folder: _build(folder, beta1=0.7)),
                                     _look_at_package),
    "build without a swap": SavePath(_build, _act_once(_build_without_swap), _look_at_package),
    "install": SavePath(_install_start,
                        _act_once(lambda folder: install(folder / "new", folder / "package")),
                        _look_at_package),
    "export": _export_path(ort=False),
    "export with ORT format": _export_path(ort=True),
    "adapter export": SavePath(_adapter_start, _act_once(lambda folder: _adapter(folder, 1)),
                               _look_at_adapter),
    "carry over": SavePath(_carry_start, _act_once(_carry), _look_at_carried),
}  # fmt: skip


def command(name: str, folder: Path) -> Sequence[str]:
    """The program that saves so."""
    return [sys.executable, "-m", "tests.powercut.paths", name, str(folder)]


def _done(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    PATHS[sys.argv[1]].act(Path(sys.argv[2]))
