"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Take half a million objects, the tests and PyTorch, out of the garbage collector's sight.

    They live until the end. A full collection walked through all of them to find nothing, and
    every build but a process's first starts with one: it cost several times the build.
    """
    gc.collect()
    gc.freeze()
