"""Write the generated pages of the documentation; with --check say whether they are stale."""

import collections
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from odtpack.fit.federated import FleetFitResult
from odtpack.fit.outcome import FitResult
from odtpack.package.coverage import coverage
from odtpack.recipe.draft import schema_text
from odtpack.update.diff import PackageDiff
from odtpack_runtime.errors import error_codes
from odtpack_simulator.device.app import APP_FOOTPRINTS, PROCESSES, RUNTIME_LIBRARY_BYTES
from odtpack_simulator.device.profile import DeviceProfile, list_profiles, load_profile
from odtpack_simulator.device.profile_check import check_profile
from odtpack_simulator.figures.compare import Comparison
from odtpack_simulator.figures.limits import budget_schema
from odtpack_simulator.figures.simulated import METRICS
from odtpack_simulator.fleet.result import FleetResult
from odtpack_simulator.measure.measured_profile import DeviceMeasurements
from odtpack_simulator.result import SimulationResult
from odtpack_simulator.values.units import Interval, Quantity, Unknown, format_bytes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs as a file too
from benchmarks.published.engine import published_phones_parts  # noqa: E402
from scripts import record_tables  # noqa: E402
from scripts.harness import DOCS, filled, table  # noqa: E402
from scripts.manifest_schema import manifest_schema  # noqa: E402


def operators() -> str:
    rows = coverage()
    counts = collections.Counter(row.how for row in rows)
    summary = ", ".join(f"{how}: {count}" for how, count in sorted(counts.items()))
    cells = [
        (f"{each.domain}.{each.op_type}".removeprefix("ai.onnx."),
         ", ".join(map(str, each.opsets)), ", ".join(each.inputs), each.how)
        for each in rows
    ]  # fmt: skip
    titles = ("operator", "definitions since opset", "trainable inputs", "how")
    return f"{len(rows)} operators. {summary}.\n\n{table(titles, cells)}"


def errors() -> str:
    """Every error code with its meaning, cause and help."""
    lines = []
    for code, entry in error_codes().items():
        lines += [f"## {code}", "", entry.means + (" **kits**" if entry.kits else ""), ""]
        lines += [f"Cause: {entry.cause}", ""] if entry.cause else []
        lines += [f"Help: {entry.advice}", ""]
        lines += ["```text", *entry.example.splitlines(), "```", ""] if entry.example else []
    return "\n".join(lines).rstrip()


def _json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _schema(title: str, made: Mapping[str, Any]) -> str:
    content = {key: value for key, value in made.items() if key != "title"}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return _json({"$schema": draft, "title": title, **content})


_MODELS: dict[str, tuple[str, type[BaseModel]]] = {
    "diff": ("Difference between two odtpack packages", PackageDiff),
    "result": ("Result of an odtpack simulation", SimulationResult),
    "comparison": ("Comparison of two results of odtpack", Comparison),
    "measurements": ("Measurements of a device by an odtpack training kit", DeviceMeasurements),
    "fleet": ("Result of a simulated federation of odtpack", FleetResult),
    "fleet-fit": ("Result of odtpack fleet fit", FleetFitResult),
    "fit": ("Result of odtpack fit", FitResult),
}


def _printed(name: str) -> str:
    """The schema of the JSON that a command prints; measurements are read."""
    title, model = _MODELS[name]
    mode: Any = "validation" if name == "measurements" else "serialization"
    return _schema(title, model.model_json_schema(mode=mode))


SCHEMAS: dict[str, Callable[[], str]] = {
    "manifest": lambda: _schema("Manifest of an odtpack package", manifest_schema()),
    **{name: partial(_printed, name) for name in _MODELS},
    "recipe": schema_text,
    "budgets": lambda: _json(budget_schema()),
}

_ASSUMED = Quantity(value=1, unit="1", kind="assumed", source="share of a published peak")
"""Stands for what is computed from a data sheet."""

_COLUMNS = (
    *("device", "system", "app memory", "threads", "rate", "memory GB/s", "storage", "power"),
    *("battery", "not judged", "unknown", "compared with"),
)


def devices() -> str:
    profiles = [load_profile(name) for name in list_profiles()]
    return f"{len(profiles)} devices.\n\n{table(_COLUMNS, map(_device_row, profiles))}"


def _device_row(profile: DeviceProfile) -> list[str]:
    memory, cpu, power = profile.memory, profile.cpu, profile.power
    report = check_profile(profile)
    limit = _sized(memory.app_limit_foreground)
    if isinstance(memory.app_limit_entitled, Quantity):
        limit += f" / {_sized(memory.app_limit_entitled)}"
    threads = profile.training_threads()
    rests_on = cpu.fp32_gemm if isinstance(cpu.fp32_gemm, Quantity) else _ASSUMED
    copy = memory.bandwidth if isinstance(memory.bandwidth, Quantity) else _ASSUMED
    read, write = profile.storage_bandwidth("read"), profile.storage_bandwidth("write")
    speeds = [_ranged(speed, 1e6, getattr(profile.storage, way))
              for way, speed in (("read", read), ("write", write))]  # fmt: skip
    return [
        f"{profile.title}<br>`{profile.name}`", profile.os, limit,
        "-" if threads is None else str(threads),
        _ranged(profile.gemm_flops(threads), 1e9, rests_on),
        _ranged(profile.copy_bandwidth(), 1e9, copy),
        " / ".join(speeds) if read or write else "-",
        _ranged(profile.load_watts(), 1, power.load),
        _ranged(profile.battery_joules(), 3600, power.battery),
        ", ".join(item.subject for item in report.not_judged) or "-",
        str(report.kinds["unknown"]), profile.held_against or "nothing",
    ]  # fmt: skip


def _star(figure: Quantity | Unknown | None) -> str:
    return "\\*" if isinstance(figure, Quantity) and figure.kind == "assumed" else ""


def _sized(figure: Quantity | Unknown | None) -> str:
    if not isinstance(figure, Quantity):
        return "-"
    return format_bytes(figure.interval("bytes").typical) + _star(figure)


def _ranged(interval: Interval | None, factor: float, figure: Quantity | Unknown | None) -> str:
    if interval is None:
        return "-"
    ends = (interval.low, interval.typical, interval.high)
    low, typical, high = (f"{float(f'{end / factor:.3g}'):g}" for end in ends)
    return f"{typical}{_star(figure)}" + ("" if low == high else f" ({low} to {high})")


def budgets() -> dict[str, str]:
    """The keys of budgets, and what is taken for the app around a training."""
    keys = []
    for metric in METRICS.values():
        quote = "" if metric.unit == "1" else '"'
        sign = "-" if metric.better == "higher" else "+"
        whose = "" if metric.scope == "device" else " Judged once, not per device."
        keys.append((f"`{metric.key}`", f"`{quote}{metric.example}{quote}`", f'`"{sign}5 %"`',
                     f"{metric.meaning}{whose}"))  # fmt: skip
    apps = [
        (f"`{system}`", format_bytes(app.nbytes), app.kind, app.source)
        for system, app in APP_FOOTPRINTS.items()
    ]
    apps.append((
        "all: ONNX Runtime's library", format_bytes(RUNTIME_LIBRARY_BYTES), "measured",
        "1.32.0 on x86-64 Linux over the C API, before any model is loaded: relocated pages and "
        "the schemas of all operators",
    ))  # fmt: skip
    apps += [
        (f"not `web`: the process of the {kit} kit",
         f"{format_bytes(base)} and {percent} % of the peak", "measured",
         "no row of `python -m benchmarks.fidelity.processes` takes more above its plan: a JVM 17 "
         "and a Node 20 on x86-64 Linux; a phone's Java was not run")
        for kit, (base, percent) in PROCESSES.items()
    ]  # fmt: skip
    titles = ("key", "example", "against a baseline", "what is judged")
    return {
        "keys": table(titles, keys),
        "apps": table(("system", "app:", "known how", "from what"), apps),
    }


_DEFAULTS = {"int64": "0", "int32": "0", "float": "0", "bool": "false", "TensorDataType": "0"}


def checkpoint_fields() -> str:
    """The fields of a checkpoint, from its schema."""
    schema = (DOCS / "formats" / "checkpoint.fbs").read_text()
    rows = []
    for name, body in reversed(re.findall(r"^table (\w+) \{\n(.*?)^\}", schema, re.M | re.S)):
        fields = re.findall(r"(?:^  /// (.*)\n)?^  (\w+):(\S+?)(?: = (\S+))?;", body, re.M)
        rows += [
            (name, number, f"`{field}`", f"`{kind}`", default or _DEFAULTS.get(kind, "none"), said)
            for number, (said, field, kind, default) in enumerate(fields)
        ]  # as flatc has it
    return table(("table", "number", "field", "type", "default", "meaning"), rows)


PARTS: dict[str, Callable[[], Mapping[str, object]]] = {
    "formats/checkpoint": lambda: {"fields": checkpoint_fields()},
    "exporters": record_tables.exporters_parts,
    "runtimes": record_tables.runtimes_parts,
    "kits": record_tables.kits_parts,
    "devices": lambda: {"devices": devices()},
    "losses": record_tables.losses_parts,
    "optimizers": record_tables.optimizers_parts,
    "reports": record_tables.reports_parts,
    "errors": lambda: {"codes": errors()},
    "operators": lambda: {"operators": operators()},
    "decoders": record_tables.decoders_parts,
    "published-phones": published_phones_parts,
    "formats/budgets": budgets,
    "recipe": lambda: {"keys": record_tables.recipe_keys()},
    "fleet": lambda: {"keys": record_tables.fleet_keys()},
}
"""What is generated of each page, by the names of its marks."""


def _page(name: str) -> str:
    return filled(DOCS / f"{name}.md", PARTS[name]())


PAGES = {DOCS / f"{name}.md": partial(_page, name) for name in PARTS} | {
    DOCS / "schemas" / f"{name}.schema.json": text for name, text in SCHEMAS.items()
}


def main() -> int:
    """Write or check every generated page."""
    check = "--check" in sys.argv[1:]
    stale = [
        path for path, page in PAGES.items() if not path.exists() or path.read_text() != page()
    ]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(PAGES[path]())
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
