"""Equal parameters that PyTorch's exporters stored once become parameters of their own again."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from odtpack.model.loading import load_model
from odtpack.model.shared_tensors import split
from tests.passes.tools import assert_same, parse, random_feeds

SCOPES = "pkg.torch.onnx.name_scopes"
TWO_NORMS = """g (float[N, 4] x) => (float[N, 4] y) <float[4] "a.weight" = {1, 1, 1, 1}> {
    ["%s"] h = LayerNormalization(x, "a.weight")
    ["%s"] y = LayerNormalization(h, "a.weight") }"""


def _initializers(model: ir.Model) -> dict[str, np.ndarray]:
    return {n: np.asarray(v.const_value.numpy()) for n, v in model.graph.initializers.items()}


def _split(model: ir.Model) -> dict[str, list[str]]:
    """Split in a copy that computes the same; return who reads each initializer."""
    after = model.clone()
    assert split(after.graph)
    assert_same(model, after, random_feeds(model, N=3))
    before = _initializers(model)
    merged = next(iter(before.values()))
    for name, value in _initializers(after).items():
        np.testing.assert_array_equal(value, before.get(name, merged))
    return {
        name: [node.name for node in after.graph if value in node.inputs]
        for name, value in after.graph.initializers.items()
    }


def _stays(model: ir.Model, **arguments: object) -> bool:
    after = model.clone()
    return not split(after.graph, **arguments) and set(_initializers(after)) == set(
        _initializers(model)
    )


def test_by_the_names_of_nodes() -> None:
    model = parse(TWO_NORMS % ("/a/LayerNormalization", "/b/LayerNormalization"))
    assert _split(model) == {
        "a.weight": ["/a/LayerNormalization"],
        "b.weight": ["/b/LayerNormalization"],
    }


def test_by_what_torch_export_notes() -> None:
    model = parse(TWO_NORMS % ("one", "two"))
    for node, path in zip(model.graph, ("blocks.0.norm", "blocks.1.norm"), strict=True):
        node.metadata_props[SCOPES] = f"['', '{path}', 'layer_norm']"
    assert _split(model) == {"a.weight": ["one"], "blocks.1.norm.weight": ["two"]}


def test_by_the_identities_that_the_older_exporter_leaves() -> None:
    model = parse(
        """g (float[N, 4] x) => (float[N, 4] y) <float[4] "a.weight" = {1, 1, 1, 1}> {
            [Identity_3] "b.weight" = Identity("a.weight")
            [one] h = LayerNormalization(x, "b.weight")
            [two] y = LayerNormalization(h, "a.weight") }"""
    )
    assert _split(model) == {"a.weight": ["two"], "b.weight": ["one"]}


def test_a_scale_that_shares_its_ones_with_a_variance() -> None:
    model = parse(
        """g (float[N, 2, 3] x) => (float[N, 2, 3] y)
            <float[2] "n.weight" = {1, 1}, float[2] "n.bias" = {0.5, 1}, float[2] mean = {1, 2}> {
            ["/n/BatchNormalization"]
            y = BatchNormalization(x, "n.weight", "n.bias", mean, "n.weight") }"""
    )
    assert set(_split(model)) == {"n.weight", "n.bias", "mean", "n.running_var"}


def test_a_name_that_is_taken() -> None:
    model = parse(
        """g (float[N, 4] x) => (float[N, 4] y)
            <float[4] "a.weight" = {1, 1, 1, 1}, float[4] "b.weight" = {1, 2, 3, 4}> {
            ["/a/LayerNormalization"] h = LayerNormalization(x, "a.weight", "b.weight")
            ["/b/LayerNormalization"] y = LayerNormalization(h, "a.weight") }"""
    )
    assert set(_split(model)) == {"a.weight", "b.weight", "b.weight_2"}


@pytest.mark.parametrize(
    "names",
    [
        ("/a/LayerNormalization", "/a/LayerNormalization_1"),  # called twice
        ("/a/LayerNormalization", "/a_1/LayerNormalization"),  # called twice, or two modules
        ("one", "two"),  # nothing says where they come from
        ("model/a/Norm", "model/b/Norm"),  # names of another exporter
    ],
)
def test_one_module(names: tuple[str, str]) -> None:
    assert _stays(parse(TWO_NORMS % names))


def test_what_was_trained_is_shared_on_purpose() -> None:
    text = TWO_NORMS % ("/a/LayerNormalization", "/b/LayerNormalization")
    assert _stays(parse(text.replace("{1, 1, 1, 1}", "{1, 1, 1, 2}")))


def test_constants_of_the_file_are_no_parameters() -> None:
    text = TWO_NORMS % ("/a/LayerNormalization", "/b/LayerNormalization")
    text = text.replace('<float[4] "a.weight" = {1, 1, 1, 1}>', "")
    constant = '{ "a.weight" = Constant<value = float[4] {1, 1, 1, 1}>()'
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> ' + text.replace("{", constant, 1)
    )
    assert list(load_model(proto).graph.initializers) == ["a.weight"]


def test_what_the_caller_names() -> None:
    model = parse(TWO_NORMS % ("/a/LayerNormalization", "/b/LayerNormalization"))
    assert _stays(model, keep=["a.weight"])


@pytest.mark.parametrize("name", ["val_3", "tmp"])
def test_a_factor_is_no_parameter(name: str) -> None:
    text = TWO_NORMS % ("/a/LayerNormalization", "/b/LayerNormalization")
    assert _stays(parse(text.replace("a.weight", name)))


def test_identities_of_equal_layers() -> None:
    """The older exporter knows a tied parameter by one name, and leaves no Identity of it."""
    model = parse(
        """g (float[N, 4] x) => (float[N, 4] y) <float[4] "a.weight" = {1, 1, 2, 1}> {
            [Identity_3] "b.weight" = Identity("a.weight")
            [one] h = LayerNormalization(x, "b.weight")
            [two] y = LayerNormalization(h, "a.weight") }"""
    )
    assert _split(model) == {"a.weight": ["two"], "b.weight": ["one"]}
