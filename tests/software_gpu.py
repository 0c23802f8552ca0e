"""The Vulkan driver in software that Debian's Chromium brings, for the WebGPU provider."""

import ctypes
import os
from pathlib import Path

import onnxruntime

NETWORKS = (
    *("mlp", "cnn", "decoder"),
    *("big-mlp", "mobilenet", "mobilenet-bn", "transformer", "vit"),
)
"""Of `benchmarks.gpu`; CI trains the first three."""
MADE = os.environ.get("ODTPACK_GPU_PACKAGES")  # where make gpu has built them
TRIED = NETWORKS if MADE else NETWORKS[:1]
CHROMIUM = Path("/usr/lib/chromium")


def reason_without() -> str:
    """Make the driver known to this process; why there is no WebGPU here, or nothing."""
    driver, loader = CHROMIUM / "vk_swiftshader_icd.json", CHROMIUM / "libvulkan.so.1"
    if driver.exists() and loader.exists():
        ctypes.CDLL(str(loader), ctypes.RTLD_GLOBAL)  # found by its name from here on
        os.environ.setdefault("VK_ICD_FILENAMES", str(driver))
        os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # noqa: S108 - nothing is written there
        os.environ.setdefault("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
    try:
        import onnxruntime_ep_webgpu as plugin
    except ImportError:
        return "onnxruntime-ep-webgpu is not installed"
    if not hasattr(onnxruntime, "get_ep_devices"):
        return f"ONNX Runtime {onnxruntime.__version__} takes no plug-ins"
    from odtpack_runtime.errors import OdtpackError
    from odtpack_runtime.session.device import Device

    del plugin
    try:
        Device("webgpu")
    except OdtpackError as error:
        return error.what
    return "" if driver.exists() else "Chromium, whose Vulkan driver is used, is not installed"


def package_of(network: str, target: str, folder: Path) -> Path:
    """A small package of a network: that of make gpu, or one that is built into a folder."""
    from benchmarks import gpu

    root = Path(MADE or folder)
    if not (root / network / target / "manifest.json").is_file():
        gpu.build(root, small=True, names=[network], targets=[gpu.TARGETS[0], target])
    return root / network / target
