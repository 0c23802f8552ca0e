"""Layers, and patterns that freeze exactly them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase

import numpy as np
import onnx
import onnx.parser
import pytest

from odtpack.fit.space import MOST_FREEZES, freezes, layers
from odtpack.model.loading import load_model
from odtpack.package.parameters import candidates, resolve
from tests import zoo

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": zoo.mlp,
    "cnn": zoo.cnn,
    "mobilenet": lambda: zoo.mobilenet_v2(size=32, width_mult=0.35, batch_norm="train"),
    "transformer": lambda: zoo.transformer_encoder(layers=2, d=32, ff=64, T=8, vocab=50),
}


def parsed(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        value = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def test_layers_of_a_convolutional_network() -> None:
    model = load_model(zoo.cnn(size=8, width=(4, 8)))
    assert layers(model, candidates(model)) == [
        ("conv1.weight", "conv1.bias"),
        ("conv2.weight", "conv2.bias"),
        ("fc.weight", "fc.bias"),
    ]


def test_branches_are_one_layer_and_vectors_belong_to_the_layer_before() -> None:
    """A skip connection, a scale of the input, a weight transposed, and a shared one."""
    model = load_model(
        parsed(
            """branches (float[batch, 8] x) => (float[batch, 8] y) {
                scaled = Mul (x, s0)
                turned = Transpose (w1)
                a = MatMul (scaled, turned)
                b = MatMul (scaled, w2)
                c = MatMul (b, w3)
                c1 = Add (c, b3)
                joined = Add (a, c1)
                d = MatMul (joined, w4)
                y = MatMul (d, w3)
            }""",
            s0=(8,),
            w1=(8, 8),
            w2=(8, 8),
            w3=(8, 8),
            b3=(8,),
            w4=(8, 8),
        )
    )
    assert layers(model, candidates(model)) == [("s0", "w1", "w2"), ("w3", "b3"), ("w4",)]


def test_layers_inside_a_loop_are_found() -> None:
    model = load_model(
        parsed(
            """looped (float[batch, 4] x) => (float[batch, 4] y) {
                a = MatMul (x, w1)
                n = Constant <value_int = 2> ()
                yes = Constant <value = bool {1}> ()
                b = Loop (n, yes, a) <body = inner (int64 i, bool go, float[b, 4] state)
                    => (bool on, float[b, 4] next) {
                        on = Identity (go)
                        next = MatMul (state, w2)
                    }>
                y = MatMul (b, w3)
            }""",
            w1=(4, 4),
            w2=(4, 4),
            w3=(4, 4),
        )
    )
    assert layers(model, ["w1", "w2", "w3"]) == [("w1",), ("w2",), ("w3",)]


@pytest.mark.parametrize("name", MODELS)
def test_every_choice_freezes_what_it_says(name: str) -> None:
    """Patterns, resolved as a build does, freeze the first layers and train the rest."""
    proto = MODELS[name]()
    model = load_model(proto)
    trained, frozen = resolve(model, (), ())
    found = layers(model, trained)
    assert sorted(n for layer in found for n in layer) == sorted(trained)
    choices = freezes(model, trained, frozen)
    assert 2 <= len(choices) <= MOST_FREEZES
    assert (choices[0].title, choices[0].patterns) == ("nothing", ())
    assert choices[-1].title == "all but the head"
    counts = []
    for choice in choices:
        again = load_model(proto, named=choice.patterns)
        left, fixed = resolve(again, (), choice.patterns)
        depth = next(d for d in range(len(found)) if sum(map(len, found[:d])) == len(fixed))
        assert set(fixed) == {n for layer in found[:depth] for n in layer}
        assert set(left) == {n for layer in found[depth:] for n in layer}
        elements = sum(math.prod(again.graph.initializers[n].shape.numpy()) for n in left)
        assert choice.trained == elements
        counts.append(elements)
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)


def test_modules_are_named_as_a_whole() -> None:
    model = load_model(zoo.cnn(size=8, width=(4, 8)))
    trained, _ = resolve(model, (), ())
    assert [choice.patterns for choice in freezes(model, trained, ())] == [
        (),
        ("conv1.*",),
        ("conv1.*", "conv2.*"),
    ]


def test_parameters_without_a_module_and_with_a_name_of_wildcards() -> None:
    """Patterns are escaped, and a tensor that stands for two parameters keeps standing so."""
    model = load_model(
        parsed(
            "flat (float[batch, 4] x) => (float[batch, 4] y) {\n"
            "a = MatMul (x, w1)\nb = Relu (a)\ny = MatMul (b, w2) }",
            w1=(4, 4),
            w2=(4, 4),
        )
    )
    model.graph.initializers["w1"].name = "w[1]*"
    model.graph.initializers["w2"].name = "w[1]x"
    (_, choice) = freezes(model, ["w[1]*", "w[1]x"], ())
    assert [fnmatchcase("w[1]*", p) for p in choice.patterns] == [True]
    assert [fnmatchcase("w[1]x", p) for p in choice.patterns] == [False]


def test_one_layer_leaves_nothing_to_freeze() -> None:
    model = load_model(
        parsed("one (float[batch, 4] x) => (float[batch, 4] y) { y = MatMul (x, w) }", w=(4, 4))
    )
    assert [choice.patterns for choice in freezes(model, ["w"], ())] == [()]
