"""Writes the corpus of hostile packages, checkpoints and manifests, with the decision on each."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from odtpack.build import build_package
from odtpack.optimizers import AdamW, GroupRule
from odtpack_runtime.checkpoint.format import CheckpointData, read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.training.schedules import ScheduleSpec
from tests import zoo
from tests.hostile.cases import Case
from tests.hostile.checkpoints import CORRUPT, checkpoints
from tests.hostile.manifests import manifests
from tests.hostile.models import outside
from tests.hostile.paths import ACCEPTED, REFUSED, odd

INDEX = "index.json"
_MANIFEST = "manifest.json"


def build_base(folder: Path) -> Path:
    """Build the package that others are made from: groups, a schedule, a self-check."""
    update = {
        "groups": (GroupRule("fc1.*", 0.5, 0.0),),
        "schedule": ScheduleSpec("cosine", {"floor": 0.1}, 0.02),
    }
    build_package(
        zoo.mlp((4, 3, 2)), folder, loss="cross_entropy", optimizer=AdamW(weight_decay=0.1),
        **update, step_model="never",
    )  # fmt: skip
    return folder


def write_corpus(out: Path) -> list[Case]:
    """Write every case, and the index.

    Args:
        out: A folder that does not exist or is empty.
    """
    out.mkdir(parents=True, exist_ok=True)
    base = build_base(out / "base")
    cases = [*_manifests(out, base), *_paths(out, base), *_files(out, base)]
    cases += [*_checkpoints(out), *_sessions(out, base)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    index = {"format": 1, "cases": [case.entry() for case in cases]}
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return cases


@cache
def _good(base: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((base / _MANIFEST).read_bytes())
    content.pop("digest")
    return content


def _folder(out: Path, base: Path, name: str) -> Path:
    """A folder like the base, whose files share its memory on the disk, but for the manifest."""
    shutil.copytree(base, out / name, copy_function=os.link)
    (out / name / _MANIFEST).unlink()
    shutil.copyfile(base / _MANIFEST, out / name / _MANIFEST)
    return out / name


def _replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _text(content: dict[str, Any] | bytes) -> bytes:
    return content if isinstance(content, bytes) else json.dumps(content).encode()


def _manifests(out: Path, base: Path) -> Iterator[Case]:
    for made, content, codes, stricter in manifests(_good(base)):
        name = _file_name(made)
        (_folder(out, base, name) / _MANIFEST).write_bytes(_text(content))
        yield Case(name=name, action="open", package=name, codes=codes, stricter=stricter)


def _file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "_-." else "_" for sign in name)


def _paths(out: Path, base: Path) -> Iterator[Case]:
    odd_paths = odd()
    for index, path in enumerate((*REFUSED, *ACCEPTED, *odd_paths)):
        name = f"path_{index:03}"
        folder = _folder(out, base, name)
        content = copy.deepcopy(_good(base))
        content["files"]["checkpoint"]["path"] = path
        (folder / _MANIFEST).write_bytes(_text(content))
        refused = path in REFUSED
        if not refused:
            target = folder.joinpath(*path.split("/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / "checkpoint").rename(folder / ".moved")
            target.parent.mkdir(parents=True, exist_ok=True)
            (folder / ".moved").rename(target)
        codes: tuple[str, ...] = ()
        if refused:
            # An empty path and half a pair of surrogates are no text of a manifest either.
            bare = path == "" or any(0xD800 <= ord(sign) < 0xE000 for sign in path)
            codes = ("manifest-invalid", "package-path") if bare else ("package-path",)
        stricter = odd_paths.get(path, {})
        yield Case(name=name, action="open", package=name, codes=codes, stricter=stricter)


def _files(out: Path, base: Path) -> Iterator[Case]:
    """Files that are not what the manifest lists."""

    def edit(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        return lambda folder: _replace(folder / file, change((folder / file).read_bytes()))

    def link(folder: Path) -> None:
        (folder / "checkpoint").rename(folder.parent / "outside.ckpt")
        (folder / "checkpoint").symlink_to("../outside.ckpt")

    def folder_in_place(folder: Path) -> None:
        (folder / "checkpoint").unlink()
        (folder / "checkpoint").mkdir()

    changes: dict[str, tuple[Callable[[Path], None], str]] = {
        "no_manifest": (lambda folder: (folder / _MANIFEST).unlink(), "package-not-found"),
        "longer": (edit("training_model.onnx", lambda data: data + b"\0"), "package-changed"),
        "shorter": (edit("optimizer_model.onnx", lambda data: data[:-1]), "package-changed"),
        "empty": (edit("eval_model.onnx", lambda data: b""), "package-changed"),
        "one_bit": (edit("checkpoint", lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:]),
                    "package-changed"),
        "a_folder": (folder_in_place, "package-incomplete"),
        "a_link": (link, "package-path"),
    }  # fmt: skip
    for file in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint"):
        changes[f"without_{file}"] = (
            lambda folder, file=file: (folder / file).unlink(),
            "package-incomplete",
        )
    for what, (change, code) in changes.items():
        name = f"file_{what}"
        change(_folder(out, base, name))
        yield Case(name=name, action="open", package=name, codes=(code,))


def _checkpoints(out: Path) -> Iterator[Case]:
    for made, data, codes in checkpoints():
        name = _file_name(made)
        (out / name).mkdir()
        (out / name / "state.ckpt").write_bytes(data)
        yield Case(name=name, action="checkpoint", checkpoint=f"{name}/state.ckpt", codes=codes)


def _sessions(out: Path, base: Path) -> Iterator[Case]:
    """Checkpoints, whole by themselves, that do not go with their package."""
    data = read_checkpoint(base / "checkpoint")
    first = next(iter(data.trainable))

    def case(name: str, state: CheckpointData, *codes: str) -> Case:
        folder = _folder(out, base, f"session_{name}")
        write_checkpoint(folder / "other.ckpt", state)
        return Case(
            name=folder.name, action="session", package=folder.name,
            checkpoint=f"{folder.name}/other.ckpt", codes=codes,
        )  # fmt: skip

    def parameters(**changes: Any) -> CheckpointData:
        changed = data.trainable | changes
        return CheckpointData({n: a for n, a in changed.items() if a is not None}, data.frozen)

    yield case("own", data)
    yield case("without_parameter", parameters(**{first: None}), "model-mismatch")
    more = np.zeros(2, np.float32)
    yield case("more_parameters", parameters(more=more), "model-mismatch")
    yield case("proto_parameter", parameters(__proto__=more), "model-mismatch")
    shape = data.trainable[first].shape
    yield case(
        "other_shape", parameters(**{first: np.zeros((*shape, 2), np.float32)}), "model-mismatch"
    )
    yield case("other_type", parameters(**{first: np.zeros(shape, np.float64)}), "model-mismatch")
    frozen = CheckpointData({}, data.trainable)
    yield case("nothing_trainable", frozen, "model-mismatch", "nothing-trainable")
    yield case("no_parameters", CheckpointData({}, {}), "model-mismatch", "nothing-trainable")
    yield from _other_manifests(out, base)


def _other_manifests(out: Path, base: Path) -> Iterator[Case]:
    """Whole packages whose models and manifest differ in a way that a session sees."""

    def case(name: str, file: str, content: bytes, *codes: str) -> Case:
        folder = _folder(out, base, f"session_{name}")
        _replace(folder / file, content)
        manifest = copy.deepcopy(_good(base))
        for entry in manifest["files"].values():
            if isinstance(entry, dict) and entry["path"] == file:
                entry["size_bytes"] = len(content)
                entry["sha256"] = hashlib.sha256(content).hexdigest()
        (folder / _MANIFEST).write_bytes(_text(manifest))
        return Case(
            name=folder.name, action="session", package=folder.name,
            checkpoint=f"{folder.name}/checkpoint", codes=codes,
        )  # fmt: skip

    for model in ("training_model", "eval_model", "optimizer_model"):
        for what, content in (("empty", b""), ("rubbish", b"\xff" * 100), ("json", b"{}")):
            yield case(f"{model}_{what}", f"{model}.onnx", content, "model-not-loadable")
        for what, content in outside((base / f"{model}.onnx").read_bytes()):
            codes = ("model-external-data", "model-not-loadable")
            yield case(f"{model}_{what}", f"{model}.onnx", content, *codes)
    yield case("checkpoint_rubbish", "checkpoint", b"ODTC" * 9, *CORRUPT)
