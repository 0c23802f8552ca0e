"""Write a device profile as the TOML file it is read from, always in the same layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.values.toml_text import toml_value

_TOP = ("schema_version", "name", "title", "vendor", "soc", "os", "validated", "held_against")
_FIGURE = ("value", "low", "high", "threads", "unit", "kind", "source", "unknown")


def profile_toml(profile: DeviceProfile, *, comment: str = "") -> str:
    """The text of a profile's file; parsing it gives an equal profile.

    Args:
        profile: What to write.
        comment: Lines for people at the top, without their ``#``.
    """
    content = profile.model_dump(mode="json", exclude_none=True)
    return "\n".join(_lines(content, comment)) + "\n"


def _lines(content: dict[str, Any], comment: str) -> Iterator[str]:
    yield from (f"# {line}".rstrip() for line in comment.splitlines())
    for key in _TOP:
        if key in content:
            yield f"{key} = {_value(content[key])}"
    sections = {k: v for k, v in content.items() if k in ("memory", "cpu", "storage", "power")}
    for key, figure in content.items():
        if key not in _TOP and key not in sections:
            yield f"{key} = {_value(figure)}"
    for section, figures in sections.items():
        clusters = figures.pop("clusters", [])
        if figures:
            yield from ("", f"[{section}]")
        for key, figure in figures.items():
            yield f"{key} = {_value(figure)}"
        for cluster in clusters:
            yield from ("", f"[[{section}.clusters]]")
            for key, figure in cluster.items():
                yield f"{key} = {_value(figure)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return toml_value({key: _whole(value[key]) for key in _FIGURE if key in value})
    return toml_value(_whole(value))


def _whole(value: Any) -> Any:
    """A number without a fraction as a whole one, which people read better."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else value
