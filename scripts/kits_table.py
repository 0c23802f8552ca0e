"""The generated parts of docs/kits.md: where the kits ran, how fast, and what they add."""

from __future__ import annotations

import json
from typing import Any

from scripts.markdown import DOCS, table

NETWORKS = ("mlp", "cnn", "transformer")


def kits_parts() -> dict[str, object]:
    """What docs/kits.json, the record, says."""
    content = json.loads((DOCS / "kits.json").read_text())
    platforms: dict[str, dict[str, Any]] = content["platforms"]
    ran = []
    for name, each in platforms.items():
        tests = each["tests"]
        left = f"{tests['skipped']}: {each['reason']}" if tests.get("skipped") else "none"
        failed = f", {tests['failed']} failed" if tests.get("failed") else ""
        ran.append((name, f"{tests.get('passed', 0)}{failed}", left))
    times = [
        (name, each["onnxruntime"], *(_step(each["steps"].get(network)) for network in NETWORKS),
         f"{each['bytes']:,}", f"{each['lines']:,}")
        for name, each in platforms.items() if "steps" in each
    ]  # fmt: skip
    titles = ("platform", "ONNX Runtime", *(f"{name}: kit, Python, ratio" for name in NETWORKS),
              "added bytes", "lines of code")  # fmt: skip
    return {
        "run": f"{content['date']} ({content['machine']})",
        "ran": table(("platform", "tests passed", "left out"), ran),
        "rounds": content["rounds"],
        "times": table(titles, times),
        "installed": _installed(content),
    }


def _installed(content: dict[str, Any]) -> str:
    """The ratios to the Python of the project where a kit has another ONNX Runtime."""
    found = []
    for name, each in content["platforms"].items():
        ratios = {key: step.get("installed_ratio") for key, step in each.get("steps", {}).items()}
        if any(ratios.values()):
            listed = ", ".join(f"{ratio:.2f} ({key})" for key, ratio in ratios.items() if ratio)
            found.append(f"{name} {listed}")
    return f"{content['installed']}: {'; '.join(found)}."


def _step(step: dict[str, float] | None) -> str:
    if step is None:
        return "not measured"
    return f"{step['ms']:.2f} ms, {step['python_ms']:.2f} ms, **{step['ratio']:.2f}**"
