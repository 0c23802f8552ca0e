from __future__ import annotations

import pytest

from odtpack.passes.patterns import upgrade
from tests.passes.tools import assert_same, check, parse, random_feeds

CNN = """
g (float[N, 3, 8, 8] x, float[4, 3, 3, 3] w, float[4] s, float[4] b, float[4] m, float[4] v)
    => (float[N, k] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w)
    positive = Abs(v)
    n = BatchNormalization (c, s, b, m, positive)
    r = Relu(n)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
    f = Flatten(p)
    l = LogSoftmax(f)
    i = Identity(l)
    q = Add(i, i)
    y = LeakyRelu(q)
}
"""


@pytest.mark.parametrize("opset", [13, 14, 15, 16])
def test_the_meaning_stays(opset: int) -> None:
    model = parse(CNN, opset)
    after = model.clone()
    assert upgrade(after.graph)
    assert after.graph.opset_imports[""] == 17
    assert_same(model, check(after), random_feeds(model, N=2))


def test_training_mode_as_an_attribute_stays() -> None:
    model = parse(
        NORM_THREE.replace("BatchNormalization", "BatchNormalization <training_mode = 1>"), 14
    )
    assert upgrade(model.graph)


@pytest.mark.parametrize("opset", [12, 17, 18, 21])
def test_other_opsets_stay(opset: int) -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Neg(x) }", opset)
    assert not upgrade(model.graph)
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
            z = RoiAlign <output_height = 2, output_width = 2> (x, rois, batch)
            e = Neg(z)
        }
    >
}
"""


@pytest.mark.parametrize("text", [ROI, NORM, NORM_THREE, BRANCH], ids=["roi", "bn5", "bn3", "if"])
def test_a_changed_meaning_keeps_its_opset(text: str) -> None:
    model = parse(text, 13)
    assert not upgrade(model.graph)
    assert model.graph.opset_imports[""] == 13
