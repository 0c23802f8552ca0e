"""(IA)3: a factor for each channel of a layer (Liu et al., 2022).

    y = l * (W x + b)        or, on feedforward layers,        y = W (l * x) + b

l begins as one. Its shape is PEFT's: [out, 1], and [1, in] on feedforward layers; of a convolution
[1, out, 1, 1] and [1, in, 1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from odtpack.adapters.layers import Layer, Use
from odtpack.adapters.low_rank import take_place
from odtpack.graph.ops import Ops
from odtpack.spec import AdapterSpec

FACTORS = "ia3_l"


def parameters(layer: Layer, spec: AdapterSpec) -> dict[str, np.ndarray]:
    """First values of the parameters on a layer, by the end of their names, float64."""
    feedforward = layer.matches(spec.feedforward)
    kernel = [1 for _ in layer.shape[2:]]
    size = layer.inputs if feedforward else layer.outputs
    shape = (1, size, *kernel) if kernel or feedforward else (size, 1)
    return {FACTORS: np.ones(shape)}


def apply(
    op: Ops, layer: Layer, use: Use, given: Mapping[str, ir.Value], spec: AdapterSpec
) -> None:
    """Scale what a layer reads, or what it gives."""
    factors = given[FACTORS]
    if len(layer.shape) == 2:
        factors = op.reshape(factors, -1)
    if layer.matches(spec.feedforward):
        use.node.replace_input_with(0, op.Mul(use.data, factors))
        return
    readers = [*use.end.uses()]
    take_place(use.end, op.Mul(use.end, factors), readers)
