"""Every error has a code of the table, and every code of the table is raised."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from odtpack.cli import main
from odtpack.cli._console import PAGE
from odtpack_runtime.error_codes import error_codes
from odtpack_runtime.errors import OdtpackError

ROOT = Path(__file__).parents[1]
ERRORS = {"OdtpackError", "UnknownNameError", "UnknownKeyError", "WrongTypeError", "unreadable"}
READ = ("missing", "unreadable", "too-large")
KINDS = ("budgets", "fleet", "measurements", "profile", "recipe", "result", "trace")
# Raised with a code that is computed, by file.
COMPUTED = {
    "packager/odtpack/option.py": {
        *("bad-accumulation", "bad-adapter", "bad-batch-size", "bad-hyperparameter"),
        *("bad-memory-budget", "bad-version", "private-training"),
    },
    "packager/odtpack/artifacts.py": {
        *("bad-loss", "bad-optimizer", "bad-requires-grad", "bad-frozen-params"),
        *("bad-loss-input-names", "bad-additional-output-names"),
    },
    "packager/odtpack/fit/search_context.py": {
        *("bad-epochs", "bad-trials", "bad-finalists", "bad-threads"),
    },
    "runtime/odtpack_runtime/checkpoint/flatbuffer.py": {"checkpoint-corrupt"},
    "runtime/odtpack_runtime/errors.py": set(),  # the callers of unreadable() say which
    "runtime/odtpack_runtime/training/parameter_vector.py": {
        "loss-not-finite",
        "gradient-not-finite",
    },
    "runtime/odtpack_simulator/replay/job.py": {
        *("bad-batch-size", "bad-epochs", "bad-seed", "bad-pieces"),
    },
    "runtime/odtpack_simulator/values/textfile.py": {
        *(f"{what}-{how}" for what in KINDS for how in READ),
        *(f"{what}-malformed" for what in ("budgets", "fleet", "profile", "recipe")),
    },
}
# Pass on the error of another process.
PASSED_ON = {
    "runtime/odtpack_runtime/apart/worker.py",
    "runtime/odtpack_simulator/replay/executor.py",
    "runtime/odtpack_simulator/replay/replay.py",
    "packager/odtpack/cli/_app.py",
    "packager/odtpack/cli/device/devices.py",
}


def raised() -> Iterator[tuple[str, int, str | None]]:
    """File, line and code of every place that makes an error; None for a computed code."""
    for path in [*ROOT.glob("packager/**/*.py"), *ROOT.glob("runtime/**/*.py")]:
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            printed = ast.unparse(node.func) == "_console.error"
            if not printed and ast.unparse(node.func) not in ERRORS:
                continue
            codes = [*literals(node.args[0])] if node.args else [None]
            yield from ((where, node.lineno, code) for code in codes)


def literals(node: ast.expr) -> Iterator[str | None]:
    if isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)
    else:
        given = node.value if isinstance(node, ast.Constant) else None
        yield given if isinstance(given, str) else None


def test_every_code_is_in_the_table_and_is_raised() -> None:
    places = [*raised()]
    found = {code for _, _, code in places if code is not None}
    assert len(found) > 200
    computed = {where for where, _, code in places if code is None}
    assert computed == set(COMPUTED) | PASSED_ON
    found |= set().union(*COMPUTED.values())
    assert found == set(error_codes())


def test_entries_are_sentences_in_order() -> None:
    codes = error_codes()
    assert [*codes] == sorted(codes)
    for code, entry in codes.items():
        assert code == code.lower().replace("_", "-").replace(" ", "-")
        assert entry.means.endswith("."), code
        assert entry.hint is None or not entry.hint.removesuffix("...").endswith("."), code


def test_an_error_takes_the_hint_of_its_code() -> None:
    assert OdtpackError("onnx-missing", "onnx is not there").hint == "pip install onnx"
    assert OdtpackError("onnx-missing", "not there", hint="ask").hint == "ask"


def test_a_printed_error_says_where_to_read_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "absent.onnx", "--loss", "mse", "--out", "package"]) == 2
    code = "model-not-found"
    assert capsys.readouterr().err.splitlines()[-1] == f"  see: {PAGE}#{code}"
    assert f"\n## {code}\n" in (ROOT / PAGE).read_text("utf-8")
