"""``odtpack fleet``: simulate the federated training of a package by a fleet of devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import odtpack_simulator as sim
from odtpack.cli import _completion, _console
from odtpack.cli._options import Count, Json, PositiveCount, command, group
from odtpack.cli.device.results import Format, comparison_form, show_comparison
from odtpack.cli.device.simulate import fails

if TYPE_CHECKING:
    from odtpack.fit.federated import FleetFitResult, Tried
    from odtpack_simulator.fleet.devices import FleetDevice
    from odtpack_simulator.fleet.federation import Federation, FleetProgress
    from odtpack_simulator.fleet.fleet_file import FleetFile
    from odtpack_simulator.fleet.result import FleetResult

CHECKPOINT = "federated.ckpt"
STATE = "state.npz"


def run(
    package: Path,
    *,
    data: Path,
    fleet_file: Path,
    report: Annotated[list[str] | None, ("autocompletion", _completion.reports)] = None,
    times: Path | None = None,
    out: Path | None = None,
    resume: bool = False,
    jobs: Count = 0,
    ray: str | None = None,
    seeds: Annotated[PositiveCount, ("max", 1000)] = 1,
    strict: bool = False,
) -> tuple[Json, int]:
    r"""Simulate federated training on a virtual clock. Each client trains for real.

    Exit code 0 within the budgets of the fleet file, 1 over budget or where a check that needs no
    budget fails, 2 for bad input. The state is written after every round: --resume continues a
    stopped run, with bit-identical results.

    Parameters:
        out DIR: Folder for the state after each round and the last checkpoint. [default: PKG-fleet,
            beside the package]
        resume: Continue from the state in the folder.
        jobs: Training processes; 0 for one per core.
        ray ADDRESS: Ray cluster that trains, or 'local'.
        seeds: Number of seeds, starting from the fleet file's; shows the variation. Budgets must be
            met with each.
        json: Print the result as JSON on stdout.

    Examples:
        odtpack fleet run package --fleet fleet.toml --data digits.npz
        odtpack fleet run package --fleet fleet.toml --data digits.npz --out build/fleet \
            --report html:fleet.html --report json:fleet.json
        odtpack fleet run package --fleet fleet.toml --data digits.npz --out build/fleet --resume
    """
    from odtpack.cli import _files
    from odtpack.cli._describe import of_fleet
    from odtpack.cli.device.demo import make_folder
    from odtpack_runtime import OdtpackError, Package
    from odtpack_simulator.fleet.federation import Federation
    from odtpack_simulator.fleet.fleet_file import budget_places, read_fleet
    from odtpack_simulator.fleet.judge import join_seeds, judge_fleet
    from odtpack_simulator.fleet.population import make_availability
    from odtpack_simulator.replay.executor import make_executor
    from odtpack_simulator.reports.console import print_result
    from odtpack_simulator.values.units import format_percent

    # Inputs are checked before anything long runs.
    if resume and times is not None:
        what = "--resume uses the times that the run began with"
        raise OdtpackError("fleet-times", what, hint="leave out --times")
    settings, places = read_fleet(fleet_file), budget_places(fleet_file)
    make_availability(settings)
    opened = Package.open(package)
    _files.check_reports(report or [], outside=opened, inputs=[data, fleet_file, times])
    folder = out or opened.path.with_name(f"{opened.path.name}-fleet")
    before = _times_before(times, settings)
    federation = Federation(package, data, settings)
    rounds = settings.federation
    if rounds.buffer is None and rounds.clients > settings.population.clients:
        _console.warn(
            f"A round waits for {rounds.clients} answers, and the population has "
            f"{settings.population.clients} clients: each is in every round for which it is there."
        )
    size, training = federation.settings.batch_size, settings.training
    if "batch_size" in training.model_fields_set and training.batch_size != size:
        _console.warn(
            f"training.batch_size is {training.batch_size}, but the models of the package only "
            f"take batches of {size}, which are used instead."
        )
    for name in (STATE, CHECKPOINT):
        _files.check_not_input(folder / name, "--out", [data, fleet_file, times])
    executor = make_executor(jobs, ray)
    _files.check_creatable(folder, "--out")
    make_folder(folder)
    _files.check_writable(folder / STATE, "--out", [], outside=opened)
    results: list[FleetResult] = []
    with _console.Progress("federation") as progress:
        titles: dict[tuple[int, int], str] = {}

        def show(now: FleetProgress) -> None:
            # Said once a day: a log has a line for each title.
            day, played = int(now.day), len(results)
            known = "" if now.accuracy is None else f", accuracy {format_percent(now.accuracy)}"
            seed = f"seed {played + 1} of {seeds}, " if seeds > 1 else ""
            title = titles.setdefault((played, day), f"{seed}day {day + 1}{known}")
            done = now.round_number - (now.trained < now.clients)
            progress.update(done, now.rounds, title)

        for old in () if resume else folder.glob("state-*.npz"):
            old.unlink()  # of other seeds of an earlier run
        if not resume and settings.population.devices:
            federation.devices = devices_of(federation, before, progress)
        for seed in range(settings.seed, settings.seed + seeds):
            first = seed == settings.seed
            if not first:
                other = settings.model_copy(update={"seed": seed})
                federation = Federation(package, data, other, federation.devices)
            path = folder / (STATE if first else f"state-{seed}.npz")
            measured, state = federation.simulate(
                executor=executor,
                state_path=path,
                resume=resume and (first or path.is_file()),
                progress=show,
            )
            if first:
                federation.save_checkpoint(state, folder / CHECKPOINT)
            results.append(judge_fleet(measured, settings.budgets, places))
    result = join_seeds(results)
    _console.results(reports=report)
    print_result(result, _console.console())
    for unknown in result.unknown:
        _console.say(f"  unknown: {unknown}")
    _console.warn(*of_fleet(result))
    _console.wrote(folder / CHECKPOINT)
    _files.write_reports(result, report or [])
    return result.model_dump(mode="json"), fails(result, strict=strict)


def _times_before(times: Path | None, fleet: FleetFile) -> sim.SimulationResult | None:
    """The result that --times names."""
    from odtpack_runtime import OdtpackError

    before = None if times is None else sim.load_result(times)
    if before is not None and not fleet.population.devices:
        what = "--times gives times of device models, and the fleet file names none"
        hint = "leave out --times, or name the models under [[population.device]]"
        raise OdtpackError("fleet-times", what, where=str(times), hint=hint)
    return before


def devices_of(
    federation: Federation, before: sim.SimulationResult | None, progress: _console.Progress
) -> list[FleetDevice]:
    """The fleet's models of device, with the costs of a result of simulate or as measured now."""
    from odtpack_simulator.fleet.devices import devices_of_result, measure_devices

    package, batch = federation.package, federation.largest_batch
    if before is not None:
        return devices_of_result(package, before, federation.fleet, batch)
    return measure_devices(
        package,
        federation.data,
        federation.fleet,
        batch,
        on_stage=lambda stage: progress.update(0, 0, stage),
    )


# ``odtpack fleet compare``: what changed from one simulated federation to another.


def compare(
    base: Path,
    head: Path,
    *,
    accuracy: Annotated[float | None, ("min", 0.0), ("max", 1.0)] = None,
    form: Format | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Compare two results of fleet run. They are of two packages, or of two ways to run the rounds.

    With three or more seeds on both sides, a difference within the spread of the seeds is
    neither better nor worse.

    Parameters:
        accuracy SHARE: Target accuracy for counting rounds and time. [default: from HEAD's budgets,
            else the lower final accuracy]
        out FILE: File for the comparison, instead of standard output.

    Examples:
        odtpack fleet compare before.json fleet.json
        odtpack fleet compare before.json fleet.json --accuracy 0.9 --format markdown
    """
    from odtpack_simulator.fleet.judge import compare_fleets
    from odtpack_simulator.fleet.result import load_fleet_result

    before, now = load_fleet_result(base), load_fleet_result(head)
    chosen = comparison_form(form, out, [base, head], as_json=as_json)
    show_comparison(compare_fleets(before, now, accuracy), chosen, out)


# ``odtpack fleet demo``: a week of 500 phones that learn the digits together.


def demo(*, out: Path = Path("odtpack-fleet-demo"), jobs: Count = 0) -> tuple[Json, int]:
    """Simulate a week of training on 500 phones of five models. A report is written.

    The data are the 1,797 handwritten digits that ship with scikit-learn (pip install
    scikit-learn). It needs neither a server nor a network.

    Parameters:
        out DIR: Folder for all files of the demo.
        jobs: Training processes; 0 for one per core.
        json: Print the result as JSON on stdout.

    Examples:
        odtpack fleet demo --out build/fleet-demo
    """
    from odtpack.build import build_package
    from odtpack.cli.device.demo import DATA, MODEL, make_folder, read_digits, write_data
    from odtpack.optimizers import SGD
    from odtpack_runtime.files.atomic import write_whole

    digits = read_digits()
    make_folder(out)
    write_data(digits, out / "digits.npz")
    build_package(MODEL, out / "package", loss="cross_entropy", optimizer=SGD())
    write_whole(out / "fleet.toml", (DATA / "fleet.toml").read_bytes())
    _console.wrote(out / "package", out / "digits.npz", out / "fleet.toml")
    return run(
        out / "package",
        data=out / "digits.npz",
        fleet_file=out / "fleet.toml",
        report=[f"html:{out / 'fleet.html'}", f"json:{out / 'fleet.json'}"],
        out=out / "run",
        jobs=jobs,
    )


# ``odtpack fleet fit``: search how a federation is run, within the budgets of its file.


def fit(
    package: Path,
    *,
    data: Path,
    fleet_file: Path,
    clients: list[PositiveCount] | None = None,
    epochs: Annotated[list[PositiveCount] | None, ("max", 10000)] = None,
    lr: list[float] | None = None,
    trials: PositiveCount = 12,
    finalists: PositiveCount = 4,
    seeds: Annotated[PositiveCount, ("max", 1000)] = 1,
    times: Path | None = None,
    jobs: Annotated[Count, ("max", 4096)] = 0,
    strict: bool = False,
) -> tuple[Json, int]:
    r"""Find settings that meet a fleet's budgets.

    Settings are clients per round, local epochs and the learning rate. Simulates candidates for a
    third of the rounds, continues the better ones, and shows the Pareto set of accuracy, days,
    traffic and energy.

    Exit code 0 if a candidate meets every budget that could be judged, 1 if none does, 2 for bad
    input.

    Parameters:
        clients: Clients per round to try; may be repeated. [default: the fleet file's, twice and
            half]
        epochs: Local epochs to try; may be repeated. [default: the fleet file's, twice and half]
        lr X: Learning rate to try; may be repeated. [default: the fleet file's, times 3 and divided
            by 3]
        trials: Candidates to simulate.
        finalists: Candidates to simulate for all rounds.
        seeds: Seeds for these; budgets must be met with each.
        jobs: Parallel simulations; 0 for one per core.
        json: Print the result as JSON on stdout.

    Examples:
        odtpack fleet fit package --fleet fleet.toml --data digits.npz
        odtpack fleet fit package --fleet fleet.toml --data digits.npz --clients 10 \
            --clients 20 --epochs 1 --epochs 3 --lr 0.05 --lr 0.1 --seeds 3 --json > fit.json
    """
    from odtpack.fit.federated import FleetFitRequest, fit_fleet, fleet_space
    from odtpack.fit.study import optuna
    from odtpack_simulator.fleet.federation import Federation
    from odtpack_simulator.fleet.fleet_file import read_fleet
    from odtpack_simulator.replay.executor import default_jobs

    optuna()  # before anything is read
    fleet = read_fleet(fleet_file)
    space = fleet_space(fleet, clients or (), epochs or (), lr or ())
    before = _times_before(times, fleet)
    federation = Federation(package, data, fleet)
    with _console.Progress("fit") as progress:
        if fleet.population.devices:
            federation.devices = devices_of(federation, before, progress)
        result = fit_fleet(
            FleetFitRequest(
                package, data, fleet, space, federation.devices, trials, finalists, seeds
            ),
            jobs=jobs or default_jobs(),
            progress=lambda title, done, count: progress.update(done, count, title),
        )
    _console.results()
    _show(result)
    return result.model_dump(mode="json"), not result.best or (strict and not result.judged)


def _show(result: FleetFitResult) -> None:
    """Print what keeps the budgets, what it beats, and what was dropped."""
    from odtpack_simulator.values.text import counted

    finished = len(result.best) + len(result.beaten) + len(result.over_budget)
    way = [f"{rung.played} played for {counted(rung.rounds, 'round')}" for rung in result.rungs]
    _console.say(", ".join([*way, f"{finished} to the end, of {result.candidates} candidates"]))
    within = "Within the budgets" if result.judged else "Within the budgets that could be judged"
    for title, rows in (
        (f"{within}, best accuracy first:", result.best),
        (f"{within}, but beaten:", result.beaten),
        ("Over a budget:", result.over_budget),
        ("Stopped early:", result.left),
    ):
        if rows:
            _console.say()
            _console.say(title, style="bold")
            _table(rows)
    if not result.best:
        _console.say()
        _console.say("No candidate meets every budget.", style="bold")
        return
    first = result.best[0]
    for message in first.not_judged:
        _console.say(f"not judged: {message}", style="yellow")
    _console.say()
    _console.say("The best one, for the fleet file:", style="bold")
    _console.lines(f"[training]\nepochs = {first.epochs}\nlearning_rate = {first.learning_rate}")
    table = {"clients": first.clients, "minimum": first.minimum, "buffer": first.buffer}
    lines = [f"{key} = {count}" for key, count in table.items() if count is not None]
    _console.lines("\n".join(["[federation]", *lines]))


def _table(rows: Sequence[Tried]) -> None:
    from odtpack_simulator.values import units

    def cells(each: Tried) -> tuple[str, ...]:
        found = each.figures
        notes = [each.reason] if each.reason else [*each.failed]
        if each.beaten_by:
            notes.append(f"beaten by {', '.join(map(str, each.beaten_by))}")
        quality = "not finite" if found.loss is None else units.format_number(found.loss)
        return (
            f"{each.number}",
            f"{each.clients}",
            f"{each.epochs}",
            f"{each.learning_rate:g}",
            f"{each.rounds}",
            quality if found.accuracy is None else units.format_percent(found.accuracy),
            "never" if found.days is None else f"{found.days:.1f}",
            units.format_percent(found.took_part),
            units.format_bytes(found.traffic_bytes),
            "unknown" if found.energy_j is None else units.format_energy(found.energy_j),
            "; ".join(notes),
        )

    quality = "loss" if rows[0].figures.accuracy is None else "accuracy"
    figures = ("clients", "epochs", "rate", "rounds", quality, "days", "took part", "traffic")
    header = ("number", *figures, "energy", "")
    _console.table([cells(each) for each in rows], header, figures=",".join((*figures, "energy")))


fleet = group(
    "fleet",
    "Simulate federated training by a fleet of devices.",
    "odtpack fleet run package --fleet fleet.toml --data digits.npz",
    "odtpack fleet demo",
)
for _each in (run, compare, fit, demo):
    command(fleet)(_each)
