"""What ONNX Runtime sessions take besides tensors: a model with measured constants.

Measured on x86-64 Linux with ONNX Runtime 1.31.1: growth of anonymous memory
while training, evaluation and optimizer models of four networks (8 to 4641
nodes, 6 to 423 inputs) were loaded, each in a new process, arena off. The line
below fits the thirteen measurements with an error of at most 0.35 MB; sessions
that follow in the same process share what the first one set up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import onnx

from odtpack_runtime.simulator.allocation import allocated_size
from odtpack_runtime.simulator.runtime_graph import RuntimeGraph

RUNTIME_BYTES: Final = 1_430_000
"""Once per process: registries of schemas and kernels, pages of the library written to."""

BYTES_PER_NODE: Final = 4_700
"""Per node of the stored model, subgraphs included: node, kernel, plan, and the heap that
graph optimization leaves behind."""

BYTES_PER_VALUE: Final = 3_300
"""Per graph input, output or initializer."""
