"""What can be chosen about ORT format and reduced builds.

This module imports nothing large: the command line reads its choices from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ORT_SUFFIX: Final = ".ort"


class Style(StrEnum):
    """How a model in ORT format is optimized."""

    FIXED = "fixed"
    """Once, by the conversion: what the file holds is what runs."""
    RUNTIME = "runtime"
    """What is safe for every provider by the conversion; the rest is recorded, and applied
    by sessions that set ``session.enable_saved_runtime_optimizations``."""


class Platform(StrEnum):
    """Processors that a model may be optimized for; without one it fits all of them."""

    ARM = "arm"
    AMD64 = "amd64"


@dataclass(frozen=True)
class OrtFormat:
    """Which files each model becomes.

    Attributes:
        styles: At least one.
        platforms: At least one; None for all processors.
    """

    styles: tuple[Style, ...] = (Style.FIXED,)
    platforms: tuple[Platform | None, ...] = (None,)

    def variants(self) -> list[tuple[Style, Platform | None]]:
        """Return every combination, in the order of the fields."""
        return [(style, platform) for platform in self.platforms for style in self.styles]

    def names(self, stem: str) -> list[str]:
        """Return the names of the files that ``<stem>.onnx`` becomes."""
        return [self.name(stem, style, platform) for style, platform in self.variants()]

    def name(self, stem: str, style: Style, platform: Platform | None) -> str:
        """Return the name of a file: the reference's, with the platform if there are several."""
        middle = f".{platform}" if platform is not None and len(self.platforms) > 1 else ""
        late = ".with_runtime_opt" if style is Style.RUNTIME else ""
        return f"{stem}{middle}{late}{ORT_SUFFIX}"


class Mode(StrEnum):
    """What a build of ONNX Runtime is for."""

    TRAIN = "train"
    """Training, evaluation and optimizer model."""
    INFER = "infer"
    """The exported inference model."""
    BOTH = "both"


class Format(StrEnum):
    """Which files an app loads."""

    ORT = "ort"
    ONNX = "onnx"


class Types(StrEnum):
    """How a configuration limits types."""

    NONE = "none"
    OPERATOR = "operator"
    """Each operator to the types that the models feed to it."""
    GLOBAL = "global"
    """All operators to the types that stand anywhere in the models."""
