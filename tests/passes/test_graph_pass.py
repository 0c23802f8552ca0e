"""What the pipeline checks of a pass, before and after it."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx_ir.passes import PostconditionError, PreconditionError

from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.errors import OdtpackError
from odtpack.graph.ops import Ops
from odtpack.passes.pipeline import ALL, apply


def _model() -> ir.Model:
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2])
    node = ir.node("Gelu", [x], domain=INTERNAL_DOMAIN)
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 17}, name="g")
    return ir.Model(graph, ir_version=8)


def _nothing(*_: object) -> bool:
    return False


def _rename(graph: ir.Graph) -> None:
    graph.name = "renamed"


def _refuse(graph: ir.Graph) -> None:
    raise OdtpackError("unknown-shape", f"{graph.name} is refused")


def test_it_says_whether_it_changed_the_model() -> None:
    model = _model()
    assert not apply(model, _nothing)
    assert not apply(model, _nothing, Ops(model.graph))
    assert apply(model, _rename)
    assert model.graph.name == "renamed"


def test_a_writer_belongs_to_the_graph() -> None:
    with pytest.raises(PreconditionError, match="_nothing has a writer for another graph"):
        apply(_model(), _nothing, Ops(_model().graph))


@pytest.mark.parametrize("lowers", ["Gelu", ALL])
def test_what_it_lowers_is_gone(lowers: str) -> None:
    with pytest.raises(PostconditionError, match="_nothing left a node Gelu"):
        apply(_model(), _nothing, lowers=lowers)
    apply(_model(), _nothing, lowers="FakeQuant")


def test_errors_for_the_user_stay_what_they_are() -> None:
    with pytest.raises(OdtpackError, match="g is refused"):
        apply(_model(), _refuse)
