"""Runs recurrent layers of float16 models in float32.

ONNX Runtime's kernels for them take float32 only, and so do their gradients. The layer's
parameters remain float16 in the model.
"""

from __future__ import annotations

import onnx_ir as ir

from odtpack.autodiff.ops import Ops
from odtpack.passes import match

_RECURRENT = ("GRU", "LSTM", "RNN")


def widen(graph: ir.Graph) -> None:
    """Put casts around every recurrent node that reads float16; types must be known."""
    op = Ops(graph, "half/")
    for node in list(graph):
        half = [v is not None and v.dtype == ir.DataType.FLOAT16 for v in node.inputs]
        if node.domain or node.op_type not in _RECURRENT or not any(half):
            continue
        with op.before(node):
            operands = [
                op.cast(value, ir.DataType.FLOAT) if narrow and value is not None else value
                for value, narrow in zip(node.inputs, half, strict=True)
            ]
            attributes = {key: attribute.value for key, attribute in node.attributes.items()}
            results = op.emit(node.op_type, operands, outputs=len(node.outputs), **attributes)
            for old, new in zip(node.outputs, results, strict=True):
                if not old.name:
                    new.name = old.name
                    continue
                new.shape = old.shape
                match.replace(old, op.cast(new, ir.DataType.FLOAT16), [])
        graph.remove(node, safe=True)
