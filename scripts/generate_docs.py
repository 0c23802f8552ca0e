"""Write the generated pages of the documentation; with --check say whether they are stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from odtpack.autodiff.coverage import coverage
from odtpack.diff_model import PackageDiff
from odtpack_runtime.manifest import Manifest

ROOT = Path(__file__).resolve().parents[1]

_INTRODUCTION = """# Operators

Generated from the registry by `scripts/generate_docs.py`; a test holds the two together.
`odtpack ops coverage` prints the same table, and `odtpack ops check MODEL.onnx` says which
nodes of a model stand in a gradient's way.

- **rule**: differentiated by a rule of its own.
- **expansion**: defined by the standard as a function of other operators, and
  differentiated through them.
- **rewritten**: replaced before differentiation where that can be done. Operators of ONNX
  Runtime's domain `com.microsoft` are written in standard ones when a model is read. Sequence
  operators whose lengths and positions are constants become Split and Concat. A QuantizeLinear
  followed by a DequantizeLinear of the same scale and zero point simulates quantization, and is
  trained through by the straight-through estimator: the gradient of the input passes where its
  level is representable, and is zero where it was clipped; the scale's is that of learned step
  size quantization. Any other QuantizeLinear lets no gradient through.
- **no gradient**: piecewise constant or not numeric; gradients stop here, as they should.
- **none**: not differentiated yet. `odtpack build` stops with an error that names the node
  if a parameter would have to be trained through it.
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


def manifest_schema() -> str:
    """The JSON Schema of a package's manifest."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Manifest of an odtpack package",
        **{k: v for k, v in Manifest.model_json_schema().items() if k != "title"},
    }
    return json.dumps(schema, indent=2) + "\n"


def diff_schema() -> str:
    """The JSON Schema of what ``odtpack diff --format json`` prints."""
    content = PackageDiff.model_json_schema(mode="serialization")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Difference between two odtpack packages",
        **{k: v for k, v in content.items() if k != "title"},
    }
    return json.dumps(schema, indent=2) + "\n"


PAGES = {
    ROOT / "docs" / "operators.md": operators_page,
    ROOT / "docs" / "schemas" / "manifest.schema.json": manifest_schema,
    ROOT / "docs" / "schemas" / "diff.schema.json": diff_schema,
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
