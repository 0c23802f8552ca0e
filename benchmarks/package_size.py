"""Sizes of packages against the artifacts of the reference for the same models.

    python -m benchmarks.package_size

docs/size.md says what is counted. The sizes are the same on every machine.
"""

import dataclasses

import onnx

from benchmarks.workloads import WORKLOADS
from odtpack.build import build_package
from odtpack.choices import STORAGES, Storage
from scripts.harness import head, row, scratch
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
    with scratch() as folder:
        path, package, reference = folder / "model.onnx", folder / "package", 0
        onnx.save(MODELS[name](), path)
        manifest = build_package(
            path, package, loss="cross_entropy", train=[HEAD] if head else [],
            frozen_storage=storage, nominal=True,
        )  # fmt: skip
        total = sum(each.stat().st_size for each in package.iterdir())
        nominal = (package / "nominal_checkpoint").stat().st_size
        if client.peer_available() is None:
            scales = {p.scale for p in manifest.parameters}
            trained, frozen = (
                [p.name for p in manifest.parameters if p.role == role and p.name not in scales]
                for role in ("trainable", "frozen")
            )
            made = client.generate(
                model=path, folder=folder / "reference", requires_grad=trained, frozen=frozen
            )
            reference = sum(made["files"].values())
        return Sizes(total - nominal, total - manifest.files.checkpoint.size_bytes, reference)


def main() -> None:
    print(head("Model", "Trained", "Frozen weights", "Package:", "Reference:", "Ratio:", "Nominal:",
               "Ratio:"))  # fmt: skip
    ways = [("all", None), ("classifier", None), *(("classifier", each) for each in STORAGES)]
    for name, (trained, storage) in ((name, way) for name in MODELS for way in ways):
        found = measure(name, storage, head=trained != "all")
        ratios = [
            f"{nbytes / found.reference:.3f}" if found.reference else "-"
            for nbytes in (found.package, found.nominal)
        ]
        kept = storage or ("none" if trained == "all" else "float32")
        print(row(name, trained, kept, f"{found.package:,}", f"{found.reference:,}", ratios[0],
                  f"{found.nominal:,}", ratios[1]), flush=True)  # fmt: skip
    if missing := client.peer_available():
        print(f"not compared with the reference: {missing}")


if __name__ == "__main__":
    main()
