"""docs/published-phones.md: published trainings on phones beside what the simulator says."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.published.engine import CALIBRATION, FOLDER, Engine, Row, counted, fitted, published

_HEAD = """# Published phones

Generated from `benchmarks/published/` by `python -m scripts.generate_docs`; a test keeps it
current.

Published trainings on one phone: five networks at five batch sizes on a Xiaomi Mi 9 (Snapdragon
855, four threads, the default governor) by MNN of 2021
(UbiquitousLearning/Benchmark-On-Device-Training@752659f). `python -m benchmarks.published` builds
the networks as that engine's sources do and counts their work; the counts are the same on every
machine. With `--time`, on an idle machine, it also times their training by ONNX Runtime and scales
it to the profile `xiaomi/mi-9`, as `odtpack simulate` does.

Other published trainings cannot be built or have no profile: those by DL4J on Nexus 6 and Redmi
Note 8 name no batch size but for one, and those of language models on an iPhone no sequence length.
"""


def published_phones_page() -> str:
    """The comparison as Markdown."""
    rows, engine = published(), fitted()
    simulated = json.loads((FOLDER / "simulated.json").read_text())
    lines = [_HEAD, *_phone(rows), *_engine(rows, engine), *_steps(rows, engine, simulated)]
    return "\n".join([*lines, *_between(rows), *_memory(rows, simulated)]) + "\n"


def _phone(rows: list[Row]) -> list[str]:
    """What the phone reaches in the engine's inference, and in its training."""
    engine, counts = fitted(), counted()
    gemm = engine.rates.gemm
    lines = [
        "## What the phone loses",
        "",
        "The same engine also timed inference on this phone, by other kernels than its training.",
        "In GFLOPS of the products' definition, at batch 16, where the profile's matrix rate is",
        f"{gemm.typical / 1e9:.0f} ({gemm.low / 1e9:.0f} to {gemm.high / 1e9:.0f}):",
        "",
        "| network | inference | training |",
        "|---|---:|---:|",
    ]
    for row in rows:
        if row.batch == 16:
            work = counts[row.network].flops * row.batch / 1e6
            pace = f"{work / row.infer_ms:.0f} | {3 * work / row.step_ms:.0f}"
            lines.append(f"| {row.network} | {pace} |")
    return [
        *lines,
        "",
        "Inference reaches the data sheet's rate, and GoogLeNet exceeds it: 3x3 convolutions by",
        "Winograd's method take fewer multiplications than the definition. So in products the",
        "phone loses nothing that the profile does not have, and `odtpack simulate` takes its",
        "rates as they are. What the published trainings lose is in the engine's training. Small",
        "kernels (Lenet) and depthwise convolutions (Mobilenet) stay below the rate in inference,",
        "too: they are bound by memory and by the runtime's own time.",
        "",
    ]


def _engine(rows: list[Row], engine: Engine) -> list[str]:
    """The other engine's own factors, and how they were found."""
    products, activations, parameters = engine.factors
    held = [row for row in rows if row.held_out]
    inside = sum(_inside(row, engine) for row in held)
    names = " and ".join(dict.fromkeys(row.network for row in held))
    others = [
        f"{name} {min(ratios):.2f} to {max(ratios):.2f}"
        for name in CALIBRATION
        for ratios in [_ratios(rows, name, fitted(tuple(n for n in CALIBRATION if n != name)))]
    ]
    return [
        "## What the other engine loses",
        "",
        "A step of the other engine is taken for the sum of three kinds of work at the profile's",
        "rates, each a number of times over:",
        "",
        "| kind of work | times over |",
        "|---|---:|",
        f"| products, three times those of a forward pass | {products:.2f} |",
        f"| one pass over the activations | {activations:.0f} |",
        f"| one pass over the parameters | {parameters:.0f} |",
        "",
        f"These three factors were fitted to {', '.join(CALIBRATION)}: 15 rows, five a factor.",
        f"{names} are held out. The interval is a factor of {engine.spread:.2f} to either side (a",
        f"width of {engine.spread**2:.1f}): Student's 95 % for one more row, from what is left.",
        f"**{inside} of {len(held)} held-out rows are inside.** Rows of one network are not",
        "independent: fitted to two of the three networks, published over typical is in the third:",
        f"{'; '.join(others)}.",
        "Three networks are the fewest that this fit can be made from.",
        "",
        "If products may not exceed the data sheet's rate (a factor of 1), the fit puts 2 of 10",
        "held-out rows inside, and the others are up to 2.5 times as slow: GoogLeNet's products,",
        "which inference computes faster than that, then leave too little for the activations.",
        "",
    ]


def _steps(rows: list[Row], engine: Engine, simulated: dict[str, Any]) -> list[str]:
    hosts = " and ".join(dict.fromkeys(each["host"] for each in simulated.values()))
    own_steps = {
        (name, int(size)): step
        for name, each in simulated.items()
        for size, step in each["step_ms"].items()
        if step is not None
    }
    plain = sum(
        step["low"] <= row.step_ms <= step["high"]
        for row in rows
        for step in [own_steps.get((row.network, row.batch))]
        if step is not None
    )
    lines = [
        "## Steps",
        "",
        "In ms. *Other engine* is the interval with the factors above. *ONNX Runtime* is what",
        "`odtpack simulate` says of the same training by ONNX Runtime, which was not run on the",
        f"phone: timed on {hosts}.",
        f"Without any factor of the engine {plain} of {len(rows)} published steps are inside.",
        "",
        "| network | batch | published | other engine | inside | ONNX Runtime | published / it |",
        "|---|---:|---:|---:|---|---:|---:|",
    ]
    for row in rows:
        low, typical, high = engine.step_ms(row.network, row.batch)
        shown = f"{typical:.3g} ({low:.3g} to {high:.3g})"
        step = own_steps.get((row.network, row.batch))
        own = "not judged | -"
        if step is not None:
            ends = f"{step['typical']:.3g} ({step['low']:.3g} to {step['high']:.3g})"
            own = f"{ends} | {row.step_ms / step['typical']:.2g}"
        name = f"**{row.network}**" if row.held_out else row.network
        inside = "yes" if _inside(row, engine) else "no"
        cells = [name, str(row.batch), f"{row.step_ms:.4g}", shown, inside, own]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "Held-out networks are in bold.", ""]


def _inside(row: Row, engine: Engine) -> bool:
    low, _, high = engine.step_ms(row.network, row.batch)
    return low <= row.step_ms <= high


def _ratios(rows: list[Row], network: str, engine: Engine) -> list[float]:
    return [
        row.step_ms / engine.step_ms(network, row.batch)[1]
        for row in rows
        if row.network == network
    ]


def line(ends: dict[int, float], size: int) -> float:
    """What lies on the line through the smallest and the largest of some points."""
    low, high = min(ends), max(ends)
    return ends[low] + (ends[high] - ends[low]) * (size - low) / (high - low)


def _networks(rows: list[Row]) -> dict[str, dict[int, Row]]:
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(row.network, {})[row.batch] = row
    return found


def _between(rows: list[Row]) -> list[str]:
    lines = ["## Batch sizes in between", "", "Published steps against the line through the", ""]
    lines[2] += " published steps of 1 and 16:"
    lines += ["| network | batch 2 | 4 | 8 |", "|---|---:|---:|---:|"]
    errors = []
    for name, of in _networks(rows).items():
        times = {size: row.step_ms for size, row in of.items()}
        found = [line(times, size) / times[size] - 1 for size in (2, 4, 8)]
        errors += found
        lines.append(f"| {name} | {' | '.join(f'{100 * error:+.1f} %' for error in found)} |")
    within = sum(abs(error) <= 0.1 for error in errors)
    return [*lines, "", f"{within} of {len(errors)} within 10 %.", ""]


def _memory(rows: list[Row], simulated: dict[str, Any]) -> list[str]:
    lines = [
        "## Memory per sample",
        "",
        "From batch 1 to 16, in MB: resident memory of the other engine, and the plan's peak.",
        "",
        "| network | published | planned |",
        "|---|---:|---:|",
    ]
    for name, of in _networks(rows).items():
        peaks = simulated.get(name, {}).get("peak_bytes", {})
        per_sample = (of[16].memory_mb - of[1].memory_mb) / 15
        planned = f"{(peaks['16'] - peaks['1']) / 15e6:.3g}" if peaks else "-"
        lines.append(f"| {name} | {per_sample:.3g} | {planned} |")
    return lines
