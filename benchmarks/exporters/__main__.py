"""Writes models with every exporter, trains each file beside PEFT, and keeps what came of it.

    python -m benchmarks.exporters                     # all of them
    python -m benchmarks.exporters --exporter optimum --model t5
    python -m benchmarks.exporters --keep              # takes the files that are there

The record, ``benchmarks/exporters/record.json``, has the last outcome of each file;
``scripts/generate_docs`` makes docs/exporters.md of it. Exit code 1 if a file is trained wrongly.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import torch

from benchmarks import apart
from benchmarks.exporters.one import compare
from benchmarks.exporters.write import EXPORTERS, SUBJECTS, hand_over, write_all
from scripts.harness import ROOT, keep, options, scratch
from scripts.record_tables import EXPORTED

# Whose decoder and adapter are given to onnxruntime-genai's generator, and where that is.
GENERATES = {"genai-0.18-int4-cpu": "transformers-5"}
FILES = ROOT / "build" / "exporters"


def python(environment: str) -> Path:
    """The interpreter of an environment."""
    return ROOT / ".venv-exporters" / environment / "bin" / "python"


def main() -> int:
    given = options(__doc__, exporter=[*EXPORTERS], model=[*SUBJECTS], keep=False)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    wrong = False
    for label in given.exporter:
        subjects, own = given.model, EXPORTERS[label].environment
        if not given.keep:
            apart.call(
                write_all, python=python(own) if own else sys.executable, label=label, root=FILES,
                subjects=subjects, environment={"HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
        for name in (each for each in subjects if (FILES / label / each).is_dir()):
            folder = FILES / label / name
            outcome = compare(SUBJECTS[name], EXPORTERS[label], folder)
            if label in GENERATES and outcome["kind"] == "right":
                with scratch() as work:
                    outcome["tokens"] = hand_over(folder, work, python(GENERATES[label]))
                if outcome["tokens"] == "other":
                    outcome |= {"kind": "wrong", "said": "onnxruntime-genai draws others"}
            keep(EXPORTED, {name: outcome}, label, sort=True)
            figure = f"{outcome['error']:.0e}" if "error" in outcome else ""
            print(f"{label:28}{name:12}{outcome['kind']:12}{figure}{outcome.get('said', '')}",
                  flush=True)  # fmt: skip
            wrong |= outcome["kind"] == "wrong"
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
