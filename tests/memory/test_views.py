"""ONNX Runtime 1.23 to 1.30 joins views that follow one another where all sizes are known.

It cannot load a model in which the first of them computes its shape.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from benchmarks.fidelity import models


@pytest.mark.parametrize("name", ["keyword-gru", "mobilenet-v3"])
def test_no_view_of_computed_shape_comes_before_one_of_known_size(
    name: str, tmp_path: Path
) -> None:
    built = models.build(models.CASES[name], tmp_path)
    graph = onnx.load(built.folder / "package" / "training_model.onnx").graph
    constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    views = [
        node.output[0]
        for node in graph.node
        if node.op_type == "Reshape" and node.input[1] not in constants
    ]
    assert views  # something is computed again
    for view in views:
        readers = [node for node in graph.node if view in node.input]
        if len(readers) != 1 or readers[0].input[0] != view:
            continue
        if readers[0].op_type == "Reshape" and readers[0].input[1] in constants:
            assert not (constants[readers[0].input[1]] > 0).all(), view
        if readers[0].op_type in ("Squeeze", "Unsqueeze"):
            assert any(dim.dim_param for dim in shapes.get(view, ())), view
