"""Writes settings as a recipe that ``odtpack build --recipe`` reads back to the same settings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odtpack.recipe.draft import SCHEMA_NAME, one_line
from odtpack_simulator.values.toml_text import toml_key, toml_value

if TYPE_CHECKING:
    from odtpack.recipe import BuildSpec


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a recipe holds besides what decides the package."""

    folder: Path  # where it will lie; paths in it are from there
    package: str  # folder of the package, from the recipe's folder
    devices: tuple[str, ...] = ()  # names of device profiles, or paths of files
    # path of a budget file, or the tables of one; None for none
    budgets: Path | Mapping[str, Any] | None = None
    remark: tuple[str, ...] = ()  # lines of comments at the top


def recipe_text(settings: BuildSpec, batch_size: int, around: Surroundings) -> str:
    """The text of ``recipe.toml``."""
    content = _content(settings, batch_size, around)
    lines = [f"#:schema {SCHEMA_NAME}", *(f"# {one_line(text)}" for text in around.remark), ""]
    lines += _table((), content)
    return "\n".join(lines) + "\n"


def _content(settings: BuildSpec, batch_size: int, around: Surroundings) -> dict[str, Any]:
    """The tables of the recipe; what is at its default is left out."""
    limits = around.budgets
    budgets = _relative(limits, around.folder) if isinstance(limits, Path) else limits
    loss = {"kind": settings.loss, "inputs": settings.loss_inputs, **settings.loss_options}
    optimizer: dict[str, Any] = {"kind": settings.optimizer, **settings.optimizer_options}
    if not settings.decay_vectors:
        optimizer["decay_vectors"] = False
    micro_batch = batch_size // settings.accumulation_steps
    schedule = settings.schedule
    formats = settings.ort_format
    content: dict[str, Any] = {
        "model": _relative(settings.model, around.folder),
        "package": around.package,
        **settings.said(""),
        "budgets": budgets,
        "head": {} if settings.head is None else dataclasses.asdict(settings.head),
        "loss": loss,
        "parameters": settings.said("parameters")
        | ({"like": _relative(Path(settings.like), around.folder)} if settings.like else {}),
        "adapter": settings.said("adapter"),
        "optimizer": optimizer,
        "clip": {"norm": settings.clip_norm, "value": settings.clip_value},
        "groups": [
            {"parameters": pattern, "learning_rate_scale": scale, "weight_decay": decay}
            for pattern, scale, decay in settings.groups
        ],
        "losses": [
            dict(zip(("name", "kind", "weight", "inputs", "options"), part, strict=True))
            for part in settings.losses
        ],
        "schedule": {}
        if schedule is None
        else {"kind": schedule.kind, **schedule.settings, "learning_rate": schedule.learning_rate},
        "batch": {
            "size": batch_size,
            "micro_batch": None if micro_batch == batch_size else micro_batch,
        },
        "memory": settings.said("memory"),
        "formats": {
            "ort": True if formats else None,
            "ort_styles": [style.value for style in formats.styles] if formats else (),
            "ort_platforms": [p.value for p in formats.platforms if p] if formats else (),
            **settings.said("formats"),
        },
        "target": {
            **settings.said("target"),
            "devices": [
                _relative(Path(name), around.folder) if name.endswith(".toml") else name
                for name in around.devices
            ],
        },
    }
    return _without_nothing(content)


def _without_nothing(content: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is None or empty, tables of nothing included."""
    kept = {}
    for key, value in content.items():
        plain = _without_nothing(value) if isinstance(value, Mapping) else value
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            plain = [_without_nothing(each) for each in value]
        if plain is not None and plain not in ((), [], {}):
            kept[key] = plain
    return kept


def _relative(path: Path, folder: Path) -> str:
    """A path from the recipe's folder; as it is where there is no way, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return path.resolve().as_posix()


def _table(path: tuple[str, ...], content: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a table: its own keys first, then the tables in it."""
    tables = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    arrays = {
        key: value
        for key, value in content.items()
        if isinstance(value, list) and value and isinstance(value[0], Mapping)
    }
    own = {key: v for key, v in content.items() if key not in tables and key not in arrays}
    if path and (own or not (tables or arrays)):
        yield from ("", f"[{toml_key(*path)}]")
    for key, value in own.items():
        yield f"{toml_key(key)} = {toml_value(value)}"
    for key, array in arrays.items():
        for each in array:
            yield from ("", f"[[{toml_key(*path, key)}]]")
            yield from (f"{toml_key(name)} = {toml_value(value)}" for name, value in each.items())
    for key, table in tables.items():
        yield from _table((*path, key), table)
