"""``odtpack build`` and ``cache-key``: a package from a forward model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odtpack.choices import ORT_TRAINING
from odtpack.cli import _console
from odtpack.cli._options import Json, takes_spec

if TYPE_CHECKING:
    from odtpack.recipe import BuildSpec
    from odtpack_runtime.package.manifest import Manifest


@takes_spec(before="sample")
def build(
    model: Path | None = None,
    *,
    recipe: Path | None = None,
    out: Path | None = None,
    if_changed: bool = False,
    sample: Path | None = None,
    **given: Any,
) -> Json:
    r"""Build a training package from a forward ONNX model.

    Writes training_model.onnx, eval_model.onnx, optimizer_model.onnx, checkpoint and
    manifest.json. The same model and options give the same bytes, except for files in ORT
    format, whose initializers ONNX Runtime orders, and the measured losses of the self-check.

    Parameters:
        model MODEL.onnx: Forward model. Default: that of the recipe.
        recipe recipe.toml: Recipe. Options override its keys. Default: recipe.toml in the current
            folder, if there is no MODEL.onnx.
        out PKG: Folder of the package: new, empty, or a package. Default: from the recipe.
        if_changed: Do nothing if the package is up to date. Writes PKG.stamp.json beside it.
        sample DATA.npz: After the build, run steps on these samples and warn of parameters whose
            gradient is zero.
        json: Print the manifest as JSON on stdout.

    Examples:
        odtpack build model.onnx --out package --loss cross_entropy
        odtpack build model.onnx --out package --loss mse --optimizer sgd --train 'head.*'
        odtpack build model.onnx --out package --loss cross_entropy --freeze 'conv1.*' \
            --weight-decay 0.01 --output logits
        odtpack build model.onnx --out package --loss cross_entropy --optimizer sgd \
            --momentum 0.9 --optimizer-option nesterov=true --clip-norm 1 --accumulate 4
        odtpack build model.onnx --out package --loss cross_entropy --weight-decay 0.05 \
            --no-vector-decay --group 'head.*:lr=10' --schedule cosine:warmup=50
        odtpack build model.onnx --out package --loss next_token --adapter lora --rank 8 \
            --alpha 16 --on '*.q_proj' --on '*.v_proj'
        odtpack build --recipe recipe.toml --if-changed
    """
    from odtpack.cli._files import find_recipe
    from odtpack.cli._options import overlay

    if sample is not None and given["runtime"] == ORT_TRAINING:
        from odtpack.errors import OdtpackError

        raise OdtpackError(
            "target-cannot",
            "--sample trains, and this ONNX Runtime cannot train what is built for "
            "onnxruntime-training",
            hint="leave --sample or --target out",
        )
    read = find_recipe(recipe, wanted=model is None)
    spec = overlay({"model": model, **given}, read)
    folder = out or (None if read is None else read.package)
    if folder is None:
        from odtpack.errors import OdtpackError

        hint = "odtpack build --help"
        raise OdtpackError("usage", "--out is missing, and no recipe names a package", hint=hint)
    if sample is not None:
        from odtpack_runtime.training.loop import load_dataset

        load_dataset(sample, [])  # before the build; what the model takes is known after it
    content = _build_if_changed(spec, folder) if if_changed else _build(spec, folder)
    if sample is not None:
        from odtpack.cli._fit import report_zero_gradients

        content["zero_gradients"] = report_zero_gradients(folder, sample)
    return {"path": str(folder), **content}


def _build(spec: BuildSpec, folder: Path) -> Json:
    from odtpack.build import build as build_spec

    checks: list[float] = []
    with _console.working(f"building {folder}") as shown:
        manifest = build_spec(
            spec,
            folder,
            remark=lambda text: _console.say(f"note: {text}", "yellow", shown),
            checked=checks.append,
        )
    print_built(manifest, folder)
    if checks:
        _console.say(f"  the models were run in {checks[0]:.2g} s of processor time")
    return {**manifest.as_dict(), "check_seconds": checks[0] if checks else None}


def _build_if_changed(spec: BuildSpec, folder: Path) -> Json:
    """Build unless the package is the one that would be built; what --json shows of it."""
    from odtpack.errors import OdtpackError
    from odtpack.recipe.key import cache_key, is_current, write_stamp
    from odtpack_runtime.package.manifest import Manifest
    from odtpack_runtime.package.package import MANIFEST_NAME

    key = cache_key(spec)
    content = None
    if is_current(folder, key):
        name = folder / MANIFEST_NAME
        with suppress(OdtpackError):  # of a schema that this version does not read
            content = Manifest.from_json(name.read_bytes(), str(name)).as_dict()
    built = content is None
    if content is None:
        content = _build(spec, folder)
        write_stamp(folder, key)
    else:
        _console.say(f"unchanged {folder}", style="bold")
    _console.say(f"  cache key {key}")
    return {"built": built, "cache_key": key, **content}


def print_built(manifest: Manifest, folder: Path) -> None:
    """Print what a package holds: parameters by role, what trains, and files."""
    from odtpack.cli._describe import parameter_summary, runtime_text, trained_lines
    from odtpack_simulator.values.units import format_bytes

    _console.say(f"built {folder}", style="bold")
    for line in (*parameter_summary(manifest), *trained_lines(manifest)):
        _console.say(f"  {line}")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    width = max(24, *(len(path.name) for path in files))
    for path in files:
        _console.say(f"  {path.name:<{width}} {format_bytes(path.stat().st_size):>10}")
    _console.say(f"  runs on {runtime_text(manifest)}")


def cache_key(*, recipe: Path = Path("recipe.toml")) -> Json:
    """Print the cache key of a recipe's package. Nothing is built.

    It depends on the keys of the recipe that affect the package, the model and its external
    data, and the versions of odtpack, onnx, onnx-ir and onnxruntime.

    Parameters:
        recipe recipe.toml: Recipe of the package.

    Examples:
        odtpack cache-key --recipe recipe.toml
    """
    from odtpack.recipe import BuildSpec, read_recipe
    from odtpack.recipe import key as keys

    found = keys.cache_key(BuildSpec.of(read_recipe(recipe)))
    # Without rich, whose import takes longer than the rest.
    if not _console.wants_json.get():
        _console.print_plain(f"{found}\n")
    return {"cache_key": found}
