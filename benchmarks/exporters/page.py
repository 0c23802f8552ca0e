"""The record of what came of each file, and the page of the documentation that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("record.json")

_PAGE = """# Files of exporters

Generated from the record of `make exporters`, which repeats it. Small models of Hugging Face's
transformers (two blocks of width 64 and more, four heads, two of them for keys, seeded weights;
Whisper hears 8 frames, so that a batch without values between two codes can be found) are written
by each exporter, of the versions in `benchmarks/exporters/*.txt`. `odtpack build` adapts all linear
layers of their blocks with LoRA, and ten steps of AdamW are made beside PEFT's, in float64, on the
model that was exported, with what the codes of a quantized file stand for.

A figure is the largest distance of a parameter from PEFT's, after any step, as a share of the way
that the parameter went: at most 3·10⁻⁴, and 3·10⁻² for files in float16.
PEFT's model has what a file in float16 stores: weights and rotations in float16, norms often in
float32. PEFT loads the adapter under its names.
**{right} of {count} files are right, {refused} refused, {wrong} wrong**, and {other} compute
something else than their model, as a note says; {missing} times the exporter writes nothing (—). An
empty cell was not tried. onnxruntime-genai, given the decoder of
the package and its adapter as `og.Adapters`, draws the tokens that odtpack draws:
for {tokens} files of genai 0.18 in int4.

ONNX Runtime's products of 8-bit weights and data (`ort-dynamic`) add pairs in 16 bits where an x86
processor has no VNNI, and saturate; the record is of one that has it. They are exact everywhere in
`ort-dynamic-7`, whose weights have 7 bits (`quantize_dynamic(..., reduce_range=True)`). Both
round data, and float32 may round a value between two codes otherwise than float64: a cell is of
the first of at most 60 batches of one row on which all ten steps agree. Batches on which PEFT's
side meets a value within 10⁻⁵ of the middle are not compared.

Where an exporter writes something else than its model, and it is known what, the cell is beside a
module that computes what the file says, and has a note. So has a file in float16 that is further
from float64 than the tolerance: it is compared with PyTorch's own float16. ViT is not tried with
optimum, whose transformers 4 names its layers otherwise than transformers 5, which PEFT has here.

| model | {head} |
|---|{rule}|
{rows}
{notes}"""


def keep(exporter: str, model: str, outcome: dict[str, Any]) -> None:
    """Keep an outcome in the record."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record.setdefault(exporter, {})[model] = outcome
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def exporters_page() -> str:
    """The page of the documentation."""
    record: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text())
    models = [*dict.fromkeys(name for cells in record.values() for name in cells)]
    outcomes = [outcome for cells in record.values() for outcome in cells.values()]
    kinds = [outcome["kind"] for outcome in outcomes]
    said = [o.get("beside") or o.get("said") for o in outcomes if o["kind"] != "not written"]
    notes = [*dict.fromkeys(each for each in said if each)]

    def cell(outcome: dict[str, Any] | None) -> str:
        if outcome is None or outcome["kind"] == "not written":
            return "" if outcome is None else "—"
        found = f"{outcome['error']:.0e}" if outcome["kind"] == "right" else outcome["kind"]
        note = outcome.get("beside") or outcome.get("said")
        return f"{found} ({notes.index(note) + 1})" if note else found

    rows = [
        f"| {model} | {' | '.join(cell(cells.get(model)) for cells in record.values())} |"
        for model in models
    ]
    told = "".join(f"\n{i}. {note}" for i, note in enumerate(notes, 1))
    return _PAGE.format(
        count=len(kinds) - kinds.count("not written"),
        right=kinds.count("right"), refused=kinds.count("refused"), wrong=kinds.count("wrong"),
        other=kinds.count("other"), missing=kinds.count("not written"),
        tokens=[outcome.get("tokens") for outcome in outcomes].count("equal"),
        head=" | ".join(record), rule="|".join("--:" for _ in record), rows="\n".join(rows),
        notes=f"{told}\n" if told else "",
    )  # fmt: skip
