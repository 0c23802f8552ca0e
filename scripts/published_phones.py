"""The generated parts of docs/published-phones.md: published trainings beside the simulator's."""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.published.engine import CALIBRATION, FOLDER, Engine, Row, counted, fitted, published
from scripts.markdown import table


def published_phones_parts() -> dict[str, str]:
    """The comparison."""
    rows, engine, counts = published(), fitted(), counted()
    simulated = json.loads((FOLDER / "simulated.json").read_text())
    networks: dict[str, dict[int, Row]] = {}
    for row in rows:
        networks.setdefault(row.network, {})[row.batch] = row
    held = [row for row in rows if row.held_out]
    products, activations, parameters = engine.factors
    own_steps = {
        (name, int(size)): step
        for name, each in simulated.items()
        for size, step in each["step_ms"].items()
        if step is not None
    }
    plain = sum(
        step["low"] <= row.step_ms <= step["high"]
        for row in rows
        if (step := own_steps.get((row.network, row.batch)))
    )
    pace, errors, samples = [], {}, []
    for name, of in networks.items():
        work = counts[name].flops * 16 / 1e6
        pace.append((name, f"{work / of[16].infer_ms:.0f}", f"{3 * work / of[16].step_ms:.0f}"))
        times = {size: row.step_ms for size, row in of.items()}
        errors[name] = [line(times, size) / times[size] - 1 for size in (2, 4, 8)]
        peaks = simulated.get(name, {}).get("peak_bytes", {})
        planned = f"{(peaks['16'] - peaks['1']) / 15e6:.3g}" if peaks else "-"
        samples.append((name, f"{(of[16].memory_mb - of[1].memory_mb) / 15:.3g}", planned))
    every = [error for own in errors.values() for error in own]
    factors = [
        ("products, three times those of a forward pass", f"{products:.2f}"),
        ("one pass over the activations", f"{activations:.0f}"),
        ("one pass over the parameters", f"{parameters:.0f}"),
    ]
    gemm = engine.rates.gemm
    return {
        "rate": f"{gemm.typical / 1e9:.0f} ({gemm.low / 1e9:.0f} to {gemm.high / 1e9:.0f})",
        "pace": table(("network", "inference:", "training:"), pace),
        "factors": table(("kind of work", "times over:"), factors),
        "spread": f"{engine.spread:.2f}",
        "width": f"{engine.spread**2:.1f}",
        "held out": f"**{sum(_inside(row, engine) for row in held)} of {len(held)} held-out rows "
        "are inside.**",
        "other fits": "; ".join(_other_fits(rows)) + ".",
        "hosts": " and ".join(dict.fromkeys(each["host"] for each in simulated.values())),
        "plain": f"{plain} of {len(rows)} published steps are inside",
        "steps": table(
            ("network", "batch:", "published:", "other engine:", "inside", "ONNX Runtime:",
             "published / it:"),
            (_step(row, engine, own_steps.get((row.network, row.batch))) for row in rows),
        ),
        "between": table(
            ("network", "batch 2:", "4:", "8:"),
            ((name, *(f"{100 * error:+.1f} %" for error in own)) for name, own in errors.items()),
        ),
        "within": f"{sum(abs(error) <= 0.1 for error in every)} of {len(every)}",
        "samples": table(("network", "published:", "planned:"), samples),
    }  # fmt: skip


def _other_fits(rows: list[Row]) -> Iterator[str]:
    """Published over typical steps of each network that is fitted to, without it in the fit."""
    for name in CALIBRATION:
        engine = fitted(tuple(each for each in CALIBRATION if each != name))
        ratios = [
            row.step_ms / engine.step_ms(name, row.batch)[1] for row in rows if row.network == name
        ]
        yield f"{name} {min(ratios):.2f} to {max(ratios):.2f}"


def _step(row: Row, engine: Engine, own: dict[str, float] | None) -> tuple[object, ...]:
    """What was published, and what is said of it, as cells."""
    low, typical, high = engine.step_ms(row.network, row.batch)
    simulated, ratio = "not judged", "-"
    if own is not None:
        simulated = f"{own['typical']:.3g} ({own['low']:.3g} to {own['high']:.3g})"
        ratio = f"{row.step_ms / own['typical']:.2g}"
    return (
        f"**{row.network}**" if row.held_out else row.network, row.batch, f"{row.step_ms:.4g}",
        f"{typical:.3g} ({low:.3g} to {high:.3g})", "yes" if _inside(row, engine) else "no",
        simulated, ratio,
    )  # fmt: skip


def _inside(row: Row, engine: Engine) -> bool:
    low, _, high = engine.step_ms(row.network, row.batch)
    return low <= row.step_ms <= high


def line(ends: dict[int, float], size: int) -> float:
    """What lies on the line through the smallest and the largest of some points."""
    low, high = min(ends), max(ends)
    return ends[low] + (ends[high] - ends[low]) * (size - low) / (high - low)
