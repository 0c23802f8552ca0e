"""``odtpack devices check``, ``measure`` and ``import``."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from odtpack_simulator.device.profile import list_profiles, load_profile
from odtpack_simulator.device.profile_check import check_profile
from odtpack_simulator.measure import measured_profile
from tests.cli.conftest import Run, Shared, assert_refused

DOCUMENT = Path(__file__).parents[2] / "docs/formats/device-profile.md"
EXAMPLE = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)[0]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "example.toml"
    path.write_text(EXAMPLE, "utf-8")
    return path


def assert_simulated(run: Run, shared: Shared, device: object, name: str = "") -> dict[str, Any]:
    """What a simulation says of a device, which has a step time and ``name`` in its name."""
    command = "simulate", shared.package, "--data", shared.data, "--device", device, "--json"
    (found,) = run(*command, "--epochs", 1, "--batch-size", 8, code=0).json()["devices"]
    assert found["latency"]["step_ms"] is not None
    assert name in found["name"]
    return dict(found)


class TestCheck:
    def test_the_documented_example(self, run, example):
        outcome = run("devices", "check", example, code=0)
        assert outcome.err == ""
        assert "is a valid profile: acme/phone-1" in outcome.out
        assert "judged      memory in the foreground, step time" in outcome.out
        lack = "not judged  memory in the background, for lack of memory.app_limit_background"
        assert lack in outcome.out
        assert "the system warns by pressure" in outcome.out
        assert "warning: " not in outcome.err

    def test_all_shipped_profiles_pass(self, run):
        names = list_profiles()
        outcome = run("devices", "check", *names, "--json", code=0)
        assert [entry["file"] for entry in outcome.json()] == names
        for entry in outcome.json():
            assert entry["valid"] is True
            assert entry["error"] is None
            expected = check_profile(load_profile(entry["file"]))
            assert entry["report"] == expected.model_dump(mode="json")

    def test_a_warning_is_no_error(self, run, example):
        old, new = "value = 0.4, low = 0.25, high = 0.5", "value = 1, low = 1, high = 1"
        example.write_text(EXAMPLE.replace(old, new), "utf-8")
        outcome = run("devices", "check", example, code=0)
        assert "warning: cpu.gemm_efficiency is 1" in outcome.err

    @pytest.mark.parametrize(("old", "new", "words"), [
        ("value = 5.1", "value = -5.1", ("memory.bandwidth.value", "greater than 0")),
        ('unit = "GB/s"', 'unit = "GBps"', ("memory.bandwidth", "did you mean GB/s")),
        ("[storage]", "[strage]", ("strage", "did you mean 'storage'")),
        (EXAMPLE, "", ("schema_version", "is missing")),
        (EXAMPLE, "x = [", ("not valid TOML",)),
        (EXAMPLE, "a = " + "[" * 20_000, ("not valid TOML",)),
    ])  # fmt: skip
    def test_a_wrong_profile_is_named(self, run, example, old, new, words):
        assert EXAMPLE.count(old) == 1
        example.write_text(EXAMPLE.replace(old, new), "utf-8")
        outcome = run("devices", "check", example)
        code = "profile-malformed" if "not valid TOML" in words else "profile-invalid"
        assert_refused(outcome, code, f"in: {example}", *words)
        line = EXAMPLE.partition(old)[0].count("\n") + 1
        if old != EXAMPLE:
            assert f"in: {example}:{line}" in outcome.err

    def test_one_of_several_is_wrong(self, run, example, tmp_path):
        profiles = tmp_path / "gone.toml", example, "pixel-8"
        outcome = run("devices", "check", *profiles, "--json", code=2)
        entries = outcome.json()
        assert [entry["valid"] for entry in entries] == [False, True, False]
        assert entries[0]["error"]["code"] == "profile-missing"
        assert entries[0]["error"]["where"] == str(tmp_path / "gone.toml")
        assert entries[2]["error"]["code"] == "device-unknown"
        assert entries[2]["error"]["hint"]
        assert entries[1]["report"]["name"] == "acme/phone-1"
        assert outcome.err.count("error[") == 2

    def test_control_characters_of_a_profile_do_not_reach_the_terminal(self, run, example):
        example.write_text(EXAMPLE.replace("not tried", "\\u001b[31mred"), "utf-8")
        outcome = run("devices", "check", example, code=0)
        assert "red" in outcome.out
        assert "\x1b[31mred" not in outcome.out


class TestMeasure:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quick = measured_profile.Effort(
            repeats=1, convolution_seconds=0.0, file_bytes=2**20, syncs=2
        )
        monkeypatch.setattr(measured_profile, "Effort", lambda: quick)

    def test_check_and_simulate_take_the_file(self, run, shared, tmp_path):
        out = tmp_path / "here.toml"
        named = "--name", "acme/edge-1", "--title", "Edge 1"
        outcome = run("devices", "measure", "--out", out, "--threads", 1, *named, "--json", code=0)
        assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]
        content = outcome.json()
        assert content["name"] == "acme/edge-1"
        assert content["digest"] == load_profile(out).digest
        assert "storage: 1 of 2" in outcome.err
        assert f"wrote {out}" in outcome.err
        assert out.read_text().startswith("# Made by odtpack devices measure.")
        checked = run("devices", "check", out, "--json", code=0)
        assert checked.json()[0]["report"]["warnings"] == []
        assert_simulated(run, shared, out, "acme/edge-1")

    @pytest.mark.parametrize(("arguments", "code"), [
        (("--out", "profile.json"), "profile-suffix"),
        (("--out", "absent/profile.toml"), "cannot-write"),
        (("--out", "profile.toml", "--name", "Pixel"), "profile-name"),
        (("--out", "profile.toml", "--threads", 0), "threads-range"),
        (("--out", "profile.toml", "--title", ""), "profile-title"),
    ])  # fmt: skip
    def test_refused_before_anything_is_measured(
        self, run, arguments, code, tmp_path,
        monkeypatch,
    ):  # fmt: skip
        monkeypatch.chdir(tmp_path)
        assert_refused(run("devices", "measure", *arguments), code)
        assert list(tmp_path.iterdir()) == []


class TestImport:
    MEASURED: ClassVar = {
        "format": 1, "kit": "swift", "onnxruntime": "1.31.1", "threads": 2,
        "gemm_flops": [8e10, 9e10], "gemm_single_flops": [4e10], "copy_bytes_per_second": [2e10],
    }  # fmt: skip

    def test_simulate_takes_what_it_writes(self, run, shared, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("phone.json").write_text(json.dumps(self.MEASURED))
        outcome = run("devices", "import", "phone.json", "--title", "My phone", "--json", code=0)
        assert "wrote phone.toml" in outcome.err
        assert outcome.json()["validated"] is True
        assert load_profile("./phone.toml").os == "ios"
        assert assert_simulated(run, shared, "./phone.toml")["validated"] is True

    def test_bad_input_is_refused(self, run, tmp_path):
        file = tmp_path / "phone.json"
        out = "--out", tmp_path / "phone.toml"
        absent = run("devices", "import", file, *out, code=2)
        assert f"error[measurements-missing]: the file of measurements {file.name!r}" in absent.err
        file.write_text(json.dumps(self.MEASURED | {"gemm_flops": [0]}))
        outcome = run("devices", "import", file, *out)
        assert_refused(outcome, "measurements-invalid", "gemm_flops[0]", str(file))
        assert_refused(run("devices", "import", file, "--out", file), "profile-suffix")
        assert [path.name for path in tmp_path.iterdir()] == ["phone.json"]


def test_all_errors_of_a_profile_are_shown(run, tmp_path):
    profile = tmp_path / "mine.toml"
    profile.write_text('schema_version = 1\nname = "Bad Name"\ntitle = "T"\nvendor = "V"\n'
                       'os = "beos"\nvalidated = "perhaps"\ncolour = 1\n')  # fmt: skip
    outcome = run("devices", "check", profile, code=2)
    for words in ("colour: unknown key", "name (line 2): ", "os (line 5): 'beos'",
                  "validated (line 6): "):  # fmt: skip
        assert words in outcome.err
