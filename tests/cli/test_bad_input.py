"""Bad input gets one clear error, exit code 2, and leaves nothing behind."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest

from odtpack.artifacts import generate_artifacts
from odtpack.build import build_package
from odtpack.cli._files import check_creatable, check_writable
from odtpack.errors import OdtpackError
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from tests.cli.conftest import Shared, arrays, assert_refused, tree
from tests.programs import ran
from tests.refused import refused


def _write(path: Path, **changed: np.ndarray | None) -> Path:
    kept = {name: array for name, array in {**arrays(), **changed}.items() if array is not None}
    np.savez(path, allow_pickle=False, **kept)
    return path


ARRAYS: dict[str, dict[str, np.ndarray | None]] = {
    "missing": {"labels": None},
    "misshapen": {"input": np.zeros((60, 1, 9, 8), np.float32)},
    "wrong-type": {"input": np.zeros((60, 1, 8, 8))},
    "unequal": {"labels": np.zeros(59, np.int64)},
    "not-finite": {"input": np.full((60, 1, 8, 8), np.nan, np.float32)},
    "label-too-large": {"labels": np.full(60, 3, np.int64)},
    "negative-label": {"labels": np.full(60, -1, np.int64)},
}
BUDGETS = {
    "cut": "[budgets\n",
    "without-unit": "[budgets]\npeak_memory = 200\n",
    "misspelt": "[budgets]\npeek_memory = '200 MB'\n",
    "wrong-unit": "[budgets]\npeak_memory = '200 MBit'\n",
    "unknown-device": "[device.'acme/one']\n",
}


@pytest.fixture(scope="module")
def files(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a row may name in braces: good files, and a folder with bad ones."""
    bad = tmp_path_factory.mktemp("bad")
    for name, changed in ARRAYS.items():
        _write(bad / f"{name}.npz", **changed)
    for name, text in BUDGETS.items():
        (bad / f"{name}.toml").write_text(text)
    (bad / "text.npz").write_text("1,2,3\n")
    (bad / "notes.txt").write_text("hello")
    (bad / "phone.toml").write_text("schema_version = 1\nname = 3\n")
    (bad / "model.ort").write_bytes(b"\x18\0\0\0ORTM" + bytes(64))
    (bad / "empty").mkdir()
    cut = (shared.package / "checkpoint").read_bytes()
    cut = cut[: len(cut) // 2]
    (bad / "cut.ckpt").write_bytes(cut)
    shutil.copytree(shared.package, bad / "package")
    (bad / "package/checkpoint").write_bytes(cut)
    build_package(shared.model, bad / "other", loss="mse", train=["fc.weight"])
    less = read_checkpoint(bad / "other/checkpoint")
    less.frozen.pop("conv1.weight")
    write_checkpoint(bad / "less.ckpt", less)
    return {**dataclasses.asdict(shared), "bad": bad}


TRAIN = "train {package} --data {data} --out {new}"
SIMULATE = "simulate {package} --data {data} --device pixel-8a"
EXPORT = "export {package} --out {new}"
# A command, the code of its error, and words that the error must contain.
ROWS: list[tuple[str, ...]] = [
    *(
        (command.replace(given, f"{{bad}}/{name}"), code, *words)
        for command in (TRAIN, f"{SIMULATE} --report html:{{new}}")
        for given, name, code, *words in [
            ("{data}", "missing.npz", "data-missing", "'labels'", "input", "{bad}/missing.npz"),
            ("{data}", "misshapen.npz", "data-shape", "'input'", "[60, 1, 9, 8]", "8, 8]",
             "{bad}/misshapen.npz"),
            ("{data}", "wrong-type.npz", "data-type", "'input'", "astype", "{bad}/wrong-type.npz"),
            ("{data}", "unequal.npz", "data-length", "59", "60", "{bad}/unequal.npz"),
            ("{data}", "not-finite.npz", "data-not-finite", "'input'", "sample 0",
             "{bad}/not-finite.npz"),
            ("{data}", "label-too-large.npz", "label-out-of-range", "'labels'", "3", "0 to 2",
             "{bad}/label-too-large.npz"),
            ("{data}", "negative-label.npz", "label-out-of-range", "-1",
             "{bad}/negative-label.npz"),
            ("{data}", "text.npz", "data-unreadable", "{bad}/text.npz", "numpy.savez"),
            ("{data}", "no.npz", "data-not-found", "no data file", "no.npz"),
            ("{data}", "empty", "data-not-found", "empty is a folder"),
            ("{package}", "no", "package-not-found", "There is no folder"),
            ("{package}", "empty", "package-not-found", "manifest.json", "odtpack build"),
            ("{package}", "package", "package-changed", "'checkpoint'"),
        ]
    ),
    (f"{TRAIN} --holdout 1.5", "bad-holdout", "1.5", "--holdout 0.2"),
    (f"{TRAIN} --holdout 0.5 --eval {{data}}", "holdout-and-eval", "leave one of them out"),
    (f"{TRAIN}/no/new.ckpt", "cannot-write", "mkdir -p"),
    (f"{TRAIN}/no(1)/new.ckpt", "cannot-write", "mkdir -p '"),
    (TRAIN.replace("{new}", "{bad}"), "cannot-write", "is a folder"),
    (TRAIN.replace("{new}", "{package}/checkpoint"), "cannot-write", "outside the package"),
    (f"{TRAIN} --lr 1e30", "diverged", "epoch 1", "--lr"),
    (f"{TRAIN} --lr inf", "bad-learning-rate", "inf"),
    (f"{TRAIN} --resume {{bad}}/cut.ckpt", "checkpoint-corrupt", "{bad}/cut.ckpt"),
    (f"{EXPORT} --checkpoint {{bad}}/cut.ckpt", "checkpoint-corrupt", "{bad}/cut.ckpt"),
    ("inspect {bad}/cut.ckpt", "checkpoint-corrupt", "{bad}/cut.ckpt"),
    (f"{EXPORT} --checkpoint {{bad}}/less.ckpt", "model-mismatch", "'conv1.weight'",
     "{bad}/less.ckpt"),
    *(
        (f"{EXPORT} --outputs {name}", "unknown-output", repr(name), "output, ")
        for name in ("nothing", "loss", "labels")
    ),
    (EXPORT.replace("{new}", "{package}/eval_model.onnx"), "cannot-write", "outside the package"),
    ("inspect {bad}/notes.txt", "not-onnx", "{bad}/notes.txt",
     "neither a package nor an ONNX model"),
    ("inspect {bad}/no", "not-found", "no"),
    ("inspect {bad}/model.ort", "ort-format", "model.ort", ".onnx"),
    (f"{SIMULATE}x", "device-unknown", "'pixel-8ax'", "'pixel-8a'", "odtpack devices list"),
    (SIMULATE.removesuffix("--device pixel-8a"), "no-device", "--device", "google/pixel-8a"),
    (SIMULATE.replace("pixel-8a", "{bad}/phone.toml"), "profile-invalid", "{bad}/phone.toml"),
    *(
        (f"{SIMULATE} --report json:{{new}} --budget {{bad}}/{name}.toml", code, name, *words)
        for name, code, *words in [
            ("cut", "budgets-malformed", "TOML"),
            ("without-unit", "budgets-invalid", ":2", "200 MB"),
            ("misspelt", "budgets-invalid", ":2", "peak_memory"),
            ("wrong-unit", "budgets-invalid", ":2", "MBit"),
            ("unknown-device", "budgets-unknown-device", "acme/one"),
        ]
    ),
    (f"{SIMULATE} --threads 257", "bad-threads", "1 to 256", "257 threads share"),
    ("data prepare no.jsonl --tokenizer t --length 8 --out {new}", "data-not-found", ".jsonl file"),
    ("verify {model}", "package-not-found", "--out package --loss cross_entropy"),
    ("import {model} --out {new}", "artifacts-not-found", "is not a folder"),
    ("devices show {data}", "device-unknown", "does not end in .toml"),
    ("explain DATA-SHAPE", "unknown-error-code", "did you mean data-shape"),
    ("build {model} --out {new} --loss mse --sample {bad}/no.npz", "data-not-found", "no.npz"),
    ("build {model} --out {new} --loss mse --memory-budget 60", "bad-memory-budget",
     "is not a size", "20 MB"),
    (f"{SIMULATE} --report pdf:report.pdf", "report-format-unknown", "html"),
    (f"{SIMULATE} --report html", "report-path-missing", "--report html:report.html"),
    (f"{SIMULATE} --report html:no/such/folder/report.html", "cannot-write",
     "mkdir -p no/such/folder"),
    (f"{SIMULATE} --report json:{{data}}", "cannot-write", "read by the same command"),
    *(
        (f"{SIMULATE} {option} {value}", "bad-policy", f"{option} must be {what}")
        for option, value, what in [
            ("--sessions-per-day", "0", "greater than 0"),
            ("--sessions-per-day", "nan", "a finite number"),
            ("--sessions-per-day", "1e9", "at most 1440"),
            ("--save-every", "99999999999999999999", "at most 2147483648"),
            ("--pieces", "10001", "at most 10000"),
        ]
    ),
    ("devices show nokia-3310", "device-unknown", "'nokia-3310'", "devices list"),
    ("devices show no.toml", "profile-missing", "no.toml"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_bad_input(
    refused, files, tmp_path, monkeypatch,
    row,
):  # fmt: skip
    command, code, *words = row
    monkeypatch.chdir(tmp_path)
    before = tree(files["bad"])
    arguments = [word.format(**files, new=tmp_path / "new") for word in command.split()]
    refused(tuple(arguments), code, *(word.format(**files) for word in words))
    assert tree(files["bad"]) == before
    assert not (tmp_path / "new").exists()


# What the system or float32 refuses is one clear error, and never a bug.

LONG = "a" * 6000


@pytest.mark.parametrize("long", [LONG, "a/" * 3000])
def test_paths_that_are_too_long(run, shared, tmp_path, long):
    build = ("build", shared.model, "--loss", "cross_entropy", "--out")
    for command, code in (
        ((*build, tmp_path / long), "package-not-written"),
        (("build", tmp_path / long, "--loss", "mse", "--out", tmp_path / "x"), "system-refused"),
        (("inspect", tmp_path / long), "system-refused"),
        (("verify", tmp_path / long), "system-refused"),
        (("train", tmp_path / long, "--data", shared.data), "system-refused"),
        (("train", shared.package, "--data", tmp_path / long), None),
    ):
        outcome = run(*command, code=2)
        assert "error[internal]" not in outcome.err
        assert code is None or f"error[{code}]" in outcome.err


def started(close: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = ['exec "$@" ' + close, "sh", sys.executable, "-m", "odtpack", *map(str, words)]
    return ran("sh", "-c", *command, code=None)


@pytest.mark.parametrize("close", [">&-", ">/dev/full"])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_results_that_cannot_be_written(shared, close, more):
    done = started(close, "inspect", shared.model, *more)
    assert done.returncode == 2
    assert done.stderr.count("error[system-refused]") == 1
    assert "Exception" not in done.stderr
    assert "internal" not in done.stderr


@pytest.mark.parametrize("close", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_commands_without_results_need_no_streams(shared, close, tmp_path):
    out = tmp_path / "package"
    words = ("build", shared.model, "--loss", "cross_entropy", "--out", out)
    done = started(close, *words)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {p.name for p in shared.package.iterdir()}
    assert (out / "checkpoint").read_bytes() == (shared.package / "checkpoint").read_bytes()


@pytest.mark.parametrize(
    "option", [("--weight-decay", "1e308"), ("--clip-norm", "1e39"), ("--clip-value", "3.5e38")]
)
def test_numbers_that_float32_does_not_hold(run, shared, tmp_path, option):
    out = tmp_path / "package"
    outcome = run("build", shared.model, "--loss", "cross_entropy", "--out", out, *option, code=2)
    assert "error[bad-hyperparameter]" in outcome.err
    assert not out.exists()


def test_a_path_that_is_not_utf8(run, shared, tmp_path):
    folder = tmp_path / os.fsdecode(b"p\xff")
    outcome = run("build", shared.model, "--loss", "cross_entropy", "--out", folder, code=2)
    assert "error[package-not-written]" in outcome.err
    assert not folder.exists()
    folder.symlink_to(shared.package, target_is_directory=True)  # what it leads to has a good name
    assert run("verify", folder).code == 0
    folder.unlink()
    subprocess.run(["cp", "-r", shared.package, folder], check=True)
    outcome = run("verify", folder, code=2)
    assert "error[model-not-readable]" in outcome.err
    assert "not UTF-8" in outcome.err


@pytest.mark.parametrize(
    "name",
    ["model", "requires_grad", "artifact_directory", "prefix", "ort_format",
     "nominal_checkpoint", "custom_op_library", "target", "loss", "optimizer"],
)  # fmt: skip
def test_artifacts_given_bytes(shared, tmp_path, name):
    arguments = {
        "model": onnx.load(shared.model), "requires_grad": ["conv2.weight"],
        "artifact_directory": str(tmp_path / "out"), name: b"\x08\x08",
    }  # fmt: skip
    with pytest.raises(OdtpackError):
        generate_artifacts(**arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


# Destinations are tried before the work whose result they get, and left as they were.

NOTHING_IS_CREATED = Path("/proc")
"""Where even root, whom no permission stops, can create no file."""


def places(folder: Path) -> list[tuple[Path, str]]:
    """Paths that cannot be written, and what is said about them."""
    (folder / "file").write_text("mine")
    (folder / "dangling").symlink_to(folder / "nowhere")
    return [
        (folder, "it is a folder"),
        (folder / "file" / "new", "is not a folder"),
        (folder / "file" / "deeper" / "new", "is not a folder"),
        (folder / "dangling" / "new", "is not a folder"),
        (folder / "missing" / "new", "does not exist"),
        (folder / ("x" * 300), "name too long"),
        # The name itself would do; that under which it is written first would not.
        (folder / ("x" * 250), "name too long"),
        (Path(os.devnull), "not an ordinary file"),
        (NOTHING_IS_CREATED / "new", "no file can be created in the folder"),
        (NOTHING_IS_CREATED / "deeper" / "new", "no file can be created in the folder"),
    ]


@pytest.mark.skipif(not NOTHING_IS_CREATED.is_dir(), reason="needs a folder that takes no file")
def test_places_that_cannot_be_written(tmp_path):
    found = places(tmp_path)
    before = tree(tmp_path)
    for path, words in found:
        with refused("cannot-write") as caught:
            check_writable(path, "--out", [])
        assert words.lower() in caught.value.what.lower()
        assert str(path) in caught.value.what
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["new", "file", "x" * 200, "dangling"])
def test_places_that_can_be_written(tmp_path, name):
    places(tmp_path)
    before = tree(tmp_path)
    check_writable(tmp_path / name, "--out", [])
    assert tree(tmp_path) == before


def test_nothing_is_written_into_a_package(run, shared, tmp_path):
    """It would not pass odtpack verify any more; an app's manifest.json makes no package."""
    package = tmp_path / "package"
    shutil.copytree(shared.package, package)
    before = tree(package)
    for command in (
        f"train {package} --data {shared.data} --out {package}/new.ckpt",
        f"export {package} --out {package}/new.onnx",
        f"inspect {package} --report html:{package}/new.html",
        f"diff {shared.package} {package} --out {package}/new.md",
        f"fit {shared.model} --data {shared.data} --device pixel-8a --loss cross_entropy "
        f"--out {package}/new",
    ):
        outcome = run(*command.split())
        assert_refused(outcome, "cannot-write", f"{package} is a package", "odtpack verify")
    (tmp_path / "link").symlink_to(package)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "app"}')
    for check in (partial(check_writable, inputs=[]), check_creatable):
        with refused("cannot-write", "is a package"):
            check(tmp_path / "link" / "new", "--out")
        check(tmp_path / "app" / "new", "--out")
        check(tmp_path / "new", "--out")
    assert tree(package) == before


def test_folders_that_can_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (Path(), Path("..") / tmp_path.name, Path("new"), Path("new/deep"), tmp_path):
        check_creatable(path, "--out")
    assert tree(tmp_path) == {}


def test_a_folder_that_takes_no_file(tmp_path, monkeypatch):
    """Permissions say yes, and the system says no: full, read-only, of another kind."""
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(os, "open", mock.Mock(side_effect=OSError(30, "Read-only file system")))
    for check in (partial(check_writable, inputs=[]), check_creatable):
        with pytest.raises(OdtpackError, match="Read-only file system"):
            check(tmp_path / "new", "--out")


@pytest.mark.skipif(not NOTHING_IS_CREATED.is_dir(), reason="needs a folder that takes no file")
@pytest.mark.parametrize("place", ["below a file", "below proc"])
def test_nothing_is_trained_for_a_report_that_cannot_be_written(
    run, shared, tmp_path, monkeypatch, place
):
    from odtpack_simulator import simulation

    started = mock.Mock(side_effect=AssertionError("the replay was started"))
    monkeypatch.setattr(simulation, "simulate", started)
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / "r" if place == "below a file" else NOTHING_IS_CREATED / "r"
    command = "simulate", shared.package, "--data", shared.data, "--device", "pixel-8a"
    for form in ("html", "json", "junit", "markdown", "github"):
        outcome = run(*command, "--report", f"{form}:{path}")
        assert_refused(outcome, "cannot-write", str(path))
    outcome = run("train", shared.package, "--data", shared.data, "--out", path)
    assert_refused(outcome, "cannot-write", str(path))
    command = "fit", shared.model, "--data", shared.data, "--device", "pixel-8a"
    outcome = run(*command, "--loss", "cross_entropy", "--out", path)
    assert_refused(outcome, "cannot-write", str(path))
    assert tree(tmp_path) == {"file": b"mine"}


def test_what_a_killed_check_left_is_removed_by_the_next(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = tmp_path / f".m.onnx.{process.pid}-0123456789ab.tmp"
    left.touch()
    check_writable(tmp_path / "m.onnx", "--out", [])
    assert list(tmp_path.iterdir()) == []


def test_no_command_writes_over_what_it_reads(run, shared, tmp_path):
    """Data, models and checkpoints survive, whatever else is written."""
    for name, source in {"data.npz": shared.data, "model.onnx": shared.model}.items():
        shutil.copyfile(source, tmp_path / name)
    data, model, trained = (tmp_path / name for name in ("data.npz", "model.onnx", "t.ckpt"))
    run("train", shared.package, "--data", data, "--epochs", "1", "--out", trained, code=0)
    before = tree(tmp_path)
    for command in (
        ("train", shared.package, "--data", data, "--out", data),
        ("train", shared.package, "--data", shared.data, "--eval", data, "--out", data),
        ("export", shared.package, "--checkpoint", trained, "--out", trained),
        ("adapter", "merge", model, tmp_path, "--out", model),
        ("init", model, "--out", model, "--force"),
        ("head", model, "--pool", "none", "--classes", "3", "--out", model),
    ):
        assert_refused(run(*command), "cannot-write", "it is read by the same command")
    assert tree(tmp_path) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_no_command_waits_for_a_pipe(refused, shared, tmp_path):
    """Opening one waits until somebody writes to it."""
    for name in ("pipe", "pair.data", "tokenizer_config.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    with mock.patch.object(writer, "EXTERNAL_DATA_THRESHOLD", 64):
        write_checkpoint(tmp_path / "whole", read_checkpoint(shared.package / "checkpoint"))
    shutil.copyfile(tmp_path / "whole", tmp_path / "pair")
    prepare = ("data", "prepare", tmp_path / "texts.jsonl", "--length", 8, "--template", "chatml")
    out = "--out", tmp_path / "new"
    for code, command in (
        ("checkpoint-unreadable", ("export", shared.package, "--checkpoint", tmp_path / "pipe")),
        ("checkpoint-unreadable", ("export", shared.package, "--checkpoint", tmp_path / "pair")),
        ("tokenizer-invalid", (*prepare, "--tokenizer", tmp_path / "pipe")),
        ("tokenizer-invalid", (*prepare, "--tokenizer", tmp_path / "tokenizer.json")),
    ):
        refused((*command, *out), code, "it is not an ordinary file")
    check = "config", shared.package, "--check", tmp_path / "pipe"
    refused(check, "config-not-found", "it is not an ordinary file")


def test_a_private_key_is_not_written_into_a_package(run, shared, tmp_path):
    package = tmp_path / "package"
    shutil.copytree(shared.package, package)
    outcome = run("sign", package, "--new-key", package / "key.pem")
    assert_refused(outcome, "cannot-write", "is a package")
    assert tree(package) == tree(shared.package)


def test_a_schedule_that_has_ended_does_not_train(run, shared, tmp_path):
    command = ("train", shared.package, "--data", shared.data, "--out", tmp_path / "further.ckpt")
    scheduled = (*command[:4], "--out", tmp_path / "t.ckpt", "--schedule", "cosine")
    run(*scheduled, "--epochs", "2", code=0)
    resume = (*command, "--resume", tmp_path / "t.ckpt")
    for rate in ((), ("--lr", "0.5")):
        assert_refused(run(*resume, *rate), "bad-schedule", "has ended", "--schedule none")
    again = run(*resume, "--schedule", "cosine", "--epochs", "1", code=0).err
    assert re.search(r"learning rate 0.001 \(cosine schedule, begins at 0\.000\d+\)", again)
    again = run(*resume, "--schedule", "none", "--epochs", "1", code=0).err
    assert "learning rate 0.001;" in again  # that with which the schedule began
    # One that is given counts the steps that the checkpoint has made, too.
    ended = run(*resume, "--schedule", "linear:total=2")
    assert_refused(ended, "bad-schedule", "the given linear schedule has ended", "--schedule none")
    again = run(*resume, "--schedule", "constant:warmup=1", "--epochs", "1", code=0).err
    assert re.search(r"\(constant schedule, its warm-up over after \d+ steps\)", again)
    early = run(*command, "--schedule", "linear:total=2,warmup=1", "--epochs", "2", code=0).err
    assert re.search(r"warning: the given linear schedule ends after 2 of \d+ steps", early)


def test_a_warm_up_may_be_longer_than_a_training(run, shared, tmp_path):
    """Its first step has the rate 0, and it has not ended."""
    command = ("train", shared.package, "--data", shared.data, "--out", tmp_path / "t.ckpt")
    said = run(*command, "--schedule", "constant:warmup=100", "--batch-size", "1000", code=0).err
    assert "warning" not in said


def test_reports_of_sizes_do_not_share_a_file(run, shared, tmp_path):
    json.loads(run("inspect", shared.package, "--report", "json:-", code=0).out)
    one = tmp_path / "one"
    outcome = run("inspect", shared.package, "--report", f"html:{one}", "--report", f"json:{one}")
    assert_refused(outcome, "report-twice")
    assert_refused(run("inspect", shared.package, "--report", "json:-", "--json"), "report-twice")
