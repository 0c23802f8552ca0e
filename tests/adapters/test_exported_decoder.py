"""Decoders train as they are exported, with contributed operators, few bits and a cache."""

import dataclasses
import json
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from odtpack.adapters import AdapterSpec
from odtpack.adapters.layers import layer_name
from odtpack.adapters.merge import merge_adapter
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack.model.loading import CACHE, load_model
from odtpack.package.candidates import candidates
from odtpack_runtime.package.adapter import PREFIX, PeftAdapter
from tests.adapters import genai, llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import ALPHA, RANK, follow, next_token
from tests.model_text import parsed
from tests.model_text import run as computed
from tests.packaging_tools import built_training, losses_of_steps, open_training
from tests.refused import refused

KINDS: dict[str, dict[str, Any]] = {
    "int4": {}, "int4-zero-points": {"symmetric": False}, "int4-packed": {"packed": True},
    "int4-tables": {"symmetric": False, "tables": True}, "int8": {"bits": 8, "symmetric": False},
}  # fmt: skip


QUERIES = AdapterSpec("lora", ("*.q_proj",))


def changed(proto: onnx.ModelProto, **attributes: int) -> None:
    """Every attention of the model has these attributes, too."""
    for node in proto.graph.node:
        if node.op_type == "GroupQueryAttention":
            made = (onnx.helper.make_attribute(*each) for each in attributes.items())
            node.attribute.extend(made)


@pytest.mark.parametrize("kind", KINDS)
def test_forward_is_that_of_the_contributed_kernels(kind, tmp_path):
    module = genai.decoder(tmp_path / "model.onnx", **KINDS[kind])
    ids = llama.batch()[0]
    expected = computed(onnx.load(tmp_path / "model.onnx"), genai.feeds(ids))["logits"]
    with torch.no_grad():
        np.testing.assert_allclose(module(torch.from_numpy(ids)), expected, rtol=1e-4, atol=1e-5)
    loaded = load_model(tmp_path / "model.onnx")
    assert {node.domain for node in loaded.graph} == {""}
    assert not {"cos_cache", "sin_cache"}.intersection(candidates(loaded))
    found = computed(loaded, {"input_ids": ids})["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_layers_that_reach_no_output_are_named(tmp_path):
    """As the builder writes a model with a layer as wide as the vocabulary."""
    genai.decoder(tmp_path / "model.onnx")
    proto, said = onnx.load(tmp_path / "model.onnx"), list[str]()
    values = {node.name: node.output[0] for node in proto.graph.node}
    for node in proto.graph.node:
        if node.name.startswith("/lm_head/MatMul"):
            node.input[0] = values["/model/layers.1/input_layernorm/SkipLayerNorm"]
    manifest = build_package(
        proto, tmp_path / "package", loss="next_token", adapter=QUERIES, remark=said.append
    )
    assert manifest.adapter.layers == ("model.layers.0.self_attn.q_proj",)
    (told,) = (text for text in said if "depends on" in text)
    assert "model.layers.1.self_attn.q_proj" in told
    assert "layers.0" not in told


@needs_peft
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_agree_with_peft(kind, tmp_path):
    module = genai.decoder(tmp_path / "model.onnx", **KINDS[kind])
    heads = {"num_attention_heads": genai.SHAPE.heads, "num_key_value_heads": genai.SHAPE.shared}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **heads}))
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    spec = AdapterSpec("lora", tuple(f"model.*.{name}" for name in names), (), RANK, ALPHA)
    follow(module, tmp_path / "model.onnx", tmp_path / "package", spec)


@needs_peft
def test_dora_sees_the_stored_weights(tmp_path):
    module = genai.decoder(tmp_path / "model.onnx", symmetric=False)
    spec = AdapterSpec("dora", ("*.self_attn.v_proj", "*.up_proj"), (), RANK, ALPHA)
    follow(module, tmp_path / "model.onnx", tmp_path / "package", spec)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_decoder_in_float16_learns_from_the_same_loss(symmetric, tmp_path):
    module = genai.decoder(tmp_path / "model.onnx", symmetric=symmetric)
    genai.to_float16(tmp_path / "model.onnx")
    ids, labels = llama.batch()
    with torch.no_grad():
        wanted = next_token(module(torch.from_numpy(ids)), torch.from_numpy(labels))
    spec = AdapterSpec("lora", ("*.q_proj", "*.down_proj"))
    build = {"loss": "next_token", "adapter": spec}
    _, trainer, optimizer = built_training(tmp_path / "model.onnx", tmp_path / "package", **build)
    optimizer.set_learning_rate(0.01)
    losses = losses_of_steps(trainer, optimizer, [(ids, labels)] * 4)
    assert losses[0] == pytest.approx(wanted.item(), rel=1e-3)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.97 * losses[0]


def test_codes_stay_codes(run, tmp_path):
    genai.decoder(tmp_path / "model.onnx")
    outcome = run(
        "build", tmp_path / "model.onnx", "--out", tmp_path / "package", "--loss", "next_token",
        "--adapter", "lora", "--on", "*.q_proj", "--on", "*.v_proj", code=0)  # fmt: skip
    shown = " ".join((outcome.out + outcome.err).split())
    assert "past_key_values.0.key" in shown
    assert "empty cache" in shown
    widest = genai.SHAPE.width * genai.SHAPE.inner
    for name in ("training", "eval"):
        graph = onnx.load(tmp_path / "package" / f"{name}_model.onnx").graph
        assert {node.domain for node in graph.node} <= {"", "ai.onnx"}
        codes = [each for each in graph.initializer if each.data_type == onnx.TensorProto.INT4]
        assert len(codes) == 15  # seven products in two blocks, and the last
        floats = [each for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
        assert max(np.prod(each.dims) for each in floats) < widest


@pytest.mark.parametrize(
    ("change", "why"),
    [({"smooth_softmax": 1}, "smooth"), ({"causal": 0}, "causal"), ({"qk_output": 1}, "scores")],
)
def test_what_is_not_read_is_one_clear_error(change, why, tmp_path):
    genai.decoder(tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    changed(proto, **change)
    with refused("no-gradient", what=why) as caught:
        build_package(proto, tmp_path / "package", loss="next_token", adapter=QUERIES)
    assert "GroupQueryAttention" in caught.value.what


def test_norms_of_queries_alone_are_refused(tmp_path):
    """The kernels take a weight for the keys with one for the queries."""
    genai.decoder(tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    for node in proto.graph.node:
        if node.op_type == "GroupQueryAttention":
            size = genai.SHAPE.inner // genai.SHAPE.heads
            weight = onnx.numpy_helper.from_array(np.ones(size, np.float32), f"{node.name}.norm")
            proto.graph.initializer.append(weight)
            node.input.extend([""] * (14 - len(node.input)) + [weight.name])
    with pytest.raises(OdtpackError, match="queries or keys, and not both"):
        build_package(proto, tmp_path / "package", loss="next_token", adapter=QUERIES)


@pytest.mark.parametrize("smooth", [0, 1])  # in standard operators, and as a kernel
def test_an_empty_cache_that_slides_is_a_window(smooth, tmp_path):
    """As genai writes Gemma 2."""
    genai.decoder(tmp_path / "model.onnx")
    proto, ids = onnx.load(tmp_path / "model.onnx"), llama.batch()[0]

    changed(proto, local_window_size=3, smooth_softmax=smooth)
    expected = computed(proto, genai.feeds(ids))["logits"]
    changed(proto, sliding_window_cache=1)
    loaded = load_model(proto)
    feeds = {str(v.name): genai.feeds(ids)[str(v.name)] for v in loaded.graph.inputs}
    assert not [name for name in feeds if name.startswith("past")]
    np.testing.assert_allclose(computed(loaded, feeds)["logits"], expected, rtol=1e-4, atol=1e-5)


@needs_peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize(("kind", "packed"), [("llama", True), ("phi", False), ("phi3", False)])
def test_peft_finds_every_layer_but_those_that_the_export_names(kind, packed, run, tmp_path):
    import peft
    import transformers

    genai.decoder(tmp_path / "model.onnx", packed=packed)
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"type": kind}}))
    spec = AdapterSpec("lora", ("*.self_attn.*", "*1.mlp.*"), (), RANK, ALPHA)
    if kind == "phi":  # whose feedforward layers are others
        spec = dataclasses.replace(spec, on=("*.self_attn.*",))
    package, adapter = tmp_path / "package", tmp_path / "adapter"
    manifest = build_package(tmp_path / "model.onnx", package, loss="next_token", adapter=spec)
    outcome = run("adapter", "export", package, "--out", adapter, code=0)
    shape, info = genai.SHAPE, manifest.adapter
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=2,
        num_attention_heads=shape.heads, num_key_value_heads=shape.shared, pad_token_id=0,
        vocab_size=llama.VOCABULARY,
    )  # fmt: skip
    module = transformers.AutoModelForCausalLM.from_config(config)
    known = {name for name, _ in module.named_modules()}
    assert info.absent == tuple(name for name in info.layers if name not in known)
    assert bool(info.absent) == packed == ("PEFT will not find" in outcome.err)
    found = peft.PeftModel.from_pretrained(module, adapter).state_dict()
    run("adapter", "merge", tmp_path / "model.onnx", adapter, "--out", tmp_path / "m.onnx", code=0)
    start = open_training(package)[0].parameters
    for name in set(info.layers) - set(info.absent):
        loaded = found[f"{PREFIX}{name}.lora_A.default.weight"]
        np.testing.assert_array_equal(loaded, start[f"{PREFIX}{name}.lora_A.weight"].data)


PLAIN = """
g (int64[batch, tokens] ids, float[batch, 2, past, 3] past_0_key) =>
    (float[batch, tokens, 5] logits, float[batch, 2, all, 3] present_0_key)
    <int64[4] heads = {0, 0, 2, 3}, int64[3] width = {0, 0, 6}, int64 two = {2}> {
    rows = Gather(table, ids) both = Reshape(rows, heads)
    new = Transpose<perm = [0, 2, 1, 3]>(both) present_0_key = Concat<axis = -2>(past_0_key, new)
    shape = Shape(past_0_key) count = Gather(shape, two) length = Cast<to = 1>(count)
    moved = Add(present_0_key, length) back = Transpose<perm = [0, 2, 1, 3]>(moved)
    flat = Reshape(back, width) logits = MatMul(flat, weight)
}"""


def test_a_cache_in_standard_operators_is_left_out():
    random = np.random.default_rng(2)
    table, weight = (random.normal(size=s).astype(np.float32) for s in ((7, 6), (6, 5)))
    proto = parsed(PLAIN, table=table, weight=weight)
    loaded = load_model(proto)
    assert [value.name for value in loaded.graph.inputs] == ["ids"]
    assert [value.name for value in loaded.graph.outputs] == ["logits"]
    assert loaded.meta[CACHE] == ("past_0_key",)
    ids = np.array([[1, 2, 6], [0, 3, 4]])
    empty = np.zeros((2, 2, 0, 3), np.float32)
    expected = computed(proto, {"ids": ids, "past_0_key": empty})["logits"]
    np.testing.assert_allclose(computed(loaded, {"ids": ids})["logits"], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_into_few_bits(kind, tmp_path):
    """The adapter goes into the codes: no further from the sum than rounding takes them."""
    model = tmp_path / "model.onnx"
    genai.decoder(model, **KINDS[kind])
    proto = onnx.load(model)
    products = [node for node in proto.graph.node if node.op_type == "MatMulNBits"]
    random, tensors, wanted = np.random.default_rng(3), {}, {}
    for node in products[:-1]:
        before = genai.numbers(proto, node).numpy().astype(np.float64)
        name = layer_name(node.input[1], {})
        a, b = (0.3 * random.standard_normal(s).astype(np.float32)
                for s in ((2, before.shape[1]), (before.shape[0], 2)))  # fmt: skip
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        wanted[node.name] = before + 1.5 * b.astype(np.float64) @ a
    said: list[str] = []
    adapter = PeftAdapter("lora", tensors, 2, 1.5)
    (tmp_path / "merged.onnx").write_bytes(merge_adapter(model, adapter, remark=said.append))
    merged = onnx.load(tmp_path / "merged.onnx")
    error = 0.0
    for node in merged.graph.node:
        if node.name in wanted:
            found = genai.numbers(merged, node).numpy().astype(np.float64)
            blocks = -(-found.shape[1] // genai.BLOCK)
            scales = next(numpy_helper.to_array(t) for t in merged.graph.initializer
                          if t.name == node.input[2]).reshape(-1, blocks)  # fmt: skip
            steps = np.abs(scales).repeat(genai.BLOCK, 1)[:, : found.shape[1]]
            off = np.abs(found - wanted[node.name])
            assert (off <= 1.001 * steps).all()
            assert np.median(off / steps) < 0.3
            error += float((off**2).sum())
    assert f"{len(wanted)} quantized matrices" in said[0]
    assert f"the error is {np.sqrt(error):.3g}," in said[0]
    computed(merged, genai.feeds(llama.batch()[0]))
