"""A package of segments trains as PEFT does, and as the package with one model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy

from odtpack import optimizers
from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.graph.graphs import nodes_of
from odtpack.package.segments import cut as rows
from odtpack_runtime import CheckpointState, OdtpackError, Package, load_adapter, save_adapter
from odtpack_runtime.package.adapter import TENSORS
from odtpack_runtime.package.verify import verify_package
from tests.adapters import genai, llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import SPECS, follow, unpacked
from tests.model_text import parsed
from tests.packages.mutations import edit
from tests.packaging_tools import built_training, losses_of_steps, open_training
from tests.refused import refused

ADAMW = optimizers.AdamW(weight_decay=0.01)


@needs_peft
def test_of_an_exported_decoder(tmp_path):
    model = tmp_path / "model.onnx"
    module = genai.decoder(model, symmetric=False)
    spec = AdapterSpec("lora", ("*.v_proj", "*.down_proj"), (), 3, 5.0)
    follow(module, model, tmp_path / "package", spec, loss_options={"words": 9}, segments=True)


@needs_peft
@pytest.mark.parametrize(("base", "part"), [("int8", (6, 24)), ("int4", (8, 16))])
def test_of_matrices_by_rows(base, part, llama_file, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "LARGEST_PART", 150)
    module = unpacked(llama.llama(), llama_file, base)
    follow(module, llama_file, tmp_path, SPECS["lora"], base=base, segments=True)
    assert part in unpacked_shapes(tmp_path)


@needs_peft
@pytest.mark.parametrize("symmetric", [False, True])
def test_of_an_exported_decoder_by_rows(symmetric, tmp_path, monkeypatch):
    """Its matrices are stored with the outputs first, and may have zero points."""
    monkeypatch.setattr(rows, "LARGEST_PART", 150)
    model = tmp_path / "model.onnx"
    module = genai.decoder(model, symmetric=symmetric)
    spec = AdapterSpec("lora", ("*.v_proj", "*.down_proj"), (), 3, 5.0)
    package = tmp_path / "package"
    follow(module, model, package, spec, segments=True)
    assert {(2, 64), (2, 80)} <= unpacked_shapes(package)


def unpacked_shapes(folder: Path) -> set[tuple[int, ...]]:
    """Shapes of the codes that the models of segments unpack."""
    found = set()
    for path in folder.glob("segment_*.onnx"):
        graph = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
        shapes = {each.name: tuple(each.dims) for each in graph.initializer}
        for each in (*graph.input, *graph.value_info):
            shapes[each.name] = tuple(dim.dim_value for dim in each.type.tensor_type.shape.dim)
        found |= {
            shapes[node.input[0]] for node in graph.node if node.op_type == "DequantizeLinear"
        }
    return found


def built(model: Path, folder: Path, **more: Any) -> Path:
    given: dict[str, Any] = {"adapter": SPECS["lora"], "base": "int4", "segments": True} | more
    build_package(model, folder, loss="next_token", optimizer=ADAMW, **given)
    return folder


def trained(folder: Path, steps: int, checkpoint: Path | None = None) -> tuple[Any, list[float]]:
    state, module, optimizer = open_training(folder, checkpoint=checkpoint)
    losses = losses_of_steps(module, optimizer, [llama.batch()] * steps)
    module.eval()
    losses.append(float(module(*llama.batch())))
    return state, losses


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("more", [{"accumulation_steps": 2}, {"loss_options": {"words": 5}}])
def test_as_one_model(kind, more, llama_file, tmp_path):
    more = {"adapter": SPECS[kind], **more}
    whole, losses = trained(built(llama_file, tmp_path / "one", segments=False, **more), 10)
    cut, again = trained(built(llama_file, tmp_path / "cut", **more), 10)
    np.testing.assert_allclose(again, losses, rtol=1e-6)
    assert_alike(cut, whole)


def assert_alike(ours: CheckpointState, wanted: CheckpointState) -> None:
    """What was trained."""
    for name, parameter in wanted.parameters:
        if parameter.requires_grad:
            found = ours.parameters[name].data
            np.testing.assert_allclose(found, parameter.data, rtol=1e-4, atol=1e-6, err_msg=name)


def test_two_pieces_as_one(llama_file, tmp_path, monkeypatch):
    """Where there are many pieces, less lies between fewer of them."""
    _, losses = trained(built(llama_file, tmp_path / "four"), 3)
    monkeypatch.setattr(rows, "_MANY", 4)
    folder = built(llama_file, tmp_path / "two")
    info = Package.open(folder).manifest.segments
    kinds = [each.forward for each in info.segments if each.backward]
    assert kinds == [kinds[0]] * 2
    np.testing.assert_allclose(trained(folder, 3)[1], losses, rtol=1e-6)


def test_blocks_share_models_and_weights_are_stored_once(llama_file, tmp_path):
    """Two blocks are four segments of two kinds; a segment's models hold no matrix."""
    folder = built(llama_file, tmp_path, loss_options={"words": 8})
    info = Package.open(folder).manifest.segments
    kinds = [each.forward for each in info.segments if each.backward]
    assert kinds == [kinds[0], kinds[1]] * 2
    for path in folder.glob("*.onnx"):
        large = [t.name for t in onnx.load(path).graph.initializer if np.prod(t.dims) >= 256]
        assert not large, path.name
    table = [each for each in info.tensors if each.shape == (llama.VOCABULARY, llama.WIDTH)]
    assert [each.dtype for each in table] == ["int8"]  # the embedding's, and the head's


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("base", [None, "int4"])
@pytest.mark.parametrize("kept", [1, 3, 99])
def test_products_that_are_kept(kept, base, kind, llama_file, tmp_path):
    """Backward models of the last segments do not compute them again."""
    given = {"base": base, "adapter": SPECS[kind]}
    plain = built(llama_file, tmp_path / "plain", **given)
    keeping = built(llama_file, tmp_path / "keeping", keep_products=kept, **given)
    before, losses = trained(plain, 4)
    after, again = trained(keeping, 4)
    np.testing.assert_allclose(again, losses, rtol=1e-6)
    assert_alike(after, before)
    # Queries (keys and values are small), and gate and up of a feed-forward layer. DoRA also reads
    # what the last product of each gives, and how long the rows of the sum are.
    each = [1, 2, 1, 2] if kind == "lora" else [4, 6, 4, 6]
    wanted = [0] * (4 - min(kept, 4)) + each[4 - min(kept, 4) :]
    (products, none), (fewer, taken) = _backward(plain), _backward(keeping)
    assert (none, taken) == ([0] * 4, wanted)
    for before, after, number in zip(products, fewer, wanted, strict=True):
        assert before - after >= number
    verify_package(keeping)


def test_products_are_kept_between_segments_only(llama_file, tmp_path):
    with refused("segments-missing", "products can only be kept"):
        built(llama_file, tmp_path, segments=False, keep_products=2)


def _backward(folder: Path) -> tuple[list[int], list[int]]:
    """How many products each backward model computes, and takes from its forward model."""
    computed, taken = [], []
    for each in Package.open(folder).manifest.segments.segments:
        if each.backward:
            forward, backward = (
                ir.load(folder / name).graph for name in (each.forward, each.backward)
            )
            computed.append(sum(node.op_type == "MatMul" for node in nodes_of(backward)))
            made = {value.name for value in forward.outputs}
            taken.append(len(made.intersection(value.name for value in backward.inputs)))
    return computed, taken


def test_resuming_gives_the_same_bits(llama_file, tmp_path):
    folder = built(llama_file, tmp_path / "package")
    state, through = trained(folder, 6)
    half, module, optimizer = open_training(folder)
    losses_of_steps(module, optimizer, [llama.batch()] * 3)
    CheckpointState.save_checkpoint(half, tmp_path / "half.ckpt", include_optimizer_state=True)
    again, rest = trained(folder, 3, tmp_path / "half.ckpt")
    assert rest == through[3:]
    for name, parameter in state.parameters:
        np.testing.assert_array_equal(again.parameters[name].data, parameter.data)


def test_lengths_change_from_step_to_step(tmp_path):
    from benchmarks.decoder.model import SHAPES, write_model

    model = write_model(SHAPES["small"], tmp_path / "model")
    linears = AdapterSpec("lora", ("*_proj",), (), 4, 8.0)
    losses = []
    for segments in (False, True):
        folder = tmp_path / f"package{segments}"
        built(model, folder, adapter=linears, loss_options={"words": 300}, segments=segments)
        _, module, optimizer = open_training(folder)
        found = []
        for batch, tokens in ((1, 9), (2, 31), (1, 9), (3, 4)):
            ids = np.random.default_rng(tokens).integers(0, 1000, (batch, tokens))
            found.append(float(module(ids, ids)))
            optimizer.step()
            module.lazy_reset_grad()
        losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)


def test_activations_in_a_file(llama_file, tmp_path):
    """The same bits, for batches of any size, and nothing is left in the folder."""
    folder, place = built(llama_file, tmp_path / "package"), tmp_path / "activations"
    place.mkdir()
    ids, labels = llama.batch()
    batches = [(ids, labels), (ids[:1], labels[:1]), (ids, labels)]
    runs = []
    for activations in (None, place):
        state, module, optimizer = open_training(folder, activations=activations)
        losses = losses_of_steps(module, optimizer, batches)
        runs.append((losses, {name: each.data.tobytes() for name, each in state.parameters}))
        assert not [*place.iterdir()]
    assert runs[0] == runs[1]


def test_a_folder_for_activations_that_is_not_there(llama_file, tmp_path):
    folder = built(llama_file, tmp_path / "package")
    with refused("file-not-written", "could not be used"):
        open_training(folder, activations=tmp_path / "none")


def test_onnxruntime_has_nothing_to_say_of_native_segments(llama_file, tmp_path, capfd):
    """It warns of an initializer that nothing reads, at each session."""
    folder = built(llama_file, tmp_path / "package", native=True, loss_options={"words": 7})
    assert capfd.readouterr().err == ""
    _, module, optimizer = open_training(folder)
    losses_of_steps(module, optimizer, [llama.batch()])
    assert capfd.readouterr().err == ""


def test_what_cannot_be_cut_says_so(llama_file, tmp_path):
    dropout = AdapterSpec("lora", ("*.q_proj",), (), 3, 5.0, dropout=0.1)
    for code, more in (
        ("segments-unsupported", {"adapter": dropout}),
        ("segments-unsupported", {"memory_budget": "60 MB"}),
    ):
        with refused(code) as caught:
            built(llama_file, tmp_path / "package", **more)
        assert ("--adapter-dropout" in str(caught.value.hint)) == ("adapter" in more)
        assert not (tmp_path / "package").exists()


def test_one_layer_has_no_place_to_cut(tmp_path):
    text = "net (float[batch, 40] x) => (float[batch, 10] y) { y = MatMul (x, w) }"
    model = parsed(text, w=np.ones((40, 10), np.float32))
    with refused("segments-not-found"):
        build_package(model, tmp_path, loss="cross_entropy", segments=True)


def test_an_input_that_nothing_reads_stays_one(tmp_path):
    text = """net (float[batch, 40] input, float[batch] unread) => (float[batch, 40] output)
        { hidden = MatMul (input, v) bent = Relu (hidden) output = MatMul (bent, w) }"""
    value = np.random.default_rng(3).standard_normal((40, 40), np.float32)
    model = parsed(text, v=value, w=value)
    losses = []
    for segments in (False, True):
        folder = tmp_path / str(segments)
        _, module, optimizer = built_training(model, folder, loss="mse", segments=segments)
        assert module.input_names() == ["input", "unread", "target"]
        batch = [np.ones((3, 40), np.float32), np.ones(3, np.float32), np.ones((3, 40), np.float32)]
        found = losses_of_steps(module, optimizer, [batch] * 3)
        losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.parametrize(("key", "value"), [
    ("segments", []),
    ("segments", [{"forward": "../training_model.onnx"}]),
    ("weights", None),
    ("weights", "training_model.onnx"),
    ("tensors", [{"name": "a", "dtype": "int4", "shape": [2**62], "offset": 0}] * 2),
    ("tensors", [{"name": "a", "dtype": "int3", "shape": [2], "offset": 0}]),
    ("tensors", [{"name": "a", "dtype": "int8", "shape": [2], "offset": 1}]),
])  # fmt: skip
def test_hostile_segments(key, value, llama_file, tmp_path):
    folder = built(llama_file, tmp_path)
    edit(folder, lambda content: content["segments"].update({key: value}))
    with refused("manifest-invalid"):
        Package.open(folder)


CONTRADICTIONS: dict[str, Callable[[Any], object]] = {
    "longer": lambda s: s["tensors"][-1].update(offset=s["tensors"][-1]["offset"] + 2**40),
    "type": lambda s: next(t for t in s["tensors"] if t["dtype"] == "uint8").update(dtype="int8"),
    "shape": lambda s: s["tensors"][-1].update(shape=[1, *s["tensors"][-1]["shape"]]),
    "names": lambda s: s["segments"][-1].pop("names"),
    "missing": lambda s: s["tensors"].pop(0),
}


@pytest.mark.parametrize("change", CONTRADICTIONS)
def test_segments_that_contradict_their_files(change, llama_file, tmp_path):
    """Nothing is read beyond the file of weights, whatever a manifest says of it."""
    folder = built(llama_file, tmp_path)
    edit(folder, lambda content: CONTRADICTIONS[change](content["segments"]))
    with pytest.raises(OdtpackError) as caught:
        open_training(folder)
    assert caught.value.code in ("segments-invalid", "model-mismatch")


@pytest.mark.parametrize("name", ["adapter.onnx_adapter", "peft"])
def test_the_adapter_is_saved_and_loaded(name, llama_file, tmp_path):
    """Both forms; others' readers of them agree."""
    package = Package.open(built(llama_file, tmp_path / "package"))
    state, _ = trained(package.path, 2)
    arrays = state.arrays(trainable=True)
    save_adapter(package, state, tmp_path / name)
    if name == "peft":
        found = safetensors.numpy.load_file(tmp_path / name / TENSORS)
    else:
        read = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / name)).get_parameters()
        found = {key: value.numpy() for key, value in read.items()}
    again = CheckpointState.load_checkpoint(package.checkpoint)
    load_adapter(package, again, tmp_path / name)
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(found[key], array)
        np.testing.assert_array_equal(again.parameters[key].data, array)


def test_verify(llama_file, tmp_path):
    found = verify_package(built(llama_file, tmp_path))
    assert found.steps.training_loss is not None
    assert found.steps.evaluation_loss is not None
    assert "trained segment by segment" in found.checked[-1]
    package = Package.open(tmp_path)
    assert [item.name for item in package.manifest.all_outputs] == ["loss"]


def _last_tensor(content: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = content["segments"]["tensors"][-1]
    return tensor


@pytest.mark.parametrize(("change", "says"), [
    (lambda c: _last_tensor(c).update(shape=[1, *_last_tensor(c)["shape"]]), "the weight"),
    (lambda c: _last_tensor(c).update(offset=_last_tensor(c)["offset"] + 64), "length"),
    (lambda c: c["operators"]["training_model"]["ai.onnx"].pop("Softmax"), "operators"),
    (lambda c: c["operators"]["eval_model"]["ai.onnx"].update(Gemm=13), "operators"),
    (lambda c: c["segments"]["segments"][-1].pop("names"), "parameters"),
    (lambda c: c["segments"]["segments"].pop(), "parameters"),
])  # fmt: skip
def test_verify_a_manifest_that_says_otherwise(change, says, llama_file, tmp_path):
    edit(built(llama_file, tmp_path), change)
    with pytest.raises(OdtpackError) as caught:
        verify_package(tmp_path)
    assert caught.value.code in ("manifest-contradicts", "manifest-invalid")
    assert says in caught.value.what


def test_what_needs_one_model_refuses(llama_file, tmp_path):
    package = Package.open(built(llama_file, tmp_path))
    assert package.manifest.self_check.reason is not None
    with refused("segments-unsupported"):
        package.require_one_model("A simulation")
    _, module, _ = open_training(tmp_path)
    with refused("segments-unsupported"):
        module.export_model_for_inferencing(tmp_path / "out.onnx", ["logits"])
