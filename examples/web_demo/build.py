"""A web page on which one draws digits and letters and watches a network learn them, offline.

    python -m examples.web_demo.build [FOLDER]            write the page as a static folder
    python -m examples.web_demo.build [FOLDER] --serve    and serve it on this machine

The network comes from a factory where it saw the 1,797 digits of scikit-learn and no letter.
"""

import contextlib
import functools
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx

from odtpack.build import build_package
from odtpack_runtime.training.loop import train_step
from scripts.harness import options
from tests import zoo
from tests.packaging_tools import open_training


class Handler(SimpleHTTPRequestHandler):
    """Sends the two headers without which a page has no shared memory."""

    extensions_map: ClassVar[dict[str, str]] = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def end_headers(self) -> None:
        """Isolate the page; take changed files up at once."""
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[tuple[str, threading.Thread]]:
    """Serve a folder; yield its address and the thread that serves."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", port), functools.partial(Handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", thread
    finally:
        server.shutdown()
        server.server_close()


ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "runtime" / "js"
MODULES = KIT / "node_modules"
SIZE, CLASSES, BATCH, EPOCHS, RATE = 28, 36, 32, 6, 0.003
RUNTIME_FILES = (
    "ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm",
    "ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
)  # fmt: skip
PACKAGES = {"package": "onnxruntime", "package-webgpu": "webgpu"}
"""By folder, for which runtime: the page takes the second where there is WebGPU."""

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def stock_digits() -> tuple[Images, Labels]:
    """The digits of scikit-learn as [n, 1, 28, 28] from 0 to 1, in an order drawn once."""
    from scipy.ndimage import zoom
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = (digits.images / 16).astype(np.float32)
    # Bilinear from 8 to 20 pixels, with the margin that the page leaves as well.
    large = zoom(small, (1, 2.5, 2.5), order=1, mode="nearest", grid_mode=True)
    images = np.pad(large, ((0, 0), (4, 4), (4, 4)))
    order = np.random.default_rng(0).permutation(len(images))
    return images[order, None], digits.target[order].astype(np.int64)


def train_factory(package: Path, exported: Path) -> float:
    """Train a package on the stock digits and export the model; return the last loss."""
    images, labels = stock_digits()
    _, module, optimizer = open_training(package)
    optimizer.set_learning_rate(RATE)
    loss = np.inf
    for epoch in range(EPOCHS):
        order = np.random.default_rng([1, epoch]).permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            loss = train_step(module, optimizer, [(images[rows], labels[rows])])
    module.export_model_for_inferencing(exported, ["output"])
    return loss


def build(folder: Path) -> Path:
    """Write the page, its packages, the kit and ONNX Runtime into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(__file__).parent / "page", folder)
    model = zoo.cnn(size=SIZE, width=(8, 16), classes=CLASSES)
    with tempfile.TemporaryDirectory() as temporary:
        factory, trained = Path(temporary, "factory"), Path(temporary, "trained.onnx")
        build_package(model, factory, loss="cross_entropy", outputs=["output"])
        loss = train_factory(factory, trained)
        print(f"factory   {EPOCHS} passes over the stock digits, loss {loss:.3f}")
        for name, runtime in PACKAGES.items():
            build_package(
                onnx.load(trained), folder / name, loss="cross_entropy", outputs=["output"],
                runtime=runtime, step_model="always" if runtime == "webgpu" else "auto",
            )  # fmt: skip
    images, labels = stock_digits()
    pixels = np.round(images[:400] * 255).astype(np.uint8).reshape(400, -1)
    rows = np.concatenate([labels[:400, None].astype(np.uint8), pixels], axis=1)
    (folder / "digits.bin").write_bytes(rows.tobytes())
    modules = folder / "modules"
    shutil.copytree(KIT / "dist", modules / "odtpack", ignore=shutil.ignore_patterns("*.d.ts"))
    flatbuffers = MODULES / "flatbuffers" / "mjs"
    shutil.copytree(flatbuffers, modules / "flatbuffers", ignore=shutil.ignore_patterns("*.d.ts"))
    (modules / "ort").mkdir()
    for name in RUNTIME_FILES:
        shutil.copy(MODULES / "onnxruntime-web" / "dist" / name, modules / "ort" / name)
    return folder


def main() -> None:
    """Build, and serve if asked to."""
    usual = ROOT / "build" / "web-demo"
    given = options(__doc__, "folder", folder=usual, serve=False, port=8000)
    build(given.folder)
    print(f"page      {given.folder}")
    if given.serve:
        with serve(given.folder, given.port) as (address, thread):
            print(f"open      {address}   (Ctrl-C ends)")
            with contextlib.suppress(KeyboardInterrupt):
                thread.join()


if __name__ == "__main__":
    main()
