"""The models that are written: plain standard operators, within what the oldest runtime loads."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from odtpack import targets
from odtpack_runtime.package.package import Package
from tests import zoo
from tests.model_text import parsed
from tests.packaging_tools import (
    OPTIMIZERS,
    batch,
    generate,
    losses_of_steps,
    open_training,
    statistic_names,
)
from tests.programs import ran
from tests.sweep import split
from tests.training.forward import contents, linear, make

SMALL = {"vocab": 20, "d": 16, "layers": 1, "T": 8, "ff": 32}
ORT_MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": lambda: zoo.mlp((6, 5, 4)),
    "cnn": lambda: zoo.cnn(size=8, width=(4, 6), classes=4),
    "mobilenet": lambda: zoo.mobilenet_v2(32, 4, 0.2, "train", stages=2),
    "transformer": lambda: zoo.transformer_encoder(**SMALL, classes=4, opset=14),
}


@pytest.mark.parametrize("name", ORT_MODELS)
def test_ort_format(name, tmp_path):
    model = ORT_MODELS[name]()
    generate(model, tmp_path, OPTIMIZERS["adamw"], ort_format=True)
    for suffix in (".ort", ".required_operators.config"):
        kinds = ("training", "eval", "optimizer")
        assert set(contents(tmp_path)) >= {f"{kind}_model{suffix}" for kind in kinds}
    losses = []
    for form in ("onnx", "ort"):
        _, module, optimizer = open_training(tmp_path, form=form)
        data = [batch(model, 4, seed, classes=4) for seed in range(4)]
        run = losses_of_steps(module, optimizer, data)
        losses.append([*run, float(module.eval()(*data[-1]))])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


NETWORKS: dict[str, tuple[Callable[..., onnx.ModelProto], tuple[int, ...]]] = {  # and opsets
    "mlp": (partial(zoo.mlp, (6, 5, 4)), (12, 23)),
    "cnn": (partial(zoo.cnn, size=8, width=(4, 6), hidden=8), (12, 13, 18)),
    **{
        f"mobilenet-{mode}": (partial(zoo.mobilenet_v2, 32, 4, 0.2, mode, stages=2), opsets)
        for mode, opsets in (("fold", (12,)), ("train", (14, 21)), ("eval", (17,)))
    },
    "transformer": (
        partial(zoo.transformer_encoder, **SMALL), (12, 13, 17, 18, 20, 21, 22, 23),
    ),
}  # fmt: skip
EMITTED = {
    f"{name}-{opset}": partial(network, opset=opset)
    for name, (network, opsets) in NETWORKS.items() for opset in opsets
}  # fmt: skip


# Opsets at which no operator of the model changed, and networks that have the same operators.
ALIKE = {
    *("mobilenet-fold-12", "mobilenet-train-21", "transformer-18", "transformer-20"),
    "transformer-22",
}


@pytest.mark.parametrize("name", split(EMITTED, lambda name: name not in ALIKE))
def test_models_are_plain_and_valid(name, tmp_path):
    model = EMITTED[name]()
    generate(model, tmp_path, OPTIMIZERS["adamw"], frozen_params=statistic_names(model))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    asked = model.opset_import[0].version
    for kind in ("training", "eval", "optimizer"):
        emitted = onnx.load(tmp_path / f"{kind}_model.onnx")
        onnx.checker.check_model(emitted, full_check=True)
        (opset,) = emitted.opset_import
        assert not opset.domain
        # Old models are read as opset 17 (13 to 16) or kept; new ones are never lifted.
        assert opset.version == (17 if 13 <= asked < 17 else asked)
        found = set(_operators(emitted.graph, opset.version))
        assert sorted(found) == list(manifest["operators"][f"{kind}_model"]["ai.onnx"])
        assert emitted.ir_version <= targets.lowest_target(opset.version).ir_version
        assert emitted.ir_version >= onnx.helper.find_min_ir_version_for(emitted.opset_import)
    least = targets.parsed(manifest["minimum_onnxruntime"])
    assert least >= targets.parsed(targets.lowest_target(opset.version).name)


def _operators(graph: onnx.GraphProto, opset: int) -> list[str]:
    """Operator types, also in subgraphs; each must stand in the standard at this opset."""
    found = []
    for node in graph.node:
        assert not node.domain, node
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        assert not schema.deprecated
        assert schema.domain == ""
        found.append(node.op_type)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += _operators(attribute.g, opset)
    return found


def test_the_newest_opset(tmp_path):
    make(linear(opset=targets.MAX_OPSET), tmp_path)
    _, module, _ = open_training(tmp_path)
    assert np.isfinite(module(np.ones((2, 3), np.float32), np.ones((2, 2), np.float32)))


# Models beyond protobuf's 2 GB: their weights are never copied into memory.

ROWS, COLUMNS = 5_800_000, 100  # 2.16 GiB
ALLOWED = 400 * 2**20  # bytes of memory of its own that the build may take


def write_model(folder: Path) -> Path:
    """An embedding of more than 2 GB, frozen, and a trained head. The file of zeros is sparse."""
    head = np.random.default_rng(0).standard_normal((COLUMNS, 3)).astype(np.float32)
    model = parsed(
        """g (int64["batch", 4] ids) => (float["batch", 3] y) { rows = Gather(table, ids)
        mean = ReduceMean<axes = [1], keepdims = 0>(rows) y = MatMul(mean, head) }""",
        head=head,
    )
    table = model.graph.initializer.add(
        name="table", data_type=onnx.TensorProto.FLOAT, dims=[ROWS, COLUMNS]
    )
    table.data_location = onnx.TensorProto.EXTERNAL
    table.external_data.add(key="location", value="weights")
    with (folder / "weights").open("wb") as stream:
        stream.truncate(ROWS * COLUMNS * 4)
        stream.seek(COLUMNS * 4)  # the second row
        stream.write(np.ones(COLUMNS, np.float32).tobytes())
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is one of Linux")
def test_a_model_of_more_than_2_gb_is_built_without_copies(tmp_path):
    if shutil.disk_usage(tmp_path).free < 8 * 2**30:
        pytest.skip("less than 8 GiB of space left")
    path = write_model(tmp_path)
    script = textwrap.dedent(f"""
        import re, resource
        from pathlib import Path
        from odtpack.build import build_package
        status = Path("/proc/self/status").read_text()
        used = int(re.search(r"VmData:\\s+(\\d+)", status)[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + {ALLOWED},) * 2)
        build_package({str(path)!r}, {str(tmp_path / "package")!r}, loss="cross_entropy",
                      train=["head"])
    """)
    ran(sys.executable, "-c", script, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    package = Package.open(tmp_path / "package")
    data = package.manifest.files.checkpoint_data
    assert data.size_bytes == ROWS * COLUMNS * 4 + COLUMNS * 3 * 4
    table = np.memmap(package.checkpoint.with_name(data.path), np.float32, "r", COLUMNS * 3 * 4)
    np.testing.assert_array_equal(table[: 3 * COLUMNS].reshape(3, -1).mean(1), [0, 1, 0])
