"""Bad packages, checkpoints and batches of the conformance suite, and the code of each error."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odtpack_runtime import CheckpointState
from odtpack_runtime.checkpoint.format import IDENTIFIER
from odtpack_runtime.checkpoint.parameters import Array
from odtpack_runtime.package.manifest import Manifest
from tests.kits import models

if TYPE_CHECKING:
    from tests.kits.cases import Case
    from tests.kits.vectors import Folder

Change = Callable[[Path], None]


def _edit(name: str, change: Callable[[bytes], bytes]) -> Change:
    def apply(package: Path) -> None:
        path = package / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def _manifest(more=lambda files: None, **changes):
    """Other values of top-level keys of the manifest, without its digest; None takes a key out.

    Then more is changed in what it says of the files.
    """

    def change(data: bytes) -> bytes:
        content = json.loads(data) | changes | {"digest": None}
        more(content.get("files"))
        return json.dumps({k: v for k, v in content.items() if v is not None}).encode()

    return _edit("manifest.json", change)


def _path(name: str) -> Change:
    """Another path of the checkpoint."""
    return _manifest(lambda files: files["checkpoint"].update(path=name))


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def _text(text: bytes) -> Change:
    return lambda package: (package / "manifest.json").write_bytes(text) and None


PACKAGES: dict[str, tuple[Change, str]] = {
    "package_missing_manifest": (
        lambda package: (package / "manifest.json").unlink(), "package-not-found"),
    "package_missing_model": (
        lambda package: (package / "eval_model.onnx").unlink(), "package-incomplete"),
    "package_missing_checkpoint": (
        lambda package: (package / "checkpoint").unlink(), "package-incomplete"),
    "package_changed_model": (_edit("training_model.onnx", _flip), "package-changed"),
    "package_changed_checkpoint": (_edit("checkpoint", _flip), "package-changed"),
    "package_truncated_model": (_edit("training_model.onnx", lambda data: data[:-1]),
                                "package-changed"),
    "package_longer_template": (_edit("inference_template.onnx", lambda data: data + b"\0"),
                                "package-changed"),
    "package_path_up": (_path("../checkpoint"), "package-path"),
    "package_path_inside_up": (_path("a/../checkpoint"), "package-path"),
    "package_path_absolute": (_path("/etc/passwd"), "package-path"),
    "package_path_backslash": (_path("..\\checkpoint"), "package-path"),
    "package_path_drive": (_path("C:checkpoint"), "package-path"),
    "package_path_dot": (_path("."), "package-path"),
    "package_path_empty_part": (_path("a//checkpoint"), "package-path"),
    "package_target": (_manifest(target="ort-training"), "package-target"),
    "package_private": (
        _manifest(privacy={"clip_norm": 1.0, "noise_multiplier": 1.0}), "private-training"),
    "manifest_version": (_manifest(schema_version=2), "manifest-version"),
    "manifest_no_files": (_manifest(files=None), "manifest-invalid"),
    "manifest_no_version": (_manifest(schema_version=None), "manifest-invalid"),
    "manifest_files_list": (_manifest(files=[]), "manifest-invalid"),
    "manifest_parameters_text": (_manifest(parameters="all"), "manifest-invalid"),
    "manifest_inputs_number": (_manifest(inputs=3), "manifest-invalid"),
    "manifest_empty": (_text(b""), "manifest-invalid"),
    "manifest_cut": (_edit("manifest.json", lambda data: data[: len(data) // 2]),
                     "manifest-invalid"),
    "manifest_list": (_text(b"[]"), "manifest-invalid"),
    "manifest_not_utf8": (_text(b'{"schema_version": 1, "tool": {"\xff": ""}}'),
                          "manifest-invalid"),
    "manifest_deep": (_text(b"[" * 100_000), "manifest-invalid"),
}  # fmt: skip
"""What is done to a package that does not open then, and the code."""


def _patched(position: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:position] + value + data[position + len(value) :]


def _other_version(data: bytes) -> bytes:
    """Version 1 in place of 2."""
    root = struct.unpack_from("<I", data)[0]
    table = root - struct.unpack_from("<i", data, root)[0]
    field = struct.unpack_from("<H", data, table + 4)[0]
    return _patched(root + field, struct.pack("<i", 1))(data)


def _without_digest(data: bytes) -> bytes:
    """The root table has no digest, and the tensors have."""
    root = struct.unpack_from("<I", data)[0]
    table = root - struct.unpack_from("<i", data, root)[0]
    return _patched(table + 4 + 2 * 4, bytes(2))(data)


CHECKPOINTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "checkpoint_empty": (lambda data: b"", "checkpoint-corrupt"),
    "checkpoint_no_identifier": (_patched(4, b"ORTM"), "checkpoint-corrupt"),
    "checkpoint_version": (_other_version, "checkpoint-version"),
    "checkpoint_root_outside": (_patched(0, struct.pack("<I", 2**31)), "checkpoint-corrupt"),
    "checkpoint_only_identifier": (
        lambda data: data[:4] + IDENTIFIER, "checkpoint-corrupt"),
    "checkpoint_other_file": (lambda data: b"PK\3\4" * 64, "checkpoint-corrupt"),
    **{
        f"checkpoint_truncated_{part}": (
            lambda data, part=part: data[: len(data) * part // 16], "checkpoint-corrupt")
        for part in range(1, 16, 2)
    },
    "checkpoint_last_byte": (lambda data: data[:-1], "checkpoint-corrupt"),
    "checkpoint_changed_value": (_flip, "checkpoint-corrupt"),
    "checkpoint_changed_name": (
        lambda data: data.replace(b"fc1.weight", b"fc1.height"), "checkpoint-corrupt"),
    "checkpoint_changed_digest": (
        lambda data: data[:-2] + bytes([data[-2] ^ 1]) + data[-1:], "checkpoint-corrupt"),
    "checkpoint_lost_digest": (_without_digest, "checkpoint-corrupt"),
}  # fmt: skip
"""What is done to a checkpoint that is not read then, and the code."""


def _batches() -> dict[str, tuple[list[Array], str]]:
    """Batches for the small perceptron that a step refuses, and the code."""
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    y = np.array([0, 3, 1])

    def labels(*values: int) -> list[Array]:
        return [x, np.array(values)]

    return {
        "label_too_large": (labels(0, 4, 1), "label-out-of-range"),
        "label_negative": (labels(0, -1, 1), "label-out-of-range"),
        "label_huge": (labels(0, 1, 2**40), "label-out-of-range"),
        "input_missing": ([x], "input-count"),
        "input_too_many": ([x, y, y], "input-count"),
        "input_type": ([x.astype(np.float64), y], "input-type"),
        "label_type": ([x, y.astype(np.int32)], "input-type"),
        "input_features": ([x[:, :15], y], "input-shape"),
        "input_rank": ([x[None], y], "input-shape"),
        "label_rank": ([x, y[:, None]], "input-shape"),
        "sizes_differ": ([x, y[:2]], "input-sizes-differ"),
        "batch_empty": ([x[:0], y[:0]], "empty-batch"),
    }


def write_errors(out: Path) -> Iterator[dict[str, Any]]:
    """Write every case of kind ``error``."""
    from tests.kits.cases import CASES
    from tests.kits.vectors import build, open_folder

    good = out / ".good"
    build(CASES["adam"], good)

    def case(name: str, action: str, code: str, of: Case | None = None, **content: Any) -> Folder:
        folder = open_folder(out, name)
        folder.content = {"kind": "error", "action": action, "code": code, **content}
        if of is not None:
            build(of, folder.path / "package")
        elif "package" in content:
            shutil.copytree(good, folder.path / "package")
        return folder

    for name, (change, code) in PACKAGES.items():
        folder = case(name, "open", code, package="package")
        change(folder.path / "package")
        yield folder.close()
    whole = (good / "checkpoint").read_bytes()
    for name, (damage, code) in CHECKPOINTS.items():
        folder = case(name, "load_checkpoint", code, checkpoint="checkpoint")
        (folder.path / "checkpoint").write_bytes(damage(whole))
        yield folder.close()
    missing = "checkpoint_missing", "load_checkpoint", "checkpoint-not-found"
    yield case(*missing, checkpoint="checkpoint").close()
    manifest = Manifest.from_json((good / "manifest.json").read_bytes(), "")
    names = [*(item.name for item in manifest.inputs), "more"]
    for name, (batch, code) in _batches().items():
        folder = case(name, "step", code, package="package", checkpoint="package/checkpoint")
        folder.content["inputs"] = folder.tensors(names[: len(batch)], batch)
        yield folder.close()
    yield from _mismatches(good, case)
    shutil.rmtree(good)


def _mismatches(good: Path, case: Callable[..., Folder]) -> Iterator[dict[str, Any]]:
    """Checkpoints that do not go with the package, and exports that cannot be."""
    from tests.kits.cases import CASES
    from tests.kits.vectors import Run, build

    at = {"package": "package", "checkpoint": "other.ckpt"}
    other = good.with_name(".other")
    folder = case("checkpoint_of_another_model", "session", "model-mismatch", **at)
    build(CASES["cnn"], other)
    shutil.copyfile(other / "checkpoint", folder.path / "other.ckpt")
    yield folder.close()
    shutil.rmtree(other)

    mismatch = "checkpoint_of_another_optimizer", "session", "optimizer-mismatch"
    folder = case(*mismatch, CASES["cnn"], **at)
    run = Run(CASES["adafactor"], build(CASES["adafactor"], other))
    run.step(folder, CASES["adafactor"].data(np.random.default_rng(0), 4), update=True)
    folder.data.clear()
    CheckpointState.save_checkpoint(run.state, folder.path / "other.ckpt", True)
    yield folder.close()
    shutil.rmtree(other)

    at_first = {"package": "package", "checkpoint": "package/checkpoint"}
    case_of = dataclasses.replace(CASES["transformer"], model=models.of_tokens)
    folder = case("token_negative", "step", "bad-prompt", case_of, **at_first)
    tokens, labels = case_of.data(np.random.default_rng(0), 4)
    tokens[2, 3] = -1
    folder.content["inputs"] = folder.tensors(["input_ids", "labels"], [tokens, labels])
    yield folder.close()

    nominal = {"package": "package", "checkpoint": "package/nominal_checkpoint"}
    case_of = dataclasses.replace(CASES["sgd"], build={"nominal": True})
    folder = case("nominal_step", "step", "nominal-state", case_of, **nominal)
    batch = case_of.data(np.random.default_rng(0), 4)
    folder.content["inputs"] = folder.tensors(["input", "labels"], batch)
    yield folder.close()

    unknown = "export_unknown_output", "export", "unknown-output"
    yield case(*unknown, **at_first, outputs=["nothing"]).close()
    folder = case("export_no_outputs", "export", "no-outputs", **at_first, outputs=[])
    yield folder.close()

    folder = case("export_without_a_model", "export", "no-outputs", **at_first, outputs=["output"])
    # As of a model that has no output but its loss.
    without = _manifest(lambda files: files.pop("inference_template"), inference=None)
    without(folder.path / "package")
    yield folder.close()
    beyond = "export_out_of_range", "export", "value-out-of-range", CASES["float16_model"]
    folder = case(*beyond, **at, outputs=["output"])
    state = CheckpointState.load_checkpoint(folder.path / "package" / "checkpoint")
    state.parameters["fc1.weight"].data[0, 0] = 1e6
    CheckpointState.save_checkpoint(state, folder.path / "other.ckpt")
    yield folder.close()
