"""Go back to the save before one that is damaged."""

from __future__ import annotations

import os
from pathlib import Path

from odtpack_runtime.checkpoint.flatbuffer import Source
from odtpack_runtime.checkpoint.format import IDENTIFIER, CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import previous_path
from odtpack_runtime.errors import OdtpackError

_HARMED = ("checkpoint-corrupt", "checkpoint-not-found", "checkpoint-unreadable",
           "checkpoint-version", "checkpoint-dtype")  # fmt: skip


def read_last_good(path: str | os.PathLike[str]) -> tuple[CheckpointData, str | None]:
    """Read a checkpoint, or the one before it if it is damaged or missing.

    Returns:
        The contents, and None or a sentence that says what was wrong and what was lost.

    Raises:
        OdtpackError: As :func:`~odtpack_runtime.checkpoint.format.read_checkpoint` of ``path``,
            if there is no save before it or that one is damaged as well.
    """
    before = previous_path(path)
    try:
        return read_checkpoint(path), None
    except OdtpackError as error:
        if error.code not in _HARMED or not before.is_file():
            raise
        try:
            data = read_checkpoint(before)
        except OdtpackError as second:
            error.what += f" The save before it is of no use either: {second.what}"
            raise error from second
        return data, f"{error.what} {_lost(Path(path), before, data)}"


def _lost(path: Path, before: Path, data: CheckpointData) -> str:
    """What was loaded, and as far as it is known what was not."""
    if data.optimizer is None:
        return f"The save before it was loaded, {before}: what was trained since is lost."
    step = data.optimizer.step
    last = _last_step(path)
    lost = "what was trained since is lost"
    if last is not None and last > step:
        lost = f"{last - step} optimizer steps made since are lost"
    return f"The save before it was loaded, {before}, of optimizer step {step}: {lost}."


def _last_step(path: Path) -> int | None:
    """The optimizer step of a damaged file, if it can still be read."""
    try:
        with path.open("rb") as stream:
            root = Source(stream, "checkpoint", str(path)).root(IDENTIFIER)
            return next((group.integer(1, "q") for group in root.tables(2)), None)
    except (OSError, OdtpackError):
        return None
