"""Record a save, replay it, and say which states are neither the old save nor the new one."""

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.kits import cpp_kit, csharp_kit, kotlin_kit, swift_kit
from tests.kits.kills import KITS
from tests.powercut.paths import PATHS, BrokenError, command, look_at_checkpoint
from tests.powercut.record import Call, record
from tests.powercut.replay import Model, materialize, replay

Found = tuple[Model, int, list[str]]
"""File system, states, and what is wrong with those that are."""


def check_path(name: str, scratch: Path) -> Iterator[Found]:
    """Replay one of Python's."""
    path = PATHS[name]
    calls, start = recorded(name, scratch)
    yield from check(start, calls, path.look, scratch / "folder")


def recorded(name: str, scratch: Path) -> tuple[list[Call], Path]:
    """What one of Python's saves does, and a copy of the folder that it starts from."""
    start, folder = _folders(scratch)
    PATHS[name].prepare(folder)
    shutil.copytree(folder, start, dirs_exist_ok=True)
    return record(command(name, folder), folder), start


def _folders(scratch: Path) -> tuple[Path, Path]:
    """Empty folders, for what is there before and for what is recorded."""
    start, folder = scratch / "start", scratch / "folder"
    for each in (start, folder):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    return start, folder


KIT_SAVES: dict[str, tuple[int, str]] = {
    "": (2**30, "replace"),
    ", the one before kept": (2**30, "keep"),
    ", data outside": (64, "replace"),
    ", data outside, the one before kept": (64, "keep"),
    ", data in and out": (64, "swap"),
}
"""Ways in which the program of a kit saves: arguments of :data:`tests.kits.kills.KITS`."""
SWAPS = ("Kotlin",)
"""Kits whose program knows ``swap``: the elements are in a data file at every second save."""
EXPORTS: dict[str, Callable[[Path], Sequence[str]]] = {
    "C++": lambda folder: cpp_kit.command("saves", "export", folder),
    "Swift": lambda folder: swift_kit.command(swift_kit.built(), "export", folder),
    "C#": lambda folder: csharp_kit.command(csharp_kit.built(), "export", folder),
    "Kotlin": lambda folder: kotlin_kit.command(
        "exports", folder / "package", folder / "1.ckpt", folder / "m.onnx"
    ),
}
"""Programs that export a trained package over the model of another training."""


def kit_paths(kit: str) -> list[str]:
    """Names of the ways in which a kit saves."""
    saves = [
        f"{kit}{name}" for name, (_, how) in KIT_SAVES.items() if how != "swap" or kit in SWAPS
    ]
    return [*saves, *([f"{kit}, export"] if kit in EXPORTS else [])]


def check_kit(kit: str, name: str, scratch: Path) -> Iterator[Found]:
    """Replay three saves of a kit's program, or an export."""
    calls, start = recorded_kit(kit, name, scratch)
    look = PATHS["export"].look if name.endswith(", export") else look_at_checkpoint
    yield from check(start, calls, look, scratch / "folder")


def recorded_kit(kit: str, name: str, scratch: Path) -> tuple[list[Call], Path]:
    """What a kit's program does, and a copy of the folder that it starts from."""
    start, folder = _folders(scratch)
    if name.endswith(", export"):
        PATHS["export"].prepare(folder)
        words, saves = EXPORTS[kit](folder), None
    else:
        arrays = {"w": np.zeros(500, np.float32)}, {"f": np.zeros(9, np.float32)}
        write_checkpoint(folder / "ck", CheckpointData(*arrays, properties={"number": 0}))
        above, how = KIT_SAVES[name.removeprefix(kit)]
        words, saves = KITS[kit][1](folder / "ck", above, how), 3
    shutil.copytree(folder, start, dirs_exist_ok=True)
    return record(words, folder, saves=saves), start


def check(
    start: Path, calls: list[Call], look: Callable[[Path], int], folder: Path
) -> Iterator[Found]:
    """Look at each state in both models: the save that was done last, or the next one.

    States lie where the save was recorded: a plan is bound to its path.
    """
    marks = [call.offset for call in calls if call.kind == "mark"]
    if not marks or not any(call.kind == "sync" for call in calls):
        raise RuntimeError("nothing was recorded")
    logging.disable(logging.WARNING)
    for model in get_args(Model):
        states, problems = 0, []
        for mark, state in replay(start, calls, model):
            states += 1
            materialize(state, folder)
            try:
                number = look(folder)
                if number not in (mark, mark + 1):
                    problems.append(f"after save {mark} there is {number}")
            except (OdtpackError, BrokenError, OSError) as error:
                problems.append(
                    f"after save {mark}: {type(error).__name__} {error}; {sorted(state)}"
                )
        yield model, states, problems
    logging.disable(logging.NOTSET)
