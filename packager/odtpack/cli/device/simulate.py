"""``odtpack simulate``: replay training under the limits of devices and judge it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import odtpack_simulator as sim
from odtpack.cli import _completion, _console
from odtpack.cli._options import Count, Json, PositiveCount
from odtpack_simulator.device.kits import Kit, Loop

if TYPE_CHECKING:
    from odtpack_simulator.fleet.result import FleetResult
    from odtpack_simulator.replay.replay import Progress


def simulate(
    package: Path,
    *,
    data: Path,
    device: Annotated[list[str] | None, ("autocompletion", _completion.devices_or_all)] = None,
    budget: Path | None = None,
    recipe: Path | None = None,
    report: Annotated[list[str] | None, ("autocompletion", _completion.reports)] = None,
    epochs: PositiveCount = 3,
    batch_size: PositiveCount | None = None,
    lr: float | None = None,
    seed: Count = 0,
    holdout: float | None = None,
    evaluation: Path | None = None,
    threads: PositiveCount | None = None,
    state: Literal["foreground", "background"] = "foreground",
    entitled: bool = False,
    kit: Kit | None = None,
    loop: Loop | None = None,
    native: Literal["yes", "no"] | None = None,
    session_options: Literal["package", "default"] = "package",
    sessions_per_day: float = 1.0,
    save_every: PositiveCount | None = None,
    pieces: PositiveCount = 1,
    interruptions: Count = 3,
    baseline: Path | None = None,
    jobs: Count = 0,
    ray: str | None = None,
    strict: bool = False,
) -> tuple[Json, int]:
    r"""Replay real training under the limits of devices.

    The training runs once for all devices: without limits, timed, interrupted and resumed, and
    shortened under the lowest memory limit that it must keep, if that is near its peak. Exit code
    0 within budget, 1 over budget, 2 for bad input. Without a budget, the command judges what
    needs none: memory limits and low-memory warnings of devices, finite losses, whether the
    training learns and finishes, and resumed weights. It then prints a suggested budget.

    Parameters:
        device NAME|FILE: Device profile, or 'all' shipped ones; may be repeated.
        recipe recipe.toml: Recipe with budgets, devices and batch size, which options override, and
            [data]. Default: recipe.toml, if there is no --device, or the data are texts.
        lr X: Learning rate; the initial one if the package has a schedule. [default: from the
            schedule, or 0.001]
        threads: Threads within an operator, for memory and times. [default: the package's]
        state: Foreground or background; selects the limits of memory and time.
        entitled: The app has the entitlement for more memory (iOS: increased-memory-limit).
        kit: Training kit of the app. Memory is judged for this kit. [default: the usual kit of each
            device's system]
        loop: How the app makes its steps: with the step model where package and kit have one, or
            with the training model, and the optimizer model after it. [default: the budgets', or
            step]
        native: Whether sessions run native kernels, where the package has nodes for them. This
            machine needs the library to simulate it (ODTPACK_NATIVE). [default: yes for the kits
            cpp and swift, which have them inside]
        session_options: Session options of the app: the manifest's, as in every kit, or ONNX
            Runtime's defaults, with which a training takes 1.1 to 2.9 times the memory.
        sessions_per_day X: Sessions, or background windows, in a day.
        save_every: Steps between checkpoints. [default: one per session]
        pieces: Number of equal parts in which the data arrive.
        interruptions: Number of interruptions of a second training: killed in a step or a save, or
            warned of low memory, then resumed.
        baseline RESULT.json: Result to compare with, for budgets such as '+5 %'.
        jobs: Parallel replays; 0 for one per core.
        ray ADDRESS: Ray cluster for the replays, or 'local'.
        json: Print the result as JSON on stdout.

    Examples:
        odtpack simulate package --data digits.npz --device pixel-8a --device pi-5
        odtpack simulate package --data digits.npz --device ./my-phone.toml \
            --budget budgets.toml --report html:report.html --report json:report.json
    """
    from odtpack.cli import _fit
    from odtpack.cli._describe import of_simulation
    from odtpack.cli._files import check_reports, check_share, find_recipe, write_reports
    from odtpack.cli.data import as_samples
    from odtpack_runtime.package.package import Package
    from odtpack_simulator.campaign import make_policy
    from odtpack_simulator.device.app import default_footprint
    from odtpack_simulator.replay.executor import default_jobs, make_executor
    from odtpack_simulator.replay.replay import load_samples
    from odtpack_simulator.reports.console import print_result
    from odtpack_simulator.values.text import counted

    # Inputs are checked before anything long runs.
    share = check_share(holdout, other=evaluation)
    read = find_recipe(recipe, wanted=not device or data.suffix == ".jsonl")
    profiles = load_devices(device or ([] if read is None else read.devices()))
    budgets = None if budget is None else sim.read_budgets(budget)
    if read is not None:
        budgets = budgets or read.budgets()
        if "batch" in read.table.model_fields_set:
            batch_size = batch_size or read.table.batch.at_once
    if budgets is not None:
        budgets.check_devices([profile.name for profile in profiles] + sim.list_profiles())
    opened = Package.open(package)
    opened.require_stock()
    own = [Path(name) for name in device or [] if name.endswith(".toml")]
    check_reports(
        report or [],
        outside=opened,
        inputs=[data, evaluation, budget, baseline, read.path if read else None, *own],
    )
    before = read_baseline(baseline, budgets)
    policy = make_policy(
        state=state,
        entitled=entitled,
        kit=kit,
        loop=loop if loop else "step" if budgets is None else budgets.defaults.loop,
        native=None if native is None else native == "yes",
        session_options=session_options,
        sessions_per_day=sessions_per_day,
        save_every=save_every,
        pieces=pieces,
    )
    wanted, cores = threads or opened.manifest.threads, default_jobs()
    if cores < wanted:
        _console.warn(
            f"{wanted} threads share {counted(cores, 'processor')} here: the replay is "
            "slow, and step times are probably not judged. Memory is."
        )
    executor = make_executor(jobs, ray)
    size = _fit.choose_batch_size(opened, batch_size)

    from odtpack_simulator.simulation import simulate as replay

    def judged(measured: sim.SimulationResult) -> sim.SimulationResult:
        return sim.judge(measured, budgets, baseline=before)

    with as_samples(read, data, evaluation) as (given, others):
        load_samples(opened, given, others)
        with _console.Progress("replay") as progress:
            measured = replay(
                opened.path,
                given,
                profiles,
                batch_size=size,
                epochs=epochs,
                learning_rate=lr,
                seed=seed,
                threads=threads,
                policy=policy,
                interruptions=interruptions,
                executor=executor,
                progress=teller(progress),
                judge=judged,
                footprint=default_footprint if budgets is None else budgets.footprint_of,
                evaluation=others,
                holdout=share,
            )
    result = judged(measured)
    _console.results(reports=report)
    print_result(result, _console.console())
    if result.data.extrapolated:
        _console.warn(result.data.extrapolated)
    _console.warn(*of_simulation(result))
    write_reports(result, report or [])
    if budgets is None:
        say_suggestion(result, baseline=before is not None)
    return result.model_dump(mode="json"), fails(result, strict=strict)


_WORDS = {
    "predicting": "predict the memory",
    "timing": "time the operators",
    "measuring": "train in measured memory",
    "replaying": "train within limits, and interrupted",
}


def teller(shown: _console.Progress) -> Callable[[Progress], None]:
    """A callback for ``simulate`` that reports its progress."""

    def report(now: Progress) -> None:
        shown.update(now.step, now.steps, f"{now.run}/{now.runs} {_WORDS[now.stage]}")

    return report


def say_suggestion(result: sim.SimulationResult, *, baseline: bool = False) -> None:
    """Print a budget to start from; it does not correct a result that fails without one."""
    _console.say()
    if result.over_budget:
        text = "This result fails without any budget: its checks say what to change first."
        _console.say(f"{text} Budgets from its figures, for when it passes:")
    else:
        _console.say(
            "No budget was given. One to start from, with room above the typical figures. A high "
            "end above its limit warns:"
        )
    _console.say()
    _console.lines(sim.suggest_budget(result, baseline=baseline))


def read_baseline(path: Path | None, *budgets: sim.Budgets | None) -> sim.SimulationResult | None:
    """The result that --baseline names; a warning if no limit refers to it."""
    if path is None:
        return None
    if not any(each is None or each.needs_baseline() for each in budgets):
        _console.warn('--baseline is not used: no limit of the budgets is like "+5 %"')
    return sim.load_result(path)


def fails(result: sim.SimulationResult | FleetResult, *, strict: bool) -> bool:
    """Whether a judged result is exit code 1."""
    return result.over_budget or (strict and result.verdict == "not judged")


def load_devices(names: list[str]) -> list[sim.DeviceProfile]:
    """The profiles that are asked for."""
    from odtpack_runtime.errors import OdtpackError

    if not names:
        what = "--device is needed: no device was named to replay on"
        hint = f"pass --device NAME; shipped are {', '.join(sim.list_profiles())}"
        raise OdtpackError("no-device", what, hint=hint)
    profiles: dict[str, sim.DeviceProfile] = {}
    shipped = sim.list_profiles() if "all" in names else []
    for name in [*shipped, *(name for name in names if name != "all")]:
        profile = sim.load_profile(name)
        if profiles.setdefault(profile.name, profile).digest != profile.digest:
            what = f"two profiles are named {profile.name!r}, and they differ"
            raise OdtpackError("device-twice", what, where=name)
    return list(profiles.values())
