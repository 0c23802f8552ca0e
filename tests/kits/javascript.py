"""Starts the JavaScript kit in Node, and Python on the same version of ONNX Runtime beside it."""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.kits import harness
from tests.kits.harness import Task
from tests.programs import ran

ROOT = Path(__file__).parents[2]
save_batch = harness.save_arrays
KIT = ROOT / "runtime" / "js"
SCRIPTS = Path(__file__).parent / "js"
NODES = os.pathsep.join([str(ROOT / "build" / "node" / "bin"), os.environ.get("PATH", "")])
NODE = shutil.which("node", path=NODES)
RUNTIME = KIT / "node_modules" / "onnxruntime-node" / "package.json"


def unavailable() -> str | None:
    """None where the kit can be run, otherwise the reason why it cannot."""
    if NODE is None:
        return "there is no Node.js on this machine"
    if not RUNTIME.is_file() or not (KIT / "dist" / "index.js").is_file():
        return "the JavaScript kit is not built (run: make kits)"
    return None


@functools.cache
def runtime_version() -> str:
    return str(json.loads(RUNTIME.read_text())["version"])


def install(project: Path) -> None:
    """Install the tarball of a release in a folder, and link ONNX Runtime, which the app brings."""
    from scripts import release  # which builds the kits of this folder

    release.npm(project / "npm")
    (archive,) = (project / "npm").iterdir()
    (project / "package.json").write_text('{"private": true, "type": "module"}')
    words = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", str(archive)]
    subprocess.run(words, cwd=project, env=release.environment(), check=True, capture_output=True)
    for name in ("onnxruntime-node", "onnxruntime-common"):
        (project / "node_modules" / name).symlink_to(KIT / "node_modules" / name)


def node(script: str, *arguments: object, options: tuple[str, ...] = (), kit: Path = KIT) -> Any:
    """Run a script on the kit; return the JSON that it prints."""
    command = [str(NODE), *options, str(SCRIPTS / script), str(kit), *map(str, arguments)]
    return json.loads(ran(*command, timeout=3600).stdout)


def python(module: str, *arguments: object) -> str:
    """Run a module on the version of ONNX Runtime that the kit has; return its output."""
    return harness.python_on(runtime_version(), module, *arguments)


def train(task: Task, where: str, *, collect: bool = False) -> dict[str, Any]:
    """Train in the kit or in ``python``; both take the same task."""
    text = json.dumps(task, default=str)
    if where == "python":
        return dict(json.loads(python("tests.kits.python_training", text)))
    return dict(node("training.mjs", text, options=("--expose-gc",) if collect else ()))


def damaged(folder: Path) -> dict[str, str]:
    """What becomes of each file and each package of a folder: ``loaded``, or a code."""
    return dict(node("hostile.mjs", folder))


def refused_export(package: Path, path: Path) -> tuple[str, str]:
    """Code and message of the error of a package that is exported as one model."""
    code, message = node("trust.mjs", "export", package, path)
    return code, message


def saving(path: Path, external_above: int, before: str) -> list[str]:
    """The program that saves until it is killed."""
    return [str(each) for each in (NODE, SCRIPTS / "saves.mjs", KIT, path, external_above, before)]


def benchmark(folder: Path) -> str:
    """What the benchmark prints."""
    return json.dumps(node("benchmark.mjs", folder))


def reader() -> list[str]:
    """The program that reads hostile files in Node: before ``hostile DIR`` or ``read DIR``."""
    return [str(NODE), str(SCRIPTS / "reader.mjs"), str(KIT)]
