"""Bad input gets one clear error, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.artifacts import generate_artifacts
from odtpack.cli._files import check_creatable, check_writable
from odtpack.errors import OdtpackError
from tests.cli.conftest import Refused, Run, Shared, arrays, assert_refused, tree


def _write(path: Path, **changed: np.ndarray | None) -> Path:
    kept = {name: array for name, array in {**arrays(), **changed}.items() if array is not None}
    np.savez(path, allow_pickle=False, **kept)
    return path


BAD_DATA: dict[str, tuple[dict[str, np.ndarray | None], str, tuple[str, ...]]] = {
    "missing array": ({"labels": None}, "data-missing", ("'labels'", "input")),
    "misshapen": (
        {"input": np.zeros((60, 1, 9, 8), np.float32)},
        "data-shape",
        ("'input'", "[60, 1, 9, 8]", "8, 8]"),
    ),
    "wrong type": ({"input": np.zeros((60, 1, 8, 8))}, "data-type", ("'input'", "astype")),
    "unequal": ({"labels": np.zeros(59, np.int64)}, "data-length", ("59", "60")),
    "not finite": (
        {"input": np.full((60, 1, 8, 8), np.nan, np.float32)},
        "data-not-finite",
        ("'input'", "sample 0"),
    ),
    "label too large": (
        {"labels": np.full(60, 3, np.int64)},
        "label-out-of-range",
        ("'labels'", "3", "0 to 2"),
    ),
    "negative label": ({"labels": np.full(60, -1, np.int64)}, "label-out-of-range", ("-1",)),
}


@pytest.mark.parametrize("command", ["train", "simulate"])
class TestData:
    def arguments(
        self, command: str, shared: Shared, data: Path, tmp_path: Path
    ) -> tuple[object, ...]:
        if command == "train":
            return "train", shared.package, "--data", data, "--out", tmp_path / "new.ckpt"
        report = f"html:{tmp_path / 'new.html'}"
        device = "--device", "pixel-8a", "--report", report
        return "simulate", shared.package, "--data", data, *device

    @pytest.mark.parametrize("case", BAD_DATA)
    def test_bad_arrays(
        self, refused: Refused, shared: Shared, tmp_path: Path, command: str, case: str
    ) -> None:
        changed, code, words = BAD_DATA[case]
        data = _write(tmp_path / "data.npz", **changed)
        arguments = self.arguments(command, shared, data, tmp_path)
        refused(arguments, code, *words, str(data))

    def test_no_archive(
        self, refused: Refused, shared: Shared, tmp_path: Path, command: str
    ) -> None:
        data = tmp_path / "data.npz"
        data.write_text("1,2,3\n")
        arguments = self.arguments(command, shared, data, tmp_path)
        refused(arguments, "data-unreadable", str(data), "numpy.savez")

    def test_no_file(self, refused: Refused, shared: Shared, tmp_path: Path, command: str) -> None:
        arguments = self.arguments(command, shared, tmp_path / "no.npz", tmp_path)
        refused(arguments, "data-not-found", "no.npz")

    def test_no_package(
        self, refused: Refused, shared: Shared, tmp_path: Path, command: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        arguments = list(self.arguments(command, shared, shared.data, tmp_path))
        arguments[1] = tmp_path / "empty"
        refused(tuple(arguments), "package-not-found", "manifest.json", "odtpack build")

    def test_package_with_truncated_checkpoint(
        self, refused: Refused, shared: Shared, tmp_path: Path, command: str
    ) -> None:
        package = shutil.copytree(shared.package, tmp_path / "package")
        whole = (package / "checkpoint").read_bytes()
        (package / "checkpoint").write_bytes(whole[: len(whole) // 2])
        arguments = list(self.arguments(command, shared, shared.data, tmp_path))
        arguments[1] = package
        refused(tuple(arguments), "package-changed", "'checkpoint'", "help:")


class TestTrain:
    def test_share_out_of_range(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        arguments = "train", shared.package, "--data", shared.data, "--out", tmp_path / "new"
        refused((*arguments, "--holdout", "1.5"), "bad-holdout", "1.5", "--holdout 0.2")
        both = "--holdout", "0.5", "--eval", shared.data
        refused((*arguments, *both), "holdout-and-eval", "leave one of them out")

    def test_place_that_cannot_be_written(
        self, refused: Refused, shared: Shared, tmp_path: Path
    ) -> None:
        arguments = "train", shared.package, "--data", shared.data, "--out"
        refused((*arguments, tmp_path / "no" / "new.ckpt"), "cannot-write", "mkdir -p")
        refused((*arguments, tmp_path), "cannot-write", "is a folder")
        refused((*arguments, shared.package / "checkpoint"), "cannot-write", "outside the package")

    def test_rate_too_high(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        arguments = "train", shared.package, "--data", shared.data, "--out", tmp_path / "new"
        refused((*arguments, "--lr", "1e30"), "diverged", "epoch 1", "--lr")
        refused((*arguments, "--lr", "inf"), "bad-learning-rate", "inf")


@pytest.fixture
def truncated(shared: Shared, tmp_path: Path) -> Path:
    whole = (shared.package / "checkpoint").read_bytes()
    path = tmp_path / "cut.ckpt"
    path.write_bytes(whole[: len(whole) // 2])
    return path


class TestCheckpoint:
    def test_truncated(
        self, refused: Refused, shared: Shared, truncated: Path, tmp_path: Path
    ) -> None:
        data = "--data", shared.data, "--out", tmp_path / "new.ckpt"
        for arguments in (
            ("train", shared.package, *data, "--resume", truncated),
            ("export", shared.package, "--checkpoint", truncated, "--out", tmp_path / "new.onnx"),
            ("inspect", truncated),
        ):
            refused(arguments, "checkpoint-corrupt", str(truncated))

    def test_of_another_model(
        self, run: Run, refused: Refused, shared: Shared, tmp_path: Path
    ) -> None:
        other = tmp_path / "other"
        built = run("build", shared.model, "--out", other, "--loss", "mse", "--train", "fc.weight")
        assert built.code == 0
        arguments = "export", shared.package, "--out", tmp_path / "new.onnx", "--checkpoint"
        cut = _without_first_parameter(other / "checkpoint", tmp_path / "less.ckpt")
        refused((*arguments, cut), "model-mismatch", "'conv1.weight'", str(cut))


def _without_first_parameter(source: Path, destination: Path) -> Path:
    from odtpack_runtime.checkpoint.format import read_checkpoint
    from odtpack_runtime.checkpoint.writer import write_checkpoint

    data = read_checkpoint(source)
    data.frozen.pop("conv1.weight")
    write_checkpoint(destination, data)
    return destination


class TestExport:
    def test_unknown_output(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        for name in ("nothing", "loss", "labels"):
            arguments = "export", shared.package, "--out", tmp_path / "new.onnx", "--outputs", name
            refused(arguments, "unknown-output", repr(name), "output, ")

    def test_place_inside_the_package(
        self, refused: Refused, shared: Shared, tmp_path: Path
    ) -> None:
        arguments = "export", shared.package, "--out", shared.package / "eval_model.onnx"
        refused(arguments, "cannot-write", "outside the package")


class TestInspect:
    def test_neither(self, refused: Refused, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("hello")
        refused(("inspect", path), "not-onnx", str(path), "neither a package nor an ONNX model")
        refused(("inspect", tmp_path / "no"), "not-found", "no")

    def test_ort_format(self, refused: Refused, tmp_path: Path) -> None:
        path = tmp_path / "model.ort"
        path.write_bytes(b"\x18\0\0\0ORTM" + bytes(64))
        refused(("inspect", path), "ort-format", "model.ort", ".onnx")


class TestSimulate:
    def arguments(self, shared: Shared, *more: object) -> tuple[object, ...]:
        return "simulate", shared.package, "--data", shared.data, *more

    def test_unknown_device(self, refused: Refused, shared: Shared) -> None:
        arguments = self.arguments(shared, "--device", "pixel-8ax")
        refused(arguments, "device-unknown", "'pixel-8ax'", "'pixel-8a'", "odtpack devices list")

    def test_no_device(self, refused: Refused, shared: Shared) -> None:
        refused(self.arguments(shared), "no-device", "--device", "google/pixel-8a")

    def test_malformed_profile(self, refused: Refused, shared: Shared, tmp_path: Path) -> None:
        profile = tmp_path / "phone.toml"
        profile.write_text("schema_version = 1\nname = 3\n")
        refused(self.arguments(shared, "--device", profile), "profile-invalid", str(profile))

    @pytest.mark.parametrize(
        ("text", "code", "words"),
        [
            ("[budgets\n", "budgets-malformed", ("TOML",)),
            ("[budgets]\npeak_memory = 200\n", "budgets-invalid", (":2", "200 MB")),
            ("[budgets]\npeek_memory = '200 MB'\n", "budgets-invalid", (":2", "peak_memory")),
            ("[budgets]\npeak_memory = '200 MBit'\n", "budgets-invalid", (":2", "MBit")),
            ("[device.'acme/one']\n", "budgets-unknown-device", ("acme/one",)),
        ],
    )
    def test_malformed_budget(
        self,
        refused: Refused,
        shared: Shared,
        tmp_path: Path,
        text: str,
        code: str,
        words: tuple[str, ...],
    ) -> None:
        budget = tmp_path / "budgets.toml"
        budget.write_text(text)
        report = f"json:{tmp_path / 'new.json'}"
        more = "--device", "pixel-8a", "--budget", budget, "--report", report
        refused(self.arguments(shared, *more), code, "budgets.toml", *words)

    @pytest.mark.parametrize(
        ("report", "code", "word"),
        [
            ("pdf:report.pdf", "report-format-unknown", "html"),
            ("html", "report-path-missing", "--report html:report.html"),
            ("html:no/such/folder/report.html", "cannot-write", "mkdir -p no/such/folder"),
        ],
    )
    def test_bad_report(
        self,
        refused: Refused,
        shared: Shared,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        report: str,
        code: str,
        word: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = self.arguments(shared, "--device", "pixel-8a", "--report", report)
        refused(arguments, code, word)

    @pytest.mark.parametrize(
        ("option", "value", "words"),
        [
            ("--sessions-per-day", "0", "--sessions-per-day must be greater than 0"),
            ("--sessions-per-day", "nan", "--sessions-per-day must be a finite number"),
            ("--sessions-per-day", "1e9", "--sessions-per-day must be at most 1440"),
            ("--save-every", "99999999999999999999", "--save-every must be at most 2147483648"),
            ("--pieces", "10001", "--pieces must be at most 10000"),
        ],
    )
    def test_bad_policy(
        self, refused: Refused, shared: Shared, option: str, value: str, words: str
    ) -> None:
        more = "--device", "pixel-8a", option, value
        refused(self.arguments(shared, *more), "bad-policy", words)

    def test_report_in_place_of_an_input(self, refused: Refused, shared: Shared) -> None:
        """The data are as precious as budgets and recipe."""
        report = "--report", f"json:{shared.data}"
        arguments = self.arguments(shared, "--device", "pixel-8a", *report)
        refused(arguments, "cannot-write", "read by the same command")


class TestDevices:
    def test_unknown(self, refused: Refused) -> None:
        refused(("devices", "show", "nokia-3310"), "device-unknown", "'nokia-3310'", "devices list")

    def test_no_file(self, refused: Refused) -> None:
        refused(("devices", "show", "no.toml"), "profile-missing", "no.toml")


# What the system or float32 refuses is one clear error, and never a bug.

LONG = "a" * 6000


@pytest.mark.parametrize("long", [LONG, "a/" * 3000])
def test_paths_that_are_too_long(run: Run, shared: Shared, tmp_path: Path, long: str) -> None:
    build = ("build", shared.model, "--loss", "cross_entropy", "--out")
    for command, code in (
        ((*build, tmp_path / long), "package-not-written"),
        (("build", tmp_path / long, "--loss", "mse", "--out", tmp_path / "x"), "system-refused"),
        (("inspect", tmp_path / long), "system-refused"),
        (("verify", tmp_path / long), "system-refused"),
        (("train", tmp_path / long, "--data", shared.data), "system-refused"),
        (("train", shared.package, "--data", tmp_path / long), None),
    ):
        outcome = run(*command)
        assert outcome.code == 2
        assert "error[internal]" not in outcome.err
        assert code is None or f"error[{code}]" in outcome.err


def started(shared: Shared, close: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = ['exec "$@" ' + close, "sh", sys.executable, "-m", "odtpack", *map(str, words)]
    return subprocess.run(["sh", "-c", *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("close", [">&-", ">/dev/full"])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_results_that_cannot_be_written(shared: Shared, close: str, more: tuple[str, ...]) -> None:
    done = started(shared, close, "inspect", shared.model, *more)
    assert done.returncode == 2
    assert done.stderr.count("error[system-refused]") == 1
    assert "Exception" not in done.stderr
    assert "internal" not in done.stderr


@pytest.mark.parametrize("close", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_commands_without_results_need_no_streams(
    shared: Shared, close: str, tmp_path: Path
) -> None:
    out = tmp_path / "package"
    words = ("build", shared.model, "--loss", "cross_entropy", "--out", out)
    done = started(shared, close, *words)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {p.name for p in shared.package.iterdir()}
    assert (out / "checkpoint").read_bytes() == (shared.package / "checkpoint").read_bytes()


@pytest.mark.parametrize(
    "option", [("--weight-decay", "1e308"), ("--clip-norm", "1e39"), ("--clip-value", "3.5e38")]
)
def test_numbers_that_float32_does_not_hold(
    run: Run, shared: Shared, tmp_path: Path, option: tuple[str, str]
) -> None:
    out = tmp_path / "package"
    outcome = run("build", shared.model, "--loss", "cross_entropy", "--out", out, *option)
    assert outcome.code == 2
    assert "error[bad-hyperparameter]" in outcome.err
    assert not out.exists()


def test_a_path_that_is_not_utf8(run: Run, shared: Shared, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"p\xff")
    outcome = run("build", shared.model, "--loss", "cross_entropy", "--out", folder)
    assert outcome.code == 2
    assert "error[package-not-written]" in outcome.err
    assert not folder.exists()
    folder.symlink_to(shared.package, target_is_directory=True)  # what it leads to has a good name
    assert run("verify", folder).code == 0
    folder.unlink()
    subprocess.run(["cp", "-r", shared.package, folder], check=True)
    outcome = run("verify", folder)
    assert outcome.code == 2
    assert "error[model-not-readable]" in outcome.err
    assert "not UTF-8" in outcome.err


@pytest.mark.parametrize(
    "changed",
    [
        {"model": b"\x08\x08"},
        {"requires_grad": b"conv1.weight"},
        {"artifact_directory": b"x"},
        {"prefix": b"x"},
        {"ort_format": b"x"},
        {"nominal_checkpoint": b"x"},
        {"custom_op_library": b"x"},
        {"target": b"x"},
        {"loss": b"x"},
        {"optimizer": b"x"},
    ],
)
def test_artifacts_given_bytes(shared: Shared, tmp_path: Path, changed: dict[str, bytes]) -> None:
    arguments = {
        "model": onnx.load(shared.model),
        "requires_grad": ["conv2.weight"],
        "artifact_directory": str(tmp_path / "out"),
        **changed,
    }
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
def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    found = places(tmp_path)
    before = tree(tmp_path)
    for path, words in found:
        with pytest.raises(OdtpackError) as caught:
            check_writable(path, "--out")
        assert caught.value.code == "cannot-write"
        assert words.lower() in caught.value.what.lower()
        assert str(path) in caught.value.what
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["new", "file", "x" * 200, "dangling"])
def test_places_that_can_be_written(tmp_path: Path, name: str) -> None:
    places(tmp_path)
    before = tree(tmp_path)
    check_writable(tmp_path / name, "--out")
    assert tree(tmp_path) == before


def test_folders_that_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path(), Path("..") / tmp_path.name, Path("new"), Path("new/deep"), tmp_path):
        check_creatable(path, "--out")
    assert tree(tmp_path) == {}


def test_a_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions say yes, and the system says no: full, read-only, of another kind."""
    monkeypatch.setattr(os, "access", lambda *_: True)

    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    for check in (check_writable, check_creatable):
        with pytest.raises(OdtpackError, match="Read-only file system"):
            check(tmp_path / "new", "--out")


@pytest.mark.skipif(not NOTHING_IS_CREATED.is_dir(), reason="needs a folder that takes no file")
@pytest.mark.parametrize("place", ["below a file", "below proc"])
def test_nothing_is_trained_for_a_report_that_cannot_be_written(
    run: Run, shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    from odtpack_simulator import simulation

    def started(*_: object, **__: object) -> None:
        raise AssertionError("the replay was started")

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


def test_what_a_killed_check_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = tmp_path / f".m.onnx.{process.pid}-0123456789ab.tmp"
    left.touch()
    check_writable(tmp_path / "m.onnx", "--out")
    assert list(tmp_path.iterdir()) == []
