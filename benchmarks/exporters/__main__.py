"""Writes models with every exporter, trains each file beside PEFT, and keeps what came of it.

    python -m benchmarks.exporters                     # all of them
    python -m benchmarks.exporters --exporter optimum --model t5

The record, ``benchmarks/exporters/record.json``, has the last outcome of each file;
``scripts/generate_docs`` makes docs/exporters.md of it. Exit code 1 if a file is trained wrongly.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

import torch

from benchmarks import apart
from benchmarks.exporters import page
from benchmarks.exporters.generate import hand_over
from benchmarks.exporters.one import compare
from benchmarks.exporters.write import EXPORTERS, SUBJECTS, write_all
from scripts.markdown import keep

# Whose decoder and adapter are given to onnxruntime-genai's generator, and where that is.
GENERATES = {"genai-0.18-int4-cpu": "transformers-5"}
FILES = apart.ROOT / "build" / "exporters"


def python(environment: str) -> Path:
    """The interpreter of an environment."""
    return apart.ROOT / ".venv-exporters" / environment / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exporter", action="append", choices=EXPORTERS)
    parser.add_argument("--model", action="append", choices=SUBJECTS)
    parser.add_argument("--keep", action="store_true", help="take the files that are there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    wrong = False
    for label in given.exporter or EXPORTERS:
        subjects, own = given.model or [*SUBJECTS], EXPORTERS[label].environment
        if not given.keep:
            apart.call(
                write_all, python=python(own) if own else sys.executable, label=label, root=FILES,
                subjects=subjects, environment={"HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        for name in (each for each in subjects if (FILES / label / each).is_dir()):
            folder = FILES / label / name
            outcome = compare(SUBJECTS[name], EXPORTERS[label], folder)
            if label in GENERATES and outcome["kind"] == "right":
                with apart.scratch() as work:
                    outcome["tokens"] = hand_over(folder, work, python(GENERATES[label]))
                if outcome["tokens"] == "other":
                    outcome |= {"kind": "wrong", "said": "onnxruntime-genai draws others"}
            keep(page.RECORD, {name: outcome}, label, sort=True)
            figure = f"{outcome['error']:.0e}" if "error" in outcome else ""
            print(f"{label:28}{name:12}{outcome['kind']:12}{figure}{outcome.get('said', '')}",
                  flush=True)  # fmt: skip
            wrong |= outcome["kind"] == "wrong"
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
