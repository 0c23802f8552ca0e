"""``odtpack demo``: the whole way on real data, from a model to a judged package.

A digit classifier leaves the factory without ever having seen a 7, an 8 or a 9. On the
device it learns them: the package is built, trained, exported and replayed.
"""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import odtpack_simulator as sim
from odtpack.cli import _console, _options
from odtpack.cli._options import Json, PositiveCount

if TYPE_CHECKING:
    import numpy.typing as npt

    from odtpack_runtime import CheckpointState
    from odtpack_simulator.replay.job import Indices

    Arrays = dict[str, npt.NDArray[Any]]

DATA: Final = Path(__file__).parents[2] / "demo"
MODEL: Final = DATA / "digits.onnx"
"""Two blocks of 3 x 3 Conv, Relu and 2 x 2 MaxPool, of 16 and 32 channels, and a classifier."""

DEVICES: Final = ("samsung/galaxy-a12", "apple/iphone-16-pro", "raspberrypi/zero-2-w")
"""A low-end Android, a current iPhone, and the smallest Raspberry Pi."""

FACTORY_CLASSES: Final = 7
"""The factory model knows the digits 0 to 6."""
_FACTORY_EPOCHS: Final = 8
_BATCH: Final = 32
_RATE: Final = 0.003
_SEED: Final = 0
_HELD_OUT: Final = 0.2
FAILING_BUDGET: Final = "budgets-too-tight.toml"
_INTERRUPTIONS: Final = 3  # one of each kind


def demo(*, out: Path = Path("odtpack-demo"), epochs: PositiveCount = 5) -> Json:
    """Build, train and replay a digit classifier.

    Ends with a report of three devices. The data are the 1,797 handwritten digits that ship with
    scikit-learn (pip install scikit-learn).

    Parameters:
        out DIR: Folder for all files of the demo.
        epochs: Passes over the data on the device.
        json: Print the figures as JSON on stdout.

    Examples:
        odtpack demo
        odtpack demo --out build/demo --epochs 3
    """
    from odtpack_runtime import CheckpointState
    from odtpack_simulator.replay.job import split

    started = time.monotonic()
    digits = read_digits()
    make_folder(out)
    data = out / "digits.npz"
    write_data(digits, data)
    parts = split(len(digits["labels"]), _HELD_OUT, _SEED)
    known = parts.train[digits["labels"][parts.train] < FACTORY_CLASSES]
    _console.say("1. The factory trains a small CNN on the digits 0 to 6", style="bold")
    factory = out / "factory.onnx"
    _train_factory_model(digits, known, factory)

    _console.say("2. Build a training package from it", style="bold")
    package = out / "package"
    _build(factory, package)

    _console.say("3. On the device it meets all ten digits, and learns", style="bold")
    before, after = out / "inference-before.onnx", out / "inference-after.onnx"
    with _console.Progress("training") as progress:
        state = _train(package, digits, parts.train, epochs, after, before, progress)
    CheckpointState.save_checkpoint(state, out / "trained.ckpt", include_optimizer_state=True)

    _console.say("4. Replay that training under the limits of three devices", style="bold")
    measured = _replay(package, data, epochs)
    result = _judge(measured, out)
    _console.say("5. Judge the same measurement by a budget that one device exceeds", style="bold")
    failing = _judge_to_fail(measured, out)
    reports = _write_reports(result, failing, out)

    held_out = {name: array[parts.held_out] for name, array in digits.items()}
    accuracy = [measure_accuracy(model, held_out) for model in (before, after)]
    _finish(accuracy, len(parts.held_out), reports, out, epochs, time.monotonic() - started)
    broken = {} if failing is None else {device.name: device.verdict for device in failing.devices}
    return {
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[1],
        "held_out_samples": len(parts.held_out),
        "devices": {device.name: device.verdict for device in result.devices},
        "devices_by_failing_budget": broken,
        "reports": [str(path) for path in reports],
    }


def measure_accuracy(model: Path, data: Arrays) -> float:
    """Share of samples that a plain inference model classifies rightly."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"input": data["input"]})
    return float((scores.argmax(axis=1) == data["labels"]).mean())


def read_digits() -> Arrays:
    """The images [1797, 1, 8, 8], float32 from 0 to 1, and their labels."""
    import numpy as np

    from odtpack.errors import OdtpackError

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        what = "the demo takes its digits from scikit-learn, which is not installed"
        raise OdtpackError("demo-extra-missing", what) from error
    digits = load_digits()
    return {
        "input": (digits.images[:, np.newaxis] / 16.0).astype(np.float32),
        "labels": digits.target.astype(np.int64),
    }


def make_folder(out: Path) -> None:
    """Make the folder that a demo writes to."""
    from odtpack.errors import OdtpackError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"--out {str(out)!r} cannot be made a folder: {error.strerror or error}"
        raise OdtpackError("cannot-write", what) from error


def write_data(digits: Arrays, path: Path) -> None:
    """Write the digits as a file that ``--data`` takes."""
    import numpy as np

    from odtpack_runtime.files.atomic import atomic_write

    with atomic_write(path) as stream:
        np.savez(stream, allow_pickle=False, **digits)


def _train_factory_model(data: Arrays, indices: Indices, destination: Path) -> None:
    """Train the model that ships: what a server would do, here on the same runtime."""
    import tempfile

    from odtpack.build import build_package

    with tempfile.TemporaryDirectory() as folder:
        build_package(MODEL, folder, loss="cross_entropy")
        _train(Path(folder), data, indices, _FACTORY_EPOCHS, destination)
    _console.say(f"  {len(indices)} images, {_FACTORY_EPOCHS} epochs: {destination}")


def _build(model: Path, folder: Path) -> None:
    from odtpack.build import build_package
    from odtpack.cli._describe import parameter_summary
    from odtpack_simulator.values.units import format_bytes

    manifest = build_package(model, folder, loss="cross_entropy")
    size = sum(path.stat().st_size for path in folder.iterdir())
    for line in parameter_summary(manifest):
        _console.say(f"  {line}")
    _console.say(
        f"  {folder}: {format_bytes(size)}, runs on ONNX Runtime "
        f"{manifest.minimum_onnxruntime} and newer"
    )


def _train(
    folder: Path,
    data: Arrays,
    indices: Indices,
    epochs: int,
    after: Path,
    before: Path | None = None,
    progress: _console.Progress | None = None,
) -> CheckpointState:
    """Train a package, and export the model of before and after."""
    from odtpack.cli import _fit
    from odtpack_runtime import CheckpointState, Optimizer, Package

    package = Package.open(folder)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    module = _fit.open_module(package, state)
    optimizer = Optimizer(package.optimizer_model, module)
    optimizer.set_learning_rate(_RATE)
    if before is not None:
        module.export_model_for_inferencing(before, ["output"])
    settings: dict[str, Any] = {"batch_size": _BATCH, "seed": _SEED, "whole": False}
    if progress is not None:
        settings["on_step"] = progress.update
    for epoch in _fit.fit(module, optimizer, data, indices, epochs=epochs, **settings):
        if progress is not None:
            progress.line(f"  epoch {epoch.number}   loss {epoch.loss:.4f}")
    module.export_model_for_inferencing(after, ["output"])
    return state


def _replay(package: Path, data: Path, epochs: int) -> sim.SimulationResult:
    from odtpack.cli.device.simulate import teller
    from odtpack_simulator.replay.executor import make_executor
    from odtpack_simulator.simulation import simulate

    with _console.Progress("replay") as progress:
        return simulate(
            package,
            data,
            [sim.load_profile(name) for name in DEVICES],
            batch_size=_BATCH,
            epochs=epochs,
            learning_rate=_RATE,
            seed=_SEED,
            interruptions=_INTERRUPTIONS,
            executor=make_executor(0),
            progress=teller(progress),
        )


def _judge(measured: sim.SimulationResult, out: Path) -> sim.SimulationResult:
    """Judge by what needs no budget, show it, and write a budget that the result keeps."""
    from odtpack_runtime.files.atomic import write_whole
    from odtpack_simulator.reports.console import print_result

    result = sim.judge(measured)
    print_result(result, _console.console())
    write_whole(out / "budgets.toml", sim.suggest_budget(result).encode())
    return result


def _judge_to_fail(measured: sim.SimulationResult, out: Path) -> sim.SimulationResult | None:
    """Judge by a budget that one device breaks, and show it; None where none can be made."""
    from odtpack_runtime.files.atomic import write_whole
    from odtpack_simulator.reports.console import print_result

    text = budget_that_one_breaks(measured)
    if not text:
        _console.say("  no step time of two devices is known to set a limit between")
        return None
    budget = out / FAILING_BUDGET
    write_whole(budget, text.encode())
    _console.say(f"  {budget}: {text.splitlines()[-1]}")
    result = sim.judge(measured, sim.read_budgets(budget))
    print_result(result, _console.console())
    _console.say(f"  {exit_words(result)}")
    return result


def budget_that_one_breaks(result: sim.SimulationResult) -> str:
    """A budget file for the step time between those of the slowest device and of the next."""
    from odtpack_simulator.values.units import format_duration, format_limit

    steps = [device.latency.step_ms for device in result.devices]
    known = sorted((step for step in steps if step is not None), key=lambda step: step.typical)
    if len(known) < 2 or known[-2].typical >= known[-1].typical:
        return ""
    next_one, slowest = known[-2], known[-1].typical
    # Above the whole interval of the next device where that is possible, so that it passes.
    low = next_one.high if next_one.high < slowest else next_one.typical
    limit = math.sqrt(low * slowest)
    rounded = float(f"{limit:.2g}")
    limit = rounded if low <= rounded < slowest else limit
    shown = format_limit(limit, "ms") if limit < 1e3 else format_duration(limit / 1e3)
    return f'[budgets]\nstep_latency = "{shown.replace("µs", "us")}"\n'


def exit_words(result: sim.SimulationResult) -> str:
    """What a CI job sees of a verdict."""
    code, then = (_options.NOT_MET, "fails") if result.over_budget else (0, "continues")
    return f"A CI job sees exit code {code} from odtpack judge and simulate, and {then}."


def _write_reports(
    result: sim.SimulationResult, failing: sim.SimulationResult | None, out: Path
) -> list[Path]:
    """The page with both verdicts, and the measurement that either was judged from."""
    from odtpack_simulator.reports import write_out, write_report
    from odtpack_simulator.reports.html_report import Again, render_html

    again = None
    if failing is not None:
        budget = (out / FAILING_BUDGET).read_text(encoding="utf-8")
        again = Again(failing, budget, exit_words(failing))
    page = write_out(render_html(result, again=again), out / "report.html")
    return [page, write_report(result, f"json:{out / 'report.json'}")]


def _finish(
    accuracy: list[float], samples: int, reports: list[Path], out: Path, epochs: int, seconds: float
) -> None:
    from odtpack_simulator.values.units import format_percent

    before, after = map(format_percent, accuracy)
    _console.say(
        f"accuracy  {before} before, {after} after, on {samples} held-out digits", style="bold"
    )
    for path in reports:
        _console.say(f"report    {path}")
    _console.say(f"took      {seconds:.1f} s. Next, judge another device by these budgets:")
    package, data, budgets = (
        shlex.quote(str(out / name)) for name in ("package", "digits.npz", "budgets.toml")
    )
    _console.say(
        f"  odtpack simulate {package} --data {data} --epochs {epochs} "
        f"--lr {_RATE} --device pixel-8a --budget {budgets}"
    )
