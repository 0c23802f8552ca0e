"""Where the bytes of a package go: the tree and the page."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack_runtime.checkpoint.format import CheckpointData
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.package.package import Package
from odtpack_simulator.reports import sizes
from odtpack_simulator.reports.sizes import (
    Piece,
    package_anatomy,
    render_size_html,
    write_size_report,
)
from tests import zoo
from tests.refused import refused
from tests.reports.page import Page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    build_package(zoo.cnn(), folder, loss="cross_entropy", nominal=True, step_model="always")
    return folder


@pytest.fixture(scope="module")
def root(folder: Path) -> Piece:
    return package_anatomy(Package.open(folder), folder / "manifest.json")


def assert_sums(part: Piece) -> None:
    """Parts make up the whole, none is negative, and they stand in order."""
    if part.parts:
        assert sum(inner.nbytes for inner in part.parts) == part.nbytes, part.name
        assert [p.nbytes for p in part.parts] == sorted(
            (p.nbytes for p in part.parts), reverse=True
        )
    for inner in part.parts:
        assert inner.nbytes > 0
        assert_sums(inner)


def find(part: Piece, name: str) -> Piece:
    return next(inner for inner in part.parts if inner.name == name)


def test_every_byte_is_somewhere(root, folder):
    assert_sums(root)
    assert {p.name: p.nbytes for p in root.parts} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }


def test_parameters_by_module(root, folder):
    checkpoint = find(root, "checkpoint")
    manifest = Package.open(folder).manifest
    nbytes = sum(4 * int(np.prod(p.shape)) for p in manifest.parameters)
    assert find(checkpoint, "names and tables").nbytes == checkpoint.nbytes - nbytes
    sizes = {p.name: 4 * int(np.prod(p.shape)) for p in manifest.parameters}
    module = next(iter(sizes)).partition(".")[0]
    expected = sum(size for name, size in sizes.items() if name.startswith(f"{module}."))
    assert find(checkpoint, module).nbytes == expected


@pytest.mark.parametrize("file", ["training_model.onnx", "step_model.onnx"])
def test_model_by_operators(root, folder, file):
    """Names, counted by hand; the operators of nodes in branches count, too."""
    graphs, total, counts = [onnx.load(folder / file).graph], 0, {}
    while graphs:
        graph = graphs.pop()
        total += sum(len(tensor.name) for tensor in graph.initializer)
        for node in graph.node:
            total += len("".join((node.name, *node.input, *node.output)))
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    part = find(root, file)
    assert find(part, "names").nbytes == total
    found = {p.name for p in find(part, "nodes").parts}
    assert found == {f"{count} × {name}" for name, count in counts.items()}


def test_checkpoint_in_two_files(tmp_path, folder, root):
    """Tensors beside the checkpoint are part of it."""
    data = CheckpointData({"fc.weight": np.ones(1000, np.float32)}, {})
    write_checkpoint(tmp_path / "checkpoint", data)
    nbytes = (tmp_path / "checkpoint").stat().st_size
    part = sizes._checkpoint(tmp_path / "checkpoint", "checkpoint", nbytes)
    assert {p.name: p.nbytes for p in part.parts} == {
        "fc.weight": 4000,
        "names and tables": nbytes - 4000,
    }


def test_collapse():
    part = Piece("p", 100, (Piece("a", 90, (Piece("x", 89), Piece("y", 1))), *[Piece("b", 1)] * 10))
    small = part.collapsed(5, 4, 3)
    assert small == Piece(
        "p", 100, (Piece("a", 90, (Piece("x", 89), Piece("y", 1))), Piece("10 smaller", 10))
    )
    assert part.collapsed(5, 4, 1).parts[0].parts == ()
    assert part.collapsed(200, 4, 3).parts == ()
    assert len(part.collapsed(0, 4, 3).parts) == 5


def test_names_are_escaped():
    page = render_size_html(Piece("r", 10, (Piece("<script>&", 10),))).decode()
    assert "<script>" not in page
    assert "&lt;script&gt;&amp;" in page


def test_page(root):
    """Well-formed, self-contained, the same every time; every file."""
    page = render_size_html(root).decode()
    assert page == render_size_html(root).decode()
    tags = Page(page).tags
    assert not {"script", "img", "iframe"} & {tag for tag, _ in tags}
    assert not any(name.startswith("on") or name == "src" for _, attrs in tags for name in attrs)
    assert not re.search(r"https?://", page)
    for part in root.parts:
        assert part.name in page


def test_reports(root, tmp_path):
    written = write_size_report(root, f"json:{tmp_path / 'sizes.json'}")
    assert json.loads(written.read_text()) == root.as_dict()
    page = write_size_report(root, f"html:{tmp_path / 'sizes.html'}")
    assert page.read_bytes() == render_size_html(root)
    with refused("report-format-unknown"):
        write_size_report(root, f"pdf:{tmp_path / 'x'}")
