"""docs/published-phones.md: published trainings on phones beside what the simulator says."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "published"

_HEAD = """# Published phones

Generated from `benchmarks/published/` by `python -m scripts.generate_docs`; a test keeps it
current.

Published trainings on one phone: five networks at five batch sizes on a Xiaomi Mi 9 (Snapdragon
855, four threads, the default governor) by MNN of 2021
(UbiquitousLearning/Benchmark-On-Device-Training@752659f). These rows are held out: no constant was
fitted to them.

`python -m benchmarks.published` rebuilds the networks from their papers, times them here at
batches of 1 and 16, scales them to the profile `xiaomi/mi-9`, and plans their memory. Networks
that were not simulated yet are marked. The other engine is not ONNX Runtime: it has other kernels,
with slow ones for the gradients of convolutions, and keeps other tensors. The comparison is
therefore about **shape**: the growth of a step with the batch size, the ratios between networks,
and memory per sample. The column *times* is the published time divided by the simulated one.
"""


def published_phones_page() -> str:
    """The comparison as Markdown."""
    with (_FOLDER / "training.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    published: dict[str, dict[int, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        published[row["model"]][int(row["batch"])] = row
    file = _FOLDER / "simulated.json"
    simulated = json.loads(file.read_text()) if file.exists() else {}
    lines = [_HEAD, *_between(published), *_steps(published, simulated)]
    return "\n".join([*lines, *_memory(published, simulated)]) + "\n"


def _milliseconds(rows: dict[int, dict[str, str]]) -> dict[int, float]:
    return {size: float(row["ms_per_step"]) for size, row in rows.items()}


def line(ends: dict[int, float], size: int) -> float:
    """What lies on the line through the smallest and the largest of some points."""
    low, high = min(ends), max(ends)
    return ends[low] + (ends[high] - ends[low]) * (size - low) / (high - low)


def _between(published: dict[str, dict[int, dict[str, str]]]) -> list[str]:
    lines = ["## Batch sizes in between", "", "Published steps against the line through the", ""]
    lines[2] += " published steps of 1 and 16:"
    lines += ["| network | batch 2 | 4 | 8 |", "|---|---:|---:|---:|"]
    errors = []
    for name, rows in published.items():
        times = _milliseconds(rows)
        found = [line(times, size) / times[size] - 1 for size in (2, 4, 8)]
        errors += found
        lines.append(f"| {name} | {' | '.join(f'{100 * error:+.1f} %' for error in found)} |")
    within = sum(abs(error) <= 0.1 for error in errors)
    return [*lines, "", f"{within} of {len(errors)} within 10 %.", ""]


def _steps(published: dict[str, dict[int, dict[str, str]]], simulated: dict[str, Any]) -> list[str]:
    lines = ["## Steps", ""]
    lines += ["| network | published 1 | 16 | ratio | simulated 1 | 16 | ratio | times, 1 | 16 |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    factors: list[float] = []
    for name, rows in published.items():
        times = _milliseconds(rows)
        steps = simulated.get(name, {}).get("step_ms", {})
        own = [f"{times[1]:.4g} ms", f"{times[16]:.4g} ms", f"{times[16] / times[1]:.1f}"]
        if steps.get("1") and steps.get("16"):
            one, many = steps["1"]["typical"], steps["16"]["typical"]
            factors.append(times[16] / many)
            own += [f"{one:.4g} ms", f"{many:.4g} ms", f"{many / one:.1f}"]
            own += [f"{times[1] / one:.1f}", f"{times[16] / many:.1f}"]
        else:
            own += ["not simulated", *"----"]
        lines.append(f"| {name} | {' | '.join(own)} |")
    lines.append("")
    if len(factors) > 1:
        middle = statistics.geometric_mean(factors)
        apart = max(abs(math.log(factor / middle)) for factor in factors)
        lines += [
            f"At batch 16 the other engine takes {middle:.1f} times as long as simulated "
            f"(geometric mean), each network within a factor of {math.exp(apart):.1f} of that.",
            "",
        ]
    return lines


def _memory(
    published: dict[str, dict[int, dict[str, str]]], simulated: dict[str, Any]
) -> list[str]:
    lines = ["## Memory per sample", ""]
    lines += [
        "From batch 1 to 16, in MB: resident memory of the other engine, and the plan's peak."
    ]
    lines += ["", "| network | published | planned |", "|---|---:|---:|"]
    for name, rows in published.items():
        peaks = simulated.get(name, {}).get("peak_bytes", {})
        per_sample = (float(rows[16]["mem_MB"]) - float(rows[1]["mem_MB"])) / 15
        planned = f"{(peaks['16'] - peaks['1']) / 15e6:.3g}" if peaks else "-"
        lines.append(f"| {name} | {per_sample:.3g} | {planned} |")
    return lines
