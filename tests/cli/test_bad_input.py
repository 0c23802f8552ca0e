"""Bad input gets one clear error, exit code 2, and leaves nothing behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import Refused, Run, Shared, arrays


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
