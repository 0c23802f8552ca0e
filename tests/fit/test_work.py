"""The counted work of operators against figures by hand, and of packages against each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from odtpack.build import build_package
from odtpack.fit.package_cache import _flops, _graph_work, step_work
from odtpack_runtime.package.package import Package
from odtpack_simulator.memory.runtime_graph import load_runtime_graph
from tests import zoo


def save(text: str, path: Path, **shapes: tuple[int, ...]) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{text}')
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        value = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("text", "shapes", "flops", "moved"),
    [
        (
            "f (float[b, 3, 4] x) => (float[b, 3, 5] y) { y = MatMul (x, w) }",
            {"x": (2, 3, 4), "w": (4, 5)},
            2 * (2 * 3 * 5) * 4,
            4 * (24 + 20 + 30),
        ),
        (
            "f (float[4, b] x) => (float[b, 5] y) { y = Gemm <transA = 1> (x, w) }",
            {"x": (4, 3), "w": (4, 5)},
            2 * (3 * 5) * 4,
            4 * (12 + 20 + 15),
        ),
        (
            "f (float[b, 4, 6, 6] x) => (float[b, 8, 4, 4] y) { y = Conv <group = 2> (x, w) }",
            {"x": (2, 4, 6, 6), "w": (8, 2, 3, 3)},
            2 * (2 * 8 * 4 * 4) * (2 * 3 * 3),
            4 * (288 + 144 + 256),
        ),
        (
            "f (float[b, 4, 5, 5] x) => (float[b, 3, 7, 7] y) { y = ConvTranspose (x, w) }",
            {"x": (2, 4, 5, 5), "w": (4, 3, 3, 3)},
            2 * (2 * 4 * 5 * 5) * (3 * 3 * 3),
            4 * (200 + 108 + 294),
        ),
        (
            "f (float[b, 5] x) => (float[b, 5] y) { y = Neg (x) }",
            {"x": (3, 5)},
            0,
            4 * (15 + 15),
        ),
    ],
)
def test_operators(
    text: str, shapes: dict[str, tuple[int, ...]], flops: int, moved: int, tmp_path: Path
) -> None:
    weights = {name: shape for name, shape in shapes.items() if name != "x"}
    path = save(text, tmp_path / "model.onnx", **weights)
    graph = load_runtime_graph(path, {"x": shapes["x"]})
    known = {v.name: (v.shape, v.itemsize) for v in graph.values.values() if v.shape is not None}
    (node,) = [each for each in graph.nodes if each.op_type not in ("Reshape", "Squeeze")][-1:]
    assert _flops(node, known) == flops
    if len(graph.nodes) == 1:
        assert _graph_work(graph, {}) == moved + flops / 8


def test_freezing_saves_work_and_accumulation_repeats_it(tmp_path: Path) -> None:
    model = zoo.cnn(size=8, width=(8, 16))
    works = {}
    for name, options in {
        "all": {},
        "head": {"freeze": ["conv1.*", "conv2.*"]},
        "parts": {"accumulation_steps": 4},
    }.items():
        build_package(model, tmp_path / name, loss="cross_entropy", **options)  # type: ignore[arg-type]
        package = Package.open(tmp_path / name)
        batch = 8 if name == "parts" else 32
        shapes = {"input": (batch, 1, 8, 8), "labels": (batch,)}
        works[name] = step_work(package, shapes)
        assert works[name] == step_work(package, shapes)
    assert works["head"] < 0.6 * works["all"]
    # The same samples, and the gradients and weights four times.
    assert works["all"] < works["parts"] < 1.5 * works["all"]
