"""What a model computes: in ONNX Runtime, or in the onnx package's reference implementation."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.autodiff.oracle import session

Feeds = dict[str, Any]
Function = Callable[[Feeds], list[Any]]

RUNTIME, REFERENCE = "ONNX Runtime", "onnx.reference"
_TYPE_ATTRIBUTES = {"dtype", "output_dtype", "softmax_precision", "stash_type", "to"}


def function_of(model: onnx.ModelProto, feeds: Feeds) -> tuple[Function | None, str]:
    """What computes the outputs of a case, of float16 ones in float32; or why nothing does."""
    wide = _widened(model)
    errors = []
    for name, start in ((RUNTIME, in_runtime), (REFERENCE, in_reference)):
        try:
            function = start(wide)
            function(feeds)
        except Exception as error:  # of whatever kind: this one does not run it
            errors.append(f"{name}: {str(error)[:120]}")
            continue
        return function, name
    return None, "; ".join(errors)


def in_runtime(model: onnx.ModelProto) -> Function:
    running = session(model, "off")
    declared = {value.name: value.type for value in running.get_inputs()}

    def run(feeds: Feeds) -> list[Any]:
        given = {n: a for n, a in _wide(feeds).items() if n in declared}
        return list(running.run([value.name for value in model.graph.output], given))

    return run


def in_reference(model: onnx.ModelProto, floats: type = np.float32) -> Function:
    evaluator = ReferenceEvaluator(model)
    return lambda feeds: list(evaluator.run(None, _wide(feeds, floats)))


def _wide(feeds: Feeds, floats: type = np.float32) -> Feeds:
    def widen(array: Any) -> Any:
        if isinstance(array, list):
            return [widen(each) for each in array]
        narrow = array.dtype in (np.float16, np.float32)
        return np.asarray(array, floats) if narrow else array

    return {name: widen(array) for name, array in feeds.items()}


def _widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float32 in the place of float16, whose steps are too coarse to difference."""
    wide = copy.deepcopy(model)
    for value in (*wide.graph.input, *wide.graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type == TensorProto.FLOAT16:
            tensor.elem_type = TensorProto.FLOAT
    for attribute in (a for node in wide.graph.node for a in node.attribute):
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
            attribute.i = TensorProto.FLOAT
        if attribute.t.data_type == TensorProto.FLOAT16:
            array = numpy_helper.to_array(attribute.t).astype(np.float32)
            attribute.t.CopyFrom(numpy_helper.from_array(array))
    return wide
