"""What the pipeline checks of a pass, before and after it."""

from unittest import mock

import onnx_ir as ir
import pytest
from onnx_ir.passes import PostconditionError, PreconditionError

from odtpack.autodiff import differentiate
from odtpack.autodiff.context import INTERNAL_DOMAIN
from odtpack.autodiff.stop_gradient import lower, stop
from odtpack.errors import OdtpackError
from odtpack.graph.graphs import Ops
from odtpack.passes.opsets import upgrade
from odtpack.passes.pipeline import ALL, apply
from tests.passes.tools import assert_same, check, parse, random_feeds


def _model() -> ir.Model:
    x = ir.val("x", dtype=ir.DataType.FLOAT, shape=[2])
    node = ir.node("Gelu", [x], domain=INTERNAL_DOMAIN)
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 17}, name="g")
    return ir.Model(graph, ir_version=8)


def _nothing(*_: object) -> bool:
    return False


def _rename(graph: ir.Graph) -> None:
    graph.name = "renamed"


def test_it_says_whether_it_changed_the_model():
    model = _model()
    assert not apply(model, _nothing)
    assert not apply(model, _nothing, Ops(model.graph))
    assert apply(model, _rename)
    assert model.graph.name == "renamed"


def test_a_writer_belongs_to_the_graph():
    with pytest.raises(PreconditionError, match="_nothing has a writer for another graph"):
        apply(_model(), _nothing, Ops(_model().graph))


@pytest.mark.parametrize("lowers", ["Gelu", ALL])
def test_what_it_lowers_is_gone(lowers):
    with pytest.raises(PostconditionError, match="_nothing left a node Gelu"):
        apply(_model(), _nothing, lowers=lowers)
    apply(_model(), _nothing, lowers="FakeQuant")


def test_errors_for_the_user_stay_what_they_are():
    refuse = mock.Mock(side_effect=OdtpackError("unknown-shape", "it is refused"))
    with pytest.raises(OdtpackError, match="it is refused"):
        apply(_model(), refuse)


CNN = """
g (float[N, 3, 8, 8] x, float[4, 3, 3, 3] w, float[4] s, float[4] b, float[4] m, float[4] v)
    => (float[N, k] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w) positive = Abs(v)
    n = BatchNormalization (c, s, b, m, positive) r = Relu(n)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r) f = Flatten(p) l = LogSoftmax(f)
    i = Identity(l) q = Add(i, i) y = LeakyRelu(q)
}
"""


@pytest.mark.parametrize("opset", [13, 14, 15, 16])
def test_the_meaning_stays(opset):
    model = parse(CNN, opset)
    after = model.clone()
    upgrade(after.graph)
    assert after.graph.opset_imports[""] == 17
    assert_same(model, check(after), random_feeds(model, N=2))


def test_training_mode_as_an_attribute_stays():
    model = parse(
        NORM_THREE.replace("BatchNormalization", "BatchNormalization <training_mode = 1>"), 14
    )
    upgrade(model.graph)
    assert model.graph.opset_imports[""] == 17


@pytest.mark.parametrize("opset", [12, 17, 18, 21])
def test_other_opsets_stay(opset):
    model = parse("g (float[2] x) => (float[2] y) { y = Neg(x) }", opset)
    upgrade(model.graph)
    assert model.graph.opset_imports[""] == opset


ROI = (
    "g (float[1, 1, 4, 4] x, float[k, 4] rois, int64[k] batch) => (float[k, 1, 2, 2] y)"
    "{ y = RoiAlign <output_height = 2, output_width = 2> (x, rois, batch) }"
)
NORM = """
g (float[2, 3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2, 3] y)
{ y, m2, v2, m3, v3 = BatchNormalization (x, s, b, m, v) }
"""
NORM_THREE = NORM.replace(", m3, v3", "")
BRANCH = """
g (bool c, float[1, 1, 4, 4] x, float[k, 4] rois, int64[k] batch) => (float[k, 1, 2, 2] y) {
    y = If (c) <
        then_branch = a () => (float[k, 1, 2, 2] t) {
            t = RoiAlign <output_height = 2, output_width = 2> (x, rois, batch)
        },
        else_branch = b () => (float[k, 1, 2, 2] e) {
            z = RoiAlign <output_height = 2, output_width = 2> (x, rois, batch) e = Neg(z)
        }
    >
}
"""


@pytest.mark.parametrize("text", [ROI, NORM, NORM_THREE, BRANCH], ids=["roi", "bn5", "bn3", "if"])
def test_a_changed_meaning_keeps_its_opset(text):
    model = parse(text, 13)
    upgrade(model.graph)
    assert model.graph.opset_imports[""] == 13


# A held value is a constant to the gradient and itself to everybody else.


@pytest.fixture
def x() -> ir.Value:
    return ir.val("x", dtype=ir.DataType.FLOAT, shape=[3])


def test_no_gradient_flows(x):
    """x times held x has the gradient held x, not twice x."""
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="g")
    op = Ops(graph)
    held = stop(op, x)
    y = op.Mul(x, held)
    y.shape = x.shape
    dy = ir.val("dy", dtype=ir.DataType.FLOAT, shape=[3])
    graph.inputs.append(dy)
    graph.outputs.append(y)
    (gradient,) = differentiate(graph, {y: dy}, [x], op).values()
    graph.outputs.append(gradient)
    producer = gradient.producer()
    assert producer.op_type == "Mul"
    assert set(producer.inputs) == {dy, held}
    lower(graph)
    assert [node.op_type for node in graph] == ["Mul", "Mul"]
    assert set(producer.inputs) == {dy, x}
    assert graph.opset_imports == {"": 17}


def test_a_held_output(x):
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="g")
    op = Ops(graph)
    graph.outputs.append(stop(op, op.Neg(x)))
    lower(graph)
    assert [node.op_type for node in graph] == ["Neg"]
    assert graph.outputs[0].producer() is graph[0]


def test_other_graphs_do_not_change(x):
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17, INTERNAL_DOMAIN: 1}, name="g")
    graph.outputs.append(Ops(graph).Identity(x))
    lower(graph)
    assert [node.op_type for node in graph] == ["Identity"]
