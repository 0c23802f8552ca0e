"""What each ONNX Runtime release loads: the only place where these numbers stand.

A model stamped with a newer IR version or opset than the runtime knows is refused when
it is loaded, so whatever odtpack emits goes through :func:`stamp`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from odtpack.errors import OdtpackError


@dataclasses.dataclass(frozen=True)
class Target:
    """The newest formats that one ONNX Runtime release loads."""

    version: tuple[int, int]
    ir_version: int
    opset: int

    @property
    def name(self) -> str:
        """Release as users write it, for example ``"1.20"``."""
        return f"{self.version[0]}.{self.version[1]}"


# What the releases loaded when scripts/kernel_table.py asked them, oldest first. The releases in
# between load what the one before them loads.
TARGETS = (
    Target((1, 8), ir_version=7, opset=14),
    Target((1, 9), ir_version=8, opset=15),
    Target((1, 11), ir_version=8, opset=16),
    Target((1, 12), ir_version=8, opset=17),
    Target((1, 14), ir_version=8, opset=18),
    Target((1, 15), ir_version=9, opset=19),
    Target((1, 17), ir_version=9, opset=20),
    Target((1, 18), ir_version=10, opset=21),
    Target((1, 21), ir_version=10, opset=22),
    Target((1, 23), ir_version=11, opset=23),
    Target((1, 24), ir_version=13, opset=25),
    Target((1, 25), ir_version=13, opset=26),
    Target((1, 32), ir_version=14, opset=28),
)

MIN_OPSET = 12
MAX_OPSET = TARGETS[-1].opset


def lowest_target(opset: int) -> Target:
    """Return the oldest runtime that loads ``opset`` of the standard operators."""
    if opset < MIN_OPSET:
        what = f"the model uses opset {opset}; odtpack reads opset 7 and newer"
        hint = f"export it again with opset {MIN_OPSET} or newer"
        raise OdtpackError("opset-too-old", what, hint=hint)
    for target in TARGETS:
        if target.opset >= opset:
            return target
    what = f"the model uses opset {opset}; ONNX Runtime loads at most {MAX_OPSET}"
    hint = f"export it again with opset {MAX_OPSET} or older"
    raise OdtpackError("opset-too-new", what, hint=hint)


def newest_opset(version: str | None) -> int:
    """The newest opset that a release of ONNX Runtime loads; that of the newest if None."""
    return MAX_OPSET if version is None else _newest(version).opset


def _newest(version: str) -> Target:
    wanted = tuple(int(part) for part in version.split(".")[:2])
    found = [target for target in TARGETS if target.version <= wanted]
    if not found:
        what = f"the target is ONNX Runtime {version}; packages run on {TARGETS[0].name} and newer"
        raise OdtpackError("target-too-old", what)
    return found[-1]


def parsed(version: str) -> tuple[int, int, int]:
    """The numbers of a release, ``"1.20"`` being ``"1.20.0"``."""
    major, minor, patch = (*map(int, version.split(".")), 0)[:3]
    return major, minor, patch


def require(version: str, opset: int, remark: Callable[[str], None]) -> None:
    """Check that a release of ONNX Runtime loads models of an opset, as odtpack stamps them."""
    loads, newest = _newest(version), TARGETS[-1]
    if parsed(version)[:2] > newest.version:
        remark(f"ONNX Runtime {version} is newer than {newest.name}, the newest that odtpack knows")
    needed = lowest_target(opset)
    if needed.version > loads.version:
        raise OdtpackError(
            "target-cannot-load",
            f"the target, ONNX Runtime {version}, loads opset {loads.opset} and IR version "
            f"{loads.ir_version} at most; the model needs opset {opset}, which "
            f"{needed.name} is the first to load",
            hint=f"export the model with opset {loads.opset} or older, or ship ONNX Runtime "
            f"{needed.name} and say so: --onnxruntime {needed.name}",
        )


# The least IR version in which each opset may stand, as the ONNX checker has it.
_IR_OF_OPSET = ((14, 7), (18, 8), (20, 9), (22, 10), (23, 11), (24, 12), (27, 13), (28, 14))


def stamp(model: ir.Model) -> Target:
    """Set the lowest IR version that holds the model's opset; return the lowest runtime."""
    opset = model.graph.opset_imports[""]
    target = lowest_target(opset)
    model.ir_version = next(version for newest, version in _IR_OF_OPSET if opset <= newest)
    return target
