"""ORT format files of a package, the operators they need, and their place in its manifest."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx_ir as ir

from odtpack.choices import OrtFormat, Types
from odtpack.ort.format import convert_variants
from odtpack.ort.kernel_needs import newest, oldest_of_files, oldest_runtime
from odtpack.ort.operator_config import CONFIG_NAME, TYPES_CONFIG_NAME, config_of
from odtpack.ort.session_runs import INFERENCE_MODEL, final_graph, onnx_models, runs_of_file
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.export.inference_model import Template, export_inference_model
from odtpack_runtime.files.folder_update import update_folder
from odtpack_runtime.package.checks import read_model
from odtpack_runtime.package.manifest import ExtraFile, Manifest
from odtpack_runtime.package.package import Package, signature_path

ORT_ROLES = frozenset({"ort_model", "operators_config", "operators_and_types_config"})
"""Roles of what :func:`write_ort_files` writes."""


@dataclass(frozen=True)
class Inference:
    """An inference model to add to a package: its outputs, and its parameters by name."""

    outputs: tuple[str, ...]
    parameters: Mapping[str, Array]

    def write(self, package: Package, path: Path) -> list[str]:
        """Cut it out of the package's evaluation or forward model; return its inputs' names."""
        template = partial(Template.beside, package.training_model)
        return export_inference_model(
            package.eval_model, self.parameters, path, self.outputs, template, apart=True
        )


def write_ort_files(
    models: Mapping[str, Path],
    formats: OrtFormat,
    folder: Path,
    prefix: str = "",
    custom_op_library: Path | None = None,
) -> list[ExtraFile]:
    """Write models in ORT format and the configurations of operators they need."""
    made: list[ExtraFile] = []
    together: list[Path] = []  # graphs of all models
    with tempfile.TemporaryDirectory(prefix=".odtpack-", dir=folder) as scratch:
        for key, model in models.items():
            written = convert_variants(model, formats, folder, custom_op_library)
            own: list[Path] = []
            for out, (style, platform) in written.items():
                how = {"style": style.value, "platform": platform and platform.value}
                made.append(ExtraFile.describe(out, role="ort_model", of=key, **how))
                for run in runs_of_file(key, out, platform, model, style):
                    graph = Path(scratch) / f"{out.stem}.applied.ort"
                    own.append(final_graph(run, graph, custom_op_library))
            made.append(_config(folder / f"{model.stem}.{CONFIG_NAME}", own, of=key))
            together += own
        made.append(_config(folder / f"{prefix}{CONFIG_NAME}", together))
        made.append(_config(folder / f"{prefix}{TYPES_CONFIG_NAME}", together, Types.OPERATOR))
    return made


def with_ort_files(manifest: Manifest, made: Sequence[ExtraFile], oldest: str) -> Manifest:
    """Return a manifest that lists these files in place of those of the same roles."""
    roles = ORT_ROLES | {file.role for file in made}
    kept = tuple(file for file in manifest.files.extra if file.role not in roles)
    files = dataclasses.replace(manifest.files, extra=(*kept, *made))
    return dataclasses.replace(manifest, files=files, minimum_onnxruntime=oldest)


def add_ort_files(
    package: Package, formats: OrtFormat, inference: Inference | None = None
) -> list[ExtraFile]:
    """Write a package's models in ORT format, replacing those that are there."""
    package.require_one_folder()
    prefix = package.training_model.name.removesuffix("training_model.onnx")
    models = onnx_models(package)
    before = package.manifest
    made: list[ExtraFile] = []
    # A signature is one of the manifest that was, and would be refused.
    signature = signature_path(package.path / package.manifest_name).name
    obsolete = {file.path for file in before.files.extra if file.role in ORT_ROLES} | {signature}
    with update_folder(package.path, last=package.manifest_name, obsolete=obsolete) as stage:
        if inference is not None:
            out = stage / f"{prefix}{INFERENCE_MODEL}.onnx"
            inference.write(package, out)
            made.append(ExtraFile.describe(out, role=INFERENCE_MODEL))
            models[INFERENCE_MODEL] = out
        made += write_ort_files(models, formats, stage, prefix)
        files = (stage / file.path for file in made if file.role == "ort_model")
        graphs = map(ir.from_proto, map(read_model, models.values()))
        oldest = newest([oldest_runtime(graphs), oldest_of_files(files)])
        manifest = with_ort_files(before, made, oldest.name)
        (stage / package.manifest_name).write_bytes(manifest.to_json().encode())
    return made


def _config(
    path: Path, graphs: Iterable[Path], types: Types = Types.NONE, of: str | None = None
) -> ExtraFile:
    # The names of temporary files would make each build's bytes differ.
    text = config_of(graphs, types).text(["Operators of the models in ORT format of this package"])
    path.write_text(text, newline="\n")
    role = "operators_config" if types is Types.NONE else "operators_and_types_config"
    return ExtraFile.describe(path, role=role, of=of)
