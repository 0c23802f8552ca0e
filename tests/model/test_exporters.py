"""Parameters are found by the names that they had before PyTorch's exporters renamed them."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from odtpack.adapters.layers import find_layers
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.model.exporters import (
    KIND,
    Folded,
    folded,
    known_names,
    made_up,
    matching,
    module_names,
)
from odtpack.model.loading import load_model
from odtpack.model.shared_tensors import split
from odtpack.package.candidates import candidates, resolve
from tests.model_text import add_initializers, parsed
from tests.passes.tools import assert_same, parse, random_feeds

RANDOM = np.random.default_rng(0)
LINEAR = '["/head/MatMul"] h = MatMul(x, "val_1") y = Add("head.bias", h)'
SCOPES = "pkg.torch.onnx.name_scopes"


def _model(body: str, scopes: str | None = None, **values: tuple[int, ...]) -> onnx.ModelProto:
    arrays = {n: RANDOM.standard_normal(s).astype(np.float32) for n, s in values.items()}
    text = f"g (float[4, 3] x) => (float[A, B] y) {{ {body} }}"
    model = parsed(text, 21, ir_version=10, **arrays)
    if scopes is not None:
        model.graph.node[0].metadata_props.add(key=SCOPES, value=scopes)
    return model


def _names(*arguments: Any, **values: tuple[int, ...]) -> dict[str, str]:
    return module_names(load_model(_model(*arguments, **values)).graph)


@pytest.mark.parametrize(
    ("bias", "weight"), [("head.bias", "head.weight"), ("mha.in_proj_bias", "mha.in_proj_weight")]
)
def test_beside_a_bias(bias, weight):
    body = LINEAR.replace("head.bias", bias)
    assert _names(body, **{"val_1": (3, 2), bias: (2,)}) == {"val_1": weight}


@pytest.mark.parametrize(("product", "codes"), [
    ("h = com.microsoft.MatMulNBits<N=2,K=32,bits=4,block_size=32>(x, CODES, s)", (2, 1, 16)),
    ("w = DequantizeLinear(CODES, z) h = MatMul(x, w)", (32, 2)),
    ("q, t, u = DynamicQuantizeLinear(x) i = MatMulInteger(q, CODES, u) c = Cast<to=1>(i) "
         "h = Mul(c, s)", (32, 2)),
    ("q, t, u = DynamicQuantizeLinear(x) i = MatMulInteger(q, CODES, u) c = Cast<to=1>(i) "
         "r = Mul(c, s) w = DequantizeLinear(CODES, z) e = MatMul(x, w) "
         "h = odtpack.StraightThrough(r, e)", (32, 2)),
])  # fmt: skip
def test_beside_a_bias_of_a_product_of_few_bits(product, codes):
    """Olive keeps optimum's bias, whose name is the module's; the node's is a part of it."""
    name = "onnx::MatMul_5_Q4"
    product = product.replace("CODES", f'"{name}"')
    text = f'g (float[4, 32] x) => (y) {{ {product} y = Add(h, "model.head.bias") }}'
    stored = {name: np.zeros(codes, np.uint8), "s": np.ones(2, np.float32),
              "z": np.ones((), np.float32), "model.head.bias": np.zeros(2, np.float32)}  # fmt: skip
    model = parsed(text, 21, ir_version=10, domains=["com.microsoft", "odtpack"], **stored)
    assert module_names(ir.from_proto(model).graph) == {name: "model.head.weight"}


@pytest.mark.parametrize(("node", "path"), [
    ("/head/MatMul", "head"),
    ("/layers.0/query/MatMul", "layers.0.query"),
    ("/blocks/blocks.0/mlp/mlp.2/MatMul_1", "blocks.0.mlp.2"),
])  # fmt: skip
def test_within_a_module(node, path):
    assert _names(f'["{node}"] y = MatMul(x, "onnx::MatMul_5")', **{"onnx::MatMul_5": (3, 2)}) == {
        "onnx::MatMul_5": f"{path}.weight"
    }


def _noted(model, key=KIND, shape=None, **notes):
    """The model with notes about initializers, by torch.export what they were."""
    for name, note in notes.items():
        info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        info.metadata_props.add(key=key, value=note)
        model.graph.value_info.append(info)
    return model


def test_made_up_names():
    body = 'a = Add(x, val_1) b = Add(a, "onnx::Add_2") c = Add(b, scale) d = Add(c, zeros_like) '
    names = ("val_1", "onnx::Add_2", "scale", "zeros_like", "norm.bias")
    model = _model(body + 'y = Add(d, "norm.bias")', **dict.fromkeys(names, (3,)))
    assert made_up(load_model(model).graph) == {"val_1", "onnx::Add_2"}
    noted = load_model(_noted(model, scale="PARAMETER"))
    # What torch.export has no note of was computed; a dot is of a name in the module.
    assert made_up(noted.graph) == {"val_1", "onnx::Add_2", "zeros_like"}


def test_fills_that_the_exporter_computed():
    model = _model("a = Mul(x, scale) y = Add(a, zeros_like)", scale=(3,))
    add_initializers(model, {"zeros_like": np.zeros((4, 3), np.float32)})
    assert candidates(load_model(model)) == ["scale", "zeros_like"]
    assert candidates(load_model(_noted(model, scale="PARAMETER"))) == ["scale"]


def test_what_the_exporter_noted_of_its_folding():
    notes = {
        "view": "['a.gamma', 'val_1']",  # a layout
        "exp_2": "['a.gamma']",
        "permute": "['mel']",
        "val_3": "['arange', 'val_2']",
        "detach_1": "['a.gamma']",
        "tanh": "['old.gamma']",  # which is not listed
    }
    body = "".join(f"h{i + 1} = Mul(h{i}, {name}) " for i, name in enumerate(notes))
    model = _model(f"h0 = Relu(x) {body} y = Relu(h6)", **dict.fromkeys(notes, (3,)))
    _noted(model, "pkg.onnxscript.optimizer.folded_from", (3,), **notes)
    every = ["view", "exp_2", "permute", "val_3", "detach_1", "tanh"]
    assert candidates(load_model(model)) == every  # as nothing says what a parameter is
    listed = "p_a: PARAMETER target='a.gamma'\nb_mel: BUFFER target='mel' persistent=True"
    key = "pkg.torch.export.ExportedProgram.graph_signature"
    model.graph.metadata_props.add(key=key, value=listed)
    loaded = load_model(model)
    assert candidates(loaded) == ["view", "exp_2", "tanh"]
    found = folded(loaded.graph)
    assert found["view"] == Folded(("a.gamma",), ())
    assert found["exp_2"] == Folded(("a.gamma",), ("exp",))
    assert "tanh" not in found
    assert module_names(loaded.graph) == {"view": "a.gamma"}


def test_a_transpose_that_was_folded_under_the_name_of_its_operation():
    model = _model("h = MatMul(x, table) y = MatMul(h, permute)", table=(3, 5))
    table = numpy_helper.to_array(model.graph.initializer[0])
    add_initializers(model, {"permute": table.T.copy()})
    assert candidates(load_model(model)) == ["table", "permute"]
    assert candidates(load_model(_noted(model, table="PARAMETER"))) == ["table"]


def test_what_torch_export_notes():
    scopes = "['', 'blocks.0.attention', 'linear']"
    assert _names("y = MatMul(x, val_5)", scopes, val_5=(3, 2)) == {
        "val_5": "blocks.0.attention.weight"
    }


@pytest.mark.parametrize(
    "scopes", ["", "[", "['a'", "{'a': 1}", "['', 3, 'x']", "['x']", "[]", "a()", "[" * 5000]
)
def test_notes_that_make_no_sense(scopes):
    assert _names("y = MatMul(x, val_5)", scopes, val_5=(3, 2)) == {}


@pytest.mark.parametrize("body", [
    "y = MatMul(x, val_1)",  # nothing says where it comes from
    '["/MatMul"] y = MatMul(x, val_1)',  # the root is not a module
    '["/head/Add"] y = Add(x, val_1)',  # no layer
    '["/a/MatMul"] h = MatMul(x, val_1) ["/b/MatMul"] y = MatMul(h, val_1)',  # two modules
    '["/a/MatMul"] h = MatMul(x, val_1) ["/a/MatMul_1"] y = MatMul(h, val_2)',  # one name
])  # fmt: skip
def test_what_stays_without_a_name(body):
    shapes = {"val_1": (3, 3)} | ({"val_2": (3, 3)} if "val_2" in body else {})
    assert _names(body, **shapes) == {}


def test_a_name_that_the_model_has_already():
    body = '["/a/MatMul"] h = MatMul(x, val_1) y = MatMul(h, "a.weight")'
    assert _names(body, **{"val_1": (3, 3), "a.weight": (3, 3)}) == {}


def test_patterns_find_both_names():
    shapes = {"val_1": (3, 2), "head.bias": (2,), "val_2": (3, 3)}
    body = LINEAR + ' ["/body/MatMul"] k = MatMul(x, val_2) z = Relu(k)'
    model = load_model(_model(body, **shapes))
    assert resolve(model, ["head.*"], [])[0] == ("val_1", "head.bias")
    assert resolve(model, ["val_1"], [])[0] == ("val_1",)
    assert resolve(model, [], ["head.weight"]) == (("head.bias",), ("val_1",))
    with pytest.raises(OdtpackError, match="matches no parameter") as raised:
        resolve(model, ["tail.*"], [])
    assert "'head.weight'" in str(raised.value.hint)


TWO = '["/a/MatMul"] h = MatMul(x, val_1) ["/a/MatMul_1"] y = MatMul(h, val_2)'
TAKEN = '["/a/MatMul"] h = MatMul(x, val_1) ["/b/MatMul"] y = MatMul(h, "a.weight")'
CONTAINER = '["/e/MatMul"] h = MatMul(x, val_1) ["/e/Add"] y = Add(h, "box.e.own") '
SPREAD = '["/b/l/MatMul"] h = MatMul(x, val_1) ["/b/m/MatMul"] y = MatMul(h, val_1)'


@pytest.mark.parametrize(("body", "pattern", "hits"), [
    (TWO, "a.*", ["val_1", "val_2"]),
    (TWO, "a.weight", ["val_1", "val_2"]),
    (TWO, "b.*", []),
    ('["/a/Mul"] y = Mul(x, val_1)', "a.*", ["val_1"]),
    (TAKEN, "a.*", ["val_1", "a.weight"]),
    (TAKEN, "a.weight", ["a.weight"]),
    (CONTAINER, "box.*", ["val_1", "box.e.own"]),
    (CONTAINER + '["/e/f/MatMul"] z = MatMul(y, val_2)', "box.e.f.*", ["val_2"]),
    (SPREAD, "b.*", ["val_1"]),
    (SPREAD, "b.l.*", []),
])  # fmt: skip
def test_a_pattern_finds_all_of_a_module(body, pattern, hits):
    """Also what has no name of its own there, as the weights of stacked recurrent layers."""
    names = ("val_1", "val_2", "a.weight", "box.e.own")
    graph = load_model(_model(body, **{name: (3, 3) for name in names if name in body})).graph
    assert matching(pattern, graph.initializers, known_names(graph)) == hits


def test_a_group_and_an_adapter_find_all_of_a_module(tmp_path):
    body = TWO.replace("y =", "k =") + " y = MatMul(k, w)"
    proto = _model(body, **dict.fromkeys(("val_1", "val_2", "w"), (3, 3)))
    layers = find_layers(load_model(proto).graph)
    assert [layer.matches(["a.*"]) for layer in layers] == [True, True, False]
    groups = (("a.*", 0.1, None),)
    manifest = build_package(proto, tmp_path / "p", loss="mse", groups=groups, self_check=False)
    assert [[*group.parameters] for group in manifest.groups] == [["val_1", "val_2"], ["w"]]


def test_a_container_that_no_name_shows_is_told(tmp_path):
    body = '["/e/MatMul"] h = MatMul(x, val_1) ["/t/MatMul"] y = MatMul(h, "box.t.weight")'
    proto = _model(body, **{"val_1": (3, 3), "box.t.weight": (3, 3)})
    for pattern, count in (("box.*", 1), ("e.*", 0)):
        notes: list[str] = []
        build_package(
            proto, tmp_path / "p", loss="mse", groups=((pattern, 0.1, None),), self_check=False,
            remark=notes.append,
        )  # fmt: skip
        assert sum("no pattern matches val_1 of e" in note for note in notes) == count


def test_inspect_shows_both_names(tmp_path, run):
    path = tmp_path / "model.onnx"
    onnx.save(_model(LINEAR, **{"val_1": (3, 2), "head.bias": (2,)}), path)
    printed = run("inspect", path, "--json", code=0)
    shown = {p["name"]: p["module_name"] for p in printed.json()["parameters"]}
    assert shown == {"val_1": "head.weight", "head.bias": "head.bias"}
    assert "val_1 (head.weight)" in printed.err


# Equal parameters that PyTorch's exporters stored once become parameters of their own again.

TWO_NORMS = """g (float[N, 4] x) => (float[N, 4] y) <float[4] "a.weight" = {1, 1, 1, 1}> {
    ["%s"] h = LayerNormalization(x, "a.weight")
    ["%s"] y = LayerNormalization(h, "a.weight") }"""
OF_MODULES = TWO_NORMS % ("/a/LayerNormalization", "/b/LayerNormalization")


def _initializers(model: ir.Model) -> dict[str, np.ndarray]:
    return {n: np.asarray(v.const_value.numpy()) for n, v in model.graph.initializers.items()}


def _split(model: ir.Model) -> dict[str, list[str]]:
    """Split in a copy that computes the same; return who reads each initializer."""
    after = model.clone()
    split(after.graph)
    assert ir.to_proto(after) != ir.to_proto(model)
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
    split(after.graph, **arguments)
    return ir.to_proto(after) == ir.to_proto(model)


def test_by_the_names_of_nodes():
    named = {f"{module}.weight": [f"/{module}/LayerNormalization"] for module in "ab"}
    assert _split(parse(OF_MODULES)) == named


def test_by_what_torch_export_notes():
    model = parse(TWO_NORMS % ("one", "two"))
    for node, path in zip(model.graph, ("blocks.0.norm", "blocks.1.norm"), strict=True):
        node.metadata_props[SCOPES] = f"['', '{path}', 'layer_norm']"
    assert _split(model) == {"a.weight": ["one"], "blocks.1.norm.weight": ["two"]}


@pytest.mark.parametrize("values", ["1, 1, 1, 1", "1, 1, 2, 1"], ids=["ones", "equal layers"])
def test_by_the_identities_that_the_older_exporter_leaves(values):
    """It knows a tied parameter by one name, and leaves no Identity of it."""
    model = parse(
        f"""g (float[N, 4] x) => (float[N, 4] y) <float[4] "a.weight" = {{{values}}}> {{
            [Identity_3] "b.weight" = Identity("a.weight")
            [one] h = LayerNormalization(x, "b.weight")
            [two] y = LayerNormalization(h, "a.weight") }}"""
    )
    assert _split(model) == {"a.weight": ["two"], "b.weight": ["one"]}


def test_a_scale_that_shares_its_ones_with_a_variance():
    model = parse(
        """g (float[N, 2, 3] x) => (float[N, 2, 3] y)
            <float[2] "n.weight" = {1, 1}, float[2] "n.bias" = {0.5, 1}, float[2] mean = {1, 2}> {
            ["/n/BatchNormalization"]
            y = BatchNormalization(x, "n.weight", "n.bias", mean, "n.weight") }"""
    )
    assert set(_split(model)) == {"n.weight", "n.bias", "mean", "n.running_var"}


def test_a_name_that_is_taken():
    model = parse(
        """g (float[N, 4] x) => (float[N, 4] y)
            <float[4] "a.weight" = {1, 1, 1, 1}, float[4] "b.weight" = {1, 2, 3, 4}> {
            ["/a/LayerNormalization"] h = LayerNormalization(x, "a.weight", "b.weight")
            ["/b/LayerNormalization"] y = LayerNormalization(h, "a.weight") }"""
    )
    assert set(_split(model)) == {"a.weight", "b.weight", "b.weight_2"}


@pytest.mark.parametrize("names", [
    ("/a/LayerNormalization", "/a/LayerNormalization_1"),  # called twice
    ("/a/LayerNormalization", "/a_1/LayerNormalization"),  # called twice, or two modules
    ("one", "two"),  # nothing says where they come from
    ("model/a/Norm", "model/b/Norm"),  # names of another exporter
])  # fmt: skip
def test_one_module(names):
    assert _stays(parse(TWO_NORMS % names))


def test_what_was_trained_is_shared_on_purpose():
    assert _stays(parse(OF_MODULES.replace("{1, 1, 1, 1}", "{1, 1, 1, 2}")))


def test_constants_of_the_file_are_no_parameters():
    text = OF_MODULES.replace('<float[4] "a.weight" = {1, 1, 1, 1}>', "")
    constant = '{ "a.weight" = Constant<value = float[4] {1, 1, 1, 1}>()'
    proto = parsed(text.replace("{", constant, 1))
    assert list(load_model(proto).graph.initializers) == ["a.weight"]


def test_what_the_caller_names():
    assert _stays(parse(OF_MODULES), keep=["a.weight"])


@pytest.mark.parametrize("name", ["val_3", "tmp"])
def test_a_factor_is_no_parameter(name):
    assert _stays(parse(OF_MODULES.replace("a.weight", name)))
