"""Tables of the documentation that follow from what is declared or recorded."""

from __future__ import annotations

import collections
import json
from typing import Any

from benchmarks.language_model import RECORD, SHOWN, published
from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack.option import Option, options_of
from odtpack_simulator.reports import report_format, report_formats
from scripts.harness import DOCS, ROOT, table

NETWORKS = ("mlp", "cnn", "transformer")
OTHERS = ("MeBP", "MeSP")
EXPORTED = ROOT / "benchmarks" / "exporters" / "record.json"


def losses_parts() -> dict[str, str]:
    """The tables of the page on losses."""
    titles = ("loss", "formula of a term", "reads", "target input", "options besides `reduction`")
    rows = [
        (f"`{name}`", loss.formula, loss.prediction, loss.target,
         ", ".join(f"`{each}`" for each in loss.option_names() if each != "reduction"))
        for name, loss in LOSSES.items()
    ]  # fmt: skip
    return {"losses": table(titles, rows), "options": _options("loss", LOSSES)}


def optimizers_parts() -> dict[str, str]:
    """The tables of the page on optimizers."""
    rows = [
        (f"`{kind}`" + (" (default)" if kind == "adamw" else ""), each.source, each.keeps)
        for kind, each in OPTIMIZERS.items()
    ]
    titles = ("`--optimizer`", "formula", "state of a parameter")
    return {"optimizers": table(titles, rows), "options": _options("optimizer", OPTIMIZERS)}


def reports_parts() -> dict[str, str]:
    """The table of the page on reports."""
    formats = {name: report_format(name) for name in report_formats()}
    rows = [
        (f"`{name}`", each.audience, each.written_as, "yes" if each.to_stdout else "no")
        for name, each in formats.items()
    ]
    return {"formats": table(("format", "for", "written as", "standard output"), rows)}


def _options(what: str, declared: dict[str, type]) -> str:
    """Every option once: what several have alike stands in one row."""
    owners: dict[tuple[str, str, str, str], list[str]] = {}
    for name, kind in declared.items():
        for each in options_of(kind):
            row = (each.name, _value(each), _default(each), each.meaning)
            owners.setdefault(row, []).append(f"`{name}`")
    rows = [
        (f"`{option}`", "all" if len(names) == len(declared) else ", ".join(names), *rest)
        for (option, *rest), names in owners.items()
    ]
    return table(("option", what, "value", "default", ""), rows)


def _value(option: Option) -> str:
    if option.type is bool:
        return "`true` or `false`"
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    return option.range


def _default(option: Option) -> str:
    shown = str(option.default).lower() if option.type is bool else option.default
    return "none" if option.default is None else f"`{shown}`"


def kits_parts() -> dict[str, object]:
    """Where the kits ran, how fast, and what they add, as docs/kits.json has it."""
    content = json.loads((DOCS / "kits.json").read_text())
    platforms: dict[str, dict[str, Any]] = content["platforms"]
    ran, times, installed = [], [], []
    for name, each in platforms.items():
        tests, steps = each["tests"], each.get("steps", {})
        left = f"{tests['skipped']}: {each['reason']}" if tests.get("skipped") else "none"
        failed = f", {tests['failed']} failed" if tests.get("failed") else ""
        ran.append((name, f"{tests.get('passed', 0)}{failed}", left))
        if "steps" in each:
            times.append((name, each["onnxruntime"], *(_step(steps.get(n)) for n in NETWORKS),
                          f"{each['bytes']:,}", f"{each['lines']:,}"))  # fmt: skip
        # To the Python of the project, where a kit has another ONNX Runtime.
        ratios = {key: step.get("installed_ratio") for key, step in steps.items()}
        if any(ratios.values()):
            listed = ", ".join(f"{ratio:.2f} ({key})" for key, ratio in ratios.items() if ratio)
            installed.append(f"{name} {listed}")
    titles = ("platform", "ONNX Runtime", *(f"{name}: kit, Python, ratio" for name in NETWORKS),
              "added bytes", "lines of code")  # fmt: skip
    return {
        "run": f"{content['date']} ({content['machine']})", "rounds": content["rounds"],
        "ran": table(("platform", "tests passed", "left out"), ran), "times": table(titles, times),
        "installed": f"{content['installed']}: {'; '.join(installed)}.",
    }  # fmt: skip


def _step(step: dict[str, float] | None) -> str:
    if step is None:
        return "not measured"
    return f"{step['ms']:.2f} ms, {step['python_ms']:.2f} ms, **{step['ratio']:.2f}**"


def runtimes_parts() -> dict[str, object]:
    """What ran on which release of ONNX Runtime, as docs/runtimes.json has it."""
    content = json.loads((DOCS / "runtimes.json").read_text())
    releases = content["releases"]
    rows = [
        (each["title"], each["minimum"], *(_difference(losses[n]) for losses in releases.values()))
        for n, each in content["packages"].items()
    ]
    return {
        "run": f"{content['date']} ({content['machine']})", "steps": content["steps"],
        "newest": [*releases][-1], "tolerance": f"{content['tolerance']:g}",
        "releases": table(("package", "`minimum_onnxruntime`", *releases), rows),
    }  # fmt: skip


def _difference(difference: float | None) -> str:
    if difference is None:
        return "–"
    return "equal" if difference == 0 else f"{difference:.0e}"


def decoders_parts() -> dict[str, str]:
    """What the record says, for docs/decoders.md."""
    record: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text())
    others = published()
    same = {(e["system"], e["shape"], str(e["tokens"])): e for e in others if e["tokens"]}
    memory, times = [], []
    for shape, lengths in record.items():
        for tokens, figures in lengths.items():
            near = [same.get((system, shape, tokens), {}) for system in OTHERS]
            start = (shape, f"{int(tokens):,}")
            memory.append((*start, *(figures.get(key, "") for key in (*SHOWN, "kernels")),
                           *(each.get("mb", "") for each in near)))  # fmt: skip
            times += [
                (*start, way, taken["step"], f"{int(tokens) / taken['step']:.1f}",
                 f"{taken['step'] / taken['forward']:.2f}",
                 figures["anonymous" if way == "plain" else way], taken["gflops"], on)
                for way, places in figures.get("times", {}).items()
                for on, taken in places.items()
            ]  # fmt: skip
    rest = [(e["system"], e["shape"], e["device"], e["mb"], e["source"])
            for e in others if not e["tokens"]]  # fmt: skip
    titles = (f"{each}:" for each in (*SHOWN, "kernels", *OTHERS))
    rates = ("step, s:", "tokens/s:", "forward passes:", "MB:", "GFLOP/s:")
    return {
        "memory": table(("shape", "tokens:", *titles), memory),
        "times": table(("shape", "tokens:", "package", *rates, "processor"), times),
        "device": " and ".join({each["device"] for each in same.values()}),
        "source": " and ".join({each["source"] for each in same.values()}),
        "others": table(("system", "model", "device", "MB:", "source"), rest),
    }


def exporters_parts() -> dict[str, object]:
    """What came of each file, for docs/exporters.md."""
    record: dict[str, dict[str, dict[str, Any]]] = json.loads(EXPORTED.read_text())
    outcomes = [outcome for cells in record.values() for outcome in cells.values()]
    kinds = collections.Counter(outcome["kind"] for outcome in outcomes)
    said = [o.get("beside") or o.get("said") for o in outcomes if o["kind"] != "not written"]
    notes = [*dict.fromkeys(each for each in said if each)]

    def cell(outcome: dict[str, Any] | None) -> str:
        if outcome is None or outcome["kind"] == "not written":
            return "" if outcome is None else "—"
        found = f"{outcome['error']:.0e}" if outcome["kind"] == "right" else outcome["kind"]
        note = outcome.get("beside") or outcome.get("said")
        return f"{found} ({notes.index(note) + 1})" if note else found

    rows = [
        (model, *(cell(cells.get(model)) for cells in record.values()))
        for model in dict.fromkeys(name for cells in record.values() for name in cells)
    ]
    told = "".join(f"\n{number}. {note}" for number, note in enumerate(notes, 1))
    return {
        "outcome": f"**{kinds['right']} of {kinds.total() - kinds['not written']} files are right, "
        f"{kinds['refused']} refused, {kinds['wrong']} wrong**",
        "other": kinds["other"],
        "missing": kinds["not written"],
        "tokens": sum(outcome.get("tokens") == "equal" for outcome in outcomes),
        "models": table(("model", *(f"{name}:" for name in record)), rows)
        + (f"\n{told}" if told else ""),
    }
