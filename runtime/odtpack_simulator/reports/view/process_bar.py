"""What a process holds at the peak of a training, part by part, against its limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from odtpack_simulator.result.result import DeviceMemory, DeviceResult, SimulationResult
from odtpack_simulator.values.units import format_bytes

_WIDTH: Final = 24
_SHARING: Final = {"shared": "one arena", "own": "an arena for each session", "none": "no arena"}

LEGEND: Final = "a = the app, r = ONNX Runtime, t = the training, . = free, | = the limit"
"""What the characters of a drawn bar are."""


@dataclass(frozen=True)
class ProcessBar:
    """The memory of an app's process on one device.

    Attributes:
        title: The device.
        app: What the app holds without the training, in bytes.
        runtime: What ONNX Runtime's library holds.
        training: The peak of the training.
        limit: What the device grants the process; None if unknown.
        kit: What the app trains with, and what its sessions share.
        source: Where the figure of the app comes from.
    """

    title: str
    app: int
    runtime: int
    training: int
    limit: int | None
    kit: str
    source: str

    @property
    def need(self) -> int:
        """All parts together, in bytes."""
        return self.app + self.runtime + self.training

    def drawn(self) -> str:
        """The bar in characters, see :data:`LEGEND`.

        It is as long as the limit, or as the need where that is more; each part that is not
        nothing has a character at least.
        """
        whole = max(self.need, self.limit or 0, 1)
        parts = ((self.app, "a"), (self.runtime, "r"), (self.training, "t"))
        text = "".join(
            mark * max(1, round(_WIDTH * nbytes / whole)) for nbytes, mark in parts if nbytes
        )
        if self.limit is None:
            return text
        if self.need <= self.limit:
            return f"{text.ljust(_WIDTH, '.')}|"
        inside = round(_WIDTH * self.limit / whole)
        return f"{text[:inside]}|{text[inside:]}"

    def words(self) -> str:
        """The parts and the limit in words."""
        parts = (
            f"app {format_bytes(self.app)} + ONNX Runtime {format_bytes(self.runtime)} + training "
            f"{format_bytes(self.training)} = {format_bytes(self.need)}"
        )
        limit = "unknown" if self.limit is None else format_bytes(self.limit)
        return f"{parts}; limit {limit}"


def process_bars(result: SimulationResult) -> list[ProcessBar]:
    """One bar for each device of a result that counts the app, in stored order."""
    return [
        _bar(device, device.memory)
        for device in result.devices
        if device.memory.app_bytes is not None
    ]


def mapped_words(result: SimulationResult) -> str:
    """What lies in a mapped file and so in no bar; empty where nothing does."""
    mapped = result.memory.mapped_bytes
    if not mapped:
        return ""
    return (
        f"base mapped: {format_bytes(mapped)} of frozen weights in a file; the system drops their "
        "pages and reads them again, and they count towards no limit"
    )


def _bar(device: DeviceResult, memory: DeviceMemory) -> ProcessBar:
    return ProcessBar(
        title=device.title,
        app=memory.app_bytes or 0,
        runtime=memory.runtime_bytes or 0,
        training=memory.peak_bytes,
        limit=memory.limit_bytes,
        kit=kit_words(memory),
        source=": ".join(filter(None, (memory.app_kind, memory.app_source))),
    )


def kit_words(memory: DeviceMemory) -> str:
    """The kit and what its sessions share; empty where the result does not say."""
    if memory.kit is None or memory.sharing is None:
        return ""
    return f"{memory.kit} kit, {_SHARING[memory.sharing]}"
