"""Pauses Python's cyclic garbage collector while a graph is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector:
    """What is known of the collector."""

    # `left_behind`: whether an earlier graph may still wait to be freed.
    # `frozen`: Whether the program froze objects of its own. It is asked until it has: to count
    # them takes as long as a small build.

    left_behind = False
    frozen = False


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running inside a ``with`` block, or a function so decorated."""
    # A graph is hundreds of thousands of small objects that all stay alive. Each collection walked
    # through them to find nothing: a third of the time of a build, which was not linear for that
    # reason. What is left is handed to the collector as old objects: as young ones all would be
    # walked through at the next allocation, a fifth of the time of a build. A program that froze
    # its own objects keeps them frozen; the build's cannot be told from them and stay young.
    was_enabled = gc.isenabled()
    if was_enabled and _Collector.left_behind:
        gc.collect()
        _Collector.left_behind = False
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _Collector.frozen = _Collector.frozen or gc.get_freeze_count() > 0
            if not _Collector.frozen:
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
                _Collector.left_behind = True
            gc.enable()
