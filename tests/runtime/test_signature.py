"""The roles of a training graph's names."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.session.graph_signature import GraphSignature, TensorSpec, check_labels

Node = tuple[str, str, list[object]]

TRAINABLE = {"w": np.zeros((2, 3), np.float32)}
FROZEN = {"s": np.zeros(3, np.float32)}
INPUTS: list[Node] = [
    ("x", "tensor(float)", ["batch", 2]),
    ("w", "tensor(float)", [2, 3]),
    ("s", "tensor(float)", [3]),
    ("w_grad.accumulation.buffer", "tensor(float)", [2, 3]),
    ("lazy_reset_grad", "tensor(bool)", [1]),
]
OUTPUTS: list[Node] = [
    ("loss", "tensor(float)", []),
    ("w_grad.accumulation.out", "tensor(float)", [2, 3]),
    ("s.update.out", "tensor(float)", [3]),
]


def read(inputs: list[Node], outputs: list[Node]) -> GraphSignature:
    nodes = [
        [SimpleNamespace(name=name, type=kind, shape=shape) for name, kind, shape in group]
        for group in (inputs, outputs)
    ]
    return GraphSignature.read("model.onnx", nodes[0], nodes[1], TRAINABLE, FROZEN)


def test_a_graph_that_keeps_the_contract() -> None:
    signature = read(INPUTS, OUTPUTS)
    assert signature.inputs == (TensorSpec("x", np.dtype(np.float32), ("batch", 2)),)
    assert signature.parameters == ("w", "s")
    assert [spec.name for spec in signature.outputs] == ["loss"]
    assert signature.gradients == ("w",)
    assert signature.updates == ("s",)


def test_names_that_only_look_like_roles_are_the_users() -> None:
    extra: list[Node] = [
        ("y.update.out", "tensor(float)", [3]),
        ("s_grad.accumulation.out", "tensor(float)", [3]),
        ("w.update.out", "tensor(float)", [2, 3]),
    ]
    signature = read(INPUTS, [*OUTPUTS, *extra])
    assert [spec.name for spec in signature.outputs] == ["loss", *(name for name, *_ in extra)]


def _with(nodes: list[Node], index: int, node: Node | None) -> list[Node]:
    return [*nodes[:index], *([node] if node else []), *nodes[index + 1 :]]


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        (_with(INPUTS, 1, None), OUTPUTS, "updates 'w', which is not among its inputs"),
        (_with(INPUTS, 2, None), OUTPUTS, "updates 's', which is not among its inputs"),
        (_with(INPUTS, 3, None), OUTPUTS, "'w_grad.accumulation.buffer' lacks"),
        (INPUTS, _with(OUTPUTS, 1, None), "'w_grad.accumulation.buffer' lacks"),
        (_with(INPUTS, 4, None), OUTPUTS, "no input 'lazy_reset_grad'"),
        (INPUTS, OUTPUTS[1:], "no outputs for the user"),
        ([*INPUTS, ("late", "tensor(float)", [1])], OUTPUTS, "'late' belongs to no parameter"),
        (
            [("v_grad.accumulation.buffer", "tensor(float)", [1]), *INPUTS],
            OUTPUTS,
            "'v_grad.accumulation.buffer' belongs to no parameter",
        ),
        (_with(INPUTS, 1, ("w", "tensor(float)", [3, 2])), OUTPUTS, r"'w' is float32\[3, 2\]"),
        (_with(INPUTS, 1, ("w", "tensor(double)", [2, 3])), OUTPUTS, r"'w' is float64\[2, 3\]"),
        (
            _with(INPUTS, 3, ("w_grad.accumulation.buffer", "tensor(float)", [6])),
            OUTPUTS,
            "accumulation.buffer' is",
        ),
        (
            _with(INPUTS, 4, ("lazy_reset_grad", "tensor(bool)", [2])),
            OUTPUTS,
            "lazy_reset_grad' is",
        ),
        (
            INPUTS,
            _with(OUTPUTS, 1, ("w_grad.accumulation.out", "tensor(bool)", [1])),
            "unlike the parameter",
        ),
        (INPUTS, _with(OUTPUTS, 2, ("s.update.out", "tensor(float)", [4])), "unlike the parameter"),
        (
            _with(INPUTS, 0, ("x", "seq(tensor(float))", [])),
            OUTPUTS,
            r"'x' is a seq\(tensor\(float\)\)",
        ),
        (_with(INPUTS, 0, ("x", "tensor(bfloat16)", [])), OUTPUTS, "numpy cannot hold"),
    ],
)
def test_graphs_that_break_the_contract(inputs: list[Node], outputs: list[Node], says: str) -> None:
    with pytest.raises(OdtpackError, match=says) as caught:
        read(inputs, outputs)
    assert caught.value.code in ("model-mismatch", "unsupported-type")
    assert caught.value.where == "model.onnx"


def test_specs_as_text() -> None:
    assert str(TensorSpec("x", np.dtype(np.int64), (None, "n", 3))) == "int64[?, n, 3]"
    assert str(TensorSpec("x", np.dtype(object), ("n",))) == "text[n]"


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 2, 2)])
def test_labels_of_any_shape(shape: tuple[int, ...]) -> None:
    labels = np.array([0, 1, 5, 1]).reshape(shape)
    check_labels("labels", labels, 6)
    with pytest.raises(OdtpackError, match="label 5 at") as caught:
        check_labels("labels", labels, 5)
    place = ", ".join(str(int(i)) for i in np.argwhere(labels == 5)[0])
    assert f"[{place}]" in str(caught.value)
    check_labels("labels", np.array([], np.int64), 5)
