"""How well this machine's measurements are predicted, on models held out from every fit.

    python -m benchmarks.fidelity [--models vit,bert] [--memory-only | --latency-only] [--quick]

``--quick`` takes one batch size and one thread. ``--json`` writes everything, ``--markdown`` table
and summary. Of memory alone are ``--no-limits``, which compares the peaks only, ``--sessions``,
session options of the app, ``--native``, with the kernels of ODTPACK_NATIVE's library,
``--threads``, only so many, and ``--jobs``, trainings at once.
"""

import argparse
import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime

from benchmarks.fidelity import latency, memory
from benchmarks.fidelity.models import CASES
from odtpack_simulator.device.app import MARGIN
from scripts.harness import head, options, row, table

Targets = list[tuple[str, float, str, bool]]
"""What is to be reached: its name, the value, the target as text, whether it is met."""
Say = Callable[[str], None]


def main() -> None:
    given = options(
        __doc__, models=[*CASES], memory_only=False, latency_only=False, no_limits=False,
        sessions=(*memory.SESSIONS,), native=False, quick=False,
        threads=[int], jobs=2, json=Path, markdown=Path,
    )  # fmt: skip
    start = time.monotonic()
    document: dict[str, Any] = {"quick": given.quick}
    targets: Targets = []
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    if not given.latency_only:
        targets += _memory(given, say, document)
    if not given.memory_only:
        targets += _latency(given, say, document)
    names = ("name", "value", "target", "met")
    document["targets"] = [dict(zip(names, each, strict=True)) for each in targets]
    document["seconds"] = round(time.monotonic() - start)
    document["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, "
        f"ONNX Runtime {onnxruntime.__version__}"
    )
    judged = [
        (name, f"{100 * value:.2f} %", target, "met" if met else "NOT met")
        for name, value, target, met in targets
    ]
    summary = table(("what", "measured:", "target", ""), judged)
    where = f"Measured on {document['machine']}, in {document['seconds']} s."
    print(f"\n{summary}\n\n{where}")
    texts = {
        given.json: json.dumps(document, indent=1, allow_nan=False),
        given.markdown: "\n".join([summary, "", where, *lines]),
    }
    for path, text in texts.items():
        if path:
            path.write_text(f"{text}\n", "utf-8")


def _memory(given: argparse.Namespace, say: Say, document: dict[str, Any]) -> Targets:
    """Everything about memory: see :mod:`benchmarks.fidelity.memory`."""
    say("\n" + head("model", "batch:", "threads, loop", "predicted:", "app:", "error:", "Python:",
                    "verdicts"))  # fmt: skip
    rows = []
    for each in memory.measure(given):
        rows.append(each)
        wrong = [f"{one.share:g}: {one.wrong}" for one in each.verdicts if one.wrong]
        right = f"{len(each.verdicts)} right" if each.verdicts else ""
        python = "" if each.python_bytes is None else f"{each.python_bytes / 1e6:.2f} MB"
        say(row(each.model, each.batch_size, f"{each.threads}, {each.loop}",
                f"{each.predicted_bytes / 1e6:.2f} MB", f"{each.measured_bytes / 1e6:.2f} MB",
                f"{100 * each.error:+.1f} %", python, "; ".join(wrong) or right))  # fmt: skip
    found = memory.summarize(rows)
    document["memory"] = [dataclasses.asdict(each) | {"error": each.error} for each in rows]
    document["memory_summary"] = found
    say(
        "\n{models} models, {cases} cases, {verdicts} limits; largest error {largest_error:.1%}; "
        "too close to call: {close:.1%} of the limits".format(**found)
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


def _latency(given: argparse.Namespace, say: Say, document: dict[str, Any]) -> Targets:
    """Everything about step times: see :mod:`benchmarks.fidelity.latency`."""
    rows = latency.report(given.models, given.quick, say)
    groups = latency.summarize(rows)
    document["latency"] = [latency.as_document(each) for each in rows]
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


if __name__ == "__main__":
    main()
