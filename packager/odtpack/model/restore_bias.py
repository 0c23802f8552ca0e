"""Puts back the biases that PyTorch's exporter left out because they were zero.

Of a fresh model it drops the bias of a product or a convolution whose values are all zero,
as those of an attention's output projection are. The module trains it all the same. The call
that torch.export noted beside the node still has it:

    y = Gemm(x, weight)   ->   y = Gemm(x, weight, out_proj.bias)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from odtpack.model.exported_parameters import ExportedParameters
from odtpack.model.exporters import KIND

_BIAS = 2
_OPERATORS = ("Conv", "ConvTranspose", "Gemm")


def restore(graph: ir.Graph) -> bool:
    """Give nodes the biases that their calls had; return whether any lacked one.

    Args:
        graph: Forward graph; changed in place. New initializers have the module's names.
    """
    parameters = ExportedParameters(graph)
    changed = False
    for node in graph:
        if node.op_type not in _OPERATORS or any(node.inputs[_BIAS:]):
            continue
        name, size = parameters.bias(node), _channels(node)
        weight = node.inputs[1]
        if name is None or size is None or weight is None or weight.dtype is None:
            continue
        if name not in graph.initializers:
            tensor = ir.tensor(np.zeros(size, weight.dtype.numpy()), name=name)
            value = ir.val(name, dtype=weight.dtype, shape=[size], const_value=tensor)
            value.metadata_props[KIND] = "PARAMETER"
            graph.register_initializer(value)
        node.resize_inputs(_BIAS + 1)
        node.replace_input_with(_BIAS, graph.initializers[name])
        changed = True
    return changed


def _channels(node: ir.Node) -> int | None:
    """Number of outputs of a layer, by its weight."""
    weight = node.inputs[1]
    tensor = None if weight is None else weight.const_value
    if tensor is None:
        return None
    shape = tensor.shape.numpy()
    if node.op_type == "Gemm":
        return shape[0] if node.attributes.get_int("transB", 0) else shape[1]
    if node.op_type == "ConvTranspose":
        return shape[1] * node.attributes.get_int("group", 1)
    return shape[0]
