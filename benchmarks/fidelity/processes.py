"""Planned against measured memory of trainings in a JVM and in Node.

    python -m benchmarks.fidelity.processes [--models mlp,vit] [--kits kotlin js]

The programs are those of the kits' tests: they train, save and evaluate. What counts is the
anonymous memory of the process, read from outside twice in a millisecond, above what it had before
the package was opened. After that the JVM and V8 load and compile what they run, and garbage
lies until it is collected: that is a part of the figure, and of no plan.
"""

import itertools
import json
import subprocess
from collections.abc import Sequence

from benchmarks.apart import Memory
from benchmarks.fidelity.models import CASES, STEPS, Built, build
from odtpack_simulator.device.kits import STEP_MODEL_KITS, Kit, Loop
from odtpack_simulator.memory.arena import session_use
from odtpack_simulator.memory.memory_plan import plan_memory
from scripts.harness import head, options, row, scratch
from tests.kits import javascript, kotlin_kit

MODELS = ("tabular", "mlp", "cnn", "bert-tiny", "recommender", "resnet18", "vit", "mobilenet-v3")
_EVERY = 0.0005
"""Seconds between two looks."""


def main() -> None:
    given = options(__doc__, models=[str], kits=["kotlin", "js"])
    print(head("kit", "model", "batch:", "loop", "plan:", "process:", "above the plan:", "before:"))
    for name, kit in itertools.product(given.models or MODELS, given.kits):
        built = build(CASES[name])
        size, manifest = max(built.case.batches), built.package.manifest
        stepped = kit in STEP_MODEL_KITS and session_use(manifest, kit).step_model
        for loop in ("step", "train") if stepped else ("train",):
            use = session_use(manifest, kit, loop)
            plan = plan_memory(built.package, built.shapes(size), use, threads=1)
            before, peak = measure(built, kit, loop, size)
            taken, planned = peak - before, plan.peak.nbytes / 1e6
            cells = (f"{planned:.2f} MB", f"{taken:.2f} MB", f"{taken - planned:+.2f} MB")
            print(row(kit, name, size, loop, *cells, f"{before:.1f} MB"), flush=True)


def measure(built: Built, kit: Kit, loop: Loop, batch_size: int) -> tuple[float, float]:
    """MB of anonymous memory of a process before the package is opened, and at its peak."""
    with scratch() as folder:
        count = built.case.accumulation_steps
        task = {
            "package": built.package.path, "rate": 1e-4, "threads": 1, "accumulate": count,
            "data": kotlin_kit.save_batch(folder / "data", **built.batch(batch_size)),
            "steps": STEPS * (count if kit == "kotlin" else 1),
            "whole_steps": STEPS if loop == "step" else 0,
            "save": folder / "saved", "evaluate": True,
        }  # fmt: skip
        text = json.dumps(task, default=str)
        command: Sequence[object] = kotlin_kit.command("train", text)
        if kit == "js":
            script = javascript.SCRIPTS / "training.mjs"
            command = [javascript.NODE, "--expose-gc", script, javascript.KIT, text]
        pipe = subprocess.PIPE
        process = subprocess.Popen([*map(str, command)], stdout=pipe, stderr=pipe, text=True)
        with process, Memory(process.pid, every=_EVERY) as memory:
            output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(errors[-2000:])
        return json.loads(output)["before"] / 1e6, memory.peaks()["anonymous"] * 2**20 / 1e6


if __name__ == "__main__":
    main()
