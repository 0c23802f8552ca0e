"""The libraries that train in an app: which one a system's apps use, and what sessions share.

This module imports nothing large, for the command line.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from odtpack_simulator.device.profile import OsClass

Kit = Literal["kotlin", "swift", "cpp", "js", "python"]
"""A kit of odtpack: the binding of ONNX Runtime that an app trains through."""

Loop = Literal["step", "train"]
"""How an app makes its steps: with the package's step model, or with the training model, and the
optimizer model after it."""

Sharing = Literal["shared", "own", "none"]
"""Whether all sessions have one arena, each its own, or none: tensors are the system's then."""

KITS: Final = MappingProxyType({
    "kotlin": False,
    "swift": True,
    "cpp": True,
    "js": False,
    "python": True,
})  # fmt: skip
"""Kit -> whether its sessions can share one arena. ONNX Runtime's bindings for Java and for
JavaScript have no call that registers an allocator."""

STEP_MODEL_KITS: Final = frozenset({"kotlin", "swift", "cpp", "python"})
"""Kits that train with a package's step model where it has one; JavaScript's reads the training and
the optimizer model."""

KERNEL_KITS: Final = frozenset({"swift", "cpp"})
"""Kits with the native kernels inside: sessions of packages with nodes for them run them."""

MAPPING_KITS: Final = frozenset({"kotlin", "swift", "cpp", "python"})
"""Kits that map the frozen weights of segments. JavaScript's reads those of a segment when it runs,
in a browser from all of them in memory."""

_OF_SYSTEM: Final[dict[OsClass, Kit]] = {
    "android": "kotlin",
    "ios": "swift",
    "linux": "python",
    "macos": "swift",
    "web": "js",
    "windows": "cpp",
}


def kit_of(system: OsClass) -> Kit:
    """The kit that an app of this system is taken to train with, unless the user names one."""
    return _OF_SYSTEM[system]
