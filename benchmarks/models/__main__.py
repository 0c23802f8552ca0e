"""Trains the models of the list and writes docs/models.md.

    python -m benchmarks.models            # every model
    python -m benchmarks.models silero     # those whose package or file has this in its name

The page has the last result of each model. Exit code 1 if one is wrong or ends in another way than
a refusal.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import apart
from benchmarks.models.files import RealModel, fetch, models
from benchmarks.models.one import TOLERANCE, attempted
from scripts.markdown import DOCS, filled, table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "models"
PAGE = DOCS / "models.md"
MEMORY = 8 << 30
SECONDS = 600


def attempt(index: int, model: RealModel) -> None:
    """Take one model through every command, and keep what became of it, a crash too."""
    folder = FOLDER / "out" / str(index)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = fetch(model, FOLDER / "cache")
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        result = apart.call(
            attempted, environment={"OMP_NUM_THREADS": "1"}, index=index, path=path, folder=folder,
            how={"preexec_fn": limit, "timeout": SECONDS},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        result = {"crashed": f"no end after {SECONDS} s"}
    except RuntimeError as error:
        result = {"crashed": str(error).strip().splitlines()[-1]}
    (folder / "result.json").write_text(json.dumps(result, indent=1))


def judge(index: int) -> dict[str, Any] | None:
    """The result of a model when it was last tried, with ``kind`` and ``said``; None if never."""
    written = FOLDER / "out" / str(index) / "result.json"
    if not written.exists():
        return None
    result = json.loads(written.read_text())
    if said := result.get("crashed") or result.get("refused"):
        refused = said.startswith("error[") and "[internal]" not in said
        return {**result, "kind": "refused" if refused else "wrong", "said": said}
    for name in ("error", "loss", "exported"):
        if not result[name] < TOLERANCE:
            said = f"{name} {result[name]:.1e} {result['where'] if name == 'error' else ''}"
            return {**result, "kind": "wrong", "said": said}
    return {**result, "kind": "right", "said": ""}


def parts(results: list[dict[str, Any]]) -> dict[str, object]:
    """What docs/models.md shows of them."""
    rows = []
    for model, result in zip(models(), results, strict=True):
        read = f"; the loss reads `{model.loss_input}`" if model.loss_input else ""
        said = result["said"].replace("|", "\\|").replace("<", "&lt;")
        numbers = [""] * 3
        if "trained" in result:
            numbers = [result["trained"], f"{result['error']:.0e}", f"{result['seconds']:.1f}"]
        fed = "<br>".join(f"`{text}`" for text in model.inputs.split("; "))
        outcome = f"{result['kind']}: {said}" if said else result["kind"]
        rows.append((model.package, f"`{model.file_ends_with}`", fed + read, outcome, *numbers))
    kinds = collections.Counter(result["kind"] for result in results)
    titles = ("Package", "File", "Fed", "Result", "Parameters:", "Error of a gradient:",
              "Build, CPU s:")  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "count": len(results),
        "outcome": f"**{kinds['right']} of {len(results)} are right, {kinds['refused']} refused, "
        f"{kinds['wrong']} wrong.**",
        "models": table(titles, rows),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chosen", nargs="*", help="parts of names of packages or files")
    chosen = parser.parse_args().chosen
    for index, model in enumerate(models()):
        if not chosen or any(part in f"{model.package} {model.file_ends_with}" for part in chosen):
            attempt(index, model)
            result = judge(index) or {}
            figure = f"{result['error']:.1e}" if "error" in result else ""
            print(f"{result['kind']:8}{model.label:60}{figure:8} {result['said']}", flush=True)
    results = [result for index, _ in enumerate(models()) if (result := judge(index)) is not None]
    if len(results) == len(models()):
        PAGE.write_text(filled(PAGE, parts(results)))
    return int(any(result["kind"] == "wrong" for result in results))


if __name__ == "__main__":
    sys.exit(main())
