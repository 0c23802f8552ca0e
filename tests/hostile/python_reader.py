"""Python as a reader of the corpus: ``python -m tests.hostile.python_reader hostile|read DIR``."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package, read_manifest
from tests.hostile.content import content_digest


def decide(folder: Path, case: dict[str, Any]) -> None:
    """Do what a case asks for."""
    if case["action"] == "checkpoint":
        read_checkpoint(folder / case["checkpoint"])
        return
    package = Package.open(folder / case["package"])
    if case["action"] == "session":
        state = CheckpointState.load_checkpoint(folder / case["checkpoint"])
        module = Module(package.training_model, state, package.eval_model)
        Optimizer(package.optimizer_model, module)


def hostile(folder: Path) -> Iterator[str]:
    """Yield a line for each case of a corpus."""
    for case in json.loads((folder / "index.json").read_text())["cases"]:
        yield f"{case['name']}\t{_outcome(lambda case=case: decide(folder, case))}"


def read(folder: Path) -> Iterator[str]:
    """Yield a line for each checkpoint and manifest of a folder, sorted by name."""
    for path in sorted((*folder.glob("*.ckpt"), *folder.glob("*.json")), key=lambda p: p.name):
        if path.suffix == ".ckpt":
            outcome = _outcome(lambda path=path: content_digest(read_checkpoint(path)))
        else:
            outcome = _outcome(
                lambda path=path: (Manifest.from_json(read_manifest(path), str(path)), "-")[1]
            )
        yield f"{path.name}\t{outcome}"


def _outcome(act: Any) -> str:
    try:
        found = act()
    except OdtpackError as error:
        return error.code
    except Exception as error:
        return f"foreign:{type(error).__name__}"
    return "ok" if found is None else f"ok\t{found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["hostile", "read"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    lines = hostile(arguments.folder) if arguments.command == "hostile" else read(arguments.folder)
    for line in lines:
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
