"""Opens a package folder."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.errors import OdtpackError, unreadable
from odtpack_runtime.files.atomic import file_sha256
from odtpack_runtime.files.folder_update import check_finished
from odtpack_runtime.files.protobuf_wire import messages
from odtpack_runtime.package.manifest import Manifest, PackageFile
from odtpack_runtime.package.records import MAX_MANIFEST_BYTES
from odtpack_runtime.training.loop import load_dataset

# The files of a package: paths that mean the same file everywhere, and nothing unlisted.

MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "manifest.sig"
_MOST_PATH_BYTES = 1024
_MOST_NAME_BYTES = 255
_TAMPERED = "do not use this package: it was tampered with, or not written by odtpack"
_KEEP_NAN = {
    *("Add", "Cast", "Concat", "Div", "Expand", "Flatten", "Gather", "Identity", "Mul", "Reshape"),
    *("Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze"),
}  # operators that leave NaN and infinity where they are, on every processor
_ASKS = {"IsNaN": "NaN", "IsInf": "infinity"}
# Names that Windows gives to devices, whatever stands after the first dot.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])", re.I)


def signature_path(manifest: Path) -> Path:
    """Return where the detached signature of a manifest lies: beside it."""
    return manifest.with_name(manifest.name.removesuffix(MANIFEST_NAME) + SIGNATURE_NAME)


def read_manifest(path: Path) -> bytes:
    """Read the bytes of a manifest, as many as one may have."""
    if path.is_symlink():
        what = f"The manifest {path.name} is a link, which may point outside the package."
        raise OdtpackError("package-path", what, where=str(path))
    try:
        if not path.is_file():  # opening a pipe would wait for somebody to write
            raise FileNotFoundError(errno.ENOENT, "there is no such file")
        with path.open("rb") as stream:
            # Room for as many bytes as are asked for is taken before they are read.
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(min(size, MAX_MANIFEST_BYTES) + 1)
    except OSError as error:
        raise unreadable("package-not-found", path, error, "check its permissions") from error
    if len(data) > MAX_MANIFEST_BYTES:
        what = f"The manifest has more than {MAX_MANIFEST_BYTES} bytes."
        raise OdtpackError("manifest-invalid", what, where=str(path), hint=_TAMPERED)
    return data


def package_in(folder: Path, name: str = MANIFEST_NAME) -> Manifest | None:
    """Return the manifest of the package that a folder holds, None without a manifest."""
    # Web apps have a `manifest.json` too: only that of a package may be replaced.
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        return Manifest.from_json(read_manifest(path), str(path))
    except OdtpackError as error:
        if isinstance(error.__cause__, OSError) and path.is_file():
            raise  # the disk: the package may be sound
        newer = "update odtpack, " if error.code == "manifest-version" else ""
        raise OdtpackError(
            "folder-not-empty",
            f"{str(path)!r} is not the manifest of a package that odtpack could replace: "
            f"{error.what}",
            hint=f"{newer}choose an empty or a new folder, or delete this one if it is a damaged "
            "package",
        ) from error


def is_as_listed(root: Path, entry: PackageFile) -> bool:
    """Whether a file of a folder is the one that a manifest lists; not so in a subfolder."""
    path = root / entry.path
    try:
        if path.parent != root or path.is_symlink() or not path.is_file():
            return False
        return path.stat().st_size == entry.size_bytes and file_sha256(path) == entry.sha256
    except OSError:  # it cannot be read: it stays
        return False


def check_paths(root: Path, files: Iterable[PackageFile], manifest: str) -> None:
    """Check that the paths of a package name its files, each once, on every system."""
    taken = {folded_path(name): name for name in (manifest, signature_path(Path(manifest)).name)}
    for file in files:
        problem = path_problem(file.path)
        if problem is None and (other := taken.get(folded_path(file.path))) is not None:
            problem = f"on some systems is the same file as '{other}'"
            if other == file.path:
                problem = "it needs for something else"
        if problem is not None:
            what = f"The manifest names the file {file.path!r}, which {problem}."
            raise OdtpackError("package-path", what, where=str(root))
        taken[folded_path(file.path)] = file.path


def folded_path(path: str) -> str:
    """Return a path as a system that ignores case and the form of accents compares it."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def path_problem(path: str) -> str | None:
    """Return what is wrong with the path of a package's file, None if nothing is."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or set(path) & set("\\:\0"):
        return "does not lie inside the package"
    if any(unicodedata.category(character) in ("Cc", "Cf", "Cs") for character in path) or (
        set(path) & set('<>"|?*')
    ):
        return "holds characters that not every system allows in a name"
    if len(path.encode()) > _MOST_PATH_BYTES:
        return f"has more than {_MOST_PATH_BYTES} bytes"
    if any(len(part.encode()) > _MOST_NAME_BYTES for part in parts):
        return f"has a name of more than {_MOST_NAME_BYTES} bytes"
    for part in parts:
        if part[-1] in " ." or part[0] == " " or _DEVICE.fullmatch(part.split(".")[0].rstrip()):
            return "is a name that Windows reserves or changes"
    return None


def check_file(root: Path, entry: PackageFile) -> Path:
    """Return the absolute path of a file of a package, once it is the one described."""
    path = root.joinpath(*entry.path.split("/"))
    if any(part.is_symlink() for part in (path, *path.parents) if root in part.parents):
        raise OdtpackError(
            "package-path",
            f"The manifest names the file '{entry.path}', which is not inside the package: "
            "it is reached through a link.",
            where=str(root),
        )
    if not path.is_file():
        what = f"The package lacks its file '{entry.path}'."
        raise OdtpackError("package-incomplete", what, where=str(root))
    try:
        size = path.stat().st_size
        if size == entry.size_bytes and file_sha256(path) == entry.sha256:
            return path
    except OSError as error:
        raise unreadable_file(root, entry.path, error) from error
    raise OdtpackError(
        "package-changed",
        f"'{entry.path}' is not the file that the manifest describes: "
        + (
            "its content differs."
            if size == entry.size_bytes
            else f"it has {size} bytes and not {entry.size_bytes}."
        ),
        where=str(root),
    )


def changed_meanwhile(root: Path) -> OdtpackError:
    """Return the error for a package whose manifest is no longer the one that was checked."""
    what = "The package was changed while it was read."
    hint = "try again when nothing writes to it"
    return OdtpackError("package-changed", what, where=str(root), hint=hint)


def unreadable_file(root: Path, name: str, error: OSError) -> OdtpackError:
    """Return the error for a file of a package that the system does not let one read."""
    what = f"'{name}' cannot be read: {error.strerror or error}."
    return OdtpackError("package-incomplete", what, where=str(root), hint="check its permissions")


def check_nothing_else(root: Path, manifest_name: str, manifest: Manifest) -> None:
    """Check that a package's folder holds what its manifest lists, and nothing besides."""
    listed = {file.path for file in manifest.files.all()}
    listed |= {manifest_name, signature_path(Path(manifest_name)).name}
    folders = {path[:at] for path in listed for at, sign in enumerate(path) if sign == "/"}
    for path, entry in sorted(_entries(root)):
        if path in folders and entry.is_dir(follow_symlinks=False):
            continue
        if path not in listed or not entry.is_file(follow_symlinks=False):
            why = "is a link" if entry.is_symlink() else "is no ordinary file"
            why = why if path in listed else "its manifest does not list"
            what = f"The package holds {path!r}, which {why}."
            raise OdtpackError("package-unlisted", what, where=str(root))


def _entries(root: Path, start: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below a folder with its path relative to it."""
    with os.scandir(root / start) as found:
        entries = list(found)
    for entry in entries:
        path = f"{start}/{entry.name}" if start else entry.name
        yield path, entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(root, path)


# Open a package: a folder with a manifest, three models and a checkpoint.


@dataclass(frozen=True, slots=True)
class Package:
    """A package whose files are those that its manifest describes.

    Attributes:
        path: The folder, absolute.
        manifest_name: Name of the manifest's file in it.
        manifest_sha256: SHA-256 of that file in hex: what this package is, to the byte.
        manifest: The manifest.
        training_model: Path of the training model, absolute; so are the others.
        eval_model: Path of the evaluation model.
        optimizer_model: Path of the optimizer model.
        step_model: Path of the training model that updates the parameters; None if there is none.
        checkpoint: Path of the checkpoint.
        nominal_checkpoint: Path of the checkpoint without values; None if there is none.
    """

    path: Path
    manifest_name: str
    manifest_sha256: str
    manifest: Manifest
    training_model: Path
    eval_model: Path
    optimizer_model: Path
    step_model: Path | None
    checkpoint: Path
    nominal_checkpoint: Path | None

    def __repr__(self) -> str:
        manifest = self.manifest
        sizes = [(item.role, math.prod(item.shape)) for item in manifest.parameters]
        trained = sum(size for role, size in sizes if role == "trainable")
        elements = f"{trained:,} of {sum(size for _, size in sizes):,} elements train"
        return f"Package({self.path.name}, {manifest.loss}, {manifest.optimizer.kind}, {elements})"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Package:
        """Read a package's manifest and check its files against it.

        Args:
            path: The folder, or its manifest file. A folder whose files carry a
                prefix may call the manifest ``<prefix>manifest.json``.

        Raises:
            OdtpackError: ``package-not-found``, ``package-ambiguous`` (several
                manifests), ``manifest-invalid``, ``manifest-version``;
                ``package-path`` for a path that leaves the folder, by ``..`` or a
                link, or does not name one file on every system;
                ``package-incomplete`` or ``package-changed`` for a file that is
                missing or is not the one the manifest describes;
                ``update-unfinished`` for a build or signature that was killed:
                the command that wrote finishes it. Files that the manifest does not
                list are let be, and nothing is changed.
        """
        manifest_path = find_manifest(path)
        root = manifest_path.parent.resolve()
        data = read_manifest(manifest_path)
        manifest = Manifest.from_json(data, str(manifest_path))
        check_paths(root, manifest.files.all(), manifest_path.name)
        found = {name: check_file(root, file) for name, file in manifest.files.named().items()}
        for file in manifest.files.extra:
            check_file(root, file)
        return cls(
            root,
            manifest_path.name,
            hashlib.sha256(data).hexdigest(),
            manifest,
            training_model=found["training_model"],
            eval_model=found["eval_model"],
            optimizer_model=found["optimizer_model"],
            step_model=found.get("step_model"),
            checkpoint=found["checkpoint"],
            nominal_checkpoint=found.get("nominal_checkpoint"),
        )

    def require_stock(self) -> None:
        """Refuse a package that ONNX Runtime as it is cannot train.

        Raises:
            OdtpackError: ``package-target``: it was built for onnxruntime-training.
        """
        if self.manifest.target is not None:
            raise OdtpackError(
                "package-target",
                "The package was built for onnxruntime-training, whose operators this ONNX Runtime "
                "does not have.",
                where=str(self.path),
            )

    def require_one_folder(self) -> None:
        """Refuse a package with files in subfolders, which are not replaced together.

        Raises:
            OdtpackError: ``package-path``.
        """
        for file in self.manifest.files.all():
            if "/" in file.path:
                raise OdtpackError(
                    "package-path",
                    f"The package has its file '{file.path}' in a subfolder, and only files of one "
                    "folder can be written or copied as one.",
                    where=str(self.path),
                    hint="build it again, or move the file and correct its path in the manifest",
                )

    def require_one_model(self, task: str) -> None:
        """Refuse a package of segments.

        Args:
            task: What works with one training model only, as a sentence begins.

        Raises:
            OdtpackError: ``segments-unsupported``.
        """
        if self.manifest.segments is not None:
            raise OdtpackError(
                "segments-unsupported",
                f"{task} needs a package with one training model, and this one is trained segment "
                "by segment.",
                where=str(self.path),
                hint="build it without --segments",
            )

    @property
    def decoder_weights(self) -> set[str]:
        """Files of the folder that the decoder's tensors may lie in."""
        roles = ("segment_weights", "decoder_weights")
        return {file.path for file in self.manifest.files.extra if file.role in roles}

    @property
    def decoder(self) -> Path:
        """The model that :class:`~odtpack_runtime.Generator` runs.

        Raises:
            OdtpackError: ``no-decoder``.
        """
        for file in self.manifest.files.extra:
            if file.role == "decoder_model":
                return self.path / file.path
        raise OdtpackError(
            "no-decoder",
            "The package has no model for generation.",
            where=str(self.path),
            hint="build it with --segments and --adapter lora, of a decoder that was exported with "
            "its key-value cache; the build says why it keeps none",
        )

    def load_data(self, path: str | os.PathLike[str]) -> dict[str, Array]:
        """Load the arrays that the models take, and check them and their labels.

        An input may hold NaN or infinity where the graph asks for them (IsNaN, IsInf) or chooses
        between its values (Where) before it computes with them.

        Raises:
            OdtpackError: As :func:`~odtpack_runtime.training.loop.load_dataset`.
        """
        return load_dataset(
            path,
            self.manifest.input_specs(),
            class_count=self.manifest.class_count,
            ignored_label=self.manifest.ignored_label,
            replaces=self._replaces,
        )

    def _replaces(self, name: str, what: str) -> bool:
        """Whether the graph seems to replace NaN or infinity in an input before it computes."""
        from odtpack_runtime.export import onnx_wire as wire

        graphs = messages(memoryview(self.eval_model.read_bytes()), wire.MODEL_GRAPH)
        holding, readers = {name}, set[str]()
        for node in (wire.Node.read(node) for g in graphs for node in messages(g, wire.NODES)):
            if not holding.isdisjoint(node.inputs):
                readers.add(node.op_type)
                holding.update(node.outputs if node.op_type in _KEEP_NAN else ())
        if readers - {*_KEEP_NAN, *_ASKS, "Where"}:  # something computes with it
            return False
        asked = readers & _ASKS.keys()
        return what in map(_ASKS.get, asked) if asked else "Where" in readers

    def ort_model(
        self,
        of: str,
        style: Literal["fixed", "runtime"] = "fixed",
        platform: Literal["arm", "amd64"] | None = None,
    ) -> Path:
        """Return the path of a model in ORT format, for :class:`Module` and :class:`Optimizer`.

        Args:
            of: ``training_model``, ``eval_model``, ``optimizer_model`` or ``inference_model``.
            style: How it was optimized.
            platform: Processors it was optimized for; None for the one that runs on all.

        Raises:
            OdtpackError: ``no-ort-model`` if the package does not hold it.
        """
        wanted = "ort_model", of, style, platform
        for file in self.manifest.files.extra:
            if (file.role, file.of, file.style, file.platform) == wanted:
                return self.path / file.path
        asked = f"--style {style}" + (f" --platform {platform}" if platform else "")
        raise OdtpackError(
            "no-ort-model",
            f"The package holds no {of} in ORT format of style {style}"
            + (f" for {platform}." if platform else " for all processors."),
            where=str(self.path),
            hint=f"odtpack ort {shlex.quote(str(self.path))} {asked}",
        )


def find_manifest(path: str | os.PathLike[str]) -> Path:
    """Return a package's manifest file."""
    path = Path(path)
    check_finished(path if path.is_dir() else path.parent)
    if path.is_file():
        if path.name.endswith(MANIFEST_NAME):
            return path
        is_model = path.suffix == ".onnx"
        what = f"{path.name} is a {'model' if is_model else 'file'}, not a package folder."
        hint = f"odtpack build {shlex.quote(str(path))} --out package --loss cross_entropy"
        raise OdtpackError(
            "package-not-found", what, where=str(path), hint=hint if is_model else None
        )
    candidates = [path / MANIFEST_NAME]
    if not candidates[0].is_file():
        candidates = sorted(path.glob(f"*{MANIFEST_NAME}")) if path.is_dir() else []
    if not candidates:
        raise OdtpackError(
            "package-not-found",
            f"{path} is not a package: it has no {MANIFEST_NAME}."
            if path.exists()
            else f"There is no folder {path}.",
            where=str(path),
            hint=f"odtpack import {shlex.quote(str(path))} --out package"
            if any(path.glob("*training_model.onnx"))
            else None,
        )
    if len(candidates) > 1:
        what = f"{path} holds several packages: {', '.join(file.name for file in candidates)}."
        hint = f"pass one of them, for example {candidates[0]}"
        raise OdtpackError("package-ambiguous", what, where=str(path), hint=hint)
    return candidates[0]
