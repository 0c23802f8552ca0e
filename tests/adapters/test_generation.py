"""Decoders generate with the adapters that were trained for them, from the training's weights."""

import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import odtpack.build
import odtpack.package.segments.build
from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack_runtime import CheckpointState, Generator, Package, save_adapter
from odtpack_runtime.package import generator as generator_module
from odtpack_runtime.package import packed
from tests.adapters import llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_written_by_tools import twin
from tests.adapters.written.models import GENAI, HERE, OPTIMUM, causal
from tests.packaging_tools import built_package, losses_of_steps, open_training
from tests.packed_weights import FILES, at_once, damaged, packed_by_onnxruntime, packed_in
from tests.refused import refused

SPEC = AdapterSpec("lora", ("model.*_proj",), (), 4, 8.0)
PROMPT = [*range(3, 9)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Package, Any]]:
    """A package of segments of a model, and its state after three steps, made once."""

    @functools.cache
    def make(name: str) -> tuple[Package, Any]:
        package = built(name, tmp_path_factory.mktemp(name))
        state, module, optimizer = open_training(package.path)
        optimizer.set_learning_rate(0.05)
        ids, labels = llama.batch()
        more = (np.ones_like(ids), np.arange(ids.shape[1]) + 0 * ids)
        batch = (ids, *(more if name in OPTIMUM else ()), labels)
        losses_of_steps(module, optimizer, [batch] * 3)
        return package, state

    return make


def exact(name: str, folder: Path) -> Path:
    """The model, with products that compute in float32."""
    proto = onnx.load(HERE / name / "model.onnx")
    for node in proto.graph.node:
        for each in node.attribute:
            if each.name == "accuracy_level":
                each.i = 1
    onnx.save(proto, folder / "model.onnx")
    for beside in (HERE / name).glob("*config.json"):  # which says what the layers are called
        shutil.copy(beside, folder)
    return folder / "model.onnx"


def built(name: str, folder: Path, **more: Any) -> Package:
    """A package of segments of the model."""
    given = {"loss": "next_token", "segments": True, "adapter": SPEC} | more
    return built_package(exact(name, folder), folder / "package", **given)


def logits(model: Path, options: Any = None) -> np.ndarray:
    """What ONNX Runtime makes of the prompt, with an empty cache."""
    session, ids = onnxruntime.InferenceSession(model), np.array([PROMPT])
    own = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    own["position_ids"] = np.arange(len(PROMPT))[None]
    feeds = {
        node.name: own[node.name] if node.name in own
        else np.zeros((1, node.shape[1], 0, node.shape[3]), np.float32)
        for node in session.get_inputs()
        if node.name in own or node.name.startswith("past")
    }  # fmt: skip
    (found,) = session.run(["logits"], feeds, options)
    return np.asarray(found[0])


@needs_peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", [*GENAI, *OPTIMUM])
def test_logits_are_those_of_peft(name, trained, tmp_path):
    import peft

    package, state = trained(name)
    save_adapter(package, state, tmp_path / "peft")
    save_adapter(package, state, tmp_path / "it.onnx_adapter")
    module = twin(name) if name in GENAI else causal(*OPTIMUM[name][:3])
    ids = np.random.default_rng(2).integers(0, 128, 25)
    with torch.no_grad():
        plain = module(torch.from_numpy(ids)[None]).logits[0]
        merged = peft.PeftModel.from_pretrained(module, str(tmp_path / "peft")).merge_and_unload()
        wanted = merged.eval()(torch.from_numpy(ids)[None]).logits[0]
    generator = Generator(package)
    for key, source in (("state", state), ("peft", tmp_path / "peft"),
                        ("file", tmp_path / "it.onnx_adapter")):  # fmt: skip
        generator.add_adapter(key, source)
        np.testing.assert_allclose(generator.logits(ids, key), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(generator.logits(ids), plain, rtol=1e-4, atol=1e-4)
    assert (wanted - plain).abs().max() > 0.01  # it has learned
    greedy = merged.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    found = [*generator.generate(PROMPT, adapter="file", max_tokens=12)]
    expected = greedy[0, len(PROMPT) :].tolist()
    assert found[: len(expected)] == expected  # PyTorch's ends at its own end of a sequence


def test_codes_of_weights_without_names(tmp_path):
    """ONNX Runtime's quantizer goes by the exporter's numbers; layers have the modules' names."""
    quantizer = MatMulNBitsQuantizer(
        onnx.load(HERE / "optimum-llama-tied-past" / "model.onnx"), block_size=16, is_symmetric=True
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(tmp_path / "model.onnx"))
    build = {"loss": "next_token", "segments": True, "adapter": SPEC}
    package = built_package(tmp_path / "model.onnx", tmp_path / "package", **build)
    assert package.manifest.adapter is not None
    assert "model.layers.1.mlp.down_proj" in package.manifest.adapter.layers
    assert len(package.manifest.adapter.layers) == 14
    found = Generator(package).logits(PROMPT)
    np.testing.assert_allclose(found, logits(tmp_path / "model.onnx"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*GENAI, *OPTIMUM])
def test_weights_are_stored_once(name, trained):
    package, _ = trained(name)
    model = onnx.load(package.decoder, load_external_data=False)
    outside = {t.external_data[0].value for t in model.graph.initializer if t.external_data}
    assert outside == {"segments.weights", "decoder.weights"}
    kept = {node.op_type for node in model.graph.node}
    assert kept.issuperset({"GroupQueryAttention", "MatMulNBits"} if "int4" in name else {"MatMul"})


def test_the_same_bytes_whatever_order_a_part_of_a_graph_has(trained, tmp_path, monkeypatch):
    """onnx-ir keeps the initializers of a part in a set, whose order changes by chance."""
    whole, _ = trained("genai-llama-tied-int4")
    extract = ir.convenience.extract

    def backwards(*args: Any) -> ir.Graph:
        found = extract(*args)
        values = [*found.initializers.values()]
        found.initializers.clear()
        for value in reversed(values):
            found.register_initializer(value)
        return found

    monkeypatch.setattr(ir.convenience, "extract", backwards)
    for path in built("genai-llama-tied-int4", tmp_path).path.iterdir():
        assert path.read_bytes() == whole.decoder.with_name(path.name).read_bytes(), path.name


def test_the_widest_matrices_are_read_in_parts(trained, tmp_path, monkeypatch):
    """Rows of the vocabulary, 36 at a time: the same bytes of a file, and the same logits."""
    whole, state = trained("genai-llama-tied-int4")
    monkeypatch.setattr(odtpack.package.segments.build, "_WIDEST", 24 * 96)
    package = built("genai-llama-tied-int4", tmp_path)
    model = onnx.load(package.decoder, load_external_data=False)
    head = [node for node in model.graph.node if node.op_type == "MatMulNBits"
            and node.input[1].startswith("lm_head")]  # fmt: skip
    assert [onnx.helper.get_node_attr_value(node, "N") for node in head] == [36, 36, 36, 20]
    assert package.decoder.with_name("decoder.weights").stat().st_size == 4 * 96 * 4  # zeros alone
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    plain, parted, in_place = Generator(whole), Generator(package), Generator(package, options)
    for generator in (plain, parted, in_place):
        generator.add_adapter("mine", state)
    wanted = plain.logits(PROMPT, "mine")
    np.testing.assert_allclose(parted.logits(PROMPT, "mine"), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(in_place.logits(PROMPT, "mine"), wanted, rtol=1e-4, atol=1e-4)


def keeping(folder: Path) -> onnxruntime.SessionOptions:
    """Options that keep packed weights in a folder."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("odtpack.packed_weights", str(folder))
    return options


@pytest.mark.parametrize("name", ["genai-qwen2-int4", "genai-llama-tied-int4", *OPTIMUM])
def test_packed_weights_are_written_once_and_mapped(name, trained, tmp_path, monkeypatch, capfd):
    package, state = trained(name)
    kept = tmp_path / "new" / "kept"
    monkeypatch.setattr(packed, "_AT_ONCE", 16384)  # some products at a time
    save, parts = packed._save, []
    monkeypatch.setattr(packed, "_save", lambda *a, **k: (parts.append(a), save(*a, **k)))
    options = keeping(kept)
    found = []
    for generator in (Generator(package), Generator(package, options), Generator(package, options)):
        generator.add_adapter("mine", state)
        found.append(generator.logits(PROMPT, "mine").tobytes())
        found.append(bytes(generator.generate(PROMPT, adapter="mine", max_tokens=6)))
    assert found == 3 * found[:2]
    assert capfd.readouterr().err == ""  # ONNX Runtime warns of inputs that have values
    assert options.log_severity_level == -1
    (first,) = kept.iterdir()
    assert {each.name for each in first.iterdir()} == FILES
    assert packed_in(first) == packed_by_onnxruntime(package.decoder, tmp_path / "whole")
    assert len(parts) > 2
    before = (first / "decoder.weights").stat()
    Generator(package, keeping(kept))
    assert (first / "decoder.weights").stat() == before

    # What a killed process left, and what another ONNX Runtime packed, gives way.
    (kept / "odtpack-packed-0.part").mkdir()
    monkeypatch.setattr(onnxruntime, "__version__", "1.99.0")
    Generator(package, keeping(kept))
    (second,) = kept.iterdir()
    assert second != first


def test_packed_weights_that_cannot_be_kept_are_an_error(trained, tmp_path):
    package, _ = trained("genai-qwen2-int4")
    (tmp_path / "file").write_bytes(b"")
    with refused("packed-not-written"):
        Generator(package, keeping(tmp_path / "file"))
    options = keeping(tmp_path / "kept")
    shutil.copytree(package.path, tmp_path / "package")
    broken = Package.open(tmp_path / "package")
    broken.decoder.write_bytes(b"\x08\x08")
    with refused("packed-not-written"):
        Generator(broken, options)
    assert not [*(tmp_path / "kept").iterdir()]  # nothing is left that would be taken
    Generator(package, options)


def test_damaged_packed_weights_are_written_anew(trained, tmp_path):
    package, _ = trained("genai-qwen2-int4")
    wanted = Generator(package).logits(PROMPT).tobytes()
    Generator(package, keeping(tmp_path))
    (kept,) = tmp_path.iterdir()
    for damage in damaged(kept):
        assert Generator(package, keeping(tmp_path)).logits(PROMPT).tobytes() == wanted, damage
        assert [*tmp_path.iterdir()] == [kept]
        assert {each.name for each in kept.iterdir()} == FILES


def test_a_full_disk_is_named(trained, tmp_path, monkeypatch):
    """ONNX Runtime says only that it cannot write."""
    package, _ = trained("genai-qwen2-int4")
    failed = mock.Mock(side_effect=OdtpackError("model-not-loadable", "graph.cc:5468"))
    monkeypatch.setattr(packed, "_save", failed)
    for free, text in ((0, "No space left on device"), (1 << 40, "graph.cc:5468")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with refused("packed-not-written", text):
            Generator(package, keeping(tmp_path))


OPENS = """
import sys
import onnxruntime
from odtpack_runtime import Generator, Package
package, kept = Package.open(sys.argv[1]), sys.argv[2]
for _ in range(15):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("odtpack.packed_weights", kept)
    options.log_severity_level = 3
    logits = Generator(package, options).logits([3, 4, 5])
print(logits.tobytes().hex())
"""


def test_two_packages_take_turns_in_one_folder(trained, tmp_path):
    packages = [trained(name)[0] for name in ("genai-qwen2-int4", "genai-llama-tied-int4")]
    wanted = [Generator(package).logits([3, 4, 5]).tobytes().hex() for package in packages]
    commands = [[sys.executable, "-c", OPENS, each.path, tmp_path] for each in packages]
    assert [each.strip() for each in at_once(*commands)] == wanted


@pytest.mark.parametrize("name", ["genai-qwen2-int4", *OPTIMUM])
def test_export_is_the_decoder_with_the_adapter_inside(name, trained, run, tmp_path):
    package, state = trained(name)
    CheckpointState.save_checkpoint(state, tmp_path / "it.ckpt")
    out = tmp_path / "out" / "m.onnx"
    out.parent.mkdir()
    asked = ("--checkpoint", tmp_path / "it.ckpt", "--out", out)
    for code, *options in (
        ("option-not-used", "--outputs", "x"), ("segments-unsupported", "--ort-format"),
    ):  # fmt: skip
        assert code in run("export", package.path, *asked, *options).err
    outcome = run("export", package.path, *asked, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["files"] == ["m.onnx", "m.onnx.data"]
    before, after = (
        onnx.load(path, load_external_data=False).graph for path in (package.decoder, out)
    )
    assert [node.op_type for node in after.node] == [node.op_type for node in before.node]
    assert not onnxruntime.InferenceSession(out).get_overridable_initializers()
    generator = Generator(package)
    generator.add_adapter("it", state)
    np.testing.assert_allclose(logits(out), generator.logits(PROMPT, "it"), rtol=1e-5, atol=1e-5)


@needs_peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_export_into_the_model_that_was_built(run, tmp_path):
    """A package of one model has no decoder; what it was built of keeps its cache."""
    import peft

    name, package = "genai-qwen2-int4", tmp_path / "package"
    model = exact(name, tmp_path)
    opened = built_package(model, package, loss="next_token", adapter=SPEC)
    random = np.random.default_rng(1)
    state = CheckpointState.load_checkpoint(opened.checkpoint)
    for array in state.arrays(trainable=True).values():
        np.add(array, 0.1 * random.normal(size=array.shape), out=array, casting="same_kind")
    CheckpointState.save_checkpoint(state, tmp_path / "it.ckpt")
    save_adapter(opened, state, tmp_path / "peft")
    out = tmp_path / "m.onnx"
    asked = ("--checkpoint", tmp_path / "it.ckpt", "--out", out)
    plain = run("export", package, *asked)
    assert "--model" in plain.out + plain.err
    for more in ("--ort-format",), ("--outputs", "logits"):
        assert "option-not-used" in run("export", package, *asked, "--model", model, *more).err
    other = run("export", package, *asked, "--model", HERE / "genai-phi3-int4" / "model.onnx")
    assert "decoder-unsupported" in other.err
    assert run("export", package, *asked, "--model", model).code == 0
    kept = {"GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization"}
    before, after = (
        [node.op_type for node in onnx.load(path).graph.node if node.op_type in kept]
        for path in (model, out)
    )
    assert before == after
    ids = torch.tensor([PROMPT])
    theirs = peft.PeftModel.from_pretrained(twin(name), str(tmp_path / "peft")).eval()
    with torch.no_grad():
        wanted, base = theirs(ids).logits[0], twin(name)(ids).logits[0]
    np.testing.assert_allclose(logits(out), wanted, rtol=1e-4, atol=1e-4)
    assert (wanted - base).abs().max() > 0.01


def test_onnx_runtime_s_own_adapters(trained, run, tmp_path):
    """The decoder and the command's file are what RunOptions.add_active_adapter takes."""
    package, state = trained("genai-qwen2-int4")
    CheckpointState.save_checkpoint(state, tmp_path / "it.ckpt")
    asked = ("--checkpoint", tmp_path / "it.ckpt", "--out", tmp_path / "out", "--onnxruntime")
    outcome = run("adapter", "export", package.path, *asked)
    assert outcome.code == 0, outcome.err
    assert not (tmp_path / "out" / "base.onnx").exists()
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "out" / "adapter.onnx_adapter"))
    options.add_active_adapter(adapter)
    generator = Generator(package)
    generator.add_adapter("it", state)
    found = logits(package.decoder, options)
    np.testing.assert_allclose(found, generator.logits(PROMPT, "it"), rtol=1e-5, atol=1e-5)


def test_tokens(trained, monkeypatch):
    """The cache, the end, and sampling; a prompt is read in parts."""
    monkeypatch.setattr(generator_module, "_AT_ONCE", 4)
    package, state = trained("genai-qwen2-int4")
    generator = Generator(package)
    generator.add_adapter("it", state)
    tokens = [*PROMPT]
    for _ in range(8):  # without the cache
        tokens.append(int(generator.logits(tokens, "it")[-1].argmax()))
    found = [*generator.generate(PROMPT, adapter="it", max_tokens=8)]
    assert found == tokens[len(PROMPT) :]
    first = found.index(found[3])
    assert [*generator.generate(PROMPT, adapter="it", stop={found[3]})] == found[:first]
    sharp: Any = {"temperature": 1, "top_k": 1}
    assert [*generator.generate(PROMPT, adapter="it", max_tokens=8, **sharp)] == found
    assert [*generator.generate(PROMPT, max_tokens=0)] == []
    softmax = np.exp(generator.logits(PROMPT)[-1].astype(np.float64) / 2)
    softmax /= softmax.sum()
    drawn = [
        next(generator.generate(PROMPT, temperature=2, seed=seed, max_tokens=1))
        for seed in range(600)
    ]
    again = [*generator.generate(PROMPT, temperature=2, seed=5, max_tokens=4)]
    assert again == [*generator.generate(PROMPT, temperature=2, seed=5, max_tokens=4)]
    counts = np.bincount(drawn, minlength=len(softmax)) / len(drawn)
    assert np.abs(counts - softmax).max() < 5 * np.sqrt(softmax.max() / len(drawn))
    few = {next(generator.generate(PROMPT, temperature=2, top_p=0.1, seed=s)) for s in range(40)}
    order = np.argsort(-softmax)
    assert few == {*order[: int(np.searchsorted(np.cumsum(softmax[order]), 0.1)) + 1]}


def test_a_decoder_that_does_not_run_is_left_out(tmp_path, monkeypatch):
    made = odtpack.build.decoder_with_adapter

    def wrong(*arguments: Any) -> ir.Model:
        decoder = made(*arguments)
        for node in decoder.graph:
            if node.op_type == "GroupQueryAttention":
                node.attributes["num_heads"] = ir.AttrInt64("num_heads", 3)
        return decoder

    monkeypatch.setattr(odtpack.build, "decoder_with_adapter", wrong)
    said: list[str] = []
    package = built("genai-qwen2-int4", tmp_path, remark=said.append)
    assert [text for text in said if text.startswith("the model is not kept for generation: ")]
    with refused("no-decoder"):
        _ = package.decoder
    assert not [*tmp_path.glob("package/decoder*")]


def test_errors(trained, llama_file, tmp_path):
    package, _ = trained("genai-qwen2-int4")
    generator = Generator(package)
    for code, action in (
        ("bad-prompt", lambda: generator.logits([])),
        ("bad-prompt", lambda: generator.logits([-1])),
        ("bad-prompt", lambda: generator.logits([0.5])),
        ("bad-prompt", lambda: generator.logits([1, 128])),
        ("run-failed", lambda: generator.logits([1] * 40)),  # of 32 positions
        ("unknown-adapter", lambda: generator.logits(PROMPT, "other")),
        ("unknown-adapter", lambda: generator.remove_adapter("other")),
        ("bad-prompt", lambda: generator.logits(np.array([2**63 + 5], np.uint64))),
        ("bad-argument", lambda: generator.generate(PROMPT, top_p=0)),
        ("bad-argument", lambda: generator.generate(PROMPT, top_k=2.5)),
        ("bad-argument", lambda: generator.generate(PROMPT, max_tokens=2.5)),
        ("bad-argument", lambda: generator.generate(PROMPT, seed=1.5)),
        ("bad-argument", lambda: generator.generate(PROMPT, temperature="1")),
        ("bad-argument", lambda: generator.generate(PROMPT, temperature=None)),
        ("bad-argument", lambda: generator.generate(PROMPT, top_p="1")),
        ("bad-argument", lambda: generator.generate(PROMPT, stop=2)),
        ("bad-argument", lambda: generator.generate(PROMPT, stop=[None])),
        ("adapter-not-found", lambda: generator.add_adapter("x", tmp_path / "x.onnx_adapter")),
    ):
        with refused(code) as caught:
            action()
        assert "checkpoint" not in str(caught.value.hint)
    assert len([*generator.generate(PROMPT, temperature=1e-320, max_tokens=2)]) == 2
    # ONNX Runtime takes the token for zeros where the embedding is of 4 bits.
    generator = Generator(trained("genai-llama-tied-int4")[0])
    for action in (generator.logits, generator.generate):
        with refused("bad-prompt", "128 is not below the 128"):
            action([3, 128])
    generator = Generator(package)
    spec = AdapterSpec("lora", ("*_proj",))
    build_package(llama_file, tmp_path / "plain", loss="next_token", segments=True, adapter=spec)
    with refused("no-decoder"):
        Generator(Package.open(tmp_path / "plain"))
    said: list[str] = []
    build_package(
        HERE / "genai-qwen2-int4" / "model.onnx", tmp_path / "dora", loss="next_token",
        segments=True, adapter=AdapterSpec("dora", ("model.*_proj",)), remark=said.append,
    )  # fmt: skip
    assert any("not kept for generation" in each for each in said)
    other = CheckpointState.load_checkpoint(tmp_path / "dora" / "checkpoint")
    with refused("adapter-mismatch"):
        generator.add_adapter("x", other)
    assert "decoder_model" not in (tmp_path / "dora" / "manifest.json").read_text()
