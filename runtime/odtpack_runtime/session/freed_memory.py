"""Memory that was freed, and that the C allocator keeps for itself."""

from __future__ import annotations

import ctypes
import os


def give_back_freed_memory() -> None:
    """Let the C allocator return freed memory to the system, where it can.

    Opening a session frees much of what it allocated, in pieces that glibc keeps: of a ViT's
    package 21 MB stay resident without this. The kits for C++ and Swift do the same.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
