"""The kits with packages that are trained segment by segment."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.decoder.model import SHAPES, Shape, write_model
from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.memory.process_memory import child_environment
from tests.kits import cpp_kit, javascript
from tests.kits.cpp_kit import save_batch
from tests.kits.harness import (
    Saved,
    Task,
    goes_on,
    inputs_of,
    job_file,
    refusal,
    same_bits,
    save_arrays,
    train,
)
from tests.once import made_once

pytestmark = pytest.mark.kits
KINDS: dict[str, dict[str, Any]] = {
    "float32": {}, "int8": {"base": "int8"}, "int4": {"base": "int4"}, "nf4": {"base": "nf4"},
    "no arena": {"base": "int4", "sessions": "small"}, "kept": {"base": "int4", "keep_products": 4},
    "kept, no arena": {"base": "int4", "keep_products": 4, "sessions": "small"},
}  # fmt: skip


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder of three blocks, by how its base is stored."""

    def build(folder: Path) -> None:
        folder.mkdir()
        model = write_model(SHAPES["small"], folder / "model")
        for name, options in KINDS.items():
            built(model, folder / name, **options)

    folder = made_once(tmp_path_factory, "segments", build)
    return {name: folder / name for name in KINDS}


def built(model: Path, folder: Path, words: int = 300, **options: Any) -> Path:
    """A package of a decoder with an adapter of rank 4, which is trained segment by segment."""
    build_package(
        model, folder, loss="next_token", loss_options={"words": words}, segments=True,
        adapter=AdapterSpec("lora", ("*_proj",), (), 4, 8.0), **options,
    )  # fmt: skip
    return folder


@pytest.fixture
def batches(tmp_path: Path) -> list[Saved]:
    """Sequences of three lengths, two of them in batches of two."""
    return three_lengths(tmp_path)


def three_lengths(folder: Path) -> list[Saved]:
    rng, found = np.random.default_rng(1), []
    for number, size in enumerate(((2, 24), (1, 40), (2, 7))):
        ids = rng.integers(0, SHAPES["small"].words, size)
        found.append(save_arrays(folder / str(number), input_ids=ids, labels=ids))
    return found


@pytest.fixture
def job(batches: list[Saved]) -> Task:
    """Seven steps on batches of several lengths, an evaluation and a save."""
    return {"steps": [inputs_of(batch) for batch in batches], "count": 7, "threads": 1,
            "learning_rate": 0.01, "evaluation": True, "save": "kit.ckpt"}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_training_gives_the_bits_of_python(every, name, packages, batches, tmp_path):
    task = {"package": packages[name], "batches": batches, "steps": 7, "rate": 0.01}
    same_bits(every, task, tmp_path)
    if every is javascript:  # with weights in memory, as a browser has them
        same_bits(every, {**task, "fetched": True}, tmp_path)


def test_a_training_begun_in_one_goes_on_in_the_other(every, packages, batches, tmp_path):
    task = {"package": packages["int4"], "batches": batches, "steps": 6, "rate": 0.01}
    goes_on(every, task, tmp_path)


@pytest.mark.parametrize("every", ["kotlin", "node"], indirect=True)
def test_kotlin_and_node_refuse_one_model_for_inference(every, packages, tmp_path):
    code, message = every.refused_export(packages["int4"], tmp_path / "model.onnx")
    assert code == "segments-unsupported"
    assert "odtpack adapter export" in message
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("every", ["kotlin", "node"], indirect=True)
def test_kotlin_and_node_refuse_contradicting_segments(every, packages, tmp_path):
    names = {what: what.replace(" ", "-") for what in (*HOSTILE, "nothing", "changed")}
    for what, name in names.items():
        write_hostile(packages["int4"], tmp_path / name, what)
    weights = tmp_path / "changed" / "segments.weights"
    data = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    expected = dict.fromkeys(names.values(), "segments-invalid")
    expected |= {"nothing": "loaded", "changed": "package-changed"}
    if every is javascript:  # no shape has such sizes, of a weight or of anything else
        odd = ("a-negative-size", "more-bytes-than-numbers-count")
        expected |= dict.fromkeys(odd, "manifest-invalid")
    assert every.damaged(tmp_path) == expected


@pytest.mark.parametrize("kit", ["cpp"], indirect=True)
def test_under_sanitizers(kit, packages, job, tmp_path):
    job = {**job, "package": packages["int4"], "resume": 2}
    found = [kit.measure(job, tmp_path, variant)["losses"] for variant in ("native", "sanitized")]
    assert found[0] == found[1]
    assert len(found[0]) == 9


def test_one_model_for_inference_is_refused(kit, packages, job, tmp_path):
    job = {**job, "package": packages["int4"], "export": tmp_path / "model.onnx"}
    done = kit.run("steps", job_file(job, tmp_path))
    assert done.returncode == 2
    assert "odtpack adapter export" in done.stderr
    # Segments have no step model; StepOn makes steps all the same.
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["0"] * 8


def _tensor(index: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda segments: segments["tensors"][index].update(values)


def _gradients(*values: str) -> Callable[[dict[str, Any]], None]:
    """Calls values gradients, whose memory serves others after two."""

    def rename(segments: dict[str, Any]) -> None:
        for segment in segments["segments"]:
            names = segment.setdefault("names", {})
            names.update({name: f"{names.get(name, name)}.cotangent" for name in values})

    return rename


TABLES = ("value_8", "value_9", "value_12")
"""What the first segment makes for all blocks: the rotary tables, and a mask of another shape."""
ATTENTION = "value_60"
"""What the model of attention makes."""


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "a weight after the end": _tensor(-1, shape=[1 << 40]),
    "more bytes than numbers count": _tensor(-1, shape=[1 << 40, 1 << 40, 1 << 40]),
    "a negative size": _tensor(0, shape=[-4, 4]),
    "two weights in one place": _tensor(1, offset=0),
    "a place that is not aligned": _tensor(0, offset=3),
    "another type": _tensor(0, dtype="int64"),
    "text": _tensor(0, dtype="string"),
    "one name twice": lambda segments: segments["tensors"][1].update(
        name=segments["tensors"][0]["name"]
    ),
    "a missing weight": lambda segments: segments["tensors"].pop(),
    "a file outside": lambda segments: segments["segments"][0].update(forward="../model.onnx"),
    "a segment less": lambda segments: segments["segments"].pop(0),
    "a segment twice": lambda segments: segments["segments"].insert(0, segments["segments"][0]),
    "weights without a file": lambda segments: segments.pop("weights"),
    "a value read after its memory is another's": _gradients(*TABLES),
    "a value read while its memory becomes another's": _gradients(*TABLES[:2], ATTENTION),
}


def write_hostile(source: Path, folder: Path, what: str) -> None:
    """Write a package that differs from another in what its manifest says of segments."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != "manifest.json":
            (folder / path.name).hardlink_to(path)
    manifest = json.loads((source / "manifest.json").read_text())
    if what in HOSTILE:
        HOSTILE[what](manifest["segments"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("what", HOSTILE)
def test_segments_that_contradict_themselves_are_refused(what, kit, packages, job, tmp_path):
    package = tmp_path / "package"
    write_hostile(packages["int4"], package, what)
    options = {"variant": "sanitized"} if kit is cpp_kit else {}
    said = refusal(kit.run, {**job, "package": package}, tmp_path, **options)
    assert "code: segments-invalid" in said


def test_mapped_weights_stay_clean_and_are_given_back(kit, tmp_path):
    """Those of a large vocabulary too, which are given back while they are read."""
    model = write_model(Shape("wide", 1, 64, 2, 1, 128, 80_000), tmp_path / "model")
    package = built(model, tmp_path / "package", words=8000)
    size = (package / "segments.weights").stat().st_size
    assert size > 20 * 10**6
    ids = np.random.default_rng(2).integers(0, 80_000, (2, 40))
    batch = {"input_ids": ids, "labels": ids}
    job = {"package": package, "steps": [save_batch(tmp_path, batch)], "count": 3, "threads": 1,
           "learning_rate": 0.01, "evaluation": True, "wait": "done"}  # fmt: skip
    words = kit.measuring(job_file(job, tmp_path))
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        try:
            found = json.loads(child.stdout.readline())
            wait_for(tmp_path / "done")
            pages = pages_of(child.pid, package / "segments.weights")
        finally:
            child.kill()
    losses, evaluated = train(package, [batch], 3, tmp_path / "python.ckpt")
    assert (found["losses"], found["evaluation"]) == (losses, [evaluated])
    assert pages["Size"] >= size
    assert pages["Anonymous"] == 0  # where a page that is written to ends up
    assert pages["Rss"] < size / 8  # the system reads some pages around those that are asked for


def wait_for(path: Path) -> None:
    """Until a file is there; a minute at most."""
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"{path} was not made")


def pages_of(pid: int, path: Path) -> Counter[str]:
    """Bytes of a process's pages of a file, by what the kernel says of them."""
    found: Counter[str] = Counter()
    is_of_file = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if "-" in key.split()[0]:  # addresses: another mapping begins
            is_of_file = line.endswith(f" {path}")
        elif is_of_file and rest.endswith(" kB"):
            found[key] += int(rest.split()[0]) * 1024
    return found


@pytest.mark.parametrize("name", ["float32", "int4", "no arena", "kept", "kept, no arena"])
def test_the_plan_is_what_an_app_needs(name, kit, packages, job, tmp_path, monkeypatch):
    """In a first life with evaluations, a save, and a second one that resumes."""
    if name.endswith("no arena"):  # what is freed goes back at once, as on phones
        for variable, value in child_environment().items():
            monkeypatch.setenv(variable, value)
    package = Package.open(packages[name])
    ids = np.random.default_rng(2).integers(0, SHAPES["small"].words, (4, 192))
    batch = save_batch(tmp_path, {"input_ids": ids, "labels": ids})
    task = {"package": package.path, "steps": [batch], "evaluate_first": True, "resume": 3}
    found = kit.measure({**job, **task}, tmp_path)
    peaks = [phase["peak_anonymous_bytes"] for phase in found["phases"].values()]
    need = max(peaks) - found["before_anonymous_bytes"]
    plan = plan_memory(package, dict.fromkeys(("input_ids", "labels"), ids.shape), threads=1)
    assert plan.peak.nbytes == pytest.approx(need, rel=0.03)
