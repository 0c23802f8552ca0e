"""Writes settings as a recipe that ``odtpack build --recipe`` reads back to the same settings."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odtpack.recipe.draft import SCHEMA_NAME

if TYPE_CHECKING:
    from odtpack.recipe import BuildSettings


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a recipe holds besides what decides the package.

    Attributes:
        folder: Where it will lie; paths in it are from there.
        package: Folder of the package, from the recipe's folder.
        devices: Names of device profiles, or paths of files.
        budgets: Path of a budget file, or the tables of one; None for none.
        remark: Lines of comments at the top.
    """

    folder: Path
    package: str
    devices: tuple[str, ...] = ()
    budgets: Path | Mapping[str, Any] | None = None
    remark: tuple[str, ...] = ()


def recipe_text(settings: BuildSettings, batch_size: int, around: Surroundings) -> str:
    """The text of ``recipe.toml``.

    Args:
        settings: What decides the package.
        batch_size: Samples of an optimizer step.
        around: What else stands in it.
    """
    content = _content(settings, batch_size, around)
    lines = [f"#:schema {SCHEMA_NAME}", *(f"# {_line(text)}" for text in around.remark), ""]
    lines += _table((), content)
    return "\n".join(lines) + "\n"


def _content(settings: BuildSettings, batch_size: int, around: Surroundings) -> dict[str, Any]:
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
        "outputs": settings.outputs,
        **({} if settings.prediction else {"prediction": False}),
        "budgets": budgets,
        "loss": loss,
        "parameters": {
            "train": settings.train,
            "freeze": settings.freeze,
            "untie": settings.untie,
        },
        "optimizer": optimizer,
        "clip": {"norm": settings.clip_norm, "value": settings.clip_value},
        "groups": [
            {"parameters": pattern, "learning_rate_scale": scale, "weight_decay": decay}
            for pattern, scale, decay in settings.groups
        ],
        "schedule": {}
        if schedule is None
        else {"kind": schedule.kind, **schedule.settings, "learning_rate": schedule.learning_rate},
        "batch": {
            "size": batch_size,
            "micro_batch": None if micro_batch == batch_size else micro_batch,
        },
        "formats": {
            "ort": True if formats else None,
            "ort_styles": [style.value for style in formats.styles] if formats else (),
            "ort_platforms": [p.value for p in formats.platforms if p] if formats else (),
            "frozen_dtype": settings.frozen_storage,
            "nominal": settings.nominal or None,
            "self_check": None if settings.self_check else False,
        },
        "target": {
            "onnxruntime": settings.onnxruntime,
            "runtime": None if settings.runtime == "onnxruntime" else settings.runtime,
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
        yield from ("", f"[{_path(path)}]")
    for key, value in own.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, array in arrays.items():
        for each in array:
            yield from ("", f"[[{_path((*path, key))}]]")
            yield from (f"{_key(name)} = {_value(value)}" for name, value in each.items())
    for key, table in tables.items():
        yield from _table((*path, key), table)


def _path(parts: Sequence[str]) -> str:
    return ".".join(_key(part) for part in parts)


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
    return name if bare else _value(name)


def _value(value: object) -> str:
    """A value of TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML one, but for the one control character that JSON leaves alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            msg = f"{value} is not a number of a recipe"
            raise ValueError(msg)
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())} }}"
    msg = f"a recipe holds no {type(value).__name__}"
    raise TypeError(msg)


def _line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
