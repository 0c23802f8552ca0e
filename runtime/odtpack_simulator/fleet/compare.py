"""Two simulated federations side by side."""

from __future__ import annotations

from odtpack_simulator.figures.compare import Comparison, DeviceComparison, changes, differences
from odtpack_simulator.fleet.judge import ENOUGH_SEEDS, METRICS, device_figures, fleet_figures
from odtpack_simulator.fleet.result import FleetResult, seed_runs
from odtpack_simulator.values.units import format_percent


def compare_fleets(
    base: FleetResult, head: FleetResult, accuracy: float | None = None
) -> Comparison:
    """Compare two results of ``odtpack fleet run``, the baseline and the new one."""
    # `accuracy`, from 0 to 1, is what rounds and days are counted until; by default what the head's
    # budgets ask, else the lower of both that are reached in the end.
    target = accuracy if accuracy is not None else _asked(base, head)
    before = {each.device.name: each for each in base.devices}
    now = {each.device.name: each for each in head.devices}
    devices = []
    for name, each in {**now, **{k: v for k, v in before.items() if k not in now}}.items():
        both = name in before and name in now
        devices.append(
            DeviceComparison(
                name=name,
                title=each.device.title,
                validated=each.device.validated,
                presence="both" if both else "new" if name in now else "removed",
                figures=changes(
                    METRICS, device_figures(base, before[name]), device_figures(head, now[name])
                )
                if both
                else [],
            )
        )
    notes = _notes(base, head)
    starts = [run.accuracy_before or 0.0 for run in (*seed_runs(base), *seed_runs(head))]
    if target is not None and max(starts) >= target:
        what = "the untrained model already has that accuracy"
        notes.append(f"rounds and time until {format_percent(target)} say nothing: {what}")
    return Comparison(
        of="fleet",
        tool_version=head.tool_version,
        notes=notes,
        accuracy=target,
        package=changes(METRICS, fleet_figures(base, target), fleet_figures(head, target)),
        devices=devices,
        verdict_before=base.verdict,
        verdict=head.verdict,
    )


def _asked(base: FleetResult, head: FleetResult) -> float | None:
    for check in head.checks:
        if check.metric == "accuracy" and check.limit is not None:
            return min(1.0, check.limit)
    ends = [run.accuracy for run in (*seed_runs(base), *seed_runs(head))]
    known = [value for value in ends if value is not None]
    return min(known) if known and len(known) == len(ends) else None


def _notes(base: FleetResult, head: FleetResult) -> list[str]:
    """What else differs; a note that data differ goes first."""
    notes = []
    if base.plan.data_digest != head.plan.data_digest:
        notes.append("the data differ: accuracies are of different samples")
    plans = [each.plan.model_dump(exclude={"digest", "data_digest"}) for each in (base, head)]
    if base.settings and head.settings:  # results of earlier versions have only a part
        plans = [
            {name: plan[name] for name in ("train_samples", "held_out_samples")} for plan in plans
        ]
        notes += differences(
            (name, base.settings.get(name), head.settings.get(name))
            for name in {**base.settings, **head.settings}
        )
    notes += differences(
        (name.replace("_", " "), plans[0][name], plans[1][name]) for name in plans[0]
    )
    notes += differences(
        (
            ("loss", base.package.loss, head.package.loss),
            ("optimizer", base.package.optimizer, head.package.optimizer),
            (
                "parameters that cross",
                base.package.crossing_parameters,
                head.package.crossing_parameters,
            ),
            ("bytes that cross", base.package.payload_bytes, head.package.payload_bytes),
        )
    )
    notes += [
        f"days and energy of the {which} are unreliable: {each.disturbed}"
        for which, each in (("baseline", base), ("new result", head))
        if each.disturbed is not None
    ]
    if base.package.manifest_sha256 == head.package.manifest_sha256:
        notes.append("both results are of the same package")
    seeds = [len(seed_runs(each)) for each in (base, head)]
    if min(seeds) >= ENOUGH_SEEDS:
        notes.append(f"figures are means over {seeds[0]} and {seeds[1]} seeds")
    else:
        notes.append(
            f"seeds: {seeds[0]} and {seeds[1]}; what is chance shows from {ENOUGH_SEEDS} on: "
            f"odtpack fleet run --seeds {ENOUGH_SEEDS}"
        )
    return notes
