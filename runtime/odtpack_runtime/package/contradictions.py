"""What of a manifest contradicts the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from odtpack_runtime.errors import OdtpackError

# Comparisons of a file with its manifest entry.


def same(where: Path, what: str, found: object, said: object) -> None:
    """Check that a file holds what the manifest says."""
    if found != said:
        raise contradiction(where, what, *_difference(found, said))


def _difference(found: Any, said: Any) -> tuple[object, object]:
    """The first entries that differ, to keep the message short."""
    if isinstance(found, Mapping) and isinstance(said, Mapping):
        for key in sorted({*found, *said}):
            if found.get(key) != said.get(key):
                return (
                    _difference(found.get(key), said.get(key))
                    if (isinstance(found.get(key), Mapping) and isinstance(said.get(key), Mapping))
                    else (f"{key}: {found.get(key)}", f"{key}: {said.get(key)}")
                )
    if isinstance(found, Sequence) and isinstance(said, Sequence) and not isinstance(found, str):
        for one, other in zip(found, said, strict=False):
            if one != other:
                return one, other
        return f"{len(found)} of them", f"{len(said)}"
    if isinstance(found, set) and isinstance(said, set):
        return sorted(found - said) or "less", sorted(said - found) or "less"
    return found, said


def contradiction(where: Path, what: str, found: object, said: object) -> OdtpackError:
    """Return the error for a file that differs from what the manifest says."""
    return OdtpackError(
        "manifest-contradicts",
        f"{where.name} and the manifest differ in {what}: the file has {_short(found)}, and the "
        f"manifest says {_short(said)}.",
        where=str(where),
    )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
