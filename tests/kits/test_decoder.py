"""Adapters that kits write and read, of a decoder that was trained in segments."""

import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.errors import OdtpackError
from odtpack_runtime import (
    CheckpointState,
    Generator,
    Module,
    Optimizer,
    Package,
    load_adapter,
    save_adapter,
)
from odtpack_runtime.errors import UnknownNameError
from odtpack_runtime.package.adapter import CONFIG, TENSORS, read_onnx_adapter, write_onnx_adapter
from odtpack_runtime.package.generator import _Draw
from tests.adapters.written.models import HERE, VOCABULARY
from tests.kits import cpp_kit, csharp_kit, javascript, kotlin_kit, swift_kit
from tests.kits.harness import Batch, Task, contents, job_file, save_batch, train
from tests.kits.js_fixtures import GUIDE
from tests.packaging_tools import built_package, losses_of_steps
from tests.packed_weights import FILES, at_once, damaged, packed_by_onnxruntime, packed_in
from tests.programs import ran
from tests.refused import refused

pytestmark = pytest.mark.kits
FORMS = ("it.onnx_adapter", "peft")
PLAIN, TIED = "genai-qwen2-int4", "genai-llama-tied-int4"  # the latter's embedding: 4 bits


def built(name: str, folder: Path) -> Package:
    return built_package(
        HERE / name / "model.onnx", folder, loss="next_token", segments=True,
        adapter=AdapterSpec("lora", ("model.*_proj",), (), 4, 8.0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Package:
    name = getattr(request, "param", PLAIN)
    return built(name, tmp_path_factory.mktemp("decoder") / "package")


@pytest.fixture(scope="module")
def batch() -> Batch:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (2, 12))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable()))
@pytest.mark.parametrize(("variant", "package"), [
    ("native", PLAIN), ("sanitized", PLAIN), ("native", TIED),
], indirect=["package"])  # fmt: skip
def test_cpp(variant, package, batch, tmp_path):
    """Both forms hold what Python's do, and each reads the other's."""
    train(package.path, [batch], 3, tmp_path / "python.ckpt")
    state = CheckpointState.load_checkpoint(tmp_path / "python.ckpt")
    for form in FORMS:
        (tmp_path / "python").mkdir(exist_ok=True)
        save_adapter(package, state, tmp_path / "python" / form)
    (tmp_path / "kit").mkdir()
    job = {
        "package": package.path, "steps": [save_batch(tmp_path / "data", batch)], "count": 3,
        "threads": 1, "learning_rate": 0.01, "adapters": [tmp_path / "kit" / f for f in FORMS],
    }  # fmt: skip
    prompt = [*range(3, 8), VOCABULARY - 1]
    unnamed, beyond, *lines = run({**job, "prompt": prompt}, tmp_path, variant).splitlines()
    assert [unnamed, beyond] == ["bad-argument", "bad-prompt"]
    for _ in range(2):  # packed weights are written, and then read
        packed = {**job, "prompt": prompt, "packed": tmp_path / "kept", "packed_at_once": 4096}
        assert run(packed, tmp_path, variant).splitlines()[2:] == lines
        (kept,) = (tmp_path / "kept").iterdir()
        assert {each.name for each in kept.iterdir()} == FILES
    assert packed_in(kept) == packed_by_onnxruntime(package.decoder, tmp_path / "whole")
    assert len(packed_in(kept)) > 1
    plain = {**job, "prompt": prompt, "count": 0, "adapters": []}
    plain_lines = run(plain, tmp_path, variant)
    again = {**plain, "packed": tmp_path / "kept", "packed_at_once": 4096}
    for damage in damaged(kept):
        assert run(again, tmp_path, variant) == plain_lines, damage
        assert [*(tmp_path / "kept").iterdir()] == [kept]
    two = [cpp_kit.command("decoder", tmp_path / "job.json", variant=variant)] * 2
    for _ in range(5):
        shutil.rmtree(kept)
        assert at_once(*two, env={**os.environ, **cpp_kit.SANITIZERS}) == [plain_lines] * 2
        assert run(again, tmp_path, variant) == plain_lines
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(AssertionError, match="code: packed-not-written"):
        run({**packed, "packed": tmp_path / "file"}, tmp_path, variant)
    with pytest.raises(AssertionError, match="holds NaN or infinity"):
        run({**plain, "load": diverged(package, tmp_path / FORMS[0])}, tmp_path, variant)
    generator = Generator(package)
    generator.add_adapter("it", state)
    for line, adapter in zip(lines, ("it", "it", "it", "it", None), strict=True):
        wanted = [*generator.generate(prompt, adapter=adapter, max_tokens=9)]
        drawn = {"temperature": 1.5, "top_p": 0.95, "seed": 7, "max_tokens": 9}
        wanted += generator.generate(prompt, adapter=adapter, **drawn)
        assert [int(each) for each in line.split()[:18]] == wanted
        logits = [float(each) for each in line.split()[18:]]
        np.testing.assert_allclose(logits, generator.logits(prompt, adapter)[-1], atol=1e-5)
    for form in FORMS:
        again = CheckpointState.load_checkpoint(package.checkpoint)
        load_adapter(package, again, tmp_path / "kit" / form)
        for name, value in state.arrays(trainable=True).items():
            np.testing.assert_array_equal(again.parameters[name].data, value)
        read = {**job, "count": 0, "load": tmp_path / "python" / form, "adapters": []}
        run({**read, "save": tmp_path / "read.ckpt"}, tmp_path, variant)
        found, wanted = contents(tmp_path / "read.ckpt"), contents(tmp_path / "python.ckpt")
        assert found["arrays"] == wanted["arrays"]
    configs = [tmp_path / each / "peft" / CONFIG for each in ("python", "kit")]
    assert configs[0].read_bytes() == configs[1].read_bytes()


@pytest.mark.skipif(cpp_kit.unavailable() is not None, reason=str(cpp_kit.unavailable()))
def test_cpp_refuses_what_is_no_adapter(package, tmp_path):
    good, state = tmp_path / "good", CheckpointState.load_checkpoint(package.checkpoint)
    good.mkdir()
    for form in FORMS:
        save_adapter(package, state, good / form)
    tries = hostile(good, tmp_path / "bad") | crafted(good, tmp_path / "crafted")
    job = {"package": package.path, "steps": [], "count": 0, "threads": 1, "tries": [*tries],
           "others": [another(tmp_path / "other")]}  # fmt: skip
    found = run(job, tmp_path, "sanitized").splitlines()
    assert dict(zip(tries, found[: len(tries)], strict=True)) == tries
    assert found[len(tries) :] == ["adapter-mismatch"] * 3


def saved_by_cpp(package: Package, targets: list[Path], folder: Path) -> list[str]:
    job = {"package": package.path, "steps": [], "count": 0, "threads": 1, "saves": targets}
    return run(job, folder, "sanitized").splitlines()


def saved_by_kotlin(package: Package, targets: list[Path], folder: Path) -> list[str]:
    batch = kotlin_kit.save_batch(folder, input_ids=np.ones((1, 4), np.int64))
    saves = [{"do": "save adapter", "path": path} for path in targets]
    task = {"package": package.path, "data": batch, "rate": 0.01, "actions": saves}
    return [code or "accepted" for code in actions(task)]


def saved_by_node(package: Package, targets: list[Path], _folder: Path) -> list[str]:
    return [*javascript.node("save_adapters.mjs", package.path, *targets).values()]


@pytest.mark.parametrize("saved", [
    pytest.param(saved, id=saved.__name__, marks=pytest.mark.skipif(
        kit.unavailable() is not None, reason=str(kit.unavailable())))
    for saved, kit in ((saved_by_cpp, cpp_kit), (saved_by_kotlin, kotlin_kit),
                       (saved_by_node, javascript))
])  # fmt: skip
def test_a_save_replaces_adapters_and_nothing_else(saved, package, tmp_path):
    """A save replaces what a kit or Python wrote, also in part, and loses no other file."""
    state, good = CheckpointState.load_checkpoint(package.checkpoint), tmp_path / "good"
    good.mkdir()
    for form in FORMS:
        save_adapter(package, state, good / form)
    settings = json.loads((good / "peft" / CONFIG).read_text())
    contents: dict[str, tuple[dict[str, str], str]] = {
        "part.onnx_adapter": ({"": "....TORT"}, "accepted"),
        "short.onnx_adapter": ({"": "."}, "file-not-written"),
        "notes.onnx_adapter": ({"": "notes on an adapter"}, "file-not-written"),
        "begun": ({CONFIG: '{"peft_type": "LORA"}'}, "accepted"),
        "list": ({CONFIG: "[]"}, "file-not-written"),
        "notes": ({CONFIG: "notes"}, "file-not-written"),
        "none": ({CONFIG: "{}"}, "file-not-written"),
        "alone": ({TENSORS: "weights"}, "file-not-written"),
        "peft's": ({CONFIG: json.dumps({**settings, "peft_version": "0.17"}), TENSORS: "theirs"},
                   "file-not-written"),
        "ours": ({CONFIG: json.dumps(settings), TENSORS: "ours"}, "accepted"),
    }  # fmt: skip
    wanted = dict.fromkeys((good / form for form in FORMS), "accepted")
    for name, (files, code) in contents.items():
        path = tmp_path / name
        wanted[path] = code
        for file, text in files.items():
            (path / file).parent.mkdir(exist_ok=True)
            (path / file).write_text(text)
    assert dict(zip(wanted, saved(package, [*wanted], tmp_path), strict=True)) == wanted
    for name, (files, code) in contents.items():
        for file, text in files.items():
            assert ((tmp_path / name / file).read_text("latin-1") == text) == (code != "accepted")
    for path in (path for path, code in wanted.items() if code == "accepted"):
        load_adapter(package, state, path)


def another(folder: Path) -> Path:
    """A checkpoint that trains parameters of the same names, of another rank."""
    spec = AdapterSpec("lora", ("model.*_proj",), (), 2, 8.0)
    model = HERE / PLAIN / "model.onnx"
    build_package(model, folder, loss="next_token", segments=True, adapter=spec)
    return folder / "checkpoint"


def crafted(good: Path, folder: Path) -> dict[Path, str]:
    """Axes below 0 and axes whose product overflows, of few bytes or none; ways to begin a LoRA."""
    found: dict[Path, str] = {}
    sizes = [((-(2**12), -(2**12)), 4), ((-1, -1), 4), ((2**52, 2**52, 0), 0), ((2**52, 2**11), 0),
             ((0, -1), 0), ((2**62, 2**62, 0), 0), ((2**62,), 0)]  # fmt: skip
    for number, (shape, size) in enumerate(sizes):
        path = folder / str(number)
        path.mkdir(parents=True)
        (path / CONFIG).write_bytes((good / "peft" / CONFIG).read_bytes())
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
        header = json.dumps({"odd": entry}).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(size)
        (path / TENSORS).write_bytes(content)
        found[path] = "peft-invalid"
        path = path / FORMS[0]
        known = np.ones((7, 7, 7)[: len(shape)], np.float32)
        write_onnx_adapter(path, {"odd": known})
        content = path.read_bytes()
        for before, after, form in ((known.shape, shape, f"<{len(shape)}q"),
                                    ((known.nbytes,), (size,), "<I")):  # fmt: skip
            old = struct.pack(form, *before)
            assert content.count(old) == 1
            content = content.replace(old, struct.pack(form, *after))
        path.write_bytes(content)
        found[path] = "adapter-corrupt"
    config = json.loads((good / "peft" / CONFIG).read_text())
    refused = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "another", 1, [])
    taken = (None, True, False, "gaussian", "orthogonal", "eva")
    for code, ways in (("peft-unsupported", refused), ("accepted", taken)):
        for way in ways:
            path = folder / f"begun-{way}"
            path.mkdir()
            (path / CONFIG).write_text(json.dumps({**config, "init_lora_weights": way}))
            (path / TENSORS).write_bytes((good / "peft" / TENSORS).read_bytes())
            found[path] = code
    return found


def test_a_state_is_read_at_each_call(package, batch):
    """A Module that is made after the state was added moves its parameters."""
    state = CheckpointState.load_checkpoint(package.checkpoint)
    generator = Generator(package)
    generator.add_adapter("it", state)
    module = Module(package.training_model, state)
    optimizer = Optimizer(package.optimizer_model, module)
    optimizer.set_learning_rate(0.01)
    losses_of_steps(module, optimizer, [batch.values()] * 3)
    generator.add_adapter("now", state)
    found, wanted, none = (generator.logits([3, 1, 4], each) for each in ("it", "now", None))
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(found - none).max() > 1e-3
    generator.remove_adapter("it")
    with pytest.raises(UnknownNameError):
        generator.logits([3], "it")


WAYS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 1.5, "top_p": 0.95, "seed": 7}, {"temperature": 1.5, "top_k": 3, "seed": 8}
)  # fmt: skip


@pytest.mark.parametrize("kit", [
    pytest.param(kit, marks=pytest.mark.skipif(
        kit.unavailable() is not None, reason=str(kit.unavailable())))
    for kit in (csharp_kit, swift_kit, kotlin_kit)
])  # fmt: skip
@pytest.mark.parametrize("package", [PLAIN, TIED], indirect=True)
def test_generation(kit, package, batch, tmp_path):
    """A kit makes the tokens that Python makes, drawn ones too, of one decoder and its adapters."""
    trained, prompt = tmp_path / "trained.ckpt", [*range(3, 8), VOCABULARY - 1]
    train(package.path, [batch], 3, trained)
    state = CheckpointState.load_checkpoint(trained)
    adapters = [tmp_path / form for form in FORMS]
    for adapter in adapters:
        save_adapter(package, state, adapter)
    words = (*adapters, ",".join(map(str, prompt)))
    done = kit.run("decoder", package.path, trained, *words)
    *lines, unknown, argument, bad, failed = getattr(done, "stdout", done).splitlines()
    assert (unknown, argument) == ("unknown-adapter", "bad-argument")
    assert bad == failed == "bad-prompt"
    generator = Generator(package)
    generator.add_adapter("it", state)
    for line, adapter in zip(lines, ("it", "it", "it", None), strict=True):
        first, *drawn = (
            [*generator.generate(prompt, adapter=adapter, max_tokens=9, **way)] for way in WAYS
        )
        stopped = first[: first.index(first[3])]
        wanted = [*first, *(token for each in drawn for token in each), *stopped]
        assert [int(each) for each in line.split()[: len(wanted)]] == wanted
        logits = [float(each) for each in line.split()[len(wanted) :]]
        np.testing.assert_allclose(logits, generator.logits(prompt, adapter)[-1], atol=1e-5)
    nan = diverged(package, tmp_path / "nan")
    try:
        said = getattr(kit.run("decoder", package.path, trained, nan, words[-1]), "stderr", "")
    except AssertionError as error:
        said = str(error)
    assert "holds NaN or infinity" in said
    environment = {**os.environ, "ODTPACK_TEST_PACKED": str(tmp_path / "kept")}
    for _ in range(2):  # packed weights are written, and then read
        again = kit.run("decoder", package.path, trained, *words, env=environment)
        assert getattr(again, "stdout", again) == getattr(done, "stdout", done)
        (kept,) = (tmp_path / "kept").glob("odtpack-packed-*")
        assert {each.name for each in kept.iterdir()} == FILES
    if kit is not kotlin_kit or onnxruntime.__version__.startswith(kotlin_kit.runtime_version()):
        assert packed_in(kept) == packed_by_onnxruntime(package.decoder, tmp_path / "whole")
    assert len(packed_in(kept)) > 1
    if kit is kotlin_kit:  # the others share the C++ kit's code
        for damage in damaged(kept):
            again = kit.run("decoder", package.path, trained, *words, env=environment)
            assert again == done, damage
            assert {each.name for each in kept.iterdir()} == FILES
        two = [kit.command("decoder", package.path, trained, *words)] * 2
        for _ in range(3):
            shutil.rmtree(kept)
            assert at_once(*two, env=environment) == [done] * 2


@pytest.mark.skipif(kotlin_kit.unavailable() is not None, reason=str(kotlin_kit.unavailable()))
def test_kotlin(package, batch, tmp_path):
    """A training's adapter has the bytes of Python's; of a bad one no parameter is taken."""
    data = kotlin_kit.save_batch(tmp_path, **batch)
    task = {"package": package.path, "data": data, "rate": 0.01}
    trained = tmp_path / "python.ckpt"
    kotlin_kit.train({**task, "steps": 3, "save": trained}, "python")
    state = CheckpointState.load_checkpoint(trained)
    python, kit = tmp_path / "python", tmp_path / "kit"
    for folder in (python, kit):
        folder.mkdir()
    for form in FORMS:
        save_adapter(package, state, python / form)
    steps = [{"do": "batch"}] * 3
    saves = [{"do": "save adapter", "path": kit / form} for form in FORMS]
    assert actions({**task, "actions": [*steps, *saves]})[3:] == [None, None]
    for name in (FORMS[0], f"peft/{TENSORS}", f"peft/{CONFIG}"):
        assert (kit / name).read_bytes() == (python / name).read_bytes()

    bad, read = hostile(python, tmp_path / "bad"), tmp_path / "read.ckpt"
    last = {"do": "state", "path": read}
    loads = [{"do": "load adapter", "path": path} for path in bad]
    assert actions({**task, "actions": [*loads, last]}) == [*bad.values(), None]
    assert contents(read)["arrays"] == contents(package.checkpoint)["arrays"]
    for form in FORMS:
        load = {"do": "load adapter", "path": python / form}
        assert actions({**task, "actions": [load, last]}) == [None, None]
        assert contents(read)["arrays"] == contents(trained)["arrays"]


def diverged(package: Package, path: Path) -> Path:
    """An adapter for ONNX Runtime that consists of NaN."""
    state = CheckpointState.load_checkpoint(package.checkpoint)
    for value in state.arrays(trainable=True).values():
        value[...] = np.nan
    save_adapter(package, state, path.with_suffix(".onnx_adapter"))
    return path.with_suffix(".onnx_adapter")


def test_a_diverged_adapter_gives_no_tokens(package, tmp_path):
    generator, state = Generator(package), CheckpointState.load_checkpoint(package.checkpoint)
    with pytest.raises(OdtpackError, match="diverged"):
        generator.add_adapter("it", diverged(package, tmp_path / "nan"))
    generator.add_adapter("it", state)
    for value in state.arrays(trainable=True).values():
        value[...] = np.nan
    for temperature in (0.0, 1.0):
        with refused("run-failed", "logits after 2 tokens are not finite"):
            next(generator.generate([3, 1], adapter="it", temperature=temperature))


# Logits, temperature, how many of the likeliest and their probability, and a seed.
ODD: list[tuple[list[str], float, int, float, int]] = [
    (logits.split(), *way, seed)
    for logits in ("1 -Infinity 2", "-3 -1 -2", "1 2 3 0", "-0 0 -0", "1e38 3e38 -3e38")
    for way in ((0.8, 0, 1.0), (0.8, 2, 0.9), (1e-320, 0, 0.5))
    for seed in (1, 2)
]
REFUSED = ("NaN NaN NaN", "1 NaN 2 NaN", "1 Infinity 2", "1 Infinity NaN", "-Infinity -Infinity")


def drawn_by_python() -> list[int]:
    return [_Draw(t, k, p, seed)(np.array(logits, np.float32)) for logits, t, k, p, seed in ODD]


@pytest.mark.skipif(kotlin_kit.unavailable() is not None, reason=str(kotlin_kit.unavailable()))
def test_kotlin_draws_of_odd_logits():
    assert json.loads(kotlin_kit.run("draws", json.dumps(ODD))) == drawn_by_python()


def actions(task: Task) -> list[str | None]:
    """What the calls of a session of the Kotlin kit gave: null, or the code of an error."""
    return list(json.loads(kotlin_kit.run("actions", json.dumps(task, default=str)))["results"])


def hostile(good: Path, folder: Path) -> dict[Path, str]:
    """Adapters that are short, damaged or another's, and the error of each."""
    tensors = read_onnx_adapter(good / FORMS[0])
    *most, last = sorted(tensors)
    found: dict[Path, str] = {folder / "none" / FORMS[0]: "adapter-not-found",
                              folder / "none" / "peft": "peft-not-found"}  # fmt: skip
    for name, changed in {
        "fewer": {name: tensors[name] for name in most},
        "more": {**tensors, "another": tensors[last]},
        "wide": {**tensors, last: tensors[last][:, :1]},
        "whole": {**tensors, last: tensors[last].astype(np.int32)},
    }.items():
        path = folder / name / FORMS[0]
        path.parent.mkdir(parents=True)
        write_onnx_adapter(path, changed)
        found[path] = "adapter-mismatch"
    content = (good / FORMS[0]).read_bytes()
    for size in (0, 7, 40, len(content) // 2, len(content) - 1):
        path = folder / f"{size}.onnx_adapter"
        path.write_bytes(content[:size])
        found[path] = "adapter-corrupt"
    config, content = ((good / "peft" / each).read_bytes() for each in (CONFIG, TENSORS))
    for number, (told, stored, code) in enumerate((
        (config, content[:9], "peft-invalid"),
        (config, content[: len(content) // 2], "peft-invalid"),
        (config, content + b" ", "peft-invalid"),
        (config, content.replace(b":[0,", b":[4,", 1), "peft-invalid"),
        (config, content.replace(b"F32", b"F99", 1), "peft-invalid"),
        (config, content.replace(b"layers.0", b"layers.7", 1), "adapter-mismatch"),
        (config[:-9], content, "peft-invalid"),
        (config.replace(b'"r": 4', b'"r": 2'), content, "adapter-mismatch"),
        (config.replace(b'"bias": "none"', b'"bias": "all"'), content, "peft-unsupported"),
        (config.replace(b'"init_lora_weights": true', b'"init_lora_weights": "pissa_niter_4"'),
         content, "peft-unsupported"),
    )):  # fmt: skip
        path = folder / f"peft-{number}"
        path.mkdir()
        (path / CONFIG).write_bytes(told)
        (path / TENSORS).write_bytes(stored)
        found[path] = code
    return found


@pytest.mark.skipif(javascript.unavailable() is not None, reason=str(javascript.unavailable()))
@pytest.mark.parametrize(
    ("name", "longest"), [(PLAIN, 20), (TIED, 20), ("optimum-llama-tied-past", 40)]
)
def test_node(name, longest, batch, tmp_path):
    """Node trains, writes and generates in one process; the tokens are those of Python."""
    package = built(name, tmp_path / "package")
    batch["input_ids"].tofile(tmp_path / "ids.bin")
    prompts = [[*range(3, 9)], [*range(longest)]]
    odd = ODD + [(each.split(), way, 0, 1.0, 0) for each in REFUSED for way in (0.0, 0.8)]
    words = ("12", json.dumps(odd), *map(str, prompts))
    found = javascript.node("decoder.mjs", package.path, tmp_path, *words)
    assert found["codes"] == [
        "unknown-adapter", "bad-prompt", *["bad-argument"] * 4, "bad-prompt", "bad-argument",
        "bad-prompt", "bad-prompt", "adapter-mismatch", *["closed"] * 3,
    ]  # fmt: skip
    assert found["drawn"] == [*drawn_by_python(), *["run-failed"] * 2 * len(REFUSED)]
    generator = Generator(package)
    for form in FORMS:
        generator.add_adapter(form, tmp_path / form)
    results = iter(found["results"])
    changed = []
    for prompt in prompts:
        for adapter in (*FORMS, FORMS[0], None):
            result = next(results)
            logits = generator.logits(prompt, adapter)[-1]
            np.testing.assert_allclose(result["logits"], logits, atol=1e-5)
            for how, options in {
                "likeliest": {}, "drawn": {"temperature": 1.5, "top_p": 0.95, "seed": 7},
                "few": {"temperature": 1.5, "top_k": 3, "seed": 8},
                "stopped": {"stop": {result["likeliest"][3]}},
            }.items():  # fmt: skip
                wanted = generator.generate(prompt, adapter=adapter, max_tokens=9, **options)
                assert result[how] == [*wanted], (adapter, how)
            changed.append(result["likeliest"])
    assert changed[0] != changed[3]


@pytest.mark.skipif(javascript.unavailable() is not None, reason=str(javascript.unavailable()))
def test_the_guides_code_generates(package, tmp_path):
    """What the guide for JavaScript shows, before anything was learned."""
    (code,) = re.findall(r"^```js\n(import { Generator.*?)^```$", GUIDE.read_text(), re.M | re.S)
    kit = (javascript.KIT / "dist" / "index.js").as_uri()
    code = code.replace("'odtpack'", f"'{kit}'").replace("'phone'", f"'{package.path}'")
    (tmp_path / "guide.mjs").write_text(f"{code}\n".replace("batches)", "[])"))
    done = ran(javascript.NODE, "guide.mjs", cwd=tmp_path)
    wanted = Generator(package).generate([3, 1, 4], max_tokens=8, stop={2})
    assert [int(each) for each in done.stdout.split()] == [*wanted]


def run(job: Task, folder: Path, variant: str) -> str:
    done = cpp_kit.run("decoder", job_file(job, folder), variant=variant)
    assert done.returncode == 0, done.stderr
    return done.stdout
