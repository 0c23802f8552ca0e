"""The manifest and the package around it."""

import contextlib
import functools
import hashlib
import json
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from odtpack_runtime import OdtpackError
from odtpack_runtime.files.records import InvalidRecordError, Part, Rule, parse_json
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from odtpack_runtime.session.graph_signature import GraphSignature, TensorSpec, check_labels
from tests.refused import refused
from tests.runtime import models

ROLES = {
    "training_model": "training_model.onnx", "eval_model": "eval_model.onnx",
    "optimizer_model": "optimizer_model.onnx", "checkpoint": "checkpoint",
}  # fmt: skip


def describe(folder: Path, prefix: str = "") -> dict[str, Any]:
    """The manifest of the regression package in `folder`."""
    files = {}
    for role, name in ROLES.items():
        data = (folder / (prefix + name)).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        files[role] = {"path": prefix + name, "size_bytes": len(data), "sha256": digest}
    return {
        "schema_version": 1, "tool": {"odtpack": "0.1.0", "onnx": "1.23.2"}, "files": files,
        "minimum_onnxruntime": "1.20", "ir_version": 8, "opsets": {"": 17},
        "inputs": [{"name": "input", "dtype": "float32", "shape": ["batch", 3], "role": "data"},
                   {"name": "labels", "dtype": "int64", "shape": ["batch", None], "role": "labels",
                    "class_count": 10}],
        "outputs": [{"name": "loss", "dtype": "float32", "shape": [], "role": "loss"}],
        "loss": "mse",
        "optimizer": {"kind": "adamw", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6,
                      "weight_decay": 0},
        "parameters": [{"name": "W", "shape": [3, 2], "dtype": "float32", "role": "trainable"},
                       {"name": "scale", "shape": [3], "dtype": "float32", "role": "frozen"}],
        "operators": {role: {"ai.onnx": {"Add": 14}} for role in list(ROLES)[:3]},
    }  # fmt: skip


@pytest.fixture
def package(regression: models.Files) -> Path:
    (regression.folder / "manifest.json").write_text(json.dumps(describe(regression.folder)))
    return regression.folder


def test_a_package_opens(package):
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


def test_the_text_of_a_manifest_comes_back(package):
    manifest = Package.open(package).manifest
    text = manifest.to_json()
    assert Manifest.from_json(text.encode(), "m") == manifest.sealed()
    assert Manifest.from_json(text.encode(), "m").to_json() == text
    assert json.loads(text) == describe(package) | {"digest": manifest.sealed().digest}


def test_a_digest_tells_damage(package):
    text = Package.open(package).manifest.to_json()
    shuffled = json.dumps(dict(reversed(json.loads(text).items())))
    assert Manifest.from_json(shuffled.encode(), "m").to_json() == text
    with pytest.raises(OdtpackError, match="changed or damaged"):
        Manifest.from_json(text.replace('"onnx": "1.23.2"', '"onnx": "1.23.3"').encode(), "m")


def test_sgd_and_prefixes(package):
    for name in ROLES.values():
        (package / name).rename(package / f"digits_{name}")
    (package / "manifest.json").unlink()
    content = describe(package, "digits_") | {"optimizer": {"kind": "sgd", "momentum": 0.5}}
    (package / "digits_manifest.json").write_text(json.dumps(content))
    opened = Package.open(package)
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
        content = functools.reduce(operator.getitem, path, content)
        content[last] = value
        if value is ABSENT:
            del content[last]

    return change


ABSENT = object()


def _drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    return _set(*keys, ABSENT)


@pytest.mark.parametrize(("change", "code", "says"), [
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
    (_set("files", "checkpoint", "path", "gone"), "package-incomplete", "lacks its file 'gone'"),
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
])  # fmt: skip
def test_packages_that_are_wrong(package, tmp_path_factory, change, code, says):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "checkpoint").write_bytes((package / "checkpoint").read_bytes())
    (package / "link").symlink_to("checkpoint")
    (package / "folder").symlink_to(outside)
    content = describe(package)
    change(content)
    (package / "manifest.json").write_text(json.dumps(content))
    with refused(code, says):
        Package.open(package)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"schema_version": 1}']
)
def test_texts_that_are_no_manifests(package, data):
    (package / "manifest.json").write_bytes(data)
    with refused("manifest-invalid"):
        Package.open(package)


def test_folders_that_are_no_packages(package, tmp_path):
    (package / "manifest.json").rename(tmp_path / "it.json")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "it.json", tmp_path / "a\0b/c"):
        with refused("package-not-found"):
            Package.open(path)


def test_a_package_behind_a_link_opens(package, tmp_path):
    (tmp_path / "alias").symlink_to(package)
    assert Package.open(tmp_path / "alias").path == package.resolve()


def test_a_nominal_checkpoint_is_checked_like_the_others(package):
    assert Package.open(package).nominal_checkpoint is None
    (package / "nominal").write_bytes(b"ODTC")
    content = describe(package)
    digest = hashlib.sha256(b"ODTC").hexdigest()
    content["files"]["nominal_checkpoint"] = {"path": "nominal", "size_bytes": 4, "sha256": digest}
    (package / "manifest.json").write_text(json.dumps(content))
    assert Package.open(package).nominal_checkpoint == package.resolve() / "nominal"
    (package / "nominal").write_bytes(b"ODTX")
    with refused("package-changed"):
        Package.open(package)


@pytest.mark.parametrize(("depth", "code"), [(60, None), (70, "manifest-invalid"),
                                             (900, "manifest-invalid")])  # fmt: skip
def test_options_of_a_loss_that_are_nested_deep(regression, depth, code):
    text = json.dumps(describe(regression.folder) | {"loss_options": {"deep": "NEST"}})
    text = text.replace('"NEST"', "[" * depth + "]" * depth)
    with refused(code) if code else contextlib.nullcontext():
        Manifest.from_json(text.encode(), "manifest.json")


# The roles of a training graph's names.

Node = tuple[str, str, list[object]]

TRAINABLE = {"w": np.zeros((2, 3), np.float32)}
FROZEN = {"s": np.zeros(3, np.float32)}
INPUTS: list[Node] = [
    ("x", "tensor(float)", ["batch", 2]), ("w", "tensor(float)", [2, 3]),
    ("s", "tensor(float)", [3]), ("w_grad.accumulation.buffer", "tensor(float)", [2, 3]),
    ("lazy_reset_grad", "tensor(bool)", [1]),
]  # fmt: skip
OUTPUTS: list[Node] = [
    ("loss", "tensor(float)", []), ("w_grad.accumulation.out", "tensor(float)", [2, 3]),
    ("s.update.out", "tensor(float)", [3]),
]  # fmt: skip


def read(inputs: list[Node], outputs: list[Node]) -> GraphSignature:
    nodes = [
        [SimpleNamespace(name=name, type=kind, shape=shape) for name, kind, shape in group]
        for group in (inputs, outputs)
    ]
    return GraphSignature.read("model.onnx", nodes[0], nodes[1], TRAINABLE, FROZEN)


def test_a_graph_that_keeps_the_contract():
    signature = read(INPUTS, OUTPUTS)
    assert signature.inputs == (TensorSpec("x", np.dtype(np.float32), ("batch", 2)),)
    assert signature.parameters == ("w", "s")
    assert [spec.name for spec in signature.outputs] == ["loss"]
    assert signature.gradients == ("w",)
    assert signature.updates == ("s",)


def test_names_that_only_look_like_roles_are_the_users():
    extra: list[Node] = [
        ("y.update.out", "tensor(float)", [3]),
        ("s_grad.accumulation.out", "tensor(float)", [3]),
        ("w.update.out", "tensor(float)", [2, 3]),
    ]
    signature = read(INPUTS, [*OUTPUTS, *extra])
    assert [spec.name for spec in signature.outputs] == ["loss", *(name for name, *_ in extra)]


def _with(nodes: list[Node], index: int, node: Node | None) -> list[Node]:
    return [*nodes[:index], *([node] if node else []), *nodes[index + 1 :]]


@pytest.mark.parametrize(("inputs", "outputs", "says"), [
    (_with(INPUTS, 1, None), OUTPUTS, "updates 'w', which is not among its inputs"),
    (_with(INPUTS, 2, None), OUTPUTS, "updates 's', which is not among its inputs"),
    (_with(INPUTS, 3, None), OUTPUTS, "'w_grad.accumulation.buffer' lacks"),
    (INPUTS, _with(OUTPUTS, 1, None), "'w_grad.accumulation.buffer' lacks"),
    (_with(INPUTS, 4, None), OUTPUTS, "no input 'lazy_reset_grad'"),
    (INPUTS, OUTPUTS[1:], "no outputs for the user"),
    ([*INPUTS, ("late", "tensor(float)", [1])], OUTPUTS, "'late' belongs to no parameter"),
    ([("v_grad.accumulation.buffer", "tensor(float)", [1]), *INPUTS], OUTPUTS,
     "'v_grad.accumulation.buffer' belongs to no parameter"),
    (_with(INPUTS, 1, ("w", "tensor(float)", [3, 2])), OUTPUTS, r"'w' is float32\[3, 2\]"),
    (_with(INPUTS, 1, ("w", "tensor(double)", [2, 3])), OUTPUTS, r"'w' is float64\[2, 3\]"),
    (_with(INPUTS, 3, ("w_grad.accumulation.buffer", "tensor(float)", [6])), OUTPUTS,
     "accumulation.buffer' is"),
    (_with(INPUTS, 4, ("lazy_reset_grad", "tensor(bool)", [2])), OUTPUTS, "lazy_reset_grad' is"),
    (INPUTS, _with(OUTPUTS, 1, ("w_grad.accumulation.out", "tensor(bool)", [1])),
     "unlike the parameter"),
    (INPUTS, _with(OUTPUTS, 2, ("s.update.out", "tensor(float)", [4])), "unlike the parameter"),
    (_with(INPUTS, 0, ("x", "seq(tensor(float))", [])), OUTPUTS,
     r"'x' is a seq\(tensor\(float\)\)"),
    (_with(INPUTS, 0, ("x", "tensor(bfloat16)", [])), OUTPUTS, "numpy cannot hold"),
])  # fmt: skip
def test_graphs_that_break_the_contract(inputs, outputs, says):
    with pytest.raises(OdtpackError, match=says) as caught:
        read(inputs, outputs)
    assert caught.value.code in ("model-mismatch", "unsupported-type")
    assert caught.value.where == "model.onnx"


def test_specs_as_text():
    assert str(TensorSpec("x", np.dtype(np.int64), (None, "n", 3))) == "int64[?, n, 3]"
    assert str(TensorSpec("x", np.dtype(object), ("n",))) == "text[n]"


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 2, 2)])
def test_labels_of_any_shape(shape):
    labels = np.array([0, 1, 5, 1]).reshape(shape)
    check_labels(labels, 6)
    with pytest.raises(OdtpackError, match="label 5 at") as caught:
        check_labels(labels, 5)
    place = ", ".join(str(int(i)) for i in np.argwhere(labels == 5)[0])
    assert f"[{place}]" in str(caught.value)
    check_labels(np.array([], np.int64), 5)


# Records of JSON are checked strictly, and say where they are wrong.


@dataclass(frozen=True, kw_only=True)
class Square(Part):
    kind: Literal["square"]
    side: float


@dataclass(frozen=True, kw_only=True)
class Circle(Part):
    kind: Literal["circle"]
    radius: Annotated[int, Rule(minimum=1, maximum=9)]


@dataclass(frozen=True, kw_only=True)
class Drawing(Part):
    name: Annotated[str, Rule(minLength=1, pattern="^[a-z]+$")]
    shapes: tuple[Square | Circle, ...] = ()
    sizes: Annotated[tuple[int | str | None, ...], Rule(maxItems=2)] = ()
    about: dict[str, Any] = field(default_factory=dict)
    seen: bool = False

    def check(self, path: tuple[str | int, ...]) -> None:
        if self.seen and not self.shapes:
            raise InvalidRecordError("nothing can be seen", path)


GOOD = {
    "name": "a", "shapes": [{"kind": "square", "side": 2}, {"kind": "circle", "radius": 3}],
    "sizes": [1, None], "about": {"x": [1, {"y": None}]}, "seen": True,
}  # fmt: skip


def test_what_is_read_comes_back():
    drawing = Drawing.read(GOOD)
    assert drawing.shapes == (Square(kind="square", side=2.0), Circle(kind="circle", radius=3))
    assert type(drawing.shapes[0].side) is float
    assert drawing.as_dict() == GOOD
    assert Drawing.read(drawing.as_dict()) == drawing
    assert Drawing.read({"name": "a"}).as_dict(defaults=False) == {"name": "a"}


@pytest.mark.parametrize(("change", "says"), [
    ({"name": ""}, "name: it must not be empty"),
    ({"name": "A"}, "name: it must match"),
    ({"name": "a\n"}, "name: it must match"),
    ({"name": 1}, "name: it must be text"),
    ({"name": "\ud800"}, "name: it holds characters"),
    ({"more": 1}, "more: there is no such key"),
    ({"seen": 1}, "seen: it must be true or false"),
    ({"seen": True, "shapes": []}, "nothing can be seen"),
    ({"shapes": {}}, "shapes: it must be a list"),
    ({"shapes": [3]}, r"shapes\[0\]: its kind must be 'square' or 'circle'"),
    ({"shapes": [{"kind": []}]}, r"shapes\[0\]: its kind"),
    ({"shapes": [{"kind": "square"}]}, r"shapes\[0\]\.side: this key is missing"),
    ({"shapes": [{"kind": "square", "side": True}]}, "side: it must be a number"),
    ({"shapes": [{"kind": "square", "side": float("inf")}]}, "side: it must be a finite"),
    ({"shapes": [{"kind": "square", "side": 10**400}]}, "side: it must be a finite"),
    ({"shapes": [{"kind": "circle", "radius": 0}]}, "radius: it must be 1 or more"),
    ({"shapes": [{"kind": "circle", "radius": 10}]}, "radius: it must be 9 or less"),
    ({"shapes": [{"kind": "circle", "radius": 1.5}]}, "radius: it must be a whole number"),
    ({"shapes": [{"kind": "circle", "radius": True}]}, "radius: it must be a whole number"),
    ({"sizes": [1, 2, 3]}, "sizes: it must have 2 entries or fewer"),
    ({"sizes": [1.5]}, r"sizes\[0\]: it must be a whole number, or it must be text"),
    ({"about": []}, "about: it must be an object"),
    ({"about": {"x": float("nan")}}, r"about\.x: it must be a finite number"),
    ({"about": {"x": ["\ud800"]}}, r"about\.x\[0\]: it holds characters"),
])  # fmt: skip
def test_what_is_wrong_is_named(change, says):
    with pytest.raises(InvalidRecordError) as caught:
        Drawing.read(GOOD | change)
    assert re.search(says, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(("text", "says"), [
    (b"", "not JSON"),
    (b"\xff", "not JSON in UTF-8"),
    (b"\xef\xbb\xbf{}", "not JSON"),
    ("{}".encode("utf-16"), "not JSON"),
    (b'{"a": 1, "a": 1}', "the key 'a' occurs twice"),
    (b'{"a": NaN}', "NaN is not a number"),
    (b'{"a": -Infinity}', "-Infinity is not a number"),
    (b"[" * 100_000, "nests too deeply"),
    (b"1" * 5000, "not JSON"),
])  # fmt: skip
def test_texts_that_are_not_json(text, says):
    with pytest.raises(InvalidRecordError, match=says):
        parse_json(text)
