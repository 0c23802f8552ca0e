"""Sessions of the C++ and Swift kits: closed while they run, used by two threads, given a NaN.

The kits' programs compare the state bit by bit with that before, or with that after so many steps
in one thread.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np

from odtpack.build import build_package
from tests.kits import cpp_kit, swift_kit
from tests.kits.cases import CASES, Case
from tests.kits.cpp_kit import save_batch


def longer(case: Case, samples: int) -> Case:
    """A case with a batch of so many samples, which takes some time."""
    return dataclasses.replace(case, data=lambda random, _: case.data(random, samples))


_LONG = {
    "adam": longer(CASES["adam"], 100_000),
    "mobilenet_batch_norm": longer(CASES["mobilenet_batch_norm"], 64),
    "step_batch_norm": longer(CASES["step_batch_norm"], 64),
}
_ON = {
    "close": ("adam", "step_adamw", "mobilenet_batch_norm", "step_batch_norm"),
    "threads": ("adam", "step_adamw"),
    "nan": ("adam", "mobilenet_batch_norm", "step_adamw", "step_batch_norm", "step_sgd_momentum"),
    "closed": ("adam", "step_adamw"),
}
TRIED: dict[str, tuple[str, Case]] = {
    **{f"{command} {name}": (command, CASES[name]) for command in _ON for name in _ON[command]},
    **{f"end {name}": ("end", case) for name, case in _LONG.items()},
}
"""Commands of the programs, and what they are tried on, by both in words."""

Program = Callable[..., CompletedProcess[str]]


def cpp_program(*words: object, variant: str = "native") -> CompletedProcess[str]:
    """The C++ kit's program."""
    return cpp_kit.run("calls", *words, variant=variant)


def swift_program(*words: object) -> CompletedProcess[str]:
    """The Swift kit's."""
    return swift_kit.run("calls", *words)


def write_job(case: Case, folder: Path) -> Path:
    """Build a case's package and write its job, with one batch."""
    options = {"loss": "cross_entropy", "self_check": False, **case.build}
    build_package(case.model(), folder / "package", **options)
    inputs = json.loads((folder / "package" / "manifest.json").read_text())["inputs"]
    batch = case.data(np.random.default_rng(4), 8)
    job = {
        "package": "package",
        "learning_rate": 0.01,
        "steps": [save_batch(folder, {i["name"]: a for i, a in zip(inputs, batch, strict=True)})],
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job, default=str))
    return path


def calls(program: Program, command: str, job: Path, times: int, **options: str) -> str:
    """Run a program, which checks what it did itself; return what it printed before the end."""
    done = program(command, job, times, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("done\n")
    return done.stdout.removesuffix("done\n").strip()


def cpp(times: int) -> None:
    """Try everything so many times with the C++ kit.

    Raises:
        AssertionError: What did not hold.
    """
    _try_all(cpp_program, times)


def swift(times: int) -> None:
    """The same with the Swift kit, and thus the C interface."""
    _try_all(swift_program, times)


def _try_all(program: Program, times: int) -> None:
    for name, (command, case) in TRIED.items():
        with tempfile.TemporaryDirectory(prefix="odtpack-stress-") as folder:
            calls(program, command, write_job(case, Path(folder)), times)
        print(f"  {name}: {times} times", flush=True)
