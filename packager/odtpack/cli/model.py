"""Forward models and what is made of them.

``odtpack head``, ``import``, ``init``, ``ops`` and ``compare-gradients``.
"""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from odtpack import __version__
from odtpack.cli import _console
from odtpack.cli._options import Count, Json, PositiveCount, command, group, takes_spec


def head(
    model: Path,
    *,
    pool: Literal["mean", "cls", "none", "global", "flatten"],
    classes: PositiveCount,
    out: Path,
    seed: Count = 0,
    encoder_output: str | None = None,
) -> Json:
    """Add a trainable classification head to an encoder.

    The head is pooling over the tokens and a linear layer, head.weight and head.bias; its
    output, logits, replaces the encoder's outputs.

    Parameters:
        pool: Mean over the tokens (those of attention_mask), the first token, or none for an output
            [batch, width]. Of a feature map [batch, channels, ...], global for the mean of each
            channel, or flatten for all of its numbers.
        classes: Number of classes.
        out FILE.onnx: Model to write.
        seed S: Seed of the new weight.
        encoder_output NAME: Output of the encoder that the head reads. Default: the first that
            fits.

    Examples:
        odtpack head encoder.onnx --pool mean --classes 4 --out model.onnx
        odtpack build model.onnx --out package --loss cross_entropy --train 'head.*'
    """
    from odtpack.cli._files import check_writable, write_file
    from odtpack.model.head import add_head

    check_writable(out, "--out", [model])
    write_file(out, add_head(model, pool, classes, seed=seed, name=encoder_output))
    _console.say(
        f"next: odtpack build {shlex.quote(str(out))} --out package --loss cross_entropy "
        "--train 'head.*'"
    )
    return {"path": str(out)}


def import_(
    artifacts: Path, *, out: Path, checkpoint: Path | None = None, prefix: str | None = None
) -> Json:
    """Build a package from artifacts of onnxruntime-training.

    They are those of release 1.19, the last one. Parameters, optimizer state and properties come
    from the checkpoint. Inputs, outputs and parameters keep their names.

    Parameters:
        artifacts DIR: Folder that onnxruntime-training's generate_artifacts wrote.
        out PKG: Folder of the package: new, empty, or a package.
        checkpoint CK: Checkpoint to continue from, for example one that a device saved. [default:
            that of the folder]
        prefix TEXT: Prefix of the file names, if the folder has several models.
        json: Print the manifest as JSON on stdout.

    Examples:
        odtpack import artifacts --out package
        odtpack import artifacts --checkpoint from_device.ckpt --out package
    """
    from odtpack.cli._describe import of_properties
    from odtpack.cli.build import print_built
    from odtpack.ort_training.importing import import_artifacts
    from odtpack_runtime.checkpoint.format import read_checkpoint

    manifest = import_artifacts(
        artifacts, out, checkpoint=checkpoint, prefix=prefix, remark=_console.warn
    )
    print_built(manifest, out)
    saved = read_checkpoint(out / manifest.files.checkpoint.path)
    _console.warn(*of_properties(saved.properties))
    return {"path": str(out), **manifest.as_dict()}


def init(
    model: Path | None = None,
    *,
    out: Path | None = None,
    example: Annotated[
        str | None,
        ("metavar", "NAME"),
        ("help", f"Write a complete example project instead: {', '.join(names())}."),
        ("autocompletion", lambda incomplete: [n for n in names() if n.startswith(incomplete)]),
    ] = None,
    force: bool = False,
) -> Json:
    """Write a recipe for a forward model. Everything optional is commented out.

    It can be built unchanged: odtpack build --recipe recipe.toml. recipe.schema.json beside it
    lets editors complete and check the keys. With --example, write a project with a network,
    data, a recipe, budgets, a CI file and training loops for apps.

    Parameters:
        out PATH: Recipe to write, or with --example the folder. [default: recipe.toml, or the
            example's name]
        force: Replace an existing recipe.

    Examples:
        odtpack init model.onnx
        odtpack init model.onnx --out training/recipe.toml
        odtpack init --example keyword-spotting
    """
    from odtpack.cli._files import check_writable, write_file
    from odtpack.errors import OdtpackError

    if example is not None and model is None:
        folder = out or Path(example)
        for path in write_example(example, folder):
            _console.wrote(path)
        _console.say(f"next: the commands in {shlex.quote(str(folder / 'README.md'))}")
        return {"path": str(folder)}
    if model is None or example is not None:
        missing = "MODEL.onnx is missing, and no --example NAME is given"
        what = missing if model is None else "give a forward model or --example, not both"
        raise OdtpackError("usage", what, hint="odtpack init --help")

    from odtpack.recipe.draft import SCHEMA_NAME, draft, schema_text

    out = out or Path("recipe.toml")
    schema = out.with_name(SCHEMA_NAME)
    for path in (out, schema):
        check_writable(path, "--out", [model])
    if out.exists() and not force:
        raise OdtpackError("recipe-exists", f"the file {str(out)!r} exists")
    for path, text in ((schema, schema_text()), (out, draft(model, out.parent))):
        write_file(path, text.encode())
    _console.say(f"next: odtpack build --recipe {shlex.quote(str(out))}")
    return {"path": str(out), "schema": str(schema)}


ops = group(
    "ops",
    "List operators that have a gradient, or check a model.",
    "odtpack ops coverage",
    "odtpack ops check model.onnx",
)


@command(ops)
def coverage(
    operators: list[str] | None = None,
    *,
    how: Literal["rule", "expansion", "rewritten", "no gradient", "none"] | None = None,
) -> Json:
    """Print the table of operators with a gradient.

    rule: it has a gradient rule. expansion: it is expanded into the operators of its definition.
    rewritten: it is replaced in the patterns of docs/operators.md. no gradient: it is constant
    almost everywhere, so its gradient is zero. none: it cannot be differentiated.

    Parameters:
        operators OPERATOR: Operators to show. Default: all.
        how: Show only operators that are differentiated in this way.

    Examples:
        odtpack ops coverage
        odtpack ops coverage Conv LSTM
        odtpack ops coverage --how none --json
    """
    from odtpack.errors import OdtpackError, near_names
    from odtpack.package.coverage import coverage as table

    _console.results()
    rows = table()
    known = {row.op_type for row in rows}
    for name in operators or ():
        if name not in known:
            hint = near_names(name, known, "odtpack ops coverage")
            raise OdtpackError("unknown-operator", f"there is no operator {name!r}", hint=hint)
    shown = [
        row
        for row in rows
        if (not operators or row.op_type in operators) and (how is None or row.how == how)
    ]
    cells = [
        (
            row.op_type if row.domain == "ai.onnx" else f"{row.domain}.{row.op_type}",
            ", ".join(map(str, row.opsets)) or "–",
            ", ".join(row.inputs) or "–",
            row.how,
        )
        for row in shown
    ]
    _console.table(cells, ("Operator", "Opsets", "Trainable inputs", "How"))
    return {"operators": [dataclasses.asdict(row) for row in shown]}


@command(ops)
def check(
    model: Path,
    *,
    train: list[str] | None = None,
    freeze: list[str] | None = None,
    loss_input: list[str] | None = None,
    target: Literal["webgpu"] | None = None,
) -> tuple[Json, int]:
    """Find the nodes of a model that block gradients. Say what to do about each.

    Exit code 0 if every parameter can be trained, 1 if a node blocks a gradient.

    Parameters:
        train GLOB: Parameters to train, as for build. Default: all.
        freeze GLOB: Parameters to freeze, as for build.
        loss_input NAME: Output that the loss reads. Default: the first.
        target: Also say which operators the provider of this target leaves to the processor.

    Examples:
        odtpack ops check model.onnx
        odtpack ops check model.onnx --train 'head.*' --json
    """
    from odtpack.errors import OdtpackError
    from odtpack.model.loading import load_model
    from odtpack.package.candidates import look_alikes, resolve, unreached
    from odtpack.package.coverage import find_fallbacks, find_obstacles
    from odtpack_simulator.values.text import counted

    _console.results()
    loaded = load_model(model, named=(*(train or ()), *(freeze or ())))
    outputs = [str(value.name) for value in loaded.graph.outputs]
    for name in loss_input or ():
        if name not in outputs:
            what = f"the model has no output {name!r}"
            hint = f"its outputs are {', '.join(outputs)}"
            raise OdtpackError("unknown-value", what, where=str(model), hint=hint)
    read, alike = loss_input or outputs[:1], look_alikes(loaded)
    trained, _ = resolve(loaded, train or (), freeze or (), read, alike)
    found = find_obstacles(loaded, trained, read)
    things = counted(len(found or trained), "node" if found else "parameter")
    if not found:
        _console.say(f"{things}: a gradient reaches each")
        if names := unreached(loaded, alike, read):
            _console.say(f"the loss does not depend on {', '.join(names)}: not trained")
    else:
        _console.say(f"{things} without a gradient", style="bold")
    for item in found:
        _console.say(f"  {item.op_type} (opset {item.opset}), node {item.node}")
        _console.say(f"    why     {item.why}")
        shown = ", ".join(item.parameters[:4]) + (", ..." if item.parameters[4:] else "")
        _console.say(f"    blocks  {shown}")
        if item.advice:
            _console.say(f"    to do   {item.advice}")
    fallbacks = find_fallbacks(loaded, trained, read) if target and not found else []
    for lack in fallbacks:
        then = "the model is refused when it runs" if lack.refused else "it runs on the processor"
        _console.say(f"  {lack.op_type} {lack.why} on {target}: {then}")
    if target and not found and not fallbacks:
        _console.say(f"all runs on {target}, but for arithmetic on shapes")
    obstacles = [dataclasses.asdict(item) for item in found]
    content: dict[str, Any] = {"path": str(model), "trained": list(trained), "obstacles": obstacles}
    if target:
        content["fallbacks"] = [dataclasses.asdict(item) for item in fallbacks]
    return content, bool(found)


# Complete example projects, which ``odtpack init --example`` writes.

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
    """Write a project into a new or empty folder; return its files."""
    from odtpack.errors import OdtpackError, near_names
    from odtpack_runtime.files.atomic import write_whole

    if name not in names():
        what = f"there is no example {name!r}; the examples are {', '.join(names())}"
        raise OdtpackError("usage", what, hint=near_names(name, names(), "odtpack init --help"))
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
        write_whole(target, text.encode())
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


@takes_spec()
def compare_gradients(path: Path, *, torch: str, **given: Any) -> tuple[Json, int]:
    """Compare one step of a package with PyTorch's own. Say why parameters differ.

    Takes the options of build for a MODEL.onnx. Exit code 0 if every gradient is PyTorch's, 1 if
    one differs. Needs PyTorch: pip install torch.

    Parameters:
        path PKG|MODEL.onnx: A package, or a model to build one from.
        torch FILE.py:FUNCTION: Your file, and a function in it that computes one step in PyTorch
            and returns the module, the loss (a scalar tensor) and a dict of all inputs, the target
            included, by the names of the model. The file is run.

    Examples:
        odtpack compare-gradients model.onnx --loss cross_entropy --torch module.py:build
        odtpack compare-gradients package --torch module.py:build

        In module.py:
            def build():
                module, x, labels = Net(), torch.randn(8, 4), torch.arange(8) % 3
                loss = torch.nn.functional.cross_entropy(module(x), labels)
                return module, loss, {"input": x, "labels": labels}
    """
    from odtpack.cli._options import overlay
    from odtpack.cli._twin import compared, read_twin
    from odtpack_runtime.files.scratch import scratch_folder
    from odtpack_runtime.package.package import Package

    _console.results()
    twin = read_twin(torch)
    if path.is_dir():
        found = compared(Package.open(path), twin)
    else:
        from odtpack.build import build

        spec = overlay({"model": path, **given}, None, "compare-gradients")
        with scratch_folder("gradients") as folder:
            build(dataclasses.replace(spec, self_check=False), folder)
            found = compared(Package.open(Path(folder)), twin)
    _console.say(f"loss {found['loss']:.5g} in the package, {found['torch_loss']:.5g} in PyTorch")
    for each in found["different"]:
        _console.say(f"{each['name']} differs by {each['error']:.2g} of its norm", style="bold")
        _console.say(f"  {each['why']}")
    count = len(found["equal"])
    _console.say(f"{count} of {count + len(found['different'])} gradients are those of PyTorch")
    if found["not_compared"]:
        _console.say(f"not compared: {', '.join(found['not_compared'])}")
    return {"path": str(path), **found}, bool(found["different"])
