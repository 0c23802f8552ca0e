"""What a message offers to paste is one word to a shell, whatever name a model's author chose."""

import itertools
import shlex

import numpy as np
from onnx import TensorProto

from odtpack.build import build_package
from odtpack_runtime.session.graph_signature import TensorSpec
from odtpack_runtime.training.loop import check_axes
from tests.refused import refused
from tests.zoo.graph_writer import GraphWriter

NAME = 'w\'$(touch hit);`x` "y"'


def offered(text: str, option: str) -> list[str]:
    """What a shell takes for the values of an option in a text."""
    words = shlex.split(text[text.index(option) :])
    return [value for word, value in itertools.pairwise(words) if word == option]


def test_a_row_of_zeros(tmp_path):
    g = GraphWriter("look-up", {}, opset=17, seed=0)
    rows = np.ones((5, 4))
    rows[0] = 0
    ids = g.input(["batch"], TensorProto.INT64)
    found = g.op("Gather", g.parameter(NAME, rows), ids, at="")
    model = g.finish(g.linear(found, 4, 3, at="fc", std=1.0), ["batch", 3])
    said: list[str] = []
    build_package(model, tmp_path / "p", loss="cross_entropy", remark=said.append)
    (remark,) = [text for text in said if "--freeze-row" in text]
    assert offered(remark, "--freeze-row") == [f"{NAME}=0"]


def test_axes_of_inputs():
    kind = np.dtype(np.float32)
    specs = [TensorSpec("x", kind, ("N", 4)), TensorSpec(NAME, kind, (2, "N"))]
    with refused("data-shape") as raised:
        check_axes(specs)
    wanted = [f"{NAME}={value}" for value in ("zeros", "NUMBER", "axis:K")]
    assert offered(raised.value.hint or "", "--input") == wanted
