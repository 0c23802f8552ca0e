"""Which operators a target leaves to the processor."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser

from tests.cli.conftest import Run


def test_operators_that_the_provider_lacks_are_named(run: Run, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y)
        <float[4] w = {1, 2, 3, 4}> { h = Mul(x, w) r = Round(h) z = Sin(h) s = Add(z, r)
        y = LogSoftmax(s) }"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    done = run("ops", "check", str(tmp_path / "m.onnx"), "--target", "webgpu")
    assert done.code == 0
    assert "Round has no kernel on webgpu" in done.out
    assert "LogSoftmax" not in done.out


def test_what_its_kernels_refuse_is_named(run: Run, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,2,2,2] x) => (float[1,1,1,1,1] y)
        <float[1,1,2,2,2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = Conv(x, w) }"""
    )
    onnx.save(model, tmp_path / "m.onnx")
    done = run("ops", "check", str(tmp_path / "m.onnx"), "--target", "webgpu")
    assert "Conv has no kernel for three axes on webgpu: the model is refused" in done.out
