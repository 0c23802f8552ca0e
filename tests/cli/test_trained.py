"""``odtpack build`` prints what trains, by name and group, in at most five lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from tests.cli.conftest import Run

TITLE = "  trains     "


DEEP = "encoder.layers.{}.attention.output."


def _chain(path: Path, layers: int, form: str = DEEP) -> Path:
    """A network of linear layers."""
    names = [form.format(i) + kind for i in range(layers) for kind in "wb"]
    nodes, x = [], "x"
    for i in range(layers):
        nodes.append(f"h{i} = Gemm({x}, p{2 * i}, p{2 * i + 1})")
        x = f"h{i}"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[N, 4] x) => (float[N, 4] {x}) '
        f"{{ {' '.join(nodes)} }}"
    )
    for i, name in enumerate(names):
        shape = (4,) if name.endswith("b") else (4, 4)
        array = np.random.default_rng(i).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        for node in model.graph.node:
            node.input[:] = [name if each == f"p{i}" else each for each in node.input]
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("layers", "options", "lines"),
    [
        (1, (), ["encoder.layers.0.attention.output.w, encoder.layers.0.attention.output.b"]),
        (30, (), ["encoder.layers.* (60)"]),
        (
            2,
            ("--freeze", "*.b", "--group", "*.1.*:lr=2,decay=0.5"),
            [
                "lr x1, decay 0: encoder.layers.0.attention.output.w",
                "lr x2, decay 0.5: encoder.layers.1.attention.output.w",
            ],
        ),
    ],
)
def test_what_trains(
    layers: int, options: tuple[str, ...], lines: list[str], run: Run, tmp_path: Path
) -> None:
    model = _chain(tmp_path / "model.onnx", layers)
    outcome = run(
        "build", model, "--out", tmp_path / "package", "--loss", "mse", "--json",
        "--no-self-check", *options,
    )  # fmt: skip
    assert outcome.code == 0
    start = outcome.err.index(TITLE) + len(TITLE)
    printed = [line.strip() for line in outcome.err[start:].splitlines()]
    assert sorted(printed[: len(lines)]) == sorted(lines)
    assert not printed[len(lines)].startswith("encoder")
    trained = {p["name"] for p in outcome.json()["parameters"] if p["role"] == "trainable"}
    kinds = "w" if options else "wb"
    assert trained == {
        f"encoder.layers.{i}.attention.output.{kind}" for i in range(layers) for kind in kinds
    }


def test_flat_names_are_counted(run: Run, tmp_path: Path) -> None:
    model = _chain(tmp_path / "model.onnx", 30, "a_layer_of_many_{}_")
    outcome = run("build", model, "--out", tmp_path / "package", "--loss", "mse", "--no-self-check")
    start = outcome.err.index(TITLE) + len(TITLE)
    printed = [line.strip() for line in outcome.err[start:].splitlines()]
    assert printed[4].endswith(" and 60 in all")
    assert not printed[5].startswith("a_layer")
    assert max(map(len, printed[:5])) <= 84
