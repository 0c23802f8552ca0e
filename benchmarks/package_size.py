"""Sizes of packages against the artifacts of the reference for the same models.

    python -m benchmarks.package_size

docs/size.md says what is counted. The sizes are the same on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import onnx

from benchmarks.workloads import WORKLOADS
from odtpack.build import build_package
from odtpack.choices import STORAGES, Storage
from odtpack_runtime.package.manifest import Manifest
from scripts.markdown import head, row
from tests.peer import client

HEAD = "classifier.*"
MODELS = {name: WORKLOADS[name].build for name in ("mobilenet", "transformer")}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes of one package and of the reference's artifacts."""

    package: int  # all files of the package, with the checkpoint
    nominal: int  # the same with a nominal checkpoint, which has no values, in its place
    reference: int  # all files but its nominal checkpoint; 0 where there is no reference


def measure(name: str, storage: Storage | None = None, *, head: bool = False) -> Sizes:
    """Build one package and the reference's artifacts, and count their bytes.

    ``head`` trains the classifier only; ``storage`` is that of the frozen weights.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = MODELS[name]()
        onnx.save(model, folder / "model.onnx")
        manifest = build_package(
            folder / "model.onnx", folder / "package", loss="cross_entropy",
            train=[HEAD] if head else [], frozen_storage=storage, nominal=True,
        )  # fmt: skip
        total = sum(path.stat().st_size for path in (folder / "package").iterdir())
        nominal = (folder / "package" / "nominal_checkpoint").stat().st_size
        return Sizes(
            total - nominal,
            total - manifest.files.checkpoint.size_bytes,
            _reference(folder, manifest) if client.peer_available() is None else 0,
        )


def _reference(folder: Path, manifest: Manifest) -> int:
    scales = {p.scale for p in manifest.parameters}
    sides = {
        role: [p.name for p in manifest.parameters if p.role == role and p.name not in scales]
        for role in ("trainable", "frozen")
    }
    made = client.generate(
        model=folder / "model.onnx", folder=folder / "reference",
        requires_grad=sides["trainable"], frozen=sides["frozen"],
    )  # fmt: skip
    return sum(made["files"].values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    print(head("Model", "Trained", "Frozen weights", "Package:", "Reference:", "Ratio:", "Nominal:",
               "Ratio:"))  # fmt: skip
    for name in MODELS:
        for head_only, storage in ((False, None), *((True, each) for each in (None, *STORAGES))):
            found = measure(name, storage, head=head_only)
            print(row(
                name, "classifier" if head_only else "all",
                storage or ("float32" if head_only else "none"),
                f"{found.package:,}", f"{found.reference:,}", _ratio(found.package, found),
                f"{found.nominal:,}", _ratio(found.nominal, found),
            ), flush=True)  # fmt: skip
    if missing := client.peer_available():
        print(f"not compared with the reference: {missing}")


def _ratio(nbytes: int, sizes: Sizes) -> str:
    return f"{nbytes / sizes.reference:.3f}" if sizes.reference else "-"


if __name__ == "__main__":
    main()
