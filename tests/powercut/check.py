"""Record a save, replay it, and say which states are neither the old save nor the new one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.errors import OdtpackError
from tests.kits import cpp_kit, swift_kit
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


def recorded(
    name: str, scratch: Path, program: Callable[[Path], Sequence[str]] | None = None
) -> tuple[list[Call], Path]:
    """What a save of Python, or of another program, does; a copy of the folder it starts from."""
    start, folder = scratch / "start", scratch / "folder"
    for each in (start, folder):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    PATHS[name].prepare(folder)
    shutil.copytree(folder, start, dirs_exist_ok=True)
    return record(command(name, folder) if program is None else program(folder), folder), start


def check_kit(kit: str, scratch: Path, *, outside: bool, keep: bool) -> Iterator[Found]:
    """Replay three saves of a kit's program."""
    start, folder = scratch / "start", scratch / "folder"
    for each in (start, folder):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    state = CheckpointData(
        {"w": np.zeros(500, np.float32)}, {"f": np.zeros(9, np.float32)}, properties={"number": 0}
    )
    write_checkpoint(folder / "ck", state)
    shutil.copytree(folder, start, dirs_exist_ok=True)
    words = KITS[kit][1](folder / "ck", 64 if outside else 2**30, "keep" if keep else "replace")
    calls = record(words, folder, saves=3)
    yield from check(start, calls, look_at_checkpoint, folder)


EXPORTS: dict[str, Callable[[Path], Sequence[str]]] = {
    "C++": lambda folder: [str(cpp_kit.built("saves")), "export", str(folder)],
    "Swift": lambda folder: swift_kit.command(swift_kit.built(), "export", folder),
}
"""Programs that export a model, by kit."""


def check_export(kit: str, scratch: Path) -> Iterator[Found]:
    """Replay the export of a kit, over that of another training."""
    calls, start = recorded("export", scratch, EXPORTS[kit])
    yield from check(start, calls, PATHS["export"].look, scratch / "folder")


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
