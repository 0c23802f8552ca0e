"""The example projects run as their pages say, and their CI runs the same commands."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from odtpack.cli import model
from odtpack_runtime.package.package import Package
from tests.programs import ran

FAST = "anomaly-autoencoder"
NAMES = [
    pytest.param(name, marks=[] if name == FAST else pytest.mark.sweep) for name in model.names()
]


def commands(text: str) -> list[list[str]]:
    """Commands of a page or a workflow that run here: nothing is installed."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [shlex.split(line) for line in lines if re.match(r" *(python|odtpack) ", line)]


def run_command(words: list[str], folder: Path) -> str:
    program = [sys.executable, *(("-m", "odtpack") if words[0] == "odtpack" else ())]
    return ran(*program, *words[1:], cwd=folder).stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_its_page_says(name, tmp_path):
    model.write_example(name, tmp_path)
    page = (tmp_path / "README.md").read_text()
    named = {each for cell in re.findall(r"^\| (`.*?`) \|", page, re.M)
             for each in re.findall("`(.*?)`", cell)}  # fmt: skip
    assert all((tmp_path / each).is_file() for each in named)
    assert len((tmp_path / "model.py").read_text().splitlines()) <= 60
    workflow = (tmp_path / ".github/workflows/training.yml").read_text()
    shown = commands(page)
    assert [words for words in commands(workflow) if words not in shown] == []
    assert not re.search("@[A-Z_]+@", page + workflow)
    said = [run_command(words, tmp_path) for words in shown]
    assert (tmp_path / ("fleet.html" if "fleet" in name else "report.html")).is_file()
    Package.open(tmp_path / "package")
    personal = onnxruntime.InferenceSession(tmp_path / "personal.onnx")
    with np.load(tmp_path / "held_out.npz") as data:
        feeds = {each.name: data[each.name] for each in personal.get_inputs()}
        (output,) = personal.run(["output"], feeds)
        assert np.isfinite(output).all()
    if name == FAST:
        found = re.search(r"(\d+)% of sound windows above it, (\d+)% of the anomalies", said[-1])
        assert int(found[1]) < 10
        assert int(found[2]) > 90


def test_the_guide_lists_the_examples():
    guide = (Path(__file__).parents[2] / "docs/guides/ml-engineer.md").read_text()
    table = guide.partition("## Start from an example")[2].partition("\n## ")[0]
    assert sorted(re.findall("^\\| `([a-z-]+)`", table, re.M)) == model.names()


def test_init_writes_an_example(run, tmp_path):
    folder = tmp_path / "a project"
    outcome = run("init", "--example", "next-word", "--out", folder, "--json", code=0)
    assert (folder / "train.mjs").is_file()
    for words, code in (
        (("--example", "next-word", "--out", folder), "folder-not-empty"),
        (("--example", "nextword"), "usage"),
        (("model.onnx", "--example", "next-word"), "usage"),
        ((), "usage"),
    ):
        outcome = run("init", *words, code=2)
        assert f"error[{code}]" in outcome.err
