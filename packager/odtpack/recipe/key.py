"""Whether a package has to be built again: the cache key, and the stamp beside a package.

The key is a SHA-256 of everything that decides the package: the settings, the bytes of the
model and of its external data, and the versions of what builds it. The stamp,
``PKG.stamp.json``, says by which key a package was built and what its files were then.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from odtpack.errors import OdtpackError, model_not_readable, not_onnx
from odtpack.names_file import read_names
from odtpack.spec import BuildSpec
from odtpack_runtime.files.atomic import file_sha256, open_regular, write_whole
from odtpack_runtime.package.package import MANIFEST_NAME

_FORMAT: Final = 1
_MAX_STAMP_BYTES: Final = 2**20


def cache_key(settings: BuildSpec) -> str:
    """The key of what settings build, in hex."""
    import onnxruntime

    versions = {name: version(name) for name in ("odtpack", "onnx", "onnx-ir")}
    content = {
        "format": _FORMAT,
        "settings": settings.canonical_json(),
        "model": _model_digests(settings.model),
        "versions": {**versions, "onnxruntime": onnxruntime.__version__},
    }
    if settings.like is not None:
        content["like"] = [str(each) for each in read_names(Path(settings.like))]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def stamp_path(folder: Path) -> Path:
    """Where the stamp of a package lies: beside it, since it is none of its files."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.stamp.json")


def write_stamp(folder: Path, key: str) -> None:
    """Note that the package in a folder was built by a key."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_file():
            status = path.stat()
            files[path.name] = [status.st_size, status.st_mtime_ns, file_sha256(path)]
    content = {"format": _FORMAT, "key": key, "files": files}
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    write_whole(stamp_path(folder), text.encode())


def is_current(folder: Path, key: str) -> bool:
    """Whether the package in a folder was built by a key, and all its files are as they were."""
    # A file whose size and time of change are those of the stamp counts as intact; one with another
    # time is read.
    content = _read_stamp(stamp_path(folder))
    if content.get("format") != _FORMAT or content.get("key") != key:
        return False
    files = content.get("files")
    if not isinstance(files, dict) or MANIFEST_NAME not in files:
        return False
    try:
        return all(_is_intact(folder, name, *entry) for name, entry in files.items())
    except (OSError, TypeError, ValueError):
        return False


def _is_intact(folder: Path, name: str, size: int, changed: int, digest: str) -> bool:
    path = folder / name
    if path.name != name or path.is_symlink() or not path.is_file():
        return False
    status = path.stat()
    if status.st_size != size:
        return False
    return status.st_mtime_ns == changed or file_sha256(path) == digest


def _read_stamp(path: Path) -> dict[str, Any]:
    """What a stamp says; nothing if there is none, or none that can be read."""
    try:
        with open_regular(path) as stream:
            content = json.loads(stream.read(_MAX_STAMP_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _model_digests(path: Path) -> dict[str, str]:
    """SHA-256 of the model as ``""`` and of its external data by name."""
    import google.protobuf.message
    import onnx

    from odtpack.model.external_data import detach, files_beside

    try:
        content = path.read_bytes()
        proto = onnx.ModelProto()
        proto.ParseFromString(detach(memoryview(content))[0])
        beside = files_beside(proto, path)
        digests = {"": hashlib.sha256(content).hexdigest()}
        return digests | {str(file.relative_to(path.parent)): file_sha256(file) for file in beside}
    except FileNotFoundError:
        what = f"there is no file {str(path)!r}"
        hint = "the path of a recipe's model is taken from the recipe's folder"
        raise OdtpackError("model-not-found", what, hint=hint) from None
    except OSError as error:
        raise model_not_readable(path, error) from error
    except google.protobuf.message.DecodeError:
        raise not_onnx(path) from None
