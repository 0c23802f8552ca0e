"""The packager's advice on how to run a training model reaches the session."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from odtpack_runtime import OdtpackError, default_session_options

_EXTENDED = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
_ALL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL


def write(path: Path, **metadata: str) -> Path:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }'
    )
    model.producer_version = "v" * 300
    for key, value in metadata.items():
        model.metadata_props.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(("text", "level"), [("extended", _EXTENDED), ("all", _ALL), ("?", _ALL)])
def test_the_recorded_level_is_taken(
    tmp_path: Path, text: str, level: onnxruntime.GraphOptimizationLevel
) -> None:
    metadata = {"other": "x" * 200, "odtpack.optimization_level": text}
    options = default_session_options(write(tmp_path / "m.onnx", **metadata), threads=3)
    assert options.graph_optimization_level == level
    assert options.intra_op_num_threads == 3
    assert not options.enable_mem_pattern


def test_threads_rest_between_runs(tmp_path: Path) -> None:
    """Threads that spin take the cores from the training's other session."""
    key = "session.force_spinning_stop"
    assert default_session_options(write(tmp_path / "m.onnx")).get_session_config_entry(key) == "1"
    with pytest.raises(RuntimeError, match=key):
        onnxruntime.SessionOptions().get_session_config_entry(key)


def test_the_manifest_beside_the_model_says_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a_training_model.onnx", **{"odtpack.optimization_level": "all"})
    session = {
        "optimization_level": "disabled", "memory_pattern": True, "arena": False,
        "prepacking": False, "shared_allocator": True, "threads": 3,
        "config": {"session.force_spinning_stop": "1"},
    }  # fmt: skip
    content = {"files": {"training_model": {"path": path.name}}, "session": session}
    manifest = tmp_path / "a_manifest.json"
    manifest.write_text(json.dumps(content))
    options = default_session_options(path)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert options.enable_mem_pattern
    assert not options.enable_cpu_mem_arena
    assert options.intra_op_num_threads == 3
    entry = options.get_session_config_entry
    assert entry("session.disable_prepacking") == "1"
    assert entry("session.use_env_allocators") == "1"
    assert entry("session.force_spinning_stop") == "1"
    assert default_session_options(path, threads=2).intra_op_num_threads == 2
    y = onnxruntime.InferenceSession(str(path), options).run(None, {"x": np.float32([-1])})
    assert y[0] == 0
    for damaged in ("", "[]", '{"files": 3}'):
        manifest.write_text(damaged)
        assert default_session_options(path).graph_optimization_level == _ALL
    manifest.write_text(json.dumps(content).replace("disabled", "odd"))
    with pytest.raises(OdtpackError) as caught:
        default_session_options(path)
    assert caught.value.code == "manifest-invalid"
    content["files"]["training_model"]["path"] = "another.onnx"
    manifest.write_text(json.dumps(content))
    assert default_session_options(path).graph_optimization_level == _ALL


def test_damaged_files_give_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", **{"odtpack.optimization_level": "extended"})
    whole = path.read_bytes()
    dice = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole[: dice.randrange(len(whole))])
        for _ in range(3):
            if damaged:
                damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(damaged)
        assert default_session_options(path).graph_optimization_level in (_EXTENDED, _ALL)
    assert default_session_options(tmp_path / "absent.onnx").graph_optimization_level == _ALL
