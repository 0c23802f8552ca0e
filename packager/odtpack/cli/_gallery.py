"""Complete example projects, which ``odtpack init --example`` writes."""

from __future__ import annotations

import textwrap
import tomllib
from pathlib import Path
from typing import Any, Final

from odtpack import __version__

_SHARED: Final = "shared"
_ABOUT: Final = "example.toml"
_PLACES: Final = {"training.yml": ".github/workflows/training.yml"}
_INPUT: Final = {
    "train.mjs": "  ['{name}', '{type}', [{shape}]],",
    "Train.kt": '        Input("{name}", OnnxJavaType.{kotlin}{more}),',
    "Train.swift": '  try Input("{name}", .{type}, [{shape}]),',
}
_KOTLIN: Final = {"float32": "FLOAT", "int64": "INT64"}


def _folder() -> Path:
    """Where the projects are: beside the package in a wheel, in the repository otherwise."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "gallery"
    return installed if installed.is_dir() else package.parents[1] / "examples" / "gallery"


def names() -> list[str]:
    """Names of the projects."""
    return sorted(path.parent.name for path in _folder().glob(f"*/{_ABOUT}"))


def write_example(name: str, folder: Path) -> list[Path]:
    """Write a project into a new or empty folder; return its files.

    Raises:
        OdtpackError: ``usage`` for an unknown name, or ``folder-not-empty``.
    """
    from odtpack.errors import OdtpackError, near_names
    from odtpack_runtime.files.atomic import atomic_write

    if name not in names():
        raise OdtpackError("usage", f"there is no example {name!r}",
                           hint=near_names(name, names(), "odtpack init --help"))  # fmt: skip
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OdtpackError("folder-not-empty", f"{str(folder)!r} exists and is not an empty folder")
    about = tomllib.loads((_folder() / name / _ABOUT).read_text(encoding="utf-8"))
    files = [*(_folder() / _SHARED).iterdir(), *(_folder() / name).iterdir()]
    written = []
    for source in sorted(path for path in files if path.is_file() and path.name != _ABOUT):
        text = source.read_text(encoding="utf-8")
        if source.parent.name == _SHARED:
            text = _filled(text, source.name, about)
        target = folder / _PLACES.get(source.name, source.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as stream:
            stream.write(text.encode())
        written.append(target)
    return written


def _filled(text: str, file: str, about: dict[str, Any]) -> str:
    """A shared file with what a project is about in the place of @NAMES@."""
    more = about.get("more", "")
    values = {
        "more": "",
        **{key: str(value) for key, value in about.items()},
        "version": __version__,
        "ci_more": textwrap.indent(more, " " * 10),
        "inputs": "\n".join(
            _INPUT[file].format(
                name=name, type=kind, kotlin=_KOTLIN[kind], shape=", ".join(map(str, shape)),
                more="".join(f", {axis}" for axis in shape),
            )
            for name, (kind, *shape) in about["inputs"].items()
        ) if file in _INPUT else "",
    }  # fmt: skip
    for key, value in values.items():
        text = text.replace(f"@{key.upper()}@", value)
    return text
