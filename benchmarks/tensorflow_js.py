"""Training in Chromium on WebGPU beside TensorFlow.js: the same losses, and the time of a step.

    python -m benchmarks.tensorflow_js [FOLDER] [--rounds N]

The result is the table of docs/guides/gpu.md, which says how. The modules come from npm.
"""

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import gpu
from odtpack.build import build_package
from odtpack_runtime import Package
from scripts.harness import ROOT, options, scratch, table
from tests import zoo
from tests.kits import javascript, web
from tests.reports.browser import Browser

VERSION = "4.22.0"
MODULES = {"tfjs": "tf.es2017.min.js", "tfjs-backend-webgpu": "tf-backend-webgpu.es2017.min.js"}
NETWORKS: dict[str, tuple[Callable[[], onnx.ModelProto], int]] = {
    "MLP 784-500-10": (zoo.mlp, 64),
    "CNN of 4 and 8 channels, 16 x 16": (lambda: zoo.cnn(size=16, width=(4, 8)), 16),
}
"""Each with its batch."""
STEPS = 5
BAR = 1e-4
"""Of a loss, relative: Adam divides each gradient by its own size, rounding included."""
ADAPTER = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")


def modules(folder: Path) -> Path:
    """Where the modules of TensorFlow.js are, which npm installs if they are not there."""
    installed = folder / "node_modules" / "@tensorflow"
    if not all((installed / name / "dist" / file).is_file() for name, file in MODULES.items()):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        npm = shutil.which("npm", path=javascript.NODES) or "npm"
        named = [f"@tensorflow/{name}@{VERSION}" for name in MODULES]
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save"]
        subprocess.run([npm, "install", *options, *named], cwd=folder, check=True)
    return installed


def compared(network: str, installed: Path, rounds: int) -> dict[str, Any]:
    """Losses of the first steps, and milliseconds of each step, of both."""
    make, size = NETWORKS[network]
    with scratch() as folder:
        files = folder / "files"
        build_package(
            make(), files / "package", loss="cross_entropy", runtime="webgpu",
            step_model="always", optimizer="adamw",
            optimizer_options={"weight_decay": 0.0, "epsilon": 1e-8, "formula": "pytorch"},
        )  # fmt: skip
        batch = gpu.batch_of(Package.open(files / "package"), size, other=0)
        for name, array in zip(("input", "labels"), batch, strict=True):
            np.ascontiguousarray(array).tofile(files / f"{name}.bin")
        scripts = [f"{name}/{file}" for name, file in MODULES.items()]
        page = web.PAGE.replace("ort.wasm.min.mjs", "ort.webgpu.min.mjs") + "".join(
            f'<script src="/{each}"></script>' for each in (*scripts, "benchmarks/tensorflow_js.js")
        )
        folders = {**web.FOLDERS, "files": files, "benchmarks": Path(__file__).parent}
        folders |= {name: installed / name / "dist" for name in MODULES}
        task = {"shape": batch[0].shape, "steps": STEPS, "rounds": rounds}
        with (
            web.serve(folders, page) as address,
            Browser(folder / "profile", served=True, options=ADAPTER) as browser,
        ):
            web.open_kit(browser, address)
            browser.evaluate(f"begin({json.dumps(task)})")
            while not browser.evaluate("Boolean(window.found)"):
                time.sleep(1)
            found = dict(browser.evaluate("window.found"))
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found


def main() -> int:
    given = options(__doc__, "folder", folder=ROOT / "build" / "tfjs", rounds=10)
    installed = modules(given.folder)
    rows, worst = [], 0.0
    for network, (_, size) in NETWORKS.items():
        found = compared(network, installed, given.rounds)
        off = float(np.abs(np.divide(*found["losses"]) - 1).max())
        worst = max(worst, off)
        own, theirs = (statistics.median(times) for times in found["times"])
        rows.append((network, size, f"{off:.1g}", f"{own:.0f}", f"{theirs:.0f}",
                     f"{own / theirs:.2f}"))  # fmt: skip
        print(found["losses"], *rows[-1], flush=True)
    titles = ("network", "batch", "losses differ by", "odtpack, ms", "TensorFlow.js, ms", "ratio")
    gpu.write_table("tensorflow.js", table(titles, rows))
    return int(worst > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
