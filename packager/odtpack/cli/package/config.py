"""``odtpack config``: the operators that a reduced build of ONNX Runtime must contain."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from odtpack.choices import Format, Mode, Platform, Types
from odtpack.cli import _console
from odtpack.cli._options import AS_JSON

if TYPE_CHECKING:
    from odtpack.ort.session_runs import SessionRun
    from odtpack_runtime.package.package import Package

_DIFFERS = 1  # exit code, as for a budget that is not met


def config(
    packages: Annotated[
        list[Path], typer.Argument(metavar="PKG...", show_default=False, help="Packages.")
    ],
    mode: Annotated[
        Mode,
        typer.Option(
            help="train: training, evaluation and optimizer model. infer: the exported model."
        ),
    ] = Mode.TRAIN,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the configuration goes.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check this configuration against what really runs."),
    ] = None,
    types: Annotated[
        bool, typer.Option("--types/--no-types", help="Limit operators to the types they need.")
    ] = False,
    globally_allowed_types: Annotated[
        bool,
        typer.Option(
            "--globally-allowed-types", help="Limit all operators to the types of the models."
        ),
    ] = False,
    file_format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="Files that the app loads. onnx: at any optimization level. Default: ort if the "
            "package holds it, else onnx.",
        ),
    ] = None,
    platform: Annotated[
        list[Platform] | None,
        typer.Option(help="Processors of the devices; may be repeated. Default: all."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA.npz", help="Samples to run models with for --check.  [default: made up]"
        ),
    ] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Write the operators that one or more packages need, or check such a file.

    ONNX Runtime's build takes the file as --include_ops_by_config. The check runs every model in
    every way that an app may run it, and compares the kernels that ran with the file. The exit
    code is 1 if an operator or type is missing or unused.
    """
    _check_options(
        out,
        check,
        limits=types or globally_allowed_types,
        both=types and globally_allowed_types,
        data=data is not None,
    )
    from odtpack.cli._files import check_writable
    from odtpack_runtime.package.package import Package

    opened = [Package.open(path) for path in packages]
    if out is not None:
        for package in opened:
            check_writable(out, "--out", outside=package)
    limit = Types.OPERATOR if types else Types.GLOBAL if globally_allowed_types else Types.NONE
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        runs = [
            _runs(package, mode, file_format, platform or [], scratch / str(index))
            for index, package in enumerate(opened)
        ]
        if out is not None:
            content = _write(out, [run for some in runs for run in some], limit, scratch)
        else:
            assert check is not None  # noqa: S101 - one of them is given
            content = _check(check, opened, runs, data, scratch)
    if as_json:
        _console.print_json(content)
    if not content.get("passed", True):
        raise typer.Exit(_DIFFERS)


def _check_options(
    out: Path | None, check: Path | None, *, limits: bool, both: bool, data: bool
) -> None:
    from odtpack.errors import OdtpackError

    if (out is None) == (check is None):
        raise OdtpackError(
            "out-or-check", "either --out writes a configuration, or --check checks one"
        )
    if both:
        raise OdtpackError(
            "types-twice",
            "--types limits each operator and --globally-allowed-types all of them alike: ONNX "
            "Runtime's build takes one or the other",
        )
    if check is not None and limits:
        raise OdtpackError(
            "option-not-used",
            "--types and --globally-allowed-types say what is written; what is checked says so "
            "itself",
            hint="leave them out",
        )
    if out is not None and data:
        raise OdtpackError("option-not-used", "--data is what models are run with by --check")


def _runs(
    package: Package,
    mode: Mode,
    file_format: Format | None,
    platforms: list[Platform],
    scratch: Path,
) -> list[SessionRun]:
    """Every way in which the models of a package are run."""
    from odtpack.cli.package.export import inference_of
    from odtpack.ort.session_runs import INFERENCE_MODEL, onnx_models, runs_of
    from odtpack_runtime.export.inference_model import export_inference_model

    scratch.mkdir()
    inference: dict[str, Path] = {}
    if mode is not Mode.TRAIN and INFERENCE_MODEL not in onnx_models(package):
        model = inference_of(package, [], None)
        inference = {INFERENCE_MODEL: scratch / f"{INFERENCE_MODEL}.onnx"}
        export_inference_model(
            package.eval_model, model.parameters, inference[INFERENCE_MODEL], model.outputs
        )
    return runs_of(package, mode, file_format, platforms, inference, scratch)


def _write(out: Path, runs: list[SessionRun], limit: Types, scratch: Path) -> dict[str, Any]:
    from odtpack.ort.kernel_count import count_kernels
    from odtpack.ort.operator_config import config_of
    from odtpack.ort.session_runs import final_graph
    from odtpack_runtime.files.atomic import atomic_write

    graphs = [final_graph(run, scratch / f"{index}.ort") for index, run in enumerate(runs)]
    found = config_of(graphs, limit)
    names = [f"- {name}" for name in dict.fromkeys(str(run) for run in runs)]
    with atomic_write(out) as stream:
        stream.write(found.text(["Operators that run in:", *names]).encode())
    count = len(found.operators)
    kernels = count_kernels(found)
    kept = "" if kernels is None else f", {kernels[0]} of {kernels[1]} kernels"
    _console.say(f"wrote {out}: {count} operator{'s' if count != 1 else ''}{kept}")
    return {
        "path": str(out),
        "operators": [str(each) for each in sorted(found.operators)],
        "kernels": None if kernels is None else {"kept": kernels[0], "of": kernels[1]},
    }


def _check(
    path: Path,
    packages: list[Package],
    runs: list[list[SessionRun]],
    data: Path | None,
    scratch: Path,
) -> dict[str, Any]:
    from odtpack.ort.operator_check import check_config, version
    from odtpack.ort.operator_config import read_config
    from odtpack.ort.sample_feeds import SampleFeeds

    held = read_config(path)
    samples = {
        run: sample
        for package, own in zip(packages, runs, strict=True)
        for sample in (SampleFeeds(package, data),)
        for run in own
    }
    verdict = check_config(
        held, list(samples), lambda run: samples[run](run.model, run.source), scratch
    )
    _console.say(f"ran on ONNX Runtime {version()}", style="bold")
    for ran in verdict.ran:
        _console.say(
            f"  {ran.run}: {ran.nodes} nodes, {ran.kernels_run} kernels ran, "
            f"{len(ran.operators)} operators"
        )
    for title, found in (("missing", verdict.missing), ("unused", verdict.unused)):
        for each in found:
            _console.say(f"  {title}  {each}", style="bold")
    count = len(held.operators)
    if verdict.passed:
        _console.say(f"{path}: all {count} operators are needed, and no other one is")
    else:
        _console.say(f"{path}: {len(verdict.missing)} missing, {len(verdict.unused)} unused")
    return {
        "path": str(path),
        "onnxruntime": version(),
        "passed": verdict.passed,
        "missing": list(verdict.missing),
        "unused": list(verdict.unused),
        "runs": [
            {
                "run": str(ran.run),
                "model": ran.run.model,
                "nodes": ran.nodes,
                "kernels_run": ran.kernels_run,
                "operators": [str(operator) for operator in sorted(ran.operators)],
            }
            for ran in verdict.ran
        ],
    }
