"""A resealed manifest that a reader would train from differently than Python does is refused."""

import io
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from odtpack.build import build_package
from odtpack.choices import OrtFormat, Style
from odtpack_runtime import OdtpackError
from odtpack_runtime.checkpoint.flatbuffer import Source
from odtpack_runtime.package.checks import ort_operators
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.trust import Limits
from odtpack_runtime.package.verify import verify_package
from tests import zoo
from tests.fuzz.mutate import mutate
from tests.hostile.corpus import build_base
from tests.packages import mutations

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("grouped") / "package")


@pytest.fixture(scope="module")
def with_ort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ort") / "package"
    build_package(
        zoo.mlp((4, 3, 2)), folder, loss="cross_entropy",
        ort_format=OrtFormat((Style.FIXED, Style.RUNTIME)),
    )  # fmt: skip
    return folder


def code_of(folder: Path, limits: Limits | None = None) -> str:
    try:
        verify_package(folder, limits=limits)
    except OdtpackError as error:
        return error.code
    return "accepted"


CONTRADICTIONS: dict[str, Change] = {
    "scale": lambda content: content["groups"][0].update(learning_rate_scale=0.25),
    "decay": lambda content: content["groups"][0].update(weight_decay=0.5),
    "swapped groups": lambda content: content["groups"].reverse(),
    "no groups": lambda content: content.pop("groups"),
    "ignore_index": lambda content: content["inputs"][1].update(ignore_index=1),
    "class_count": lambda content: content["inputs"][1].update(class_count=7),
    "accumulation": lambda content: content.update(accumulation_steps=2),
    "model_dtype": lambda content: content["parameters"][0].update(model_dtype="float16"),
    "order of state": lambda content: content["layout"]["state"].reverse(),
    "run": lambda content: content["layout"].update(run="whole"),
    "optimizer": lambda content: content["optimizer"].update(kind="lion"),
    "role": lambda content: content["inputs"][0].update(name="odd"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_what_a_kit_would_take_from_the_manifest(grouped, tmp_path, what):
    folder = Path(shutil.copytree(grouped, tmp_path / "package"))
    mutations.edit(folder, CONTRADICTIONS[what])
    assert code_of(folder) == "manifest-contradicts"


@pytest.mark.parametrize("scale", [0, 1e300, 1e-46])
def test_a_scale_that_is_no_rate(grouped, tmp_path, scale):
    folder = Path(shutil.copytree(grouped, tmp_path / "package"))
    mutations.edit(folder, lambda content: content["groups"][0].update(learning_rate_scale=scale))
    assert code_of(folder, Limits()) == "manifest-invalid"


def test_foreign_operators_of_the_template(grouped, tmp_path):
    folder = Path(shutil.copytree(grouped, tmp_path / "package"))
    with mutations.changed_model(folder, "inference_template.onnx") as model:
        model.graph.node[0].domain, model.graph.node[0].op_type = "evil.ops", "Backdoor"
        model.opset_import.add(domain="evil.ops", version=1)
    assert code_of(folder, Limits()) == "package-limits"


def test_foreign_operators_of_models_in_ort_format(with_ort, tmp_path):
    assert code_of(with_ort, Limits()) == "accepted"
    files = Package.open(with_ort).manifest.files.extra
    listed = [file for file in files if file.role == "ort_model"]
    assert len(listed) >= 6
    for file in listed:
        if file.of != "optimizer_model":
            operators = {operator for _, operator in ort_operators(with_ort / file.path)}
            assert operators & {"MatMul", "Gemm", "FusedGemm"}
    name = next(file.path for file in listed if file.of == "eval_model")
    folder = Path(shutil.copytree(with_ort, tmp_path / "package"))
    data = (folder / name).read_bytes()
    assert b"Relu\0" in data
    # A text of another length has no place: the domain of a node is that of its operator's name.
    changed = bytearray(data)
    _rename_domain(changed)
    (folder / name).write_bytes(bytes(changed))
    mutations.rehash(folder, name)
    assert code_of(folder, Limits()) == "package-limits"


def _rename_domain(data: bytearray) -> None:
    """Let the first node's domain be the text of its operator."""
    root = Source(io.BytesIO(bytes(data)), "model", "m").root(b"ORTM")
    graph = root.table(1).table(7)  # type: ignore[union-attr]
    node = next(graph.tables(2))  # type: ignore[union-attr]
    domain, operator = node.slot(2), node.slot(5)
    target = operator + struct.unpack_from("<I", data, operator)[0]
    struct.pack_into("<I", data, domain, target - domain)


def test_damaged_models_in_ort_format_are_refused(with_ort, tmp_path):
    data = next(with_ort.glob("*.ort")).read_bytes()
    rng = random.Random(1)
    codes: set[str] = set()
    path = tmp_path / "model.ort"
    for _ in range(300):
        path.write_bytes(mutate([data], rng))
        try:
            ort_operators(path)
        except OdtpackError as error:
            codes.add(error.code)
    assert "model-not-readable" in codes
    assert codes <= {"model-not-readable", "model-external-data"}


def test_sizes_come_before_hashes(grouped, tmp_path, monkeypatch):
    """A file of 5 GiB, listed or not, is refused without being read."""

    never = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr("odtpack_runtime.package.package.file_sha256", never)
    for listed in (False, True):
        folder = Path(shutil.copytree(grouped, tmp_path / f"package{listed}"))
        with (folder / "more.bin").open("wb") as stream:
            stream.truncate(5 * 2**30)
        if listed:
            entry = {"path": "more.bin", "size_bytes": 5 * 2**30, "sha256": "0" * 64}
            mutations.edit(folder, lambda content, entry=entry: content["files"].update(
                extra=[entry | {"role": "recipe"}]))  # fmt: skip
        assert code_of(folder, Limits()) == ("package-limits" if listed else "package-unlisted")
        os.truncate(folder / "more.bin", 0)
