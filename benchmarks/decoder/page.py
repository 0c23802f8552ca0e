"""What training decoders takes: the record, and the page that shows it beside others' figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHOWN = ("anonymous", "resident", "held", "generation", "from a file", "packing", "in place")
HEAD = (*SHOWN, "kernels", "MeBP", "MeSP")
RECORD = Path(__file__).with_name("record.json")
PUBLISHED = Path(__file__).with_name("published.json")

_PAGE = """# Decoders beside published figures

Generated from the record of `python -m benchmarks.language_model --shape NAME --kit cpp --steps 1
--threads 1 --held --generate --record`, and of `--rounds 2 --steps 2 [--native] [--keep-products N]
--record` for times. It writes a decoder of the named shape as onnxruntime-genai's
builder does, in int4 with seeded random codes, trains LoRA of rank 8 on all
linear layers of its blocks (batch 1, AdamW, segments, a vocabulary in 1,024 parts) by the C++ kit,
x86-64, one thread, and looks at the memory of the process each 5 ms. MB are 2^20 bytes.

- **anonymous**: what the system cannot drop, at the highest moment of two steps, the first of
  8 tokens.
- **resident**: with the pages of the mapped weights and of libraries, which go where memory is
  short.
- **held**: what is resident where the process is in a control group of 32 MB more than its
  anonymous memory, and no file is in the cache. The step is made.
- **generation**: anonymous memory while the adapter is saved and, the training closed, the decoder
  reads 32 tokens and 2 more follow. ONNX Runtime packs the weights of `MatMulNBits` when it loads
  them, which takes most of it.
- **from a file**: the same with the option `odtpack.packed_weights`: the packed weights are written
  into a file, part by part, and mapped from there. A token takes as long as without it. The disk
  holds the weights a second time, and packed.
- **packing**: the part of that in which the file is written, once.
- **in place**: the same with the option `session.disable_prepacking`: weights are read where they
  are mapped. A token then takes many times as long.
- **kernels**: as anonymous, with [native kernels](native.md).

What was not measured has no row, or an empty cell.

| shape | tokens | {head} |
|---|--:{rule}|
{rows}

{times}The last two columns: published for an {device}, LoRA of rank 8 on seven linear layers, int4,
batch 1, with SGD, which has no moments ({source}).

Others publish no length, or another model:

| system | model | device | MB | source |
|---|---|---|--:|---|
{others}

QVAC Fabric fine-tunes a BitNet of a billion parameters on 18,000 tokens in 78 minutes on the GPU of
a Galaxy S25, 3.8 tokens a second (huggingface.co/blog/qvac/fabric-llm-finetune-bitnet). Systems
whose tables could not be read are left out: MobileFineTuner, nntrainer and ExecuTorch.
"""

_TIMES = """Processor time, each step in turns with a forward pass of the same int4 file in ONNX
Runtime, by its default options; plain packages, packages with [native kernels](native.md), and with
`--keep-products`, where the kept segments compute no product again. The rate is that of ONNX
Runtime's products of float32 in the same turns, which tells how fast the processor was. A forward
pass multiplies bytes, as `accuracy_level` 4 allows, and with VNNI in less time than float32 takes;
a step computes in float32, about three products for each one of a forward pass, and about two and
a third where all segments keep theirs. MB is anonymous memory, as above.

| shape | tokens | package | step, s | tokens/s | forward passes | MB | GFLOP/s | processor |
|---|--:|---|--:|--:|--:|--:|--:|---|
{rows}

"""


def published() -> list[dict[str, Any]]:
    """Peaks that others published for one of the shapes, each with its device and source."""
    found: list[dict[str, Any]] = json.loads(PUBLISHED.read_text())
    return found


def keep(shape: str, tokens: int, figures: dict[str, float]) -> None:
    """Keep figures in the record, in MB (2^20 bytes)."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known = record.setdefault(shape, {}).setdefault(str(tokens), {})
    known.update({key: round(value) for key, value in figures.items()})
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def keep_times(
    shape: str, tokens: int, way: str, step: float, forward: float, gflops: float, on: str
) -> None:
    """Keep the seconds of a step and of a forward pass, and where they were taken."""
    record = json.loads(RECORD.read_text())
    known = record.setdefault(shape, {}).setdefault(str(tokens), {})
    known.setdefault("times", {}).setdefault(way, {})[on] = {
        "step": round(step, 2), "forward": round(forward, 2), "gflops": round(gflops),
    }  # fmt: skip
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def decoders_page() -> str:
    """The page of the documentation."""
    record: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text())
    others = published()
    same = {(e["system"], e["shape"], str(e["tokens"])): e for e in others if e["tokens"]}
    rows, times = [], []
    for shape, lengths in record.items():
        for tokens, figures in lengths.items():
            near = [same.get((system, shape, tokens), {}) for system in HEAD[-2:]]
            cells = [figures.get(key, "") for key in HEAD[:-2]] + [e.get("mb", "") for e in near]
            start = f"| {shape} | {int(tokens):,} |"
            rows.append(f"{start} {' | '.join(map(str, cells))} |")
            for way, places in figures.get("times", {}).items():
                for on, taken in places.items():
                    ratio = taken["step"] / taken["forward"]
                    cells = [
                        way, taken["step"], f"{int(tokens) / taken['step']:.1f}", f"{ratio:.2f}",
                        figures["anonymous" if way == "plain" else way], taken["gflops"], on,
                    ]  # fmt: skip
                    times.append(f"{start} {' | '.join(map(str, cells))} |")
    return _PAGE.format(
        head=" | ".join(HEAD),
        rule="|--:" * len(HEAD),
        rows="\n".join(rows),
        times=_TIMES.format(rows="\n".join(times)) if times else "",
        device=" and ".join({each["device"] for each in same.values()}),
        source=" and ".join({each["source"] for each in same.values()}),
        others="\n".join(
            f"| {e['system']} | {e['shape']} | {e['device']} | {e['mb']} | {e['source']} |"
            for e in others
            if not e["tokens"]
        ),
    )
