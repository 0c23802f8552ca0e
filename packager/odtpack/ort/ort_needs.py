"""The oldest ONNX Runtime that loads files in ORT format.

What optimization has fused stands in them, so they may need newer kernels than the models that
they were made of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from odtpack.ort.kernel_needs import Need, newest, of_operator

_FORMAT: Final = Need((1, 16), "ORT format of version 6")
"""The first release that reads what the present converter writes; `make runtimes` holds it."""


def oldest_of_files(paths: Iterable[Path]) -> Need:
    """Return the oldest release of ONNX Runtime that loads files in ORT format."""
    # Its package must come first: it makes the bindings of the format importable.
    from onnxruntime.tools.ort_format_model import OperatorTypeUsageManager, OrtFormatModelProcessor

    needs = [_FORMAT]

    class Collects(OperatorTypeUsageManager):  # type: ignore[misc] # it has no types
        def process_node(self, node: Any, value_name_to_typeinfo: dict[Any, Any]) -> None:
            domain, name = (node.Domain() or b"").decode(), node.OpType().decode()
            inputs = [node.Inputs(index) for index in range(node.InputsLength())]
            outputs = [node.Outputs(index) for index in range(node.OutputsLength())]
            needs.extend(
                of_operator(
                    "" if domain == "ai.onnx" else domain,
                    name,
                    node.SinceVersion(),
                    tuple(_type_name(each, value_name_to_typeinfo) for each in inputs),
                    tuple(_type_name(each, value_name_to_typeinfo) for each in outputs),
                )
            )

    for path in paths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it forgets to close the file
            OrtFormatModelProcessor(str(path), {}, Collects()).process()
    return newest(needs)


def _type_name(value: bytes, known: Mapping[Any, Any]) -> str | None:
    fbs = "ort_flatbuffers_py.fbs."
    info = known.get(value)
    if info is None:
        return None
    if info.ValueType() != import_module(f"{fbs}TypeInfoValue").TypeInfoValue.tensor_type:
        return None
    tensor = import_module(f"{fbs}TensorTypeAndShape").TensorTypeAndShape()
    tensor.Init(info.Value().Bytes, info.Value().Pos)
    return ir.DataType(tensor.ElemType()).name.lower()  # the numbers are those of ONNX
