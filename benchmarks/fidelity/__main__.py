"""How well this machine's measurements are predicted, on models held out from every fit.

python -m benchmarks.fidelity [--models vit,bert] [--memory-only | --latency-only] [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
from rich.console import Console
from rich.table import Table

from benchmarks.fidelity import latency, latency_comparison, memory
from benchmarks.fidelity.models import CASES, Case
from odtpack_runtime.files.atomic import atomic_write
from odtpack_simulator.device.app import MARGIN

Targets = list[tuple[str, float, str, bool]]
"""What is to be reached: its name, the value, the target as text, whether it is met."""


def main() -> None:
    arguments = _arguments()
    cases = [CASES[name] for name in arguments.models]
    console = Console(width=None if os.isatty(1) else 120, highlight=False)
    start = time.monotonic()
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, "
        f"ONNX Runtime {onnxruntime.__version__}"
    )
    document: dict[str, Any] = {"machine": machine, "quick": arguments.quick}
    targets: Targets = []
    if not arguments.latency_only:
        targets += _memory(cases, arguments, console, document)
    if not arguments.memory_only:
        targets += _latency(cases, arguments.quick, console, document)
    for name, value, target, met in targets:
        console.print(f"{name:44}{100 * value:7.2f} %   {target:20}{'met' if met else 'NOT met'}")
    document["targets"] = [
        {"name": name, "value": value, "target": target, "met": met}
        for name, value, target, met in targets
    ]
    document["seconds"] = round(time.monotonic() - start)
    console.print(f"{document['seconds']} s on {document['machine']}")
    if arguments.json:
        _write(arguments.json, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if arguments.markdown:
        _write(arguments.markdown, "\n".join(_markdown(document, targets)) + "\n")


def _arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in CASES]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(CASES)}")
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__)
    parser.add_argument("--models", type=names, default=list(CASES), help="names with commas")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--memory-only", action="store_true")
    only.add_argument("--latency-only", action="store_true")
    parser.add_argument("--no-limits", action="store_true", help="memory: only compare the peaks")
    parser.add_argument("--loops", nargs="+", default=["step", "train"], choices=["step", "train"],
                        help="memory: how the app makes its steps")  # fmt: skip
    parser.add_argument("--sessions", default="package", choices=list(memory.SESSIONS),
                        help="memory: session options of the app")  # fmt: skip
    parser.add_argument("--native", action="store_true",
                        help="memory: kernels of ODTPACK_NATIVE's library")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one batch size, one thread")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="memory: only so many")
    parser.add_argument("--jobs", type=int, default=2, help="memory: trainings at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write table and summary")
    return parser.parse_args()


def _memory(
    cases: Sequence[Case],
    arguments: argparse.Namespace,
    console: Console,
    document: dict[str, Any],
) -> Targets:
    table = Table("model", "batch", "threads", "predicted", "app", "error", "Python", "verdicts",
                  title="peak memory")  # fmt: skip
    rows = []
    with console.status("peak memory") as status:
        limits = () if arguments.no_limits else memory.LIMITS
        say: Callable[[str], None] = status.update
        for row in memory.measure(
            cases, limits=limits, quick=arguments.quick, threads=arguments.threads,
            jobs=arguments.jobs, sessions=arguments.sessions, loops=arguments.loops,
            native=arguments.native, say=say,
        ):  # fmt: skip
            rows.append(row)
            table.add_row(*_memory_cells(row))
            if not console.is_terminal:  # the status is not shown; a reader sees what came
                print(*_memory_cells(row), file=sys.stderr, flush=True)
            say(f"peak memory: {len(rows)} done, the last was {row.model}")
    console.print(table)
    found = memory.summarize(rows)
    document["memory"] = [dataclasses.asdict(row) | {"error": row.error} for row in rows]
    document["memory_summary"] = dataclasses.asdict(found)
    console.print(
        f"{found.models} models, {found.cases} cases, {found.verdicts} limits; "
        f"largest error {100 * found.largest_error:.1f} %"
    )
    targets = [
        ("memory: median error", found.median_error, 0.015),
        ("memory: P95 of the errors", found.p95_error, 0.04),
        ("memory: plan below the need", max(0.0, -found.lowest_error), MARGIN / (1 + MARGIN)),
        ("memory: plan above the need", max(0.0, found.highest_error), 0.08),
    ]
    if found.verdicts:
        targets += [
            ("limits: said fits, and it did not", found.said_fits_did_not / found.verdicts, 0.0),
            ("limits 3 % above the need: said no", found.said_no_did, 0.05),
        ]
        console.print(f"too close to call: {100 * found.close:.1f} % of the limits")
    return [
        (name, value, f"at most {100 * most:.2g} %", value <= most) for name, value, most in targets
    ]


def _memory_cells(row: memory.Row) -> list[str]:
    wrong = [f"{verdict.share:g}: {verdict.wrong}" for verdict in row.verdicts if verdict.wrong]
    return [
        row.model,
        str(row.batch_size),
        f"{row.threads}, {row.loop}",
        f"{row.predicted_bytes / 1e6:.2f} MB",
        f"{row.measured_bytes / 1e6:.2f} MB",
        f"{100 * row.error:+.1f} %",
        "" if row.python_bytes is None else f"{row.python_bytes / 1e6:.2f} MB",
        "; ".join(wrong) or (f"{len(row.verdicts)} right" if row.verdicts else ""),
    ]


def _latency(
    cases: Sequence[Case], quick: bool, console: Console, document: dict[str, Any]
) -> Targets:
    """Everything about step times: see :mod:`benchmarks.fidelity.latency`."""
    rows: list[latency_comparison.Row] = []
    names = [case.name for case in cases]
    with console.status("step times") as status:
        for found in latency.measure(names, latency.QUICK if quick else None):
            rows += found
            status.update(f"step times: the last was {found[-1].model}" if found else "step times")
    for line in latency_comparison.table(rows):
        console.print(line, soft_wrap=True)
    groups = latency_comparison.summarize(rows)
    document["latency"] = [latency_comparison.as_document(row) for row in rows]
    document["latency_summary"] = [dataclasses.asdict(group) for group in groups]
    targets: Targets = []
    for group in groups:
        error = group.median_error
        targets.append(
            (f"latency, {group.group}: median error", error, "at most 5 %", error <= 0.05)
        )
        for name, within in (
            ("cases within 10 %", group.cases_within),
            ("steps within 10 %", group.steps_within),
            ("the same, cases alike", group.alike_within),
        ):
            title = f"latency, {group.group}: {name}"
            least = 0.8 if group.group == "threads" else 0.9
            targets.append((title, within, f"at least {100 * least:.0f} %", within >= least))
    return targets


def _markdown(document: dict[str, Any], targets: Targets) -> list[str]:
    lines = ["| what | measured | target | |", "|---|---:|---|---|"]
    for name, value, target, met in targets:
        lines.append(f"| {name} | {100 * value:.2f} % | {target} | {'met' if met else 'NOT met'} |")
    lines += ["", f"Measured on {document['machine']}, in {document['seconds']} s.", ""]
    if "memory" in document:
        lines += [
            "| model | batch | threads | loop | plan | app | error | Python | wrong verdicts |",
            "|---|---:|---:|---|---:|---:|---:|---:|---|",
        ]
        for row in document["memory"]:
            verdicts = (memory.Verdict(**each) for each in row["verdicts"])
            shares = ", ".join(f"{v.share:g}: {v.wrong}" for v in verdicts if v.wrong)
            lines.append(
                f"| {row['model']} | {row['batch_size']} | {row['threads']} | {row['loop']} "
                f"| {row['predicted_bytes'] / 1e6:.2f} MB | {row['measured_bytes'] / 1e6:.2f} MB "
                f"| {100 * row['error']:+.1f} % | {(row['python_bytes'] or 0) / 1e6:.2f} MB "
                f"| {shares} |"
            )
        lines.append("")
    if "latency" in document:
        lines += [
            "| model | asks | batch | threads | predicted | measured | error | steps within 10 % |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {row['model']} | {row['group']} | {row['batch_size']} | {row['threads']} "
            f"| {row['predicted_ms']:.2f} ms | {row['measured_ms']:.2f} ms "
            f"| {100 * row['error']:+.1f} % | {100 * row['within']:.0f} % |"
            if row["steps"]
            else f"| {row['model']} | {row['group']} | {row['batch_size']} | {row['threads']} "
            "| | not judged: every step was disturbed | | |"
            for row in document["latency"]
        ]
    return lines


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as stream:
        stream.write(text.encode())


if __name__ == "__main__":
    main()
