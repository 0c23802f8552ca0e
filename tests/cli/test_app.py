"""Help, versions, usage errors, bugs, and what goes to which stream."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args
from unittest import mock

import pytest
import typer

import odtpack
from odtpack.cli import _app, _console, _options
from odtpack.cli._options import LossName, OptimizerName
from odtpack.losses import LOSSES
from odtpack.optimizers import OPTIMIZERS
from tests.cli.conftest import assert_refused
from tests.programs import ran

COMMANDS = [
    (), ("build",), ("fit",), ("train",), ("export",), ("inspect",), ("diff",), ("simulate",),
    ("judge",), ("compare",), ("demo",), ("devices",), ("devices", "list"), ("devices", "show"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_shows_an_example(run, command):
    outcome = run(*command, "--help", code=0)
    assert " ".join(("odtpack", *command)).strip() in outcome.out.partition("Examples:")[2]


@pytest.mark.parametrize("group", [(), ("adapter",), ("data",), ("devices",), ("fleet",), ("ops",)])
def test_what_commands_do_is_not_cut_off(run, group):
    listed = run(*group, "--help", code=0).out.partition("Commands:")[2].partition("Examples:")[0]
    assert len(listed.split("\n")) > 2
    assert "..." not in listed


def test_every_option_says_what_it_is():
    def commands(command: Any) -> Iterator[Any]:
        yield command
        for inner in getattr(command, "commands", {}).values():
            yield from commands(inner)

    every = [*commands(_app._parser(""))]
    assert len(every) > 40
    assert not [(each.name, p.name) for each in every for p in each.params if not p.help]


def test_docstrings_list_parameters_only():
    def callbacks(app: Any) -> Iterator[Any]:
        yield from (each.callback for each in app.registered_commands)
        for each in app.registered_groups:
            yield from callbacks(each.typer_instance)

    every = [*callbacks(_app.app)]
    assert len(every) > 30
    for each in every:
        assert {*_options._texts(each._section)} <= {*each.__signature__.parameters}


def test_version(run):
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"odtpack {odtpack.__version__}\n")


def test_installed_script_answers_without_heavy_imports():
    code = (
        "import sys; from odtpack.cli import main; main(['--help']); "
        "heavy = {'onnx', 'onnx_ir', 'onnxruntime', 'numpy', 'pydantic', 'torch'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    ran(sys.executable, "-c", code)


@pytest.mark.parametrize("command", [(), ("devices",)], ids=["odtpack", "devices"])
def test_no_command_is_a_usage_error(run, command):
    outcome = run(*command, code=2)
    assert outcome.out == ""
    assert "Usage: odtpack" in outcome.err


@pytest.mark.parametrize(("arguments", "words"), [
    (("bulid",), ("bulid", "build")),
    (("build",), ("MODEL.onnx", "odtpack build --help")),
    (("build", "m.onnx", "--out", "p"), ("--loss",)),
    (("build", "m.onnx", "--out", "p", "--loss", "hinge"), ("'hinge'", "cross_entropy")),
    (("build", "m.onnx", "--loss", "CrossEntropyLoss"), ("did you mean cross_entropy?",)),
    (("build", "m.onnx", "--epochs", "3"), ("--epochs is an option of odtpack", "train")),
    (("train", "p", "--data", "d", "--epochs", "0"), ("--epochs", "it must be greater")),
    (("train", "p", "--data", "d", "--lr", "fast"), ("--lr", "it must be a valid number")),
    (("train", "p", "--learning-rate", "1"), ("did you mean --lr?",)),
    (("train", "p", "--frobnicate", "x"), ("help: odtpack train --help",)),
    (("simulate", "p", "--dataa", "d"), ("--dataa", "did you mean --data?")),
    (("init",), ("MODEL.onnx is missing", "--example NAME")),
    (("init", "m.onnx", "--example", "image-head"), ("not both",)),
    (("init", "--example", "keyword"), ("did you mean keyword-spotting",)),
    (("fit", "m.onnx", "--data", "d", "--device", "x"), ("--loss", "odtpack fit --help")),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else None)  # fmt: skip
def test_usage_errors(run, arguments, words):
    assert_refused(run(*arguments), "usage", "help: ", *words)


def test_choices_are_those_of_the_packager():
    assert set(get_args(LossName)) == {*LOSSES, "none"}
    assert {name.value for name in OptimizerName} == set(OPTIMIZERS)


def ends_with(error: BaseException) -> Callable[[str], mock.Mock]:
    """In the place of the parser: what every command ends with."""
    return lambda name: mock.Mock(**{"main.side_effect": error})


def test_a_bug_says_so_and_how_to_see_more(run, monkeypatch):
    monkeypatch.setattr(_app, "_parser", ends_with(ZeroDivisionError("oh")))
    outcome = run("devices", "list")
    assert_refused(outcome, "internal", "bug", "ZeroDivisionError", "oh", "ODTPACK_TRACEBACK=1")
    monkeypatch.setenv("ODTPACK_TRACEBACK", "1")
    assert "Traceback" in run("devices", "list").err


def test_interrupt(run, monkeypatch):
    monkeypatch.setattr(_app, "_parser", ends_with(KeyboardInterrupt()))
    assert run("devices", "list", code=130).err.startswith("error[interrupted]")


def test_control_characters_never_reach_the_terminal(run):
    outcome = run("devices", "show", "\x1b[31mred\x07.toml", code=2)
    assert "\x1b" not in outcome.err
    assert "\x07" not in outcome.err


class TestProgress:
    def test_elsewhere_than_on_a_terminal_there_are_plain_lines(self, capfd, monkeypatch):
        monkeypatch.setattr(_console, "_QUIET_SECONDS", 0.0)
        with _console.Progress("training") as progress:
            progress.update(3, 10)
            progress.line("epoch 1")
        assert capfd.readouterr().err == "training: 3 of 10\nepoch 1\n"

    def test_short_work_is_quiet(self, capfd):
        with _console.Progress("training") as progress:
            for step in range(10):
                progress.update(step, 10)
        assert capfd.readouterr().err == ""

    @pytest.mark.skipif(os.name != "posix", reason="a terminal is made with openpty")
    @pytest.mark.parametrize(("environment", "moves", "coloured"), [
        ({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"CI": "true"}, False, True),
    ], ids=["terminal", "NO_COLOR", "CI"])  # fmt: skip
    def test_on_a_terminal(self, environment, moves, coloured):
        text = _on_a_terminal(
            "with _console.Progress('training') as p: p.update(1, 2)\n"
            "_console.error('some-code', 'what')\n",
            environment,
        )
        assert ("\x1b[?25l" in text) == moves  # the cursor is hidden while the bar moves
        assert ("\x1b[1;31merror" in text) == coloured

    @pytest.mark.skipif(os.name != "posix", reason="a terminal is made with openpty")
    @pytest.mark.parametrize(("after", "environment", "moves"), [
        (0.0, {}, True), (60.0, {}, False), (0.0, {"CI": "true"}, False),
    ], ids=["long", "short", "CI"])  # fmt: skip
    def test_work_without_a_known_end(self, after, environment, moves):
        text = _on_a_terminal(
            f"import time\nwith _console.working('building', {after}) as shown:\n"
            "    time.sleep(0.3)\n    _console.say('note', on=shown)\n",
            environment,
        )
        assert ("building" in text) == moves
        assert "note\r\n" in text


def _on_a_terminal(code: str, environment: dict[str, str]) -> str:
    code = f"from odtpack.cli import _console\n{code}"
    ours = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "FORCE_COLOR")}
    main, terminal = os.openpty()
    try:
        environment = {**ours, "TERM": "xterm-256color", **environment}
        subprocess.run([sys.executable, "-c", code], env=environment, stderr=terminal, check=True)
        return os.read(main, 65536).decode()
    finally:
        os.close(main)
        os.close(terminal)


def test_every_destination_is_out_and_o():
    """One word for where a command writes, in every command."""
    waiting, seen = [("odtpack", typer.main.get_command(_app.app))], []
    while waiting:
        name, command = waiting.pop()
        inner = getattr(command, "commands", {})
        waiting += [(f"{name} {key}", each) for key, each in inner.items()]
        for parameter in command.params:
            if "--out" in parameter.opts:
                assert parameter.opts == ["--out", "-o"], name
                seen.append(name)
    assert {"odtpack build", "odtpack export", "odtpack train", "odtpack adapter merge"} <= {*seen}
