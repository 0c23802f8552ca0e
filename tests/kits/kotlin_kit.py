"""Starts the programs of the Kotlin kit, and Python on the same ONNX Runtime beside it."""

import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from tests.kits import harness
from tests.kits.harness import Task
from tests.programs import ran

ROOT = Path(__file__).parents[2]
save_batch = harness.save_arrays
KIT = ROOT / "runtime" / "kotlin"
CLASSES = KIT / "target" / "classes"
SOURCES = Path(__file__).parent / "kotlin"
BUILD = ROOT / "build" / "kotlin"
ANDROID = BUILD / "tools" / "android-all-16-robolectric-13921718-2.jar"
# Compiled only as far as it pays for a short program.
OPTIONS = ("-XX:+UseSerialGC", "-Xmx512m", "-XX:TieredStopAtLevel=1")


def unavailable() -> str | None:
    """None where the kit can be run, otherwise the reason why it cannot."""
    if shutil.which("java") is None:
        return "there is no Java on this machine"
    if not (BUILD / ".ready").is_file():
        return "the Kotlin kit is not built (run: make kits)"
    return None


@functools.cache
def runtime_version() -> str:
    """The version of the published onnxruntime that the kit is built against."""
    (version,) = re.findall("<onnxruntime.version>(.*)<", (KIT / "pom.xml").read_text())
    return str(version)


def class_path(*first: Path) -> str:
    jars = sorted((KIT / "target").glob("odtpack-*[0-9].jar"))  # that of a release
    return os.pathsep.join(map(str, [*first, *jars, KIT / "target" / "lib" / "*"]))


def command(program: str, *arguments: object, options: tuple[str, ...] = OPTIONS) -> list[str]:
    """What runs a program of ``tests/kits/kotlin``."""
    path = class_path(BUILD / "tests")
    return ["java", *options, "-cp", path, "JobKt", program, *map(str, arguments)]


def run(program: str, *arguments: object, options: tuple[str, ...] = OPTIONS, **more: Any) -> str:
    """Run a program to its end; return what it prints."""
    return finish(command(program, *arguments, options=options), **more)


def finish(words: list[str], **options: Any) -> str:
    """Run a command, which must succeed; return what it prints."""
    options = {"timeout": 900, **options}
    return ran(*words, **options).stdout


def compile_kotlin(target: Path, sources: list[Path], *more: Path) -> None:
    """Compile sources against the kit, and what else they need."""
    compiler = [str(SOURCES / "kotlinc.sh"), "-Werror", "-d", str(target)]
    finish([*compiler, "-cp", class_path(*more), *map(str, sources)])


def python(module: str, *arguments: object) -> str:
    """Run a module on the version of ONNX Runtime that the kit has; return its output."""
    return harness.python_on(runtime_version(), module, *arguments)


def train(task: Task, where: str) -> dict[str, Any]:
    """Train in the kit or in ``python``; both take the same task."""
    text = json.dumps(task, default=str)
    if where == "python":
        return dict(json.loads(python("tests.kits.python_training", text)))
    return dict(json.loads(run("train", text)))


def damaged(folder: Path) -> dict[str, str]:
    """What becomes of each file and each package of a folder: ``loaded``, or a code."""
    return dict(line.split(" ", 1) for line in run("damaged", folder).splitlines())


def refused_export(package: Path, path: Path) -> tuple[str, str]:
    """Code and message of the error of a package that is exported as one model."""
    code, message = run("export", package, path).split("\n", 1)
    return code, message


def saving(path: Path, external_above: int, before: str) -> list[str]:
    """The program that saves until it is killed."""
    return command("saves", path, external_above, before)


def benchmark(folder: Path) -> str:
    """What the benchmark prints."""
    return run("benchmark", folder)
