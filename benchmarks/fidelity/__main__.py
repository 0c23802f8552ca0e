"""How well this machine's measurements are predicted, on models held out from every fit.

python -m benchmarks.fidelity [--models vit,bert] [--memory-only | --latency-only] [--quick]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from benchmarks.fidelity import latency, latency_comparison, memory
from benchmarks.fidelity.models import CASES, Case
from odtpack_runtime.files.atomic import atomic_write
from odtpack_simulator.device.app import MARGIN
from scripts.markdown import head, row, table

Targets = list[tuple[str, float, str, bool]]
"""What is to be reached: its name, the value, the target as text, whether it is met."""


def main() -> None:
    arguments = _arguments()
    cases = [CASES[name] for name in arguments.models]
    start = time.monotonic()
    document: dict[str, Any] = {"quick": arguments.quick}
    targets: Targets = []
    lines: list[str] = []
    if not arguments.latency_only:
        targets += _memory(cases, arguments, lines, document)
    if not arguments.memory_only:
        targets += _latency(cases, arguments.quick, lines, document)
    judged = [
        (name, f"{100 * value:.2f} %", target, "met" if met else "NOT met")
        for name, value, target, met in targets
    ]
    summary = table(("what", "measured:", "target", ""), judged)
    document["targets"] = [
        {"name": name, "value": value, "target": target, "met": met}
        for name, value, target, met in targets
    ]
    document["seconds"] = round(time.monotonic() - start)
    document["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, "
        f"ONNX Runtime {onnxruntime.__version__}"
    )
    where = f"Measured on {document['machine']}, in {document['seconds']} s."
    print(f"\n{summary}\n\n{where}")
    if arguments.json:
        _write(arguments.json, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if arguments.markdown:
        _write(arguments.markdown, "\n".join([summary, "", where, *lines]) + "\n")


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


def _say(line: str, lines: list[str]) -> None:
    """Print a line of the document."""
    print(line, flush=True)
    lines.append(line)


def _memory(
    cases: Sequence[Case],
    arguments: argparse.Namespace,
    lines: list[str],
    document: dict[str, Any],
) -> Targets:
    _say("\n" + head("model", "batch:", "threads, loop", "predicted:", "app:", "error:", "Python:",
                     "verdicts"), lines)  # fmt: skip
    rows = []
    for each in memory.measure(
        cases, limits=() if arguments.no_limits else memory.LIMITS, quick=arguments.quick,
        threads=arguments.threads, jobs=arguments.jobs, sessions=arguments.sessions,
        loops=arguments.loops, native=arguments.native,
    ):  # fmt: skip
        rows.append(each)
        wrong = [
            f"{verdict.share:g}: {verdict.wrong}" for verdict in each.verdicts if verdict.wrong
        ]
        right = f"{len(each.verdicts)} right" if each.verdicts else ""
        python = "" if each.python_bytes is None else f"{each.python_bytes / 1e6:.2f} MB"
        _say(row(each.model, each.batch_size, f"{each.threads}, {each.loop}",
                 f"{each.predicted_bytes / 1e6:.2f} MB", f"{each.measured_bytes / 1e6:.2f} MB",
                 f"{100 * each.error:+.1f} %", python, "; ".join(wrong) or right),
             lines)  # fmt: skip
    found = memory.summarize(rows)
    document["memory"] = [dataclasses.asdict(each) | {"error": each.error} for each in rows]
    document["memory_summary"] = found
    _say(
        "\n{models} models, {cases} cases, {verdicts} limits; largest error {largest_error:.1%}; "
        "too close to call: {close:.1%} of the limits".format(**found),
        lines,
    )
    targets = [
        ("memory: median error", found["median_error"], 0.015),
        ("memory: P95 of the errors", found["p95_error"], 0.04),
        ("memory: plan below the need", max(0.0, -found["lowest_error"]), MARGIN / (1 + MARGIN)),
        ("memory: plan above the need", max(0.0, found["highest_error"]), 0.08),
    ]
    if limits := found["verdicts"]:
        targets += [
            ("limits: said fits, and it did not", found["said_fits_did_not"] / limits, 0.0),
            ("limits 3 % above the need: said no", found["said_no_did"], 0.05),
        ]
    return [
        (name, value, f"at most {100 * most:.2g} %", value <= most) for name, value, most in targets
    ]


def _latency(
    cases: Sequence[Case], quick: bool, lines: list[str], document: dict[str, Any]
) -> Targets:
    """Everything about step times: see :mod:`benchmarks.fidelity.latency`."""
    names = [case.name for case in cases]
    rows = latency.report(names, quick, lambda line: _say(line, lines))
    groups = latency_comparison.summarize(rows)
    document["latency"] = [latency_comparison.as_document(each) for each in rows]
    document["latency_summary"] = [dataclasses.asdict(group) for group in groups]
    targets: Targets = []
    for group in groups:
        title, error = f"latency, {group.group}", group.median_error
        least = 0.8 if group.group == "threads" else 0.9
        targets.append((f"{title}: median error", error, "at most 5 %", error <= 0.05))
        for name, within in (
            ("cases within 10 %", group.cases_within),
            ("steps within 10 %", group.steps_within),
            ("the same, cases alike", group.alike_within),
        ):
            wanted = f"at least {100 * least:.0f} %"
            targets.append((f"{title}: {name}", within, wanted, within >= least))
    return targets


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as stream:
        stream.write(text.encode())


if __name__ == "__main__":
    main()
