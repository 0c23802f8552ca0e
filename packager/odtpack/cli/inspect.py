"""``odtpack inspect``: a model, a package or a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from odtpack.cli import _completion, _console
from odtpack.cli._options import Json

if TYPE_CHECKING:
    import onnx_ir as ir


def inspect(
    path: Path,
    *,
    report: Annotated[list[str] | None, ("autocompletion", _completion.size_reports)] = None,
) -> Json:
    """Show the contents of a package, model or checkpoint.

    For a forward model it lists the parameters for --train and --freeze of odtpack build, and
    which operators have a gradient.

    Parameters:
        path PKG|MODEL.onnx|CHECKPOINT: A package, a forward model or a checkpoint.
        report FORMAT:PATH: Report on the sizes in a package, html:FILE or json:FILE. May be
            repeated.

    Examples:
        odtpack inspect model.onnx
        odtpack inspect package --json
        odtpack inspect package --report html:sizes.html
        odtpack inspect trained.ckpt
    """
    _console.results(reports=report)
    kind = _kind(path)
    if kind == "package":
        content = _package(path, report or ())
    elif report:
        from odtpack.errors import OdtpackError

        what = "--report shows the sizes in a package, and this is not a package"
        hint = "pass the folder of a package, or leave --report out"
        raise OdtpackError("option-not-used", what, hint=hint)
    else:
        content = _checkpoint(path) if kind == "checkpoint" else _model(path)
    return {"path": str(path), **content}


def _kind(path: Path) -> str:
    from odtpack.errors import OdtpackError

    if path.is_dir() or path.name.endswith("manifest.json"):
        return "package"
    if not path.is_file():
        raise OdtpackError("not-found", f"there is no file or folder {str(path)!r}")
    try:
        with path.open("rb") as stream:
            identifier = stream.read(8)[4:]
    except OSError as error:
        what = f"{str(path)!r} cannot be read: {error.strerror or error}"
        raise OdtpackError("unreadable", what) from error
    if identifier == b"ORTM":
        what = f"{str(path)!r} is a model in ORT format, which cannot be inspected"
        raise OdtpackError("ort-format", what)
    return "checkpoint" if identifier == b"ODTC" else "model"


def _package(path: Path, reports: Sequence[str]) -> Json:
    from odtpack.cli import _describe
    from odtpack.cli._files import check_reports
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.reports.sizes import FORMATS

    package = Package.open(path)
    check_reports(reports, outside=package, formats=FORMATS)
    manifest = package.manifest
    _console.say(f"package {package.path}", style="bold")
    settings = manifest.optimizer.as_dict()
    del settings["kind"]
    shown = ", ".join(
        f"{key} {value:g}" if type(value) in (int, float) else f"{key} {value}".lower()
        for key, value in settings.items()
    )
    _console.say(f"  loss        {manifest.loss}")
    _console.say(f"  optimizer   {manifest.optimizer.kind}{f' ({shown})' if shown else ''}")
    for line in _describe.update_lines(manifest):
        _console.say(f"  {line}")
    _console.say(f"  runs on     {_describe.runtime_text(manifest)}")
    for taken in manifest.inputs:
        text = _describe.shape_text(taken.dtype, taken.shape)
        _console.say(f"  input       {taken.name}: {text} ({taken.role})")
    for given in manifest.all_outputs:
        text = _describe.shape_text(given.dtype, given.shape)
        _console.say(f"  output      {given.name}: {text} ({given.role})")
    _console.say("files", style="bold")
    sizes_of_parts = _describe.show_sizes(package, reports)
    _console.say("parameters", style="bold")
    for line in _describe.parameter_summary(manifest):
        _console.say(f"  {line}")
    for dtype in sorted({p.model_dtype for p in manifest.parameters if p.model_dtype}):
        count = sum(p.model_dtype == dtype for p in manifest.parameters)
        _console.say(f"  {count} of them are {dtype} in the model, and stored as shown")
    names = [f"{p.name} ({p.module})" if p.module else p.name for p in manifest.parameters]
    pairs = zip(names, manifest.parameters, strict=True)
    _parameters([(name, p.role, p.dtype, p.shape) for name, p in pairs])
    _console.say("operators", style="bold")
    for name, domains in manifest.operators.by_model().items():
        for domain, operators in domains.items():
            _console.say(f"  {name} ({domain}): {', '.join(operators)}")
    content: dict[str, Any] = {"kind": "package", **manifest.as_dict()}
    content["sizes"] = sizes_of_parts
    for entry in content["parameters"]:
        entry["size_bytes"] = _describe.byte_size(entry["dtype"], entry["shape"])
    return content


def _model(path: Path) -> Json:
    from odtpack.cli._describe import count_line, shape_text
    from odtpack.errors import OdtpackError, some
    from odtpack.graph.graphs import dims_of
    from odtpack.model.exporters import known_names, module_names
    from odtpack.model.loading import load_model
    from odtpack.model.shared_tensors import shared_tensors
    from odtpack.ort.kernel_needs import oldest_runtime
    from odtpack.package.candidates import candidates

    try:
        model = load_model(path)
    except OdtpackError as error:
        if error.code == "not-onnx":
            error.what = f"{str(path)!r} is neither a package nor an ONNX model nor a checkpoint"
            error.hint = "pass the folder of a package, a .onnx file or a checkpoint"
        raise
    graph = model.graph
    trainable = set(candidates(model))
    parameters = [
        (name, "trainable" if name in trainable else "constant", *_tensor(value))
        for name, value in graph.initializers.items()
    ]
    original = module_names(graph)
    shared = shared_tensors(graph, [row[0] for row in parameters if row[1] == "trainable"])
    values: dict[str, list[dict[str, Any]]] = {
        way: [{"name": v.name, "dtype": _dtype(v), "shape": list(dims_of(v) or ())} for v in found]
        for way, found in (("inputs", graph.inputs), ("outputs", graph.outputs))
    }
    operators = _gradients(graph)
    opset = graph.opset_imports[""]
    oldest = oldest_runtime([model])
    _console.say(f"model {path}", style="bold")
    _console.say(f"  opset       {opset}, runs on ONNX Runtime {oldest.name} and newer")
    for way, found in values.items():
        for item in found:
            text = shape_text(item["dtype"], item["shape"])
            _console.say(f"  {way[:-1]:<11} {item['name']}: {text}")
    _console.say("parameters that build can train or freeze", style="bold")
    shown = [row for row in parameters if row[1] == "trainable"]
    if shown:
        _console.say(f"  {count_line('together', [(row[2], row[3]) for row in shown])}")
        # A name that an exporter made up, and the one that the parameter had in its module.
        both = {n: f"{n} ({names[0]})" for n, names in known_names(graph).items() if names}
        _parameters([(both.get(row[0], row[0]), *row[1:]) for row in shown])
    else:
        _console.say("  none")
    if shared:
        _console.say("tensors that several places read, trained as one parameter", style="bold")
        for each in shared:
            if not each.one_parameter:
                _console.say(f"  {each.name}: {', '.join(each.places)}")
        if known := [each.name for each in shared if each.one_parameter]:
            _console.say(f"  one parameter of the module each: {some(known)}")
        _console.say("  build --untie GLOB gives each place its own")
    _console.say("operators", style="bold")
    rows = [(o["domain"], o["operator"], str(o["nodes"]), _WORDS[o["gradient"]]) for o in operators]
    _console.table(rows, ("Domain", "Operator", "Nodes", "Gradient"), figures="Nodes")
    return {
        "kind": "model",
        "opsets": dict(sorted(graph.opset_imports.items())),
        "minimum_onnxruntime": oldest.name,
        **values,
        "parameters": [
            {"name": n, "module_name": original.get(n, n), **_entry(role, dtype, shape)}
            for n, role, dtype, shape in parameters
        ],
        "shared": [
            {"name": each.name, "places": list(each.places), "one_parameter": each.one_parameter}
            for each in shared
        ],
        "operators": operators,
    }


_WORDS = {
    "rule": "yes",
    "expanded": "by expansion",
    "rewritten": "if it can be rewritten",
    "none": "stops here",
    "missing": "missing",
}


def _gradients(graph: ir.Graph) -> list[dict[str, Any]]:
    """Count the operators of a graph, and say how the gradient goes through each."""
    from collections import Counter

    import onnx.defs

    from odtpack.autodiff.context import REGISTRY
    from odtpack.package.coverage import REWRITTEN

    counts = Counter((node.domain, node.op_type) for node in graph.all_nodes())
    found = []
    for (domain, operator), count in sorted(counts.items()):
        version = graph.opset_imports.get(domain, 1)
        rule = REGISTRY.lookup(domain, operator, version)
        if rule is not None:
            gradient = "rule" if rule.differentiable else "none"
        else:
            gradient = "missing"
            if onnx.defs.has(operator, version, domain):
                schema: Any = onnx.defs.get_schema(operator, version, domain)
                if schema.has_function or schema.has_context_dependent_function:
                    gradient = "expanded"
                elif operator in REWRITTEN:
                    gradient = "rewritten"
        found.append(
            {
                "domain": domain or "ai.onnx",
                "operator": operator,
                "nodes": count,
                "gradient": gradient,
            }
        )
    return found


def _dtype(value: ir.Value) -> str:
    """Element type as numpy names it."""
    if value.dtype is None:
        return "unknown"
    return "string" if value.dtype.name == "STRING" else value.dtype.numpy().name


def _tensor(value: ir.Value) -> tuple[str, tuple[int, ...]]:
    """Element type and shape of an initializer."""
    tensor = value.const_value
    shape = () if tensor is None else tuple(tensor.shape.numpy())
    return _dtype(value), shape


def _entry(role: str, dtype: str, shape: Sequence[int]) -> Json:
    """A parameter as JSON has it, but for its name."""
    from odtpack.cli._describe import byte_size

    size = byte_size(dtype, shape)
    return {"role": role, "dtype": dtype, "shape": list(shape), "size_bytes": size}


def _parameters(rows: Sequence[tuple[str, str, str, Sequence[int]]]) -> None:
    """Print name, role, type, shape and size of each parameter."""
    from odtpack.cli._describe import byte_size, shape_text
    from odtpack_simulator.values.units import format_bytes

    cells = [
        (name, role, shape_text(dtype, shape), format_bytes(byte_size(dtype, shape)))
        for name, role, dtype, shape in rows
    ]
    _console.table(cells, ("Parameter", "Role", "Type", "Size"), figures="Size")


def _checkpoint(path: Path) -> Json:
    from odtpack.cli._describe import count_line
    from odtpack_runtime.checkpoint.format import read_checkpoint

    data = read_checkpoint(path)
    rows = [
        (name, role, array.dtype.name, array.shape)
        for role, arrays in (("trainable", data.trainable), ("frozen", data.frozen))
        for name, array in arrays.items()
    ]
    _console.say(f"checkpoint {path}", style="bold")
    if data.nominal:
        _console.say("  nominal: names and types without values")
    if not data.checked:
        _console.say("  no digest: whether it is as it was saved cannot be checked")
    for role in ("trainable", "frozen"):
        found = [(dtype, shape) for _, kind, dtype, shape in rows if kind == role]
        if found:
            _console.say(f"  {count_line(role, found)}")
    _parameters(rows)
    optimizer: dict[str, Any] | None = None
    if data.optimizer is not None:
        moments = max((len(arrays) for arrays in data.optimizer.moments.values()), default=0)
        optimizer = {
            "step": data.optimizer.step,
            "learning_rate": data.optimizer.learning_rate,
            "moments": moments,
        }
        _console.say(
            f"  optimizer   step {data.optimizer.step}, learning rate "
            f"{data.optimizer.learning_rate:g}, {moments} moments per parameter"
        )
    for name, value in sorted(data.properties.items()):
        _console.say(f"  property    {name} = {value!r}")
    return {
        "kind": "checkpoint",
        "nominal": data.nominal,
        "checked": data.checked,
        "parameters": [
            {"name": name, **_entry(role, dtype, shape)} for name, role, dtype, shape in rows
        ],
        "optimizer": optimizer,
        "properties": dict(sorted(data.properties.items())),
    }
