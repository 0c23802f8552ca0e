"""Writes the files of segments: their models, and one with all weights, which a runtime maps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir

from odtpack.package.training import Segments
from odtpack_runtime.checkpoint.layout import ALIGNMENT
from odtpack_runtime.files.atomic import atomic_write
from odtpack_runtime.package.manifest import (
    ExtraFile,
    Manifest,
    PackageFile,
    SegmentsInfo,
    WeightInfo,
)


@dataclasses.dataclass(frozen=True)
class StagedSegments:
    """Files of segments, and what a manifest says of them."""

    info: SegmentsInfo
    files: tuple[ExtraFile, ...]

    def listed_in(self, manifest: Manifest) -> Manifest:
        """The manifest with them."""
        files = dataclasses.replace(manifest.files, extra=(*manifest.files.extra, *self.files))
        return dataclasses.replace(manifest, files=files, segments=self.info).sealed()


def stage_segments(segments: Segments, folder: Path, prefix: str) -> StagedSegments:
    """Write the models and the weights into a folder.

    Raises:
        OSError: They cannot be written.
    """
    paths = []
    for name, model in segments.models.items():
        paths.append(folder / f"{prefix}{name}.onnx")
        with atomic_write(paths[-1]) as stream:
            stream.write(ir.to_proto(model).SerializeToString(deterministic=True))
    files = [_listed(path, "segment_model") for path in paths]
    tensors = []
    if segments.tensors:
        weights = folder / f"{prefix}segments.weights"
        with atomic_write(weights) as stream:
            for name, tensor in segments.tensors.items():
                stream.write(bytes(-stream.tell() % ALIGNMENT))
                tensors.append(
                    WeightInfo.read(
                        {
                            "name": name,
                            "dtype": tensor.dtype.numpy().name,
                            "shape": list(tensor.shape.numpy()),
                            "offset": stream.tell(),
                        }
                    )
                )
                stream.write(tensor.tobytes())
        files.append(_listed(weights, "segment_weights"))
    plan = [
        dataclasses.replace(
            each,
            forward=f"{prefix}{each.forward}.onnx",
            backward=None if each.backward is None else f"{prefix}{each.backward}.onnx",
        )
        for each in segments.plan
    ]
    info = SegmentsInfo(
        weights=weights.name if tensors else None, tensors=tuple(tensors), segments=tuple(plan)
    )
    return StagedSegments(info, tuple(files))


def _listed(path: Path, role: str) -> ExtraFile:
    return ExtraFile.read({**PackageFile.describe(path).as_dict(), "role": role})
