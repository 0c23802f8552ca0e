"""What ONNX Runtime takes from the system per byte that its tensors hold, in a process of its own.

``python -m odtpack_simulator.measure.allocator arena|heap`` prints one line of
JSON with ``held`` and ``taken`` in bytes. Tensors of the sizes a small network's step has
(16 KiB to 8 MiB) are produced by elementwise operators and held; three rounds, so that
an allocator that returns or keeps memory has had the occasion to.

``taken`` is the growth of ``VmData``: memory that the process has mapped for itself, touched
or not, which is what ``RLIMIT_DATA`` counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.memory.process_memory import child_environment

Allocator = Literal["arena", "heap"]

_SIZES: Final = tuple(
    elements * 4
    for power in range(12, 22)
    for elements in (2**power, 3 * 2**power // 2, 5 * 2**power // 4)
    if elements <= 2**21
)
TENSORS: Final = len(_SIZES)
_ROUNDS: Final = 3
_SECONDS: Final = 60.0


def allocator_overhead(allocator: Allocator) -> float | None:
    """Bytes taken from the system per byte held; None where the system does not say."""
    # `allocator`: `"arena"` for ONNX Runtime's default, `"heap"` with the arena off.
    if sys.platform != "linux":
        return None
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([package_root, *([inherited] if inherited else [])])
    command = [sys.executable, "-m", "odtpack_simulator.measure.allocator", allocator]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            env={**os.environ, **child_environment(), "PYTHONPATH": paths},
        )
        found = json.loads(done.stdout)
        return float(found["taken"] / found["held"])
    except (subprocess.TimeoutExpired, ValueError, KeyError, OSError) as error:
        raise OdtpackError(
            "allocator-not-measured",
            f"the process that measures ONNX Runtime's allocator gave no answer ({error})",
        ) from error


def _measure(allocator: Allocator) -> dict[str, int]:
    import numpy as np
    import onnxruntime
    from onnx import ModelProto, TensorProto, helper

    nodes, inputs, outputs = [], [], []
    for index, size in enumerate(_SIZES):
        nodes.append(helper.make_node("Neg", [f"input{index}"], [f"output{index}"]))
        shape = [size // 4]
        inputs.append(helper.make_tensor_value_info(f"input{index}", TensorProto.FLOAT, shape))
        outputs.append(helper.make_tensor_value_info(f"output{index}", TensorProto.FLOAT, shape))
    graph = helper.make_graph(nodes, "allocator", inputs, outputs)
    model = ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 13))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = allocator == "arena"
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = {
        f"input{index}": onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(size // 4, np.float32))
        for index, size in enumerate(_SIZES)
    }
    names = [f"output{index}" for index in range(len(_SIZES))]
    before = _mapped()
    taken = 0
    for _ in range(_ROUNDS):
        held = session.run_with_ort_values(names, values)
        taken = max(taken, _mapped() - before)
        del held
    return {"held": sum(_SIZES), "taken": taken}


def _mapped() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise KeyError("VmData")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure("arena" if sys.argv[1] == "arena" else "heap")) + "\n")
