"""Tables of the documentation that follow from what is declared: losses, optimizers, reports."""

from __future__ import annotations

from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack.option import Option, options_of
from odtpack_simulator.reports import report_format, report_formats
from scripts.markdown import table


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
