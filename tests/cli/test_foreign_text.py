"""Names from a stranger's model or package cannot begin a line, recolour it or command a CI job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from odtpack.cli import main
from odtpack_runtime.package.manifest import Manifest
from odtpack_simulator.reports.svg import element
from odtpack_simulator.values.text import clean

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
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", [f"in{EVIL}", f"w{EVIL}"], ["h"], name=f"n{EVIL}"),
            helper.make_node("Relu", ["h"], [EVIL], name=f"m{EVIL}"),
        ],
        EVIL,
        [info(f"in{EVIL}", TensorProto.FLOAT, [f"size{EVIL}", 2])],
        [info(EVIL, TensorProto.FLOAT, [f"size{EVIL}", 2])],
        [numpy_helper.from_array(np.eye(2, dtype=np.float32), f"w{EVIL}")],
    )
    model = onnx.ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 17))
    path = tmp_path / "evil.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def harmless(text: str) -> None:
    assert not COMMAND.search(text), text
    assert not INVISIBLE.search(text), repr(text)
    assert not re.search(r"^\s*signature   valid", text, re.M), text


def test_every_command_that_reads_it(
    evil: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "package"
    commands = [
        (0, ["build", evil, "--out", out, "--loss", "mse"]),
        (0, ["inspect", evil]),
        (0, ["ops", "check", evil]),
        (0, ["inspect", out]),
        (0, ["inspect", out / "checkpoint"]),
        (0, ["verify", out]),
        (2, ["build", evil, "--out", tmp_path / "other", "--loss", "mse", "--train", "nothing"]),
        (2, ["ops", "check", evil, "--loss-input", "nothing"]),
        (2, ["inspect", tmp_path / f"none{EVIL}"]),
        (0, ["diff", out, out]),
    ]
    for code, words in commands:
        found = main([str(word) for word in words])
        printed = capfd.readouterr()
        assert found == code, printed.err
        for text in printed:
            harmless(text)


def test_an_unsigned_package_does_not_say_that_it_is_signed(
    evil: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "package"
    assert main(["build", str(evil), "--out", str(out), "--loss", "mse"]) == 0
    capfd.readouterr()
    assert main(["verify", str(out)]) == 0
    text = capfd.readouterr().out
    assert [line.split() for line in text.splitlines() if line.split()[0] == "signature"] == [
        ["signature", "none"]
    ]


def test_a_manifest_with_hostile_names(
    evil: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "package", tmp_path / "changed"
    assert main(["build", str(evil), "--out", str(out), "--loss", "mse"]) == 0
    shutil.copytree(out, other)
    content = json.loads((other / "manifest.json").read_text())
    content.pop("digest")
    content["tool"]["odtpack"] = EVIL
    (other / "manifest.json").write_text(
        Manifest.from_json(json.dumps(content).encode(), "x").to_json()
    )
    capfd.readouterr()
    for command in ("inspect", "verify"):
        main([command, str(other)])
        for text in capfd.readouterr():
            harmless(text)


@pytest.mark.parametrize("text", [EVIL, "::error::x", "  ::group::x", "x ::notice a=b::c"])
def test_clean(text: str) -> None:
    found = clean(text)
    assert "\n" not in found
    harmless(found)
    assert "::error" not in found
    harmless(str(element("text", text, title=text)))


def test_what_stays() -> None:
    for text in ("aten::add", "torch::nn::Linear", "a: b", "#3 [x]", "naïve ☃ 名前", "x::errors"):
        assert clean(text) == text


@pytest.fixture
def unet(tmp_path: Path) -> Path:
    """Takes images whose sizes two divides: a made-up size of 2 fits, 3 does not."""
    info, node = helper.make_tensor_value_info, helper.make_node
    shape = ["n", 1, "height", "width"]
    graph = helper.make_graph(
        [
            node("MaxPool", ["x"], ["small"], kernel_shape=[4, 4], strides=[4, 4]),
            node("ConvTranspose", ["small", "up"], ["large"], strides=[4, 4]),
            node("Concat", ["large", "x"], ["both"], axis=1, name=f"joins{EVIL}"),
            node("Conv", ["both", "w"], ["y"], pads=[1] * 4),
        ],
        "unet",
        [info("x", TensorProto.FLOAT, shape)],
        [info("y", TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(np.full((1, 1, 4, 4), 0.1, np.float32), "up"),
            numpy_helper.from_array(np.full((1, 2, 3, 3), 0.1, np.float32), "w"),
        ],
    )
    model = onnx.ModelProto(ir_version=8, graph=graph)
    model.opset_import.append(helper.make_opsetid("", 17))
    path = tmp_path / "unet.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_onnxruntimes_own_log(
    unet: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A build that succeeds shows none of it, and a training that fails what it says, once."""
    out, data = tmp_path / "package", tmp_path / "data.npz"
    assert main(["build", str(unet), "--out", str(out), "--loss", "mse"]) == 0
    text = capfd.readouterr().err
    assert "ONNX Runtime says" not in text
    assert "[E:" not in text
    images = np.ones((8, 1, 6, 6), np.float32)
    np.savez(data, allow_pickle=False, x=images, target=images)
    command = ["train", str(out), "--data", str(data), "--out", str(tmp_path / "trained")]
    done = subprocess.run(
        [sys.executable, "-m", "odtpack", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "error[run-failed]" in done.stderr
    assert done.stderr.count("ONNX Runtime says: ") == 1
    harmless(done.stderr)
