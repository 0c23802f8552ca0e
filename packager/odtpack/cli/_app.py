"""The application: which commands there are, and how a command ends.

Exit codes: 0 success or within budget, 1 over budget, 2 bad usage or bad input (and bugs,
which say so), 130 interrupted.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextvars import copy_context
from typing import Annotated, Any, Final

import typer

from odtpack.cli import _console
from odtpack.cli._options import command, examples
from odtpack.cli._supervisor import INTERRUPTED, TERMINATED, supervised, told
from odtpack.cli.adapter import adapter
from odtpack.cli.build import build, cache_key
from odtpack.cli.data import data
from odtpack.cli.device.demo import demo
from odtpack.cli.device.devices import devices
from odtpack.cli.device.fit import fit
from odtpack.cli.device.results import compare, history, judge
from odtpack.cli.device.simulate import simulate
from odtpack.cli.device.train import privacy, train
from odtpack.cli.explain import explain
from odtpack.cli.export import config, export, ort
from odtpack.cli.fleet import fleet
from odtpack.cli.inspect import inspect
from odtpack.cli.model import compare_gradients, head, import_, init, ops
from odtpack.cli.release import carry_over, diff, install, sign, verify

BAD_INPUT: Final = 2
CLOSED_PIPE: Final = 141

app = typer.Typer(
    name="odtpack",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(
    invoke_without_command=True,
    epilog=examples(
        "odtpack build model.onnx --out package --loss cross_entropy",
        "odtpack simulate package --data digits.npz --device pixel-8a",
        "odtpack demo",
    ),
)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train on the ONNX Runtime that the app already ships.

    odtpack turns a forward ONNX model into a package that stock ONNX Runtime can train, and
    replays the training under the limits of named devices before it ships.

    Exit codes: 0 success or within budget, 1 over budget, 2 bad usage or bad input. Answers
    go to stdout; progress, remarks, and what a command says of files that it writes go to stderr.
    With --json, stdout is JSON and nothing else.
    """
    if version:
        from odtpack import __version__

        typer.echo(f"odtpack {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(BAD_INPUT)


for _each in (
    build, fit, import_, head, init, privacy, cache_key, train, export, ort, config, install,
    inspect, verify, sign, diff, carry_over, simulate, judge, history, compare, compare_gradients,
    explain, demo,
):  # fmt: skip
    command(app)(_each)
for _group in (adapter, data, devices, fleet, ops):
    app.add_typer(_group, name=_group.info.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    if arguments is None:  # a process of its own, which a signal must end whatever it does
        _open_standard_streams()
        return supervised(lambda: _main(sys.argv[1:]), _ended_by)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return told(_main(arguments), _ended_by)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@functools.cache
def _parser(name: str) -> Any:
    """The parser of one command, or of all where none has the name."""
    # That of all takes as long to make as the imports: typer reads the types of 600 options.
    one = copy.copy(app)
    one.registered_commands = [each for each in app.registered_commands if each.name == name]
    one.registered_groups = [each for each in app.registered_groups if each.name == name]
    known = one.registered_commands or one.registered_groups
    return typer.main.get_command(one if known else app)


def _main(arguments: Sequence[str]) -> int:
    _stopped_by.clear()
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stop)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, _stop)
        if "--help" not in arguments:
            import logging  # which help has no time for

            logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # it names shapes of unknown type
        run = _parser(arguments[0] if arguments else "").main
        # What a command sets for its own output ends with it.
        code = copy_context().run(run, arguments, prog_name="odtpack", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer ends so on Ctrl-C, without a word
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _TerminatedError:
        return TERMINATED
    except (SystemExit, Exception) as error:
        if _stopped_by:  # what click, rich, C code and __set_name__ made of the exception
            return _stopped_by[0]
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if isinstance(cause, BrokenPipeError):
            return _closed_pipe()
        if isinstance(error, SystemExit):  # with the code of a budget not kept
            raise
        return _failed(error)
    return code if isinstance(code, int) else 0


def _open_standard_streams() -> None:
    """Give a process that was started without standard streams some."""
    # A file that is opened would take their places, and be written to. A result for a closed
    # standard output would be lost, so it is refused; messages are dropped.
    for number, name, flags in (
        (0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)
    ):  # fmt: skip
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            stream = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
            buffer = io.BufferedReader(stream) if number == 0 else io.BufferedWriter(stream)
            setattr(sys, name, io.TextIOWrapper(buffer, encoding="utf-8", errors="replace"))


class _TerminatedError(BaseException):
    """SIGTERM, as an exception: temporary files and children end with the blocks that made them."""


_stopped_by: list[int] = []  # the exit code of a command that a signal has stopped


def _stop(number: int, _frame: object) -> None:
    """End a command by an exception, and let what is cleaned up not be interrupted again."""
    # Not SIG_IGN: Python warns if a second signal is pending.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    _stopped_by.append(INTERRUPTED if number == signal.SIGINT else TERMINATED)
    raise KeyboardInterrupt if number == signal.SIGINT else _TerminatedError


def _ended_by(number: int) -> None:
    """Say which signal ended the command."""
    match number:
        case signal.SIGINT:
            _console.error("interrupted", "stopped before the end")
        case signal.SIGTERM:
            _console.error("terminated", "stopped by SIGTERM before the end")
        case _:
            name = next((each.name for each in signal.Signals if each == number), str(number))
            _console.error("killed", f"the command was ended by {name}")


def _closed_pipe() -> int:
    """The reader closed the pipe: nothing more is written, also not at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # standard output
    return CLOSED_PIPE


def _failed(error: Exception) -> int:
    from odtpack.errors import OdtpackError, system_refused
    from odtpack_runtime.errors import error_codes

    if isinstance(error, OSError):  # no bug: a name that is too long, a disk that is full
        error = system_refused(error)
        try:
            sys.stdout.flush()
        except OSError:  # it was the output: nothing more is written, also not at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if os.environ.get("ODTPACK_TRACEBACK", "0") not in ("", "0"):
        traceback.print_exception(error)
    message = getattr(error, "format_message", None)  # the parser's own errors
    if isinstance(error, OdtpackError):
        _console.error(error.code, error.what, where=error.where, hint=error.hint)
    elif message is not None:
        text, hint = _usage(error, str(message()))
        _console.error("usage", text, hint=hint)
    else:
        what = f"this is a bug in odtpack: {type(error).__name__}: {error}"
        _console.error("internal", what, hint=error_codes()["internal"].hint)
    return BAD_INPUT


def _usage(error: Any, text: str) -> tuple[str, str]:
    """What the parser found wrong, and what to do: a near name, or the command with the option."""
    from odtpack.errors import near_names

    context = getattr(error, "ctx", None)
    path = context.command_path if context else "odtpack"
    text = text.replace("Value error, ", "")
    text = re.sub(r"Input should be (a valid \w+|[^,]*)(, unable.*)?", r"it must be \1", text)
    hint = f"{path} --help"
    if choice := re.search(r"'([^']*)' is not one of (.*)", text):
        return text, near_names(choice[1], re.findall(r"'([^']+)'", choice[2]), hint)
    if not hasattr(error, "option_name") or not hasattr(error, "possibilities"):
        return text, hint
    name = {"--learning-rate": "--lr"}.get(error.option_name, error.option_name)
    own = [each for option in context.command.params for each in option.opts] if context else []
    others = [
        other
        for other, command in _parser("").commands.items()
        if name not in own and any(name in option.opts for option in command.params)
    ]
    if others:
        return error.message, f"{name} is an option of odtpack {', '.join(others)}"
    return error.message, near_names(name, own, hint, cutoff=0.7)
