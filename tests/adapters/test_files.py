"""Adapters to and from PEFT's files and ONNX Runtime's, and into the model's weights."""

import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import nn

from odtpack.adapters import AdapterSpec, low_rank
from odtpack.build import build_package
from odtpack_runtime import CheckpointState, Package, load_adapter, save_adapter
from odtpack_runtime.package.adapter import CONFIG, TENSORS, PeftAdapter, read_peft, write_peft
from tests.adapters import llama
from tests.adapters.conftest import needs_peft
from tests.adapters.test_follow_peft import SPECS, config
from tests.adapters.written.models import HERE
from tests.cli.conftest import Run
from tests.exported.export import export
from tests.model_text import parsed
from tests.packaging_tools import built_package, built_training, losses_of_steps, open_training
from tests.refused import refused

Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(llama_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A folder with a package of a kind and a checkpoint after three steps, made once."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        spec = AdapterSpec("bitfit") if kind == "bitfit" else SPECS[kind]
        build = {"loss": "next_token", "adapter": spec}
        state, module, optimizer = built_training(llama_file, folder / "package", **build)
        optimizer.set_learning_rate(0.05)
        losses_of_steps(module, optimizer, [llama.batch()] * 3)
        CheckpointState.save_checkpoint(state, folder / "trained.ckpt")
        return folder

    return make


TOKENS, _ = llama.batch()
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def logits(model: Path, options: Any = None, ids: np.ndarray = TOKENS) -> np.ndarray:
    (found,) = onnxruntime.InferenceSession(model).run(["logits"], {"input_ids": ids}, options)
    return np.asarray(found)


def plain(package: Path, run: Run, *more: str | Path) -> Path:
    """What a package exports as a plain model; without a checkpoint, before the training."""
    out = package.with_name("plain.onnx")
    run("export", package, "--outputs", "logits", "--out", out, *more, code=0)
    return out


def expected(folder: Path, run: Run) -> np.ndarray:
    """What the package exports as a plain model with the trained values."""
    return logits(plain(folder / "package", run, "--checkpoint", folder / "trained.ckpt"))


def exported(folder: Path, run: Run, *more: str) -> Path:
    out = folder / "adapter"
    asked = ("--checkpoint", folder / "trained.ckpt", "--out", out, *more)
    run("adapter", "export", folder / "package", *asked, code=0)
    return out


def merged(model: Path, adapter: Path, run: Run) -> Path:
    out = model.with_name("merged.onnx")
    run("adapter", "merge", model, adapter, "--out", out, code=0)
    return out


def refusal(run: Run, code: str, *words: Any) -> str:
    """What the command says that ends in an error of this code, and writes nothing."""
    there = Path(words[-1]).exists()
    said = run("adapter", *words, code=2).err
    assert code in said
    assert Path(words[-1]).exists() == there
    return said


@needs_peft
@pytest.mark.parametrize("kind", SPECS)
def test_peft_reads_what_is_written(kind, trained, run):
    import peft

    folder = trained(kind)
    model = peft.PeftModel.from_pretrained(llama.llama(), str(exported(folder, run))).eval()
    with torch.no_grad():
        theirs = model(torch.from_numpy(llama.batch()[0])).numpy()
    wanted = expected(folder, run)
    close(theirs, wanted)
    assert np.abs(wanted - logits(plain(folder / "package", run))).max() > 0.01  # it has learned


@needs_peft
@pytest.mark.parametrize("kind", SPECS)
def test_what_peft_writes_is_read(kind, trained, run, tmp_path):
    import peft

    folder = trained(kind)
    info = Package.open(folder / "package").manifest.adapter
    torch.manual_seed(8)
    model = peft.get_peft_model(llama.llama(), config(SPECS[kind], list(info.layers))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        theirs = model(torch.from_numpy(llama.batch()[0])).numpy()
    model.save_pretrained(str(tmp_path / "theirs"))
    start = tmp_path / "start.ckpt"
    run("adapter", "import", folder / "package", tmp_path / "theirs", "--out", start, code=0)
    close(logits(plain(folder / "package", run, "--checkpoint", start)), theirs)


@pytest.mark.parametrize("kind", [*SPECS, "bitfit"])
def test_onnxruntime_runs_the_adapter(kind, trained, run):
    folder = trained(kind)
    out = exported(folder, run, "--onnxruntime", "--outputs", "logits")
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(out / "adapter.onnx_adapter"))
    options = onnxruntime.RunOptions()
    options.add_active_adapter(adapter)
    base = out / "base.onnx"
    close(logits(base, options), expected(folder, run), rtol=1e-5, atol=1e-5)
    close(logits(base), logits(plain(folder / "package", run)), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def dynamo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of ``llama_file`` as the newer exporter writes it."""
    return llama.exported(llama.llama(), tmp_path_factory.mktemp("dynamo") / "model.onnx", "dynamo")


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_merged_weights(kind, exporter, trained, run, tmp_path, request):
    folder = trained(kind)
    file = "dynamo_file" if exporter == "dynamo" else "llama_file"
    original: Path = request.getfixturevalue(file)
    shutil.copytree(original.parent, tmp_path, dirs_exist_ok=True)  # with its data beside it
    model = tmp_path / original.name
    out = merged(model, exported(folder, run), run)
    close(logits(out), expected(folder, run))
    assert out.stat().st_size < 1.1 * model.stat().st_size + 1000


def test_merged_weights_do_not_read_the_model_s_data_from_another_folder(
    trained, run, dynamo_file, tmp_path
):
    folder, source = trained("lora"), tmp_path / "source"
    shutil.copytree(dynamo_file.parent, source)
    model = onnx.load(source / dynamo_file.name)
    onnx.save(model, source / "outside.onnx", save_as_external_data=True, size_threshold=0)
    out, adapter = tmp_path / "merged.onnx", exported(folder, run)
    run("adapter", "merge", source / "outside.onnx", adapter, "--out", out, code=0)
    shutil.rmtree(source)
    close(logits(out), expected(folder, run))


def test_what_does_not_fit_is_an_error(trained, run, llama_file, tmp_path):
    folder = trained("lora")
    adapter = shutil.copytree(exported(folder, run), tmp_path / "adapter")
    other = tmp_path / "other"
    for change in ({"rank": 2}, {"alpha": 9.0}, {"kind": "dora"}, {"on": ("*.q_proj",)}):
        spec = dataclasses.replace(SPECS["lora"], **change)
        build_package(llama_file, other, loss="next_token", adapter=spec)
        start = tmp_path / "start.ckpt"
        refusal(run, "adapter-mismatch", "import", other, adapter, "--out", start)
    package, nothing = folder / "package", tmp_path / "nothing"
    said = refusal(run, "cannot-write", "export", package, "--out", package)
    assert f"{package} is a package" in said
    run("adapter", "export", package, "--out", adapter, code=0)  # replaces what it wrote
    foreign = adapter / CONFIG
    foreign.write_text(json.dumps({**json.loads(foreign.read_text()), "peft_version": "0.17"}))
    for name, more in ((CONFIG, []), ("base.onnx", ["--onnxruntime"])):
        out = tmp_path / f"with {name}"
        out.mkdir()
        shutil.copy(foreign, out / name)
        said = refusal(run, "file-not-written", "export", package, *more, "--out", out)
        assert f"{name} in '{out}' would be replaced" in said
        assert [path.name for path in out.iterdir()] == [name]
        assert (out / name).read_bytes() == foreign.read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    refusal(run, "peft-invalid", "merge", llama_file, adapter, "--out", nothing)
    build_package(llama_file, tmp_path / "plain", loss="next_token")
    refusal(run, "no-adapter", "export", tmp_path / "plain", "--out", nothing)
    refusal(run, "peft-without-kind", "export", trained("bitfit") / "package", "--out", nothing)
    assert not nothing.exists()


def test_an_export_replaces_what_it_wrote_of_another_kind(trained, run, tmp_path):
    """But no base that something else changed, though an adapter lies beside it."""
    out, kinds = tmp_path / "adapter", ("lora", "ia3", "lora")
    asked = ("--onnxruntime", "--out", out)
    for kind in kinds:
        said = run("adapter", "export", trained(kind) / "package", *asked, code=0).err
        assert read_peft(out).kind == kind
        assert "older" not in said
    said = run("adapter", "export", trained("lora") / "package", "--out", out, code=0).err
    assert "which may be another adapter's: adapter.onnx_adapter, base.onnx" in said
    before = (out / CONFIG).read_bytes()
    base = onnx.load(out / "base.onnx")
    base.producer_name = "quantizer"
    onnx.save(base, out / "base.onnx")
    said = refusal(run, "file-not-written", "export", trained("ia3") / "package", *asked)
    assert f"base.onnx in '{out}' would be replaced" in said
    assert (onnx.load(out / "base.onnx"), (out / CONFIG).read_bytes()) == (base, before)


def test_a_save_replaces_adapters_and_nothing_else(trained, tmp_path):
    package = Package.open(trained("lora") / "package")
    state = CheckpointState.load_checkpoint(package.checkpoint)
    file, folder = tmp_path / "it.onnx_adapter", tmp_path / "peft"
    for value in (0.5, np.nan, 0.25):  # also an adapter of a training that diverged
        for array in state.arrays(trainable=True).values():
            array[...] = value
        save_adapter(package, state, file)
        save_adapter(package, state, folder)
    (folder / CONFIG).write_text('{"peft_type": "LORA"}')  # of an odtpack that wrote fewer settings
    save_adapter(package, state, folder)
    kept, settings = file.read_bytes(), json.loads((folder / CONFIG).read_text())
    for content in (b"", kept[:4] + b"ORTM" + kept[8:], b"notes"):
        file.write_bytes(content)
        with refused("file-not-written"):
            save_adapter(package, state, file)
        assert file.read_bytes() == content
    with refused("file-not-written", "Not a directory"):
        save_adapter(package, state, tmp_path / "it.onnx_adapter" / "peft")
    for inside in (".", "it.onnx_adapter"):
        with refused("file-not-written", "lies in the package"):
            save_adapter(package, state, package.path / inside)
    for no_name in ("a\0b", "a\0b.onnx_adapter"):
        with refused("file-not-written", "embedded null"):
            save_adapter(package, state, tmp_path / no_name)
    for text in (None, "notes", "[]", "{}", json.dumps({**settings, "peft_version": "0.17"})):
        (folder / CONFIG).unlink(missing_ok=True)
        if text is not None:
            (folder / CONFIG).write_text(text)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with refused("file-not-written"):
            save_adapter(package, state, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for name in (TENSORS, CONFIG):
        (folder / name).unlink()
    (folder / CONFIG).symlink_to(file)
    with refused("file-not-written"):
        save_adapter(package, state, folder)
    assert (folder / CONFIG).is_symlink()
    assert not (folder / TENSORS).exists()


@pytest.fixture
def peft_files(tmp_path: Path) -> Path:
    """A folder with the files of a small adapter."""
    tensors = {"base_model.model.fc.lora_A.weight": np.ones((2, 3), np.float32)}
    write_peft(tmp_path, PeftAdapter("lora", tensors, 2, 1.0, ("fc",)))
    return tmp_path


def configure(folder: Path, setting: str) -> None:
    """Add a setting to those of the files, after which the earlier one of its name counts not."""
    path = folder / CONFIG
    path.write_text(path.read_text().rstrip("}\n") + f", {setting}}}")


@pytest.mark.parametrize(("setting", "code"), [
    *((f'"lora_alpha": {value}', "peft-invalid")
          for value in ("NaN", "Infinity", "-1e31", "1" + "0" * 400, "true", '"2"', "null", "[2]")),
    *((f'"r": {value}', "peft-invalid")
          for value in ("0", "-1", "1" + "0" * 400, "2.0", "true", "null")),
    ('"peft_type": ["LORA"]', "peft-unsupported"),
    ('"peft_type": "LOHA"', "peft-unsupported"),
    ('"bias": "all"', "peft-unsupported"),
    ('"rank_pattern": {"fc": 4}', "peft-unsupported"),
    *((f'"init_lora_weights": "{value}"', "peft-unsupported")
          for value in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")),
    ('"init_lora_weights": [1]', "peft-unsupported"),
    *((f'"{name}": {value}', "peft-invalid") for name in ("use_rslora", "use_dora")
          for value in ('"false"', "1", "[]")),
    ('"r": 1', "adapter-mismatch"),  # of its tensors
])  # fmt: skip
def test_bad_settings_of_peft(setting, code, peft_files):
    assert read_peft(peft_files).scaling == 1.0
    configure(peft_files, setting)
    with refused(code) as caught:
        read_peft(peft_files)
    assert len(caught.value.what) < 300


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite(value, trained, llama_file, run, tmp_path):
    folder = trained("lora")
    adapter = read_peft(exported(folder, run))
    first, *_ = adapter.tensors
    wide = {name: array.astype(np.float64) for name, array in adapter.tensors.items()}
    wide[first][0, 0] = value
    write_peft(tmp_path, dataclasses.replace(adapter, tensors=wide))
    for words in (("merge", llama_file), ("import", folder / "package")):
        said = refusal(run, "peft-invalid", *words, tmp_path, "--out", tmp_path / "out")
        assert f"{first!r} holds NaN or infinity" in said
    package, state = Package.open(folder / "package"), open_training(folder / "package")[0]
    with np.errstate(over="ignore"):
        state.parameters[first].data[:] = value
    save_adapter(package, state, tmp_path / "it.onnx_adapter")
    with refused("adapter-corrupt") as caught:
        load_adapter(package, state, tmp_path / "it.onnx_adapter")
    assert "diverged" in str(caught.value.hint)


def changed(tensors: Any, how: str) -> Any:
    """Tensors of a LoRA adapter that are not those of its configuration."""
    first, second, *_ = tensors
    smaller = {first: tensors[first][:2], second: tensors[second][:, :2]}
    return {
        "ranks that differ": {**tensors, first: tensors[first][:2]},
        "a smaller rank": {**tensors, **smaller},
        "no tensors": {},
        "a layer is missing": {name: a for name, a in tensors.items() if "layers.1" not in name},
        "no B": {name: array for name, array in tensors.items() if name != second},
        "magnitudes": tensors | {
            name.replace(low_rank.B, low_rank.MAGNITUDE): np.ones(len(array), np.float32)
            for name, array in tensors.items() if name.endswith(low_rank.B)
        },
    }.get(how, tensors)  # fmt: skip


@pytest.mark.parametrize(("how", "kind", "said"), [
    ("ranks that differ", "lora", "is [2, "),
    ("a smaller rank", "lora", "is [2, "),
    ("no tensors", "lora", "no tensors "),
    ("a layer is missing", "lora", "no tensors for '"),
    ("no B", "lora", "it has lora_A.weight ["),
    ("magnitudes", "lora", "lora_magnitude_vector ["),
    ("no magnitudes", "dora", "dora of rank 3, does not fit"),
    ("factors", "ia3", "ia3, does not fit"),
])  # fmt: skip
@pytest.mark.parametrize("ends", [False, True])
def test_an_adapter_that_is_not_whole_is_not_merged(
    how, kind, said, ends, trained, llama_file, run,
    tmp_path,
):  # fmt: skip
    adapter = read_peft(exported(trained("lora"), run))
    layers = tuple({name.rpartition(".")[2] for name in adapter.layers})  # as PEFT writes them
    adapter = dataclasses.replace(
        adapter, kind=kind, tensors=changed(adapter.tensors, how),
        layers=(*layers, "not_of_this_model") if ends else adapter.layers,
    )  # fmt: skip
    write_peft(tmp_path / "it", adapter)
    words = ("merge", llama_file, tmp_path / "it", "--out", tmp_path / "m.onnx")
    assert said in refusal(run, "adapter-mismatch", *words)


@pytest.mark.parametrize(
    "narrower", [{"exclude_modules": ["v_proj"]}, {"layers_to_transform": [0]}, {}]
)
def test_layers_that_a_configuration_leaves_out(narrower, trained, llama_file, run, tmp_path):
    adapter = read_peft(exported(trained("lora"), run))
    tensors = changed(adapter.tensors, "a layer is missing")
    write_peft(tmp_path, dataclasses.replace(adapter, tensors=tensors))
    config = json.loads((tmp_path / CONFIG).read_text()) | narrower
    (tmp_path / CONFIG).write_text(json.dumps(config))
    words = ("merge", llama_file, tmp_path, "--out", tmp_path / "m.onnx")
    assert run("adapter", *words).code == (0 if narrower else 2)


@pytest.mark.parametrize("start", ["true", "false", "null", '"gaussian"', '"orthogonal"', '"eva"'])
def test_starts_that_leave_the_base_as_it_is(start, peft_files):
    configure(peft_files, f'"init_lora_weights": {start}')
    assert read_peft(peft_files).kind == "lora"


def test_what_peft_will_not_find_is_named(run, tmp_path):
    build_package(
        HERE / "genai-llama-tied-fp32" / "model.onnx", tmp_path / "package", loss="next_token",
        adapter=AdapterSpec("lora", ("*.q_proj",)), train=("*final_norm*", "*.0.input_layernorm.*"),
    )  # fmt: skip
    said = run("adapter", "export", tmp_path / "package", "--out", tmp_path / "adapter", code=0)
    saved = ("model.layers.0.input_layernorm", "model.layers.2.final_norm_layernorm")
    assert read_peft(tmp_path / "adapter").saved == saved
    assert f"PEFT will not find {saved[1]}: " in said.err


def test_a_model_of_optimum_is_merged_without_a_word(run, tmp_path, caplog):
    plain = onnx.load(HERE / "optimum-llama-tied-past" / "model.onnx")
    quantizer = MatMulNBitsQuantizer(plain, block_size=16, is_symmetric=True)
    quantizer.process()
    model = tmp_path / "model.onnx"
    quantizer.model.save_model_to_file(str(model))
    spec = AdapterSpec("lora", ("*.q_proj",))
    build_package(model, tmp_path / "package", loss="next_token", adapter=spec)
    run("adapter", "export", tmp_path / "package", "--out", tmp_path / "adapter", code=0)
    caplog.clear()
    caplog.set_level(logging.WARNING, "onnx_ir")
    merged(model, tmp_path / "adapter", run)
    assert not caplog.records


def test_a_table_that_is_tied_cannot_be_merged(run, tmp_path):
    model = HERE / "genai-llama-tied-fp32" / "model.onnx"
    spec = AdapterSpec("lora", ("*embed_tokens",))
    build_package(model, tmp_path / "package", loss="next_token", adapter=spec)
    run("adapter", "export", tmp_path / "package", "--out", tmp_path / "adapter", code=0)
    words = ("merge", model, tmp_path / "adapter", "--out", tmp_path / "m.onnx")
    refusal(run, "adapter-not-mergeable", *words)


@pytest.mark.parametrize("saved", ["5", "true", '"fc"', "null", "{}"])
def test_modules_to_save_that_are_no_list(saved, peft_files):
    configure(peft_files, f'"modules_to_save": {saved}')
    assert read_peft(peft_files).saved == ()


@pytest.mark.parametrize(("header", "said"), [
    ({"fc": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}, "'fc' is of 'I32', not"),
    ({"fc": {"dtype": "F32", "shape": [1]}}, "its header does not describe tensors"),
    ({"fc": [1, 2]}, "its header does not describe tensors"),
    ([], "its header does not describe tensors"),
    ({"fc": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}, "not where it should be"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_plain_words(header, said, peft_files):
    text = json.dumps(header).encode()
    (peft_files / TENSORS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with refused("peft-invalid") as caught:
        read_peft(peft_files)
    assert said in caught.value.what
    assert "Error" not in caught.value.what


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff" * 9, b"[" * 100_000, b"\x00" * 64])
def test_files_that_are_not_peft_s(name, content, peft_files):
    (peft_files / name).write_bytes(content)
    with refused("peft-invalid"):
        read_peft(peft_files)


@pytest.mark.parametrize(("kind", "change", "code"), [
    ("lora", {}, "bad-adapter"),
    ("lora", {"on": ("*",), "rank": 0}, "bad-adapter"),
    ("lora", {"on": ("*",), "alpha": float("nan")}, "bad-adapter"),
    ("dora", {"on": ("*",), "dropout": 0.1}, "bad-adapter"),
    ("lora", {"on": ("*",), "feedforward": ("*",)}, "bad-adapter"),
    ("lora", {"on": "*.q_proj"}, "bad-argument"),
    ("prefix", {"on": ("*",)}, "bad-argument"),
])  # fmt: skip
def test_a_bad_adapter_is_an_error(kind, change, code):
    with refused(code):
        AdapterSpec(kind, **change)


def test_an_unknown_layer_is_an_error(llama_file, tmp_path):
    spec = AdapterSpec("lora", ("*.query",))
    with refused("unknown-layer") as caught:
        build_package(llama_file, tmp_path, loss="next_token", adapter=spec)
    assert "layers.0.self_attn.q_proj" in str(caught.value.hint)


def test_layers_that_get_no_adapter_are_named(tmp_path):
    text = """g (float[N, 4, 5, 5] x) => (float[N, 4, 5, 5] y)
        { h = Conv<group = 4>(x, "b.dw.weight") y = Conv(h, "b.pw.weight") }"""
    shapes = {"b.dw.weight": (4, 1, 1, 1), "b.pw.weight": (4, 4, 1, 1)}
    model = parsed(text, **{name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    for pattern, count in (("b.*", 1), ("b.pw", 0)):
        notes: list[str] = []
        build_package(
            model, tmp_path / "p", loss="mse", adapter="lora", adapter_on=(pattern,),
            remark=notes.append, self_check=False,
        )  # fmt: skip
        assert sum("--on also names b.dw" in note for note in notes) == count
    with refused("unknown-layer", "matches no layers but b.dw"):
        build_package(model, tmp_path / "p", loss="mse", adapter="lora", adapter_on=("b.dw",))


class Tokens(nn.Module):
    """A language model with a square layer, equal norms and, if asked for, one table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.a, self.b = nn.Embedding(19, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.n1, self.n2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 19, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(self.n1(self.embed(input_ids))))
        return self.lm_head(self.n2(self.b(x)))  # type: ignore[no-any-return]


IDS = np.random.default_rng(0).integers(0, 19, (8, 7))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, str], Path]:
    """The file of such a model, made once."""

    @functools.cache
    def make(tied: bool, exporter: Any) -> Path:
        path = tmp_path_factory.mktemp("tokens") / "model.onnx"
        sizes, feeds = {0: "batch", 1: "tokens"}, {"input_ids": torch.from_numpy(IDS)}
        return export(
            Tokens(tied).eval(), feeds, path, exporter, dynamic={"input_ids": sizes},
            output="logits", opset=18,
        )  # fmt: skip

    return make


def of_tokens(model: Path | Any) -> np.ndarray:
    if isinstance(model, nn.Module):
        with torch.no_grad():
            return np.asarray(model.eval()(torch.from_numpy(IDS)))
    return logits(model, ids=IDS)


def of_package(package: Path, state: CheckpointState, run: Run) -> np.ndarray:
    checkpoint = package.with_name("c.ckpt")
    CheckpointState.save_checkpoint(state, checkpoint)
    return of_tokens(plain(package, run, "--checkpoint", checkpoint))


@needs_peft
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*", "ignore:.*tied.*")
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize(
    ("tied", "saved"),
    [(False, "b"), (False, "n1"), (False, "n2"), (False, "lm_head"), (True, "embed"),
     (True, "lm_head"), (True, "both")],
)  # fmt: skip
def test_modules_that_are_saved_as_a_whole(exporter, tied, saved, tokens, run, tmp_path):
    """Import, export and merge mean what PEFT means, however the exporter stored them."""
    import peft

    model, module = tokens(tied, exporter), Tokens(tied)
    modules = ["embed", "lm_head"] if saved == "both" else [saved]
    settings = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["a"], modules_to_save=modules, bias="none"
    )
    theirs = peft.get_peft_model(module, settings)
    torch.manual_seed(1)
    added = 0.2 * torch.randn(19, 16)
    with torch.no_grad():
        for each in theirs.parameters():
            if each.requires_grad:
                each.add_(added if each.shape == added.shape else 0.2 * torch.randn_like(each))
    theirs.save_pretrained(tmp_path / "theirs")
    out, package = tmp_path / "merged.onnx", tmp_path / "package"
    run("adapter", "merge", model, tmp_path / "theirs", "--out", out, code=0)
    close(of_tokens(out), of_tokens(theirs), atol=1e-5)
    names = {
        name for each in modules for name, _ in getattr(Tokens(tied), each).named_parameters(each)
    }
    if tied:
        names = {"lm_head.weight" if exporter == "dynamo" else "embed.weight"}
    spec = AdapterSpec("lora", ("a",), (), 2, 4.0)
    opened = built_package(model, package, loss="next_token", adapter=spec, train=tuple(names))
    state, *_ = open_training(package)
    if tied and saved != "both":
        with refused("adapter-mismatch") as caught:
            load_adapter(opened, state, tmp_path / "theirs")
        assert "'embed.weight' and 'lm_head.weight' are one parameter" in caught.value.what
        return
    load_adapter(opened, state, tmp_path / "theirs")
    close(of_package(package, state, run), of_tokens(theirs), atol=1e-5)
    save_adapter(opened, state, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(Tokens(tied), str(tmp_path / "ours"))
    close(of_tokens(back), of_tokens(theirs), atol=1e-5)


@needs_peft
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*", "ignore:.*tied.*")
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_a_tied_table_is_called_what_looks_it_up(exporter, tokens, run, tmp_path):
    import peft

    model, package = tokens(True, exporter), tmp_path / "package"
    with refused("unknown-layer"):
        build_package(model, package, loss="next_token", adapter=AdapterSpec("lora", ("lm_head*",)))
    spec = AdapterSpec("lora", ("embed", "a"), (), 2)
    opened = built_package(model, package, loss="next_token", adapter=spec)
    state, *_ = open_training(package)
    for each in state.arrays(trainable=True).values():
        np.add(each, 0.1, out=each)
    save_adapter(opened, state, tmp_path / "ours")
    wanted = of_package(package, state, run)
    back = peft.PeftModel.from_pretrained(Tokens(True), str(tmp_path / "ours"))
    close(of_tokens(back), wanted, atol=1e-5)
    out = tmp_path / "merged.onnx"
    run("adapter", "merge", model, tmp_path / "ours", "--out", out, code=0)
    close(of_tokens(out), wanted, atol=1e-5)
