"""Sessions of the C++, Swift and C# kits: closed while they run, used by two threads, given a NaN.

Programs compare states, bit by bit, with that before or that of so many steps in one thread.
"""

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import onnx.parser

from odtpack.build import build_package
from tests.kits import cpp_kit
from tests.kits.cases import CASES, Case
from tests.kits.cpp_kit import save_batch
from tests.kits.harness import job_file
from tests.model_text import parsed


def normed() -> onnx.ModelProto:
    """Two layers with batch normalization in training mode between them."""
    text = """normed (float[batch, 16] input) => (float[batch, 4] output)
    {
        hidden = Gemm<transB = 1>(input, weight, bias)
        even, mean_out, variance_out =
            BatchNormalization<training_mode = 1>(hidden, scale, shift, mean, variance)
        active = Relu(even)
        output = Gemm<transB = 1>(active, last_weight, last_bias)
    }"""
    shapes = {"weight": (12, 16), "bias": (12,), "scale": (12,), "shift": (12,), "mean": (12,),
              "variance": (12,), "last_weight": (4, 12), "last_bias": (4,)}  # fmt: skip
    rng = np.random.default_rng(5)
    drawn = {name: np.float32(rng.uniform(0.1, 0.9, shape)) for name, shape in shapes.items()}
    return parsed(text, **drawn)


def longer(case: Case, samples: int) -> Case:
    """A case with a batch of so many samples, which takes some time."""
    return dataclasses.replace(case, data=lambda random, _: case.data(random, samples))


_CASES = {
    **CASES,
    "statistics": Case(normed, CASES["adam"].data),
    "step_statistics": Case(normed, CASES["adam"].data, {"step_model": "always"}),
}
_KINDS = ("adam", "step_adamw", "statistics", "step_statistics")
TRIED: dict[str, tuple[str, Case]] = {
    **{f"{command} {name}": (command, _CASES[name])
       for command in ("close", "threads", "nan", "closed") for name in _KINDS},
    **{f"end {name}": ("end", longer(_CASES[name], 2_000 if name == "step_adamw" else 50_000))
       for name in _KINDS},
}  # fmt: skip
"""Commands of the programs, and what they are tried on, by both in words."""

Program = Callable[..., CompletedProcess[str]]


def cpp_program(*words: object, variant: str = "native") -> CompletedProcess[str]:
    """The C++ kit's program."""
    return cpp_kit.run("calls", *words, variant=variant)


def program_of(layer: Any) -> Program:
    """That of a kit over the C interface."""
    return lambda *words: layer.run("calls", *words)


_BUILT: dict[object, Path] = {}
"""Packages that this process built, by what they were built of."""


def _built(case: Case) -> Path:
    options = {"loss": "cross_entropy", "self_check": False, **case.build}
    key = case.model, repr(options)
    if key not in _BUILT:
        folder = Path(tempfile.mkdtemp(prefix="odtpack-jobs-"))
        atexit.register(shutil.rmtree, folder)
        build_package(case.model(), folder / "package", **options)
        _BUILT[key] = folder / "package"
    return _BUILT[key]


def write_job(case: Case, folder: Path) -> Path:
    """Write a case's package and its job, with one batch."""
    shutil.copytree(_built(case), folder / "package")
    inputs = json.loads((folder / "package" / "manifest.json").read_text())["inputs"]
    batch = case.data(np.random.default_rng(4), 8)
    steps = [save_batch(folder, {i["name"]: a for i, a in zip(inputs, batch, strict=True)})]
    job = {"package": "package", "learning_rate": 0.01, "steps": steps}
    return job_file(job, folder)


def calls(program: Program, command: str, job: Path, times: int, **options: str) -> str:
    """Run a program, which checks what it did itself; return what it printed before the end."""
    done = program(command, job, times, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("done\n")
    return done.stdout.removesuffix("done\n").strip()


def cpp(times: int) -> None:
    """Try everything so many times with the C++ kit."""
    _try_all(cpp_program, times)


def layer(kit: Any, times: int) -> None:
    """The same with a kit over the C interface."""
    _try_all(program_of(kit), times)


def _try_all(program: Program, times: int) -> None:
    for name, (command, case) in TRIED.items():
        with tempfile.TemporaryDirectory(prefix="odtpack-stress-") as folder:
            calls(program, command, write_job(case, Path(folder)), times)
        print(f"  {name}: {times} times", flush=True)
