"""Write the generated pages of the documentation; with --check say whether they are stale."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from odtpack.fit.federated import FleetFitResult
from odtpack.fit.outcome import json_schema as fit_json_schema
from odtpack.package.coverage import coverage
from odtpack.recipe.draft import schema_text
from odtpack.update.diff import PackageDiff
from odtpack_runtime.error_codes import error_codes
from odtpack_simulator.device.app import (
    APP_FOOTPRINTS,
    PROCESSES,
    RUNTIME_LIBRARY_BYTES,
)
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
from benchmarks.decoder.page import decoders_page  # noqa: E402
from benchmarks.exporters.page import exporters_page  # noqa: E402
from scripts.fleet_table import fleet_keys  # noqa: E402
from scripts.kits_table import kits_page  # noqa: E402
from scripts.manifest_schema import manifest_schema  # noqa: E402
from scripts.published_phones import published_phones_page  # noqa: E402
from scripts.recipe_reference import reference  # noqa: E402
from scripts.registry_tables import losses_page, optimizers_page, reports_page  # noqa: E402

_INTRODUCTION = """# Operators

Generated from the registry by `python -m scripts.generate_docs`; a test keeps it current.
`odtpack ops coverage` prints the same table, and `odtpack ops check MODEL.onnx` lists the nodes of
a model that block gradients.

- **rule**: differentiated by its own rule.
- **expansion**: the standard defines the operator as a function of other operators, which are
  differentiated.
- **rewritten**: replaced before differentiation if possible. Operators of ONNX Runtime's domain
  `com.microsoft` are replaced by standard ones when a model is read. Sequence operators with
  constant lengths and positions become Split and Concat. A QuantizeLinear followed by a
  DequantizeLinear of the same scale and zero point simulates quantization and is differentiated by
  the straight-through estimator: the gradient of the input passes where its level is
  representable, and is zero where it was clipped; the gradient of the scale is that of learned
  step size quantization. Any other QuantizeLinear blocks gradients. What `quantize_dynamic` of ONNX
  Runtime writes (MatMulInteger and ConvInteger between DynamicQuantizeLinear, Cast and Mul;
  DynamicQuantizeLSTM) runs as it is, with weights that stay as they are, and the gradient is that
  of the product or LSTM of the numbers that the codes stand for, as if nothing else were rounded.
- **no gradient**: piecewise constant or not numeric. Gradients stop here by definition.
- **none**: not differentiable yet. If a parameter would have to be trained through the operator,
  `odtpack build` fails with an error that names the node.
"""


def operators_page() -> str:
    """The support table as Markdown."""
    rows = coverage()
    counts = {
        how: sum(row.how == how for row in rows) for how in dict.fromkeys(r.how for r in rows)
    }
    summary = ", ".join(f"{how}: {count}" for how, count in sorted(counts.items()))
    lines = [_INTRODUCTION, f"{len(rows)} operators. {summary}.", ""]
    lines += [
        "| operator | definitions since opset | trainable inputs | how |",
        "|---|---|---|---|",
    ]
    for row in rows:
        name = row.op_type if row.domain == "ai.onnx" else f"{row.domain}.{row.op_type}"
        opsets = ", ".join(map(str, row.opsets))
        lines.append(f"| {name} | {opsets} | {', '.join(row.inputs)} | {row.how} |")
    return "\n".join(lines) + "\n"


_ERRORS = """# Errors

Generated from `runtime/odtpack_runtime/error_codes.toml` by `python -m scripts.generate_docs`.
A command that fails prints the code of its error, what is wrong, where, and what to do, and exits
with code 2. From Python the code is the attribute `code` of an `OdtpackError`.
`odtpack explain CODE` prints a section of this page in the terminal. Codes do not change. The
training kits of other languages raise those with **kits** too.
"""


def errors_page() -> str:
    """Every error code with its meaning, cause and help, as Markdown."""
    lines = [_ERRORS]
    for code, entry in error_codes().items():
        lines += [f"## {code}", "", entry.means + (" **kits**" if entry.kits else ""), ""]
        lines += [f"Cause: {entry.cause}", ""] if entry.cause else []
        lines += [f"Help: {entry.advice}", ""]
        lines += ["```text", *entry.example.splitlines(), "```", ""] if entry.example else []
    return "\n".join(lines)


# Of each schema: its title, and what makes it; a model's is that of the JSON that a command prints.
_SCHEMAS: dict[str, tuple[str, type[BaseModel] | Callable[[], dict[str, Any]]]] = {
    "manifest": ("Manifest of an odtpack package", manifest_schema),
    "diff": ("Difference between two odtpack packages", PackageDiff),
    "result": ("Result of an odtpack simulation", SimulationResult),
    "comparison": ("Comparison of two results of odtpack", Comparison),
    "measurements": (
        "Measurements of a device by an odtpack training kit",
        partial(DeviceMeasurements.model_json_schema, mode="validation"),
    ),
    "fleet": ("Result of a simulated federation of odtpack", FleetResult),
    "fleet-fit": ("Result of odtpack fleet fit", FleetFitResult),
}


def _schema(name: str) -> str:
    """One of these schemas as text."""
    title, source = _SCHEMAS[name]
    content = (
        source.model_json_schema(mode="serialization") if isinstance(source, type) else source()
    )
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **{k: v for k, v in content.items() if k != "title"},
    }
    return json.dumps(schema, indent=2) + "\n"


_KEYS = "<!-- Generated by scripts/generate_docs.py from here to the end. -->\n"


def _below(page: Path, mark: str, generated: str) -> str:
    """A page whose part below a mark is generated."""
    written, _, _ = page.read_text().partition(mark)
    return f"{written}{mark}\n{generated}"


_RECIPE = ROOT / "docs" / "recipe.md"
_FLEET = ROOT / "docs" / "fleet.md"


_DEVICES = """# Devices

Generated from `device_profiles/` by `python -m scripts.generate_docs`; a test keeps it current.
`odtpack devices show NAME` prints the kind and source of every figure.
[Device profiles](formats/device-profile.md) describes how to write or measure your own profile.

**None of these profiles has been validated on the hardware.** A figure with a star is assumed:
taken from a similar device or computed, for the reason that the profile gives. A dash is unknown;
checks that need the figure are "not judged".

- **app memory**: limit of an app in the foreground; after the slash, with the entitlement.
- **rate**: rate of a large single-precision matrix product with the threads of a training: typical
  value and interval in GFLOPS.
- **storage**: sequential read / write in MB/s.
- **power**: whole device under load, in watts. **battery**: in watt-hours.
- **unknown**: number of unknown figures.
- **compared with**: measurements with which its predictions were compared.
"""

_ASSUMED = Quantity(value=1, unit="1", kind="assumed", source="share of a published peak")
"""Stands for what is computed from a data sheet."""

_COLUMNS = (
    *("device", "system", "app memory", "threads", "rate", "memory GB/s", "storage", "power"),
    *("battery", "not judged", "unknown", "compared with"),
)


def devices_page() -> str:
    """The table of shipped devices as Markdown."""
    profiles = [load_profile(name) for name in list_profiles()]
    lines = [_DEVICES, f"{len(profiles)} devices.", ""]
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    lines += [f"| {' | '.join(_device_row(profile))} |" for profile in profiles]
    return "\n".join(lines) + "\n"


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
    return [
        f"{profile.title}<br>`{profile.name}`",
        profile.os,
        limit,
        "-" if threads is None else str(threads),
        _ranged(profile.gemm_flops(threads), 1e9, rests_on),
        _ranged(profile.copy_bandwidth(), 1e9, copy),
        f"{_ranged(read, 1e6, profile.storage.read)} / {_ranged(write, 1e6, profile.storage.write)}"
        if read or write
        else "-",
        _ranged(profile.load_watts(), 1, power.load),
        _ranged(profile.battery_joules(), 3600, power.battery),
        ", ".join(item.subject for item in report.not_judged) or "-",
        str(report.kinds["unknown"]),
        profile.held_against or "nothing",
    ]


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


_BUDGETS = ROOT / "docs" / "formats" / "budgets.md"


def budgets_page() -> str:
    """The page on budgets, whose table of keys is generated."""
    lines = [
        "## Keys",
        "",
        "| key | example | against a baseline | what is judged |",
        "|---|---|---|---|",
    ]
    for metric in METRICS.values():
        quote = "" if metric.unit == "1" else '"'
        sign = "-" if metric.better == "higher" else "+"
        whose = "" if metric.scope == "device" else " Judged once, not per device."
        lines.append(
            f"| `{metric.key}` | `{quote}{metric.example}{quote}` | "
            f'`"{sign}5 %"` | {metric.meaning}{whose} |'
        )
    lines += [
        "",
        "## What is taken for the app",
        "",
        "`app_footprint` in place of these says what your app holds; see "
        "[above](#the-app-around-the-training).",
        "",
        "| system | app | known how | from what |",
        "|---|---:|---|---|",
    ]
    lines += [
        f"| `{system}` | {format_bytes(app.nbytes)} | {app.kind} | {app.source} |"
        for system, app in APP_FOOTPRINTS.items()
    ]
    library = format_bytes(RUNTIME_LIBRARY_BYTES)
    lines.append(
        f"| all: ONNX Runtime's library | {library} | measured | 1.32.0 on x86-64 Linux over the C "
        "API, before any model is loaded: relocated pages and the schemas of all operators |"
    )
    lines += [
        f"| not `web`: the process of the {kit} kit | {format_bytes(base)} and {percent} % of the "
        "peak | measured | no row of `python -m benchmarks.fidelity.processes` takes more above "
        "its plan: a JVM 17 and a Node 20 on x86-64 Linux; a phone's Java was not run |"
        for kit, (base, percent) in PROCESSES.items()
    ]
    return _below(_BUDGETS, _KEYS, "\n".join(lines) + "\n")


_RUNTIMES = """# Releases of ONNX Runtime

The field `minimum_onnxruntime` in `manifest.json` is the oldest ONNX Runtime that loads all models
of a package. It follows from the opset, the IR version, and the kernels of each operator for the
types in the package. A model of opset 19 needs 1.16, although 1.15 knows that opset, because its
kernels came later. A package with files in ORT format needs 1.16, the first that
reads the format, or more if a fused operator does. `odtpack build --onnxruntime VERSION`, or
`[target]` in a recipe, refuses models that this version does not load, and names the operator.

## What ran

Generated by `make runtimes` on {date} ({machine}). It trained each package for {steps} steps and
evaluated it on the official Python wheel of each release, one thread, memory patterns off, and
compared the losses with those of the newest release here, {newest}. The figure is the largest
relative difference of a loss; the test requires at most {tolerance:g}. A dash marks a release that
is older than the manifest allows, and that refused the package.

{table}

Keep memory patterns off (`enable_mem_pattern = False`), as all kits do: with them, 1.14 to 1.18
silently compute a wrong loss from the second step of a GRU on.

## Where the minimum comes from

`packager/odtpack/ort/kernels.json` says since which release each CPU kernel takes which type, and
which opset and IR version each release loads. `scripts/kernel_table.py` writes it: it installs
every release from 1.8 on and asks it. From 1.16 on the Python module lists its kernels. Older ones
get a model of one node for each operator, version and type that 1.16 lists, and refuse it if they
have no kernel; any other error counts as a refusal. Where a kernel lacks float16 but has float32,
ONNX Runtime inserts casts, so float32 is enough. An operator's types are looked at one by one: a
kernel that takes each of two types, but not both together, is counted as taking them.

The table is about the CPU kernels of full builds, and not about NNAPI, CoreML or reduced builds.
"""


def runtimes_page() -> str:
    """Return the page as Markdown."""
    content = json.loads((ROOT / "docs" / "runtimes.json").read_text())
    releases = list(content["releases"])
    lines = [
        f"| package | `minimum_onnxruntime` | {' | '.join(releases)} |",
        "|---" * (len(releases) + 2) + "|",
    ]
    for name, package in content["packages"].items():
        cells = [_difference(content["releases"][release][name]) for release in releases]
        lines.append(f"| {package['title']} | {package['minimum']} | {' | '.join(cells)} |")
    return _RUNTIMES.format(
        date=content["date"],
        machine=content["machine"],
        steps=content["steps"],
        tolerance=content["tolerance"],
        newest=releases[-1],
        table="\n".join(lines),
    )


def _difference(difference: float | None) -> str:
    if difference is None:
        return "–"
    return "equal" if difference == 0 else f"{difference:.0e}"


_CHECKPOINT = ROOT / "docs" / "formats" / "checkpoint.md"
_FIELDS = "## Fields\n"
_DEFAULTS = {"int64": "0", "int32": "0", "float": "0", "bool": "false", "TensorDataType": "0"}


def checkpoint_page() -> str:
    """The page on checkpoints, whose table of fields is generated from the schema."""
    lines = [
        "Generated from the schema. A field that a file does not hold has its default.",
        "",
        "| table | number | field | type | default | meaning |",
        "|---|---|---|---|---|---|",
    ]
    schema = _CHECKPOINT.with_suffix(".fbs").read_text()
    tables = re.findall(r"^table (\w+) \{\n(.*?)^\}", schema, re.M | re.S)
    for table, body in reversed(tables):
        fields = re.findall(r"(?:^  /// (.*)\n)?^  (\w+):(\S+?)(?: = (\S+))?;", body, re.M)
        for number, (meaning, name, kind, default) in enumerate(fields):
            default = default or _DEFAULTS.get(kind, "none")  # noqa: PLW2901 - as flatc has it
            lines.append(f"| {table} | {number} | `{name}` | `{kind}` | {default} | {meaning} |")
    return _below(_CHECKPOINT, _FIELDS, "\n".join(lines) + "\n")


PAGES = {
    _CHECKPOINT: checkpoint_page,
    ROOT / "docs" / "exporters.md": exporters_page,
    ROOT / "docs" / "runtimes.md": runtimes_page,
    ROOT / "docs" / "kits.md": kits_page,
    ROOT / "docs" / "devices.md": devices_page,
    ROOT / "docs" / "losses.md": losses_page,
    ROOT / "docs" / "optimizers.md": optimizers_page,
    ROOT / "docs" / "reports.md": reports_page,
    ROOT / "docs" / "errors.md": errors_page,
    ROOT / "docs" / "operators.md": operators_page,
    ROOT / "docs" / "decoders.md": decoders_page,
    ROOT / "docs" / "published-phones.md": published_phones_page,
    ROOT / "docs" / "schemas" / "fit.schema.json": lambda: (
        json.dumps(fit_json_schema(), indent=2) + "\n"
    ),
    ROOT / "docs" / "schemas" / "recipe.schema.json": schema_text,
    ROOT / "docs" / "schemas" / "budgets.schema.json": lambda: (
        json.dumps(budget_schema(), indent=2, ensure_ascii=False) + "\n"
    ),
    _BUDGETS: budgets_page,
    _RECIPE: lambda: _below(_RECIPE, _KEYS, reference()),
    _FLEET: lambda: _below(_FLEET, _KEYS, f"## Keys of `fleet.toml`\n\n{fleet_keys()}"),
    **{
        ROOT / "docs" / "schemas" / f"{name}.schema.json": partial(_schema, name)
        for name in _SCHEMAS
    },
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
