"""Where output goes: what a command found to stdout, messages to stderr; and shell completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack_simulator.device.profile import list_profiles
from odtpack_simulator.reports import report_formats
from tests.cli.conftest import Run, Shared

READING = {
    "inspect a package": (("inspect", "PACKAGE"), "conv2.weight"),
    "inspect a model": (("inspect", "MODEL"), "parameters that build can train"),
    "inspect a checkpoint": (("inspect", "PACKAGE/checkpoint"), "trainable"),
    "devices list": (("devices", "list"), "google/pixel-8a"),
    "devices show": (("devices", "show", "pixel-8a"), "memory.app_limit_foreground"),
    "devices check": (("devices", "check", "pixel-8a"), "is a valid profile"),
    "ops coverage": (("ops", "coverage", "Conv"), "Conv"),
    "ops check": (("ops", "check", "MODEL"), "a gradient reaches each"),
    "verify": (("verify", "PACKAGE"), "no others"),
}


def words(shared: Shared, command: tuple[str, ...]) -> list[str]:
    places = {"PACKAGE": str(shared.package), "MODEL": str(shared.model)}
    return ["/".join(places.get(part, part) for part in word.split("/")) for word in command]


@pytest.mark.parametrize("name", READING)
def test_what_a_command_found_goes_to_stdout(run: Run, shared: Shared, name: str) -> None:
    command, found = READING[name]
    outcome = run(*words(shared, command))
    assert outcome.code == 0, outcome.err
    assert found in outcome.out
    assert outcome.err.strip() == "" or outcome.err.startswith("warning")


@pytest.mark.parametrize("name", READING)
def test_with_json_stdout_is_json_and_nothing_else(run: Run, shared: Shared, name: str) -> None:
    outcome = run(*words(shared, READING[name][0]), "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)


def test_diff_goes_to_stdout(run: Run, shared: Shared) -> None:
    text = run("diff", shared.package, shared.package)
    assert text.code == 0
    assert text.out.strip()
    assert text.err == ""
    assert json.loads(run("diff", shared.package, shared.package, "--format", "json").out)


def test_one_command_does_not_decide_for_the_next(run: Run, shared: Shared, tmp_path: Path) -> None:
    assert run("devices", "list").out
    built = run("build", shared.model, "--loss", "cross_entropy", "--out", tmp_path / "package")
    assert built.code == 0, built.err
    assert built.out == ""
    assert "built" in built.err


def test_errors_go_to_stderr(run: Run) -> None:
    for command in (("inspect", "nowhere"), ("devices", "show", "nothing"), ("verify", "nowhere")):
        outcome = run(*command)
        assert outcome.code == 2
        assert outcome.out == ""
        assert outcome.err.startswith("error[")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("a12", ["samsung/galaxy-a12"]),
        ("iphone", [name for name in list_profiles() if "iphone" in name]),
        ("PIXEL", [name for name in list_profiles() if "pixel" in name]),
    ],
)
def test_part_of_a_name_gets_the_devices_that_contain_it(
    run: Run, asked: str, expected: list[str]
) -> None:
    outcome = run("devices", "show", asked)
    assert outcome.code == 2
    assert expected
    assert f"did you mean {' or '.join(map(repr, expected))}?" in outcome.err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """As under ``head``: more than a pipe holds, and it is closed."""
    code = "import sys; from odtpack.cli import main; sys.exit(main(['ops', 'coverage', '--json']))"
    for text in (code, code.replace(", '--json'", "")):
        with subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            error = process.stderr.read()
            process.wait()
        assert process.returncode == 141, error
        for word in (b"error[", b"Exception", b"BrokenPipe"):
            assert word not in error


def completed(*command: str, cwd: Path | None = None) -> list[str]:
    """What bash is offered for the last of these words."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from odtpack.cli import main; sys.exit(main([]))"],
        env={
            **os.environ,
            "_ODTPACK_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("odtpack", *(word or "''" for word in command))),
            "COMP_CWORD": str(len(command)),
        },
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


class TestCompletion:
    def test_devices(self, tmp_path: Path) -> None:
        (tmp_path / "pixel-of-mine.toml").touch()
        (tmp_path / "pixel.txt").touch()
        assert set(completed("simulate", "p", "--device", "pixel", cwd=tmp_path)) == {
            *(n.rpartition("/")[2] for n in list_profiles() if "/pixel" in n),
            "pixel-of-mine.toml",
        }
        google = [name for name in list_profiles() if name.startswith("google/")]
        assert completed("devices", "show", "google/") == google
        assert completed("fit", "m", "--device", "google/") == google
        assert "all" in completed("simulate", "p", "--device", "al")

    def test_losses_and_optimizers(self) -> None:
        assert set(completed("build", "m", "--loss", "")) == {*LOSSES, "none"}
        assert set(completed("build", "m", "--optimizer", "")) == set(OPTIMIZERS)

    def test_formats_of_reports_and_their_paths(self, tmp_path: Path) -> None:
        formats = [f"{name}:" for name in report_formats()]
        assert completed("simulate", "p", "--report", "") == formats
        assert completed("judge", "r", "--report", "ht") == ["html:"]
        (tmp_path / "reports").mkdir()
        found = completed("simulate", "p", "--report", "html:rep", cwd=tmp_path)
        assert found == ["html:reports/"]
        assert completed("inspect", "p", "--report", "j") == ["json:"]

    def test_the_script_is_shown(self, run: Run) -> None:
        assert "--install-completion" in run("--help").out
