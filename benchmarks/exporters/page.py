"""The record of what came of each file, and the parts of docs/exporters.md that show it."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

from scripts.markdown import table

RECORD = Path(__file__).with_name("record.json")


def exporters_parts() -> dict[str, object]:
    """What the record says."""
    record: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text())
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
