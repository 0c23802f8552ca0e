"""Where output goes: what a command found to stdout, messages to stderr; and shell completion."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.text import Text

from odtpack.cli import _console, main
from odtpack.cli.model import names
from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from odtpack_simulator.device.profile import list_profiles
from odtpack_simulator.reports import report_formats
from odtpack_simulator.reports.svg import element
from odtpack_simulator.values.text import clean
from tests.cli.conftest import Shared
from tests.packages.mutations import edit
from tests.programs import ran
from tests.simulator.factory import make_result
from tests.simulator.graphs import weighted

READING = {
    "inspect a package": (("inspect", "PACKAGE"), "conv2.weight"),
    "inspect a model": (("inspect", "MODEL"), "parameters that build can train"),
    "inspect a checkpoint": (("inspect", "PACKAGE/checkpoint"), "trainable"),
    "devices list": (("devices", "list"), "google/pixel-8a"),
    "devices show": (("devices", "show", "pixel-8a"), "memory.app_limit_foreground"),
    "devices check": (("devices", "check", "pixel-8a"), "is a valid profile"),
    "ops coverage": (("ops", "coverage", "Conv"), "Conv"),
    "ops check": (("ops", "check", "MODEL"), "a gradient reaches each"),
    "verify": (("verify", "PACKAGE"), "5 listed and the manifest, "),
}


def words(shared: Shared, command: tuple[str, ...]) -> list[str]:
    places = {"PACKAGE": str(shared.package), "MODEL": str(shared.model)}
    return ["/".join(places.get(part, part) for part in word.split("/")) for word in command]


@pytest.mark.parametrize("name", READING)
def test_what_a_command_found_goes_to_stdout(run, shared, name):
    command, found = READING[name]
    outcome = run(*words(shared, command), code=0)
    assert found in outcome.out
    assert outcome.err.strip() == "" or outcome.err.startswith("warning")


@pytest.mark.parametrize("name", READING)
def test_with_json_stdout_is_json_and_nothing_else(run, shared, name):
    assert json.loads(run(*words(shared, READING[name][0]), "--json", code=0).out)


def test_diff_goes_to_stdout(run, shared):
    text = run("diff", shared.package, shared.package, code=0)
    assert text.out.strip()
    assert text.err == ""
    assert json.loads(run("diff", shared.package, shared.package, "--format", "json").out)


def test_one_command_does_not_decide_for_the_next(run, shared, tmp_path):
    assert run("devices", "list").out
    build = "build", shared.model, "--loss", "cross_entropy", "--out", tmp_path / "package"
    built = run(*build, code=0)
    assert built.out == ""
    assert "built" in built.err


def test_errors_go_to_stderr(run):
    for command in (("inspect", "nowhere"), ("devices", "show", "nothing"), ("verify", "nowhere")):
        outcome = run(*command, code=2)
        assert outcome.out == ""
        assert outcome.err.startswith("error[")


@pytest.mark.parametrize(("asked", "expected"), [
    ("a12", ["samsung/galaxy-a12"]),
    ("iphone", [name for name in list_profiles() if "iphone" in name]),
    ("PIXEL", [name for name in list_profiles() if "pixel" in name]),
])  # fmt: skip
def test_part_of_a_name_gets_the_devices_that_contain_it(run, asked, expected):
    outcome = run("devices", "show", asked, code=2)
    assert expected
    assert f"did you mean {' or '.join(map(repr, expected))}?" in outcome.err


@pytest.mark.parametrize(
    ("encoding", "words"),
    [("cp1252", "loss 2.32 -> 0.114, accuracy 9.4 -> 96.6 %"), ("ascii", "over 10 us")],
)
def test_what_an_encoding_lacks_has_a_plain_form(tmp_path, encoding, words):
    result, budget = tmp_path / "result.json", tmp_path / "budgets.toml"
    result.write_text(make_result().to_json())
    budget.write_text('[budgets]\nstep_latency = "10 us"\n')
    command = [sys.executable, "-m", "odtpack", "judge", str(result), "--budget", str(budget)]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    text = done.stdout.decode(encoding)
    assert "\\x" not in text
    assert "\\u" not in text
    assert words in text


def test_a_reader_that_leaves_early_is_no_error():
    """As under ``head``: more than a pipe holds, and it is closed."""
    code = "import sys; from odtpack.cli import main; sys.exit(main(['ops', 'coverage', '--json']))"
    for text in (code, code.replace(", '--json'", "")):
        with subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.close()
            error = process.stderr.read()
            process.wait()
        assert process.returncode == 141, error
        for word in (b"error[", b"Exception", b"BrokenPipe"):
            assert word not in error


def completed(*command: str, cwd: Path | None = None) -> list[str]:
    """What bash is offered for the last of these words."""
    code = "import sys; from odtpack.cli import main; sys.exit(main([]))"
    environment = {
        **os.environ,
        "_ODTPACK_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("odtpack", *(word or "''" for word in command))),
        "COMP_CWORD": str(len(command)),
    }
    return ran(sys.executable, "-c", code, code=None, env=environment, cwd=cwd).stdout.split()


class TestCompletion:
    def test_devices(self, tmp_path):
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

    def test_losses_and_optimizers(self):
        assert set(completed("build", "m", "--loss", "")) == {*LOSSES, "none"}
        assert set(completed("build", "m", "--optimizer", "")) == set(OPTIMIZERS)

    def test_formats_of_reports_and_their_paths(self, tmp_path):
        formats = [f"{name}:" for name in report_formats()]
        assert completed("simulate", "p", "--report", "") == formats
        assert completed("judge", "r", "--report", "ht") == ["html:"]
        (tmp_path / "reports").mkdir()
        found = completed("simulate", "p", "--report", "html:rep", cwd=tmp_path)
        assert found == ["html:reports/"]
        assert completed("inspect", "p", "--report", "j") == ["json:"]

    def test_examples(self):
        assert completed("init", "--example", "") == names()
        assert completed("init", "--example", "next") == ["next-word"]

    def test_the_script_is_shown(self, run):
        assert "--install-completion" in run("--help").out


# Names from a stranger's model or package cannot begin a line, recolour it or command a CI job.

EVIL = (
    "a\n::error::x\r::warning title=y::z\x1b[2J\x1b]0;t\x07\n  signature   valid\u202ec\u2066b"
    "\u200f##[error]no ##vso[task.x]\u2028::stop-commands::t\x9b1m\U000e0041"
)
COMMAND = re.compile(r"^\s*::|##\w*\[", re.M)
INVISIBLE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\U000e0000-\U000e007f]"
)


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A model whose names are all hostile."""
    shape = f"size{EVIL}", 2
    given, result = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name in (f"in{EVIL}", EVIL)
    )
    graph = helper.make_graph(
        [helper.make_node("MatMul", [f"in{EVIL}", f"w{EVIL}"], ["h"], name=f"n{EVIL}"),
         helper.make_node("Relu", ["h"], [EVIL], name=f"m{EVIL}")],
        EVIL, [given], [result], [numpy_helper.from_array(np.eye(2, dtype=np.float32), f"w{EVIL}")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    model = onnx.ModelProto(ir_version=8, graph=graph, opset_import=opsets)
    onnx.save(model, tmp_path / "evil.onnx")
    return tmp_path / "evil.onnx"


def harmless(text: str) -> None:
    assert not COMMAND.search(text), text
    assert not INVISIBLE.search(text), repr(text)
    assert not re.search(r"^\s*signature   valid", text, re.M), text


def test_every_command_that_reads_it(evil, tmp_path, run):
    out = tmp_path / "package"
    commands = [
        (0, ["build", evil, "--out", out, "--loss", "mse"]), (0, ["inspect", evil]),
        (0, ["ops", "check", evil]), (0, ["inspect", out]), (0, ["inspect", out / "checkpoint"]),
        (0, ["verify", out]),
        (2, ["build", evil, "--out", tmp_path / "other", "--loss", "mse", "--train", "nothing"]),
        (2, ["ops", "check", evil, "--loss-input", "nothing"]),
        (2, ["inspect", tmp_path / f"none{EVIL}"]), (0, ["diff", out, out]),
    ]  # fmt: skip
    for code, words in commands:
        printed = run(*words, code=code)
        harmless(printed.out)
        harmless(printed.err)


def test_an_unsigned_package_does_not_say_that_it_is_signed(evil, tmp_path, run):
    run("build", evil, "--out", tmp_path / "package", "--loss", "mse", code=0)
    lines = [line.split() for line in run("verify", tmp_path / "package", code=0).out.splitlines()]
    assert [words for words in lines if words[0] == "signature"] == [["signature", "none"]]


def test_a_manifest_with_hostile_names(evil, tmp_path, run):
    out = tmp_path / "package"
    run("build", evil, "--out", out, "--loss", "mse", code=0)
    edit(out, lambda content: content["tool"].update(odtpack=EVIL))
    for command in ("inspect", "verify"):
        printed = run(command, out)
        harmless(printed.out)
        harmless(printed.err)


@pytest.mark.parametrize("text", [
    EVIL, "::error::x", "  ::group::x", "x ::notice a=b::c", "x ::ERROR::y",
    "x ::internal-set x::y",
])  # fmt: skip
def test_clean(text):
    found = clean(text)
    assert "\n" not in found
    harmless(found)
    assert "::error" not in found.lower()
    assert "::internal" not in found
    harmless(str(element("text", text, title=text)))


def test_nothing_is_broken_into_lines_where_nothing_is_a_terminal(capfd):
    _console.console().print(Text("a " * 60 + "::x::y"))
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_narrow_terminal_cuts_nothing_off(monkeypatch):
    narrow = Console(file=io.StringIO(), width=40)
    monkeypatch.setattr(_console, "console", lambda: narrow)
    row = ("layer.0.attention.query.weight", "trainable", "float32[32, 32]", "", "4.1 kB")
    _console.table([row], ("Parameter", "Role", "Type", "", "Size"), figures="Size")
    assert isinstance(narrow.file, io.StringIO)
    found = narrow.file.getvalue()
    assert all(word in found for word in (row[0], "trainable", "float32[32,", "4.1 kB"))


def test_what_stays():
    for text in ("aten::add", "torch::nn::Linear", "a: b", "#3 [x]", "naïve ☃ 名前", "x::errors"):
        assert clean(text) == text


@pytest.fixture
def unet(tmp_path: Path) -> Path:
    """Takes images whose sizes two divides: a made-up size of 2 fits, 3 does not."""
    text = """unet (float[n, 1, height, width] x) => (float[n, 1, height, width] y) {
        small = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (x)
        large = ConvTranspose <strides = [4, 4]> (small, up)
        both = Concat <axis = 1> (large, x)
        y = Conv <pads = [1, 1, 1, 1]> (both, w)
    }"""
    shapes = {"up": (1, 1, 4, 4), "w": (1, 2, 3, 3)}
    weights = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}
    model = weighted(text, weights)
    model.graph.node[2].name = f"joins{EVIL}"
    onnx.save(model, tmp_path / "unet.onnx")
    return tmp_path / "unet.onnx"


def test_onnxruntimes_own_log(unet, tmp_path, capfd):
    """Neither a build that succeeds nor a training that fails shows it; the error says it once."""
    out, data = tmp_path / "package", tmp_path / "data.npz"
    assert main(["build", str(unet), "--out", str(out), "--loss", "mse"]) == 0
    text = capfd.readouterr().err
    assert "ONNX Runtime says" not in text
    assert "[E:" not in text
    images = np.ones((8, 1, 6, 6), np.float32)
    np.savez(data, allow_pickle=False, x=images, target=images)
    command = ["train", str(out), "--data", str(data), "--out", str(tmp_path / "trained")]
    done = ran(sys.executable, "-m", "odtpack", *command, code=2)
    assert "error[run-failed]" in done.stderr
    assert done.stderr.count("running Concat node") == 1
    assert "ONNX Runtime says" not in done.stderr
    assert "the inputs in " in done.stderr
    assert "lazy_reset_grad" not in done.stderr
    harmless(done.stderr)
