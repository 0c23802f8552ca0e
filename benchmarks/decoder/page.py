"""What training decoders takes: the record, and what docs/decoders.md shows of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.markdown import table

SHOWN = ("anonymous", "resident", "held", "generation", "from a file", "packing", "in place")
HEAD = (*SHOWN, "kernels", "MeBP", "MeSP")
RECORD = Path(__file__).with_name("record.json")
PUBLISHED = Path(__file__).with_name("published.json")


def published() -> list[dict[str, Any]]:
    """Peaks that others published for one of the shapes, each with its device and source."""
    found: list[dict[str, Any]] = json.loads(PUBLISHED.read_text())
    return found


def decoders_parts() -> dict[str, str]:
    """What the record says, for docs/decoders.md."""
    record: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text())
    others = published()
    same = {(e["system"], e["shape"], str(e["tokens"])): e for e in others if e["tokens"]}
    memory, times = [], []
    for shape, lengths in record.items():
        for tokens, figures in lengths.items():
            near = [same.get((system, shape, tokens), {}) for system in HEAD[-2:]]
            start = (shape, f"{int(tokens):,}")
            memory.append((*start, *(figures.get(key, "") for key in HEAD[:-2]),
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
    rates = ("step, s:", "tokens/s:", "forward passes:", "MB:", "GFLOP/s:")
    return {
        "memory": table(("shape", "tokens:", *(f"{title}:" for title in HEAD)), memory),
        "times": table(("shape", "tokens:", "package", *rates, "processor"), times),
        "device": " and ".join({each["device"] for each in same.values()}),
        "source": " and ".join({each["source"] for each in same.values()}),
        "others": table(("system", "model", "device", "MB:", "source"), rest),
    }
