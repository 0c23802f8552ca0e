"""The manifest and the package around it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from tests.runtime import models

ROLES = {
    "training_model": "training_model.onnx",
    "eval_model": "eval_model.onnx",
    "optimizer_model": "optimizer_model.onnx",
    "checkpoint": "checkpoint",
}


def describe(folder: Path, prefix: str = "") -> dict[str, Any]:
    """The manifest of the regression package in `folder`."""
    files = {}
    for role, name in ROLES.items():
        data = (folder / (prefix + name)).read_bytes()
        files[role] = {
            "path": prefix + name,
            "size_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    return {
        "schema_version": 1,
        "tool": {"odtpack": "0.1.0", "onnx": "1.23.2"},
        "files": files,
        "minimum_onnxruntime": "1.20",
        "ir_version": 8,
        "opsets": {"": 17},
        "inputs": [
            {"name": "input", "dtype": "float32", "shape": ["batch", 3], "role": "data"},
            {
                "name": "labels",
                "dtype": "int64",
                "shape": ["batch", None],
                "role": "labels",
                "class_count": 10,
            },
        ],
        "outputs": [{"name": "loss", "dtype": "float32", "shape": [], "role": "loss"}],
        "loss": "mse",
        "optimizer": {
            "kind": "adamw",
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-6,
            "weight_decay": 0,
        },
        "parameters": [
            {"name": "W", "shape": [3, 2], "dtype": "float32", "role": "trainable"},
            {"name": "scale", "shape": [3], "dtype": "float32", "role": "frozen"},
        ],
        "operators": {role: {"ai.onnx": {"Add": 14}} for role in list(ROLES)[:3]},
    }


@pytest.fixture
def package(regression: models.Files) -> Path:
    (regression.folder / "manifest.json").write_text(json.dumps(describe(regression.folder)))
    return regression.folder


def test_a_package_opens(package: Path) -> None:
    opened = Package.open(package)
    assert opened.path == package.resolve()
    for role, name in ROLES.items():
        assert getattr(opened, role) == package.resolve() / name
    manifest = opened.manifest
    assert manifest.class_count == 10
    specs = manifest.input_specs()
    assert [str(spec) for spec in specs] == ["float32[batch, 3]", "int64[batch, ?]"]
    assert specs[0].dtype == np.float32
    assert Package.open(package / "manifest.json") == opened
    assert Package.open(os.path.relpath(package)) == opened


def test_the_text_of_a_manifest_comes_back(package: Path) -> None:
    manifest = Package.open(package).manifest
    text = manifest.to_json()
    assert Manifest.from_json(text.encode(), "m") == manifest.sealed()
    assert Manifest.from_json(text.encode(), "m").to_json() == text
    assert json.loads(text) == describe(package) | {"digest": manifest.sealed().digest}


def test_a_digest_tells_damage(package: Path) -> None:
    text = Package.open(package).manifest.to_json()
    shuffled = json.dumps(dict(reversed(json.loads(text).items())))
    assert Manifest.from_json(shuffled.encode(), "m").to_json() == text
    with pytest.raises(OdtpackError, match="changed or damaged"):
        Manifest.from_json(text.replace('"onnx": "1.23.2"', '"onnx": "1.23.3"').encode(), "m")


def test_sgd_and_prefixes(package: Path) -> None:
    for name in ROLES.values():
        (package / name).rename(package / f"digits_{name}")
    (package / "manifest.json").unlink()
    content = describe(package, "digits_") | {"optimizer": {"kind": "sgd", "momentum": 0.5}}
    (package / "digits_manifest.json").write_text(json.dumps(content))
    opened = Package.open(package)
    assert opened.manifest.optimizer.kind == "sgd"
    assert opened.manifest.optimizer.settings == {"momentum": 0.5}
    assert opened.manifest.optimizer.as_dict() == {"kind": "sgd", "momentum": 0.5}
    assert opened.checkpoint.name == "digits_checkpoint"
    (package / "other_manifest.json").write_text("{}")
    with pytest.raises(OdtpackError, match="several packages"):
        Package.open(package)
    assert Package.open(package / "digits_manifest.json") == opened


def _set(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *path, last, value = keys

    def change(content: dict[str, Any]) -> None:
        for key in path:
            content = content[key]
        content[last] = value

    return change


def _drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *path, last = keys

    def change(content: dict[str, Any]) -> None:
        for key in path:
            content = content[key]
        del content[last]

    return change


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (_set("schema_version", 2), "manifest-version", "schema version 2"),
        (_drop("schema_version"), "manifest-invalid", "schema_version: this key is missing"),
        (_set("extra", 1), "manifest-invalid", "extra: there is no such key"),
        (_set("files", "checkpoint", "mode", 1), "manifest-invalid", r"files\.checkpoint\.mode"),
        (_drop("files", "eval_model"), "manifest-invalid", r"files\.eval_model"),
        (_set("files", "checkpoint", "sha256", "ABC"), "manifest-invalid", "sha256"),
        (_set("files", "checkpoint", "size_bytes", -1), "manifest-invalid", "size_bytes"),
        (_set("files", "checkpoint", "size_bytes", "12"), "manifest-invalid", "size_bytes"),
        (_set("minimum_onnxruntime", "new"), "manifest-invalid", "minimum_onnxruntime"),
        (_set("parameters", 0, "role", "odd"), "manifest-invalid", r"parameters\[0\]\.role"),
        (_set("parameters", 1, "name", "W"), "manifest-invalid", "two parameters"),
        (_set("inputs", 1, "name", "input"), "manifest-invalid", "two inputs"),
        (_set("inputs", 0, "shape", [-1]), "manifest-invalid", r"inputs\[0\]\.shape"),
        (_set("inputs", 0, "dtype", "float"), "manifest-invalid", r"inputs\[0\]\.dtype"),
        (_set("outputs", []), "manifest-invalid", "first output must be the loss"),
        (_set("outputs", 0, "role", "additional"), "manifest-invalid", "first output must be"),
        (_set("loss", "Hinge loss"), "manifest-invalid", "loss: it must match"),
        (_set("loss", "a" * 65), "manifest-invalid", "loss: it must match"),
        (_set("loss", None), "manifest-invalid", "loss: it must be text"),
        (_set("optimizer", "sgd"), "manifest-invalid", "optimizer: it must be an object"),
        (_set("optimizer", {"rate": 1.0}), "manifest-invalid", r"optimizer\.kind: this key"),
        (_set("optimizer", {"kind": "../sgd"}), "manifest-invalid", r"optimizer\.kind: it must"),
        (_set("optimizer", "beta1", [0.9]), "manifest-invalid", r"optimizer\.beta1: it must be"),
        (_set("optimizer", "beta1", None), "manifest-invalid", r"optimizer\.beta1: it must be"),
        (_set("optimizer", "", 1.0), "manifest-invalid", "optimizer: it must not be empty"),
        (
            _set("files", "checkpoint", "path", "gone"),
            "package-incomplete",
            "lacks its file 'gone'",
        ),
        (_set("files", "checkpoint", "path", "."), "package-path", "inside"),
        (_set("files", "checkpoint", "size_bytes", 3), "package-changed", "bytes and not 3"),
        (_set("files", "checkpoint", "sha256", "0" * 64), "package-changed", "content differs"),
        (_set("files", "checkpoint", "path", "../checkpoint"), "package-path", "inside"),
        (_set("files", "checkpoint", "path", "a/../checkpoint"), "package-path", "inside"),
        (_set("files", "checkpoint", "path", "/etc/passwd"), "package-path", "inside"),
        (_set("files", "checkpoint", "path", "..\\checkpoint"), "package-path", "inside"),
        (_set("files", "checkpoint", "path", "C:checkpoint"), "package-path", "inside"),
        (_set("files", "checkpoint", "path", "check\0point"), "package-path", "inside"),
        (_set("files", "checkpoint", "path", "link"), "package-path", "inside"),
        (_set("files", "checkpoint", "path", "folder/checkpoint"), "package-path", "inside"),
    ],
)
def test_packages_that_are_wrong(
    package: Path,
    tmp_path_factory: pytest.TempPathFactory,
    change: Callable[[dict[str, Any]], None],
    code: str,
    says: str,
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "checkpoint").write_bytes((package / "checkpoint").read_bytes())
    (package / "link").symlink_to("checkpoint")
    (package / "folder").symlink_to(outside)
    content = describe(package)
    change(content)
    (package / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(OdtpackError, match=says) as caught:
        Package.open(package)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"schema_version": 1}']
)
def test_texts_that_are_no_manifests(package: Path, data: bytes) -> None:
    (package / "manifest.json").write_bytes(data)
    with pytest.raises(OdtpackError) as caught:
        Package.open(package)
    assert caught.value.code == "manifest-invalid"


def test_folders_that_are_no_packages(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(OdtpackError) as caught:
            Package.open(path)
        assert caught.value.code == "package-not-found"


def test_a_package_behind_a_link_opens(package: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(package)
    assert Package.open(tmp_path / "alias").path == package.resolve()


def test_a_nominal_checkpoint_is_checked_like_the_others(package: Path) -> None:
    assert Package.open(package).nominal_checkpoint is None
    (package / "nominal").write_bytes(b"ODTC")
    content = describe(package)
    digest = hashlib.sha256(b"ODTC").hexdigest()
    content["files"]["nominal_checkpoint"] = {"path": "nominal", "size_bytes": 4, "sha256": digest}
    (package / "manifest.json").write_text(json.dumps(content))
    assert Package.open(package).nominal_checkpoint == package.resolve() / "nominal"
    (package / "nominal").write_bytes(b"ODTX")
    with pytest.raises(OdtpackError) as caught:
        Package.open(package)
    assert caught.value.code == "package-changed"


@pytest.mark.parametrize(("depth", "code"), [(60, None), (70, "manifest-invalid"),
                                             (900, "manifest-invalid")])  # fmt: skip
def test_options_of_a_loss_that_are_nested_deep(
    regression: models.Files, depth: int, code: str | None
) -> None:
    content = describe(regression.folder)
    text = json.dumps(content | {"loss_options": {"deep": "NEST"}})
    text = text.replace('"NEST"', "[" * depth + "]" * depth)
    if code is None:
        Manifest.from_json(text.encode(), "manifest.json")
        return
    with pytest.raises(OdtpackError) as caught:
        Manifest.from_json(text.encode(), "manifest.json")
    assert caught.value.code == code
