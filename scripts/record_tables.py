"""Tables of the documentation that follow from what is declared or recorded."""

import collections
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from benchmarks.language_model import RECORD, SHOWN, published
from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack.option import BOUNDS, Option, options_of
from odtpack.recipe.schema import json_schema
from odtpack.spec import keys_of
from odtpack_simulator.fleet.fleet_file import HOURS, FleetFile, Quantity
from odtpack_simulator.reports import report_format, report_formats
from odtpack_simulator.values.units import format_limit
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


# The keys of recipes and of fleet files, of the schemas of both.

Schema = dict[str, Any]
_SHOWN_ELSEWHERE = {"budgets"}
_ABOVE = "Above all tables"


def recipe_keys() -> str:
    """All tables of a recipe with their keys, what these take, their defaults and options."""
    parts, schema = [], json_schema()
    for title, keys in _recipe_tables(schema):
        above = re.sub(r"[^a-z].*", "", title.strip("`[]"))
        flags = {key: f"`{option.flag.replace('/', '`, `')}`" for key, option in keys_of(above)}
        parts += _part(title, _described(keys), keys, schema, flags)
    return "\n\n".join(parts)


def fleet_keys() -> str:
    """A table for each table of a fleet file."""
    schema = FleetFile.model_json_schema(schema_generator=_WithQuantities)
    parts = (_part(*found, schema) for found in _fleet_tables(schema, schema, ""))
    return "\n\n".join(line for part in parts for line in part)


class _WithQuantities(GenerateJsonSchema):
    """Tells the numbers that are written with a unit, and no bounds."""

    def int_schema(self, schema: Any) -> Schema:
        return {"type": "integer"}

    def float_schema(self, schema: Any) -> Schema:
        return {"type": "number"}

    def function_before_schema(self, schema: Any) -> Schema:
        reader, found = schema["function"]["function"], super().function_before_schema(schema)
        return {"quantity": reader} if isinstance(reader, Quantity) else found

    def encode_default(self, dft: Any) -> Any:
        return int(dft) if isinstance(dft, float) and dft.is_integer() else dft


def _part(
    title: str, meaning: str, keys: Schema, schema: Schema, flags: Mapping[str, str] | None = None
) -> list[str]:
    """The heading of a table, what it is for, and its keys."""
    required, titles = keys.get("required", ()), ("key", "value", "default", "option", "")
    rows = [
        (f"`{key}`", _taken(value, schema), _standing(value, key in required),
         *([] if flags is None else [flags.get(key, "")]), _described(value))
        for key, value in keys["properties"].items()
    ]  # fmt: skip
    if not rows:
        return []
    shown = table([each for each in titles if each != "option" or flags is not None], rows)
    return [f"### {title}", *filter(None, [meaning]), shown]


def _described(value: Schema) -> str:
    return " ".join(str(value.get("description", "")).split())


def _recipe_tables(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Title and schema of each table; the keys above them come first."""
    tables = {
        key: [] if key in _SHOWN_ELSEWHERE else [*_models(value, schema)]
        for key, value in schema["properties"].items()
    }
    above = {key: schema["properties"][key] for key, models in tables.items() if not models}
    yield _ABOVE, {"required": schema["required"], "properties": above}
    for key, models in tables.items():
        is_list = schema["properties"][key].get("type") == "array"
        for model in models:
            kind = model["properties"].get("kind", {}).get("const")
            title = f"`[[{key}]]`" if is_list else f"`[{key}]`"
            yield (f'{title}, `kind = "{kind}"`' if kind else title), model


def _fleet_tables(
    keys: Schema, schema: Schema, path: str, meaning: str = ""
) -> Iterator[tuple[str, str, Schema]]:
    """Title, meaning and schema of a table without those below it, and of these."""
    below = {key: [*_models(value, schema)] for key, value in keys["properties"].items()}
    own = {key: value for key, value in keys["properties"].items() if not below[key]}
    yield (f"`[{path}]`" if path else _ABOVE), meaning, {**keys, "properties": own}
    for key, inner in ((key, inner) for key, models in below.items() for inner in models):
        value, name = keys["properties"][key], f"{path}.{key}".lstrip(".")
        text = re.sub(r"^`\[.*?`: ", "", _described(value) or _described(inner))
        name = f"[{name}]" if "items" in value else name
        yield from _fleet_tables(inner, schema, name, text[:1].upper() + text[1:])


def _models(value: Schema, schema: Schema) -> Iterator[Schema]:
    """The tables that a key may hold."""
    if "$ref" in value:
        found = schema["$defs"][value["$ref"].rpartition("/")[2]]
        if "properties" in found:
            yield found
    inner = [value["items"]] if "items" in value else []
    for part in (*value.get("anyOf", ()), *value.get("oneOf", ()), *inner):
        yield from _models(part, schema)


def _taken(value: Schema, schema: Schema) -> str:
    if "quantity" in value:
        return f'`"{value["quantity"].example}"`'
    if "const" in value:
        return f'`"{value["const"]}"`'
    if "enum" in value:
        return " or ".join(f'`"{v}"`' if isinstance(v, str) else f"`{v}`" for v in value["enum"])
    parts = [*value.get("anyOf", ()), *value.get("oneOf", ())]
    if parts:
        shown = [_taken(part, schema) for part in parts if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(shown))
    if "prefixItems" in value:
        return f"{_taken(value['prefixItems'][0], schema)} or a pair"
    if value.get("minItems") == HOURS:
        return f"{HOURS} numbers from 0 to 1"
    if value.get("type") == "array":
        inner = _taken(value["items"], schema)
        return f"list of ({inner})" if "," in inner else f"list of {inner}"
    if "$ref" in value:
        return "table"
    bounds = [word.format(value[name]) for _, name, word, _ in BOUNDS if name in value]
    names = {"string": "text", "number": "number", "integer": "whole number",
             "boolean": "`true` or `false`", "object": "table"}  # fmt: skip
    what = names[value["type"]]
    return ", ".join(filter(None, (what, " and ".join(bounds))))


def _standing(value: Schema, required: bool) -> str:
    default = value.get("default")
    if required:
        return "required"
    if default is None or default == []:
        return "none"
    if "prefixItems" in value:
        value, default = value["prefixItems"][0], default[0]
    if measured := value.get("quantity"):
        is_time = measured.dimension == "duration"
        default = format_limit(default, "s" if is_time else "B") + ("" if is_time else "/s")
    return f"`{json.dumps(default)}`"
