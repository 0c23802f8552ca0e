"""Every error has a code of the table, and every code of the table is raised."""

from __future__ import annotations

import ast
import functools
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odtpack.cli import main
from odtpack_runtime.error_codes import error_codes
from odtpack_runtime.errors import OdtpackError
from scripts.docs_site import generated

ROOT = Path(__file__).parents[1]
ERRORS = {"OdtpackError", "UnknownNameError", "UnknownKeyError", "WrongTypeError", "unreadable"}
TABLE = "runtime/odtpack_runtime/error_codes.toml"
READ = ("missing", "unreadable", "too-large")
KINDS = ("budgets", "fleet", "measurements", "names", "profile", "recipe", "result", "trace")
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
    "runtime/odtpack_simulator/values/text.py": {
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


def test_a_printed_error_says_how_to_read_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "absent.onnx", "--loss", "mse", "--out", "package"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "  see: odtpack explain model-not-found"
    assert main(last.removeprefix("  see: odtpack ").split()) == 0
    assert "There is no model at the path." in capsys.readouterr().out


@functools.cache
def table() -> dict[str, Any]:
    return tomllib.loads((ROOT / TABLE).read_text("utf-8"))


@pytest.mark.parametrize("code", error_codes())
def test_every_code_has_a_page_and_an_explanation(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both hold every field of the table."""
    entry = table()[code]
    fields = [entry["means"], entry.get("hint") or entry["fix"]]
    fields += [entry[key] for key in ("cause", "example") if key in entry]
    assert main(["explain", code]) == 0
    printed = capsys.readouterr().out
    page = generated()[f"errors/{code}.md"]
    assert f"[`{code}`](errors/{code}.md)" in generated()["errors.md"]
    for text in fields:
        for line in text.splitlines():
            assert line in printed
            assert line[1:] in page  # a sentence begins with a capital there
    assert ("kits" in printed) == entry.get("kits", False) or "kit" in entry["means"]
    assert main(["explain", code, "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert {key: given[key] for key in entry} == entry
    assert given["code"] == code


def test_an_unknown_code_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "data-shapes"]) == 2
    assert "did you mean data-shape" in capsys.readouterr().err
    assert main(["explain", "error[data-shape]:", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code"] == "data-shape"


def test_without_a_code_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json"]) == 0
    listed = [entry["code"] for entry in json.loads(capsys.readouterr().out)["codes"]]
    assert listed == [*error_codes()]
