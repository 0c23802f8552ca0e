"""Weights in 8 bits that a model makes numbers of by itself: each is a layer."""

import itertools
import re

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest

from odtpack.adapters import insert_adapter
from odtpack.adapters.layers import find_layers
from odtpack.build import build_package
from odtpack.graph.graphs import Ops
from odtpack.model.loading import load_model
from odtpack.package.segments import cut as packed
from odtpack.quantized import quantize_base
from odtpack.spec import AdapterSpec
from tests.adapters import genai, llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import SPECS, follow, unpacked, with_its_own_matrix
from tests.autodiff.oracle import add_gradients, normal, session
from tests.model_text import parsed
from tests.refused import refused

IN, OUT, RANK = 6, 4, 2
FORMS = {  # how a model writes a weight [IN, OUT] of codes, scales and zero points
    "cast": ("w = Mul(f, s)", "f = Cast<to = 1>(q)", False),
    "scale-first": ("w = Mul(s, f)", "f = Cast<to = 1>(q)", False),
    "zero-points": ("d = Sub(f, z) \n w = Mul(d, s)", "f = Cast<to = 1>(q)", True),
    "dequantized": ("w = DequantizeLinear<axis = 1>(q, t)", "", False),
    "transposed": ("m = Mul(f, s) \n u = Transpose(m) \n w = Transpose(u)", "f = Cast<to = 1>(q)",
                   False),
    "divided": ("w = Div(f, s)", "f = Cast<to = 1>(q)", False),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("form", FORMS)
def test_low_rank_adapter_on_codes(form, kind):
    """Value and gradients are those of the product with the numbers, and a thin one beside it."""
    after, before, zeros = FORMS[form]
    nodes = f"{before} {after} y = MatMul(x, w)"
    codes = np.random.default_rng(1).integers(0, 100, (IN, OUT)).astype(kind)
    scales, points = normal(1, OUT, seed=2) + 3, normal(1, OUT, seed=3)
    stored = {"q": codes, "s": scales, "t": scales[0], "z": points}
    model = parsed(f"g (float[n, {IN}] x) => (float[n, {OUT}] y) {{ {nodes} }}", **stored)
    inserted = insert_adapter(load_model(model), AdapterSpec("lora", ("q",), rank=RANK, alpha=6))
    assert inserted.layers == ("q",)
    a, b = (str(name) for name in inserted.parameters)
    given = {a: normal(RANK, IN, seed=4), b: normal(OUT, RANK, seed=5)}
    for name, array in given.items():
        inserted.model.graph.initializers[name].const_value = ir.tensor(array, name=name)
    loaded, gradients = add_gradients(inserted.model, [a, b])
    x, seed = normal(3, IN, seed=6), normal(3, OUT, seed=7)
    outputs = ["y", gradients[a], gradients[b]]
    found = session(ir.to_proto(loaded), "all").run(outputs, {"x": x, "seed_y": seed})
    numbers = codes - (points if zeros else 0)
    weight = (numbers / scales if form == "divided" else numbers * scales).astype(np.float64)
    wide = x.astype(np.float64)
    wanted = [
        wide @ weight + 3 * wide @ given[a].T @ given[b].T,
        3 * (seed @ given[b]).T @ wide,
        3 * seed.T @ (wide @ given[a].T),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_a_base_of_float16(kind):
    """Its matrices and its table get codes as those of float32 do, and it goes on in float16."""
    logits = []
    for dtype in ("float", "float16"):
        random, shapes = np.random.default_rng(1), {"table": (40, 64), "w": (64, 8)}
        values = {n: random.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
        if dtype == "float":
            values = {name: array.astype(np.float32) for name, array in values.items()}
        nodes = "e = Gather(table, x) l = MatMul(e, w) y = Cast<to = 1>(l)"
        text = f"g (int64[n] x) => (float[n, 8] y) {{ {nodes} }}"
        loaded = load_model(parsed(text, 21, ir_version=10, **values))
        loaded = quantize_base(loaded, kind, (), 21)
        assert not {"table", "w"} & {*loaded.graph.initializers}
        (product,) = (node for node in loaded.graph if node.op_type == "MatMul")
        assert product.outputs[0].dtype == ir.DataType[dtype.upper()]
        ours = onnxruntime.InferenceSession(ir.to_proto(loaded).SerializeToString())
        logits += ours.run(None, {"x": np.arange(40)})
    # Each of 64 products of about 0.64 is rounded four times, to 11 bits.
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=4 * 64 * 0.64 / 2**11)


def layers_of(*widths: int, table: bool = False, opset: int = 17) -> onnx.ModelProto:
    """Products with matrices ``w0``, ``w1`` and so on, or of rows of a table."""
    nodes = ["x0 = Gather(table, x)"] if table else ["x0 = Identity(x)"]
    nodes += [f"x{i + 1} = MatMul(x{i}, w{i})" for i in range(len(widths) - 1)]
    taken = "int64[n]" if table else f"float[n, {widths[0]}]"
    text = f"{' '.join(nodes)} y = Identity(x{len(widths) - 1})"
    shapes = {f"w{i}": pair for i, pair in enumerate(itertools.pairwise(widths))}
    if table:
        shapes["table"] = (40, widths[0])
    values = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    text = f"g ({taken} x) => (float[n, {widths[-1]}] y) {{ {text} }}"
    return parsed(text, opset, ir_version=10, **values)


@pytest.mark.parametrize(("kind", "widths", "narrow"), [
    ("int4", (64, 50, 48, 200, 16), ["w1", "w3"]),
    ("nf4", (64, 50, 48, 200, 16), ["w1", "w3"]),
    ("int4", (96, 32, 64, 16), []),
    ("int8", (50, 70, 33), []),
])  # fmt: skip
def test_what_4_bits_would_not_make_smaller_is_int8(kind, widths, narrow):
    """Each stands for its weights as well as its kind can, takes less, and is named."""
    said: list[str] = []
    model = layers_of(*widths, opset=19)
    loaded = quantize_base(load_model(model), kind, remark=said.append)
    *about, total = said
    assert [line.rpartition(": ")[2].split(", ") for line in about] == [narrow] * bool(narrow)
    numbers = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) weights", total)]
    assert sum(numbers) == sum(a * b for a, b in itertools.pairwise(widths))
    stored = loaded.graph.initializers
    for i, (rows, columns) in enumerate(itertools.pairwise(widths)):
        codes, scales = (stored[f"w{i}.weight_{end}"].const_value for end in ("quantized", "scale"))
        assert codes is not None
        assert scales is not None
        is_int8 = kind == "int8" or f"w{i}" in narrow
        assert (codes.dtype == ir.DataType.INT8) == is_int8
        taken = (codes.nbytes + scales.nbytes) / (rows * columns)
        assert taken <= (1.1 if is_int8 else 0.75)
    given = {"x": normal(5, widths[0], seed=9)}
    ours = onnx.reference.ReferenceEvaluator(ir.to_proto(loaded)).run(None, given)[0]
    exact = onnx.reference.ReferenceEvaluator(model).run(None, given)[0]
    error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
    assert error < {"int8": 0.02, "int4": 0.25, "nf4": 0.25}[kind]
    np.testing.assert_allclose(
        session(ir.to_proto(loaded), "off").run(None, given)[0], ours, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_a_model_in_which_nothing_would_have_4_bits(kind):
    with refused("base-not-used") as caught:
        quantize_base(load_model(layers_of(50, 70, 200, 33)), kind)
    assert caught.value.hint == "use --base int8"


def test_4_bits_beside_a_split_into_equal_parts():
    """As PyTorch's newer exporter writes ``chunk``, in opset 20."""
    nodes = "z = MatMul(x, w) a, b = Split <axis = 1, num_outputs = 2> (z) y = Mul(a, b)"
    graph = f"g (float[n, 64] x) => (float[n, 32] y) {{ {nodes} }}"
    model = parsed(graph, 20, ir_version=10, w=normal(64, 64))
    loaded = quantize_base(load_model(model), "int4")
    assert loaded.graph.opset_imports[""] == 21
    assert session(ir.to_proto(loaded), "off").run(None, {"x": normal(5, 64)})[0].shape == (5, 32)


@pytest.mark.parametrize("kind", ["int4", "nf4"])
def test_a_table_alone_is_int8_and_needs_no_newer_opset(kind):
    model = layers_of(50, table=True)
    loaded = quantize_base(load_model(model), kind, newest_opset=17)
    assert loaded.graph.opset_imports[""] == 17
    rows = {"x": np.arange(40)}
    exact = onnx.numpy_helper.to_array(model.graph.initializer[0])
    ours = onnx.reference.ReferenceEvaluator(ir.to_proto(loaded)).run(None, rows)[0]
    np.testing.assert_allclose(ours, exact, rtol=0, atol=np.abs(exact).max() / 250)


# Weights of 4 bits that a model takes apart from bytes.


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
@pytest.mark.parametrize("shape", [(4, 32), (3, 5), (1, 1)])
@pytest.mark.parametrize("zeros", [None, "stored", "constant"])
@pytest.mark.parametrize("late", [False, True])
def test_what_it_unpacks(kind, shape, zeros, late):
    """As numpy computes it from the codes, with a scale a column."""
    rng = np.random.default_rng(0)
    low = int(ml_dtypes.iinfo(kind).min)
    codes = rng.integers(low, low + 16, shape).astype(kind)
    scales = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    points = rng.integers(low, low + 16, shape[1]).astype(kind)

    scale = ir.val("scale", dtype=ir.DataType.FLOAT, shape=[shape[1]])
    graph = ir.Graph([scale], [], nodes=[], opset_imports={"": 21})
    op = Ops(graph)
    stored = [ir.val("codes", const_value=ir.tensor(codes, name="codes"))]
    if zeros is not None:
        stored.append(ir.val("points", const_value=ir.tensor(points, name="points")))
    for value in stored:
        graph.register_initializer(value)
    unpacked = op.DequantizeLinear(stored[0], op.Mul(scale, 1.0) if late else scale, *stored[1:])
    result = op.Identity(unpacked)
    result.type = unpacked.type = ir.TensorType(ir.DataType.FLOAT)
    result.shape = ir.Shape(shape)
    graph.outputs.append(result)

    lifted = stored if zeros == "stored" else stored[:1]
    packed.unpack(graph, lifted)
    fed = {"scale": scales}
    for value in lifted:
        fed[str(value.name)] = value.const_value.numpy()
        assert fed[str(value.name)].dtype == np.uint8
        graph.initializers.pop(str(value.name))
        value.const_value = None
        graph.inputs.append(value)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    (found,) = onnxruntime.InferenceSession(model).run(None, fed)
    zero = points if zeros else np.zeros_like(points)
    wanted = (codes.astype(np.float32) - zero.astype(np.float32)) * scales
    np.testing.assert_array_equal(found, wanted)


# The loss by parts of the vocabulary is PyTorch's, whatever matrix the model ends in.


@needs_peft
@pytest.mark.parametrize(("words", "base"), [(7, None), (7, "int8"), (100, None)])
def test_tied_to_the_embedding(words, base, llama_file, tmp_path):
    module = llama.llama() if base is None else unpacked(llama.llama(), llama_file, base)
    follow(module, llama_file, tmp_path, SPECS["lora"], base=base, loss_options={"words": words})
    found = onnx.load(tmp_path / "training_model.onnx").graph
    shapes = [[d.dim_value for d in info.type.tensor_type.shape.dim] for info in found.value_info]
    whole = [s for s in shapes if s[-1:] == [llama.VOCABULARY] and len(s) == 3]
    assert words >= llama.VOCABULARY or not whole


@needs_peft
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("base", [None, "int8", "int4"])
def test_a_matrix_of_its_own(base, segments, tmp_path):
    module, model = with_its_own_matrix(base, tmp_path / "model.onnx")
    options = {"base": base, "loss_options": {"words": 8}, "segments": segments}
    follow(module, model, tmp_path / "package", SPECS["lora"], **options)


@needs_peft
@pytest.mark.parametrize("symmetric", [True, False])
def test_of_an_exported_decoder(symmetric, tmp_path):
    model = tmp_path / "model.onnx"
    module = genai.decoder(model, symmetric=symmetric)
    spec = AdapterSpec("lora", ("*.v_proj", "*.down_proj"), (), 3, 5.0)
    follow(module, model, tmp_path / "package", spec, loss_options={"words": 9})
    graph = onnx.load(tmp_path / "package" / "training_model.onnx").graph
    heads = [each.dims for each in graph.initializer if "lm_head" in each.name]
    assert all(rows < llama.VOCABULARY for rows, _ in heads)


def test_the_matrix_must_be_frozen(llama_file, tmp_path):
    head = find_layers(load_model(llama_file).graph)[-1]
    assert head.outputs == llama.VOCABULARY
    for more, code in (
        ({}, "trained-and-frozen"),
        ({"adapter": AdapterSpec("dora", (head.name,))}, "head-not-found"),
        ({"adapter": SPECS["ia3"], "train": (str(head.source.name),)}, "trained-and-frozen"),
    ):
        with refused(code) as caught:
            build_package(
                llama_file, tmp_path, loss="next_token", loss_options={"words": 8}, **more
            )
        missing = code == "head-not-found"
        assert ("--base int4" in str(caught.value.hint)) == missing
        assert ("an adapter on that product" in caught.value.what) == missing


@needs_peft
@pytest.mark.parametrize("base", [None, "int8", "int4"])
def test_adapter_on_the_embedding_of_a_tied_model(base, llama_file, tmp_path):
    """It is on the look-up, as in PEFT, and not on the product with the same table."""
    module = llama.llama() if base is None else unpacked(llama.llama(), llama_file, base)
    spec = AdapterSpec("lora", ("embed_tokens", "*.q_proj"), (), 3, 5.0)
    follow(module, llama_file, tmp_path, spec, base=base)


@needs_peft
def test_adapter_on_an_embedding_of_few_bits(tmp_path):
    model = tmp_path / "model.onnx"
    module = genai.decoder(model, symmetric=False, tables=True)
    spec = AdapterSpec("lora", ("model.embed_tokens", "*.v_proj"), (), 3, 5.0)
    follow(module, model, tmp_path / "package", spec)


@pytest.mark.parametrize("segments", [False, True])
def test_blocks_need_the_release_that_has_them(segments, llama_file, tmp_path):
    with refused("target-cannot-load", what="1.19 is the first"):
        build_package(
            llama_file, tmp_path, loss="next_token", adapter=AdapterSpec("lora", ("*.q_proj",)),
            base="int4", onnxruntime="1.18", segments=segments,
        )  # fmt: skip
