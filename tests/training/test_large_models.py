"""Models beyond protobuf's 2 GB: their weights are never copied into memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from odtpack_runtime.package.package import Package

ROWS, COLUMNS = 5_800_000, 100  # 2.16 GiB
ALLOWED = 400 * 2**20  # bytes of memory of its own that the build may take


def write_model(folder: Path) -> Path:
    """An embedding of more than 2 GB, frozen, and a trained head. The file of zeros is sparse."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        g (int64["batch", 4] ids) => (float["batch", 3] y) {
            rows = Gather(table, ids)
            mean = ReduceMean<axes = [1], keepdims = 0>(rows)
            y = MatMul(mean, head)
        }
        """
    )
    table = model.graph.initializer.add(
        name="table", data_type=onnx.TensorProto.FLOAT, dims=[ROWS, COLUMNS]
    )
    table.data_location = onnx.TensorProto.EXTERNAL
    table.external_data.add(key="location", value="weights")
    head = np.random.default_rng(0).standard_normal((COLUMNS, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(head, "head"))
    with (folder / "weights").open("wb") as stream:
        stream.truncate(ROWS * COLUMNS * 4)
        stream.seek(COLUMNS * 4)  # the second row
        stream.write(np.ones(COLUMNS, np.float32).tobytes())
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is one of Linux")
def test_a_model_of_more_than_2_gb_is_built_without_copies(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 8 * 2**30:
        pytest.skip("less than 8 GiB of space left")
    path = write_model(tmp_path)
    script = textwrap.dedent(f"""
        import re, resource
        from pathlib import Path
        from odtpack.build import build_package
        status = Path("/proc/self/status").read_text()
        used = int(re.search(r"VmData:\\s+(\\d+)", status)[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + {ALLOWED},) * 2)
        build_package({str(path)!r}, {str(tmp_path / "package")!r}, loss="cross_entropy",
                      train=["head"])
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    package = Package.open(tmp_path / "package")
    data = package.manifest.files.checkpoint_data
    assert data is not None
    assert data.size_bytes == ROWS * COLUMNS * 4 + COLUMNS * 3 * 4
    table = np.memmap(package.checkpoint.with_name(data.path), np.float32, "r", COLUMNS * 3 * 4)
    np.testing.assert_array_equal(table[: 3 * COLUMNS].reshape(3, -1).mean(1), [0, 1, 0])
