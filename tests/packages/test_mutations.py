"""Damaged and forged packages: an error that is clear, or the same content; never a crash."""

import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from odtpack.cli import main
from odtpack_runtime import OdtpackError
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package, check_nothing_else
from odtpack_runtime.package.verify import check_checkpoints, check_models, verify_package
from tests.packages import mutations
from tests.programs import ran
from tests.refused import refused
from tests.sweep import split

NAMES = [
    "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint",
    "nominal_checkpoint", "manifest.json",
]  # fmt: skip
# How many: a part of them in every run, all of them in the sweep.
DAMAGED = split([120, 1000], lambda count: count == 120)
FORGED = split([100, 600], lambda count: count == 100)
HARMLESS_SHARE = 0.05
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")


def read(folder: Path) -> Package:
    """All of ``odtpack verify`` but the steps, which need a second each."""
    package = Package.open(folder)
    check_nothing_else(package.path, package.manifest_name, package.manifest)
    check_models(package)
    check_checkpoints(package)
    return package


def assert_clear(error: OdtpackError) -> None:
    """One sentence that can be printed, and a way out."""
    assert error.code == error.code.lower()
    assert error.what.strip()
    assert "\n" not in error.what.strip(), error.what
    assert len(error.what) < 1000, error.what
    assert error.hint, error.code
    assert error.where
    str(error).encode()


@pytest.mark.parametrize("mutated", DAMAGED)
def test_damaged_packages(built, tmp_path, mutated):
    """Harmless are changes of spaces in the manifest: its content is the same."""
    original = read(built)
    codes: Counter[str] = Counter()
    printed = 0
    for index, (name, damage) in enumerate(mutations.damage(NAMES, mutated, seed=7)):
        folder = Path(shutil.copytree(built, tmp_path / str(index) / "package"))
        damage(folder)
        try:
            package = read(folder)
        except OdtpackError as error:
            assert_clear(error)
            codes[error.code] += 1
            if printed < 40 or index % 25 == 0:
                printed += 1
                assert main(["verify", str(folder)]) == 2, name
        else:
            assert package.manifest == original.manifest, name
            for file in NAMES[:-1]:
                assert (folder / file).read_bytes() == (built / file).read_bytes(), name
            codes["harmless"] += 1
        shutil.rmtree(tmp_path / str(index))
    assert codes.total() == mutated
    assert codes["harmless"] <= HARMLESS_SHARE * mutated, codes
    # A plan that came with a package is none of them: it is an unlisted file like others.
    assert "update-unfinished" not in codes
    assert len(codes) >= (8 if mutated == 1000 else 6), codes


@pytest.mark.parametrize("count", split([15, 60], lambda count: count == 15))
def test_what_is_damaged_is_refused_by_the_command(built, tmp_path, run, count):
    for index, (name, damage) in enumerate(mutations.damage(NAMES, count, seed=8)):
        folder = Path(shutil.copytree(built, tmp_path / str(index)))
        damage(folder)
        shown = run("verify", folder)
        assert (shown.code, shown.out) == (2, ""), name
        assert shown.err.count("error[") == 1
        assert "error[internal]" not in shown.err, (name, shown.err)


@pytest.mark.parametrize("seed", split([1, 2, 3], lambda seed: seed == 1))
def test_processes_end_with_code_2(built, tmp_path, seed):
    for index, (name, damage) in enumerate(mutations.damage(NAMES, 500, seed=seed)):
        if index in (seed * 13, 450 + seed):
            folder = Path(shutil.copytree(built, tmp_path / str(index)))
            damage(folder)
            done = ran(sys.executable, "-m", "odtpack", "verify", folder, code=None)
            assert done.returncode == 2, (name, done.stderr)
            assert "Traceback" not in done.stderr


def test_no_change_of_a_signed_manifest_passes(signed, key, tmp_path):
    folder = Path(shutil.copytree(signed, tmp_path / "package"))
    data = (folder / "manifest.json").read_bytes()
    for change in mutations.byte_changes(seed=11, count=200):
        changed = change(data)
        if changed == data:
            continue
        (folder / "manifest.json").write_bytes(changed)
        with refused("signature-wrong"):
            verify_package(folder, public_key=key.with_suffix(".pub"))


@pytest.mark.parametrize("count", FORGED)
def test_forged_manifests(built, tmp_path, count):
    """Their digest is right, so that what they say is looked at."""
    folder = Path(shutil.copytree(built, tmp_path / "package"))
    content = json.loads((folder / "manifest.json").read_bytes())
    original = Package.open(built).manifest
    refused = 0
    for data in mutations.forged_manifests(content, count, seed=3):
        (folder / "manifest.json").write_bytes(data)
        try:
            manifest = read(folder).manifest
        except OdtpackError as error:
            assert_clear(error)
            refused += 1
        else:
            # What can be held against the files is as it was.
            for key in ("files", "inputs", "outputs", "opsets", "operators", "parameters"):
                assert _loose(manifest, key) == _loose(original, key), key
    assert refused > 0.66 * count


def _loose(manifest: Manifest, key: str) -> object:
    """A part of a manifest without what the files do not tell."""
    exclude = {"size_bytes", "role", "class_count"} if key in ("inputs", "parameters") else set()
    part = manifest.as_dict()[key]
    if isinstance(part, tuple | list):
        return [{k: v for k, v in item.items() if k not in exclude} for item in part]
    return part


@pytest.mark.parametrize("count", FORGED)
def test_forged_checkpoints(built, tmp_path, count):
    """Their hashes are right, so that they are parsed."""
    folder = Path(shutil.copytree(built, tmp_path / "package"))
    original = read_checkpoint(built / "checkpoint")
    data = (built / "checkpoint").read_bytes()
    refused = 0
    for change in mutations.byte_changes(seed=5, count=count):
        (folder / "checkpoint").write_bytes(change(data))
        mutations.rehash(folder, "checkpoint")
        try:
            package = read(folder)
        except OdtpackError as error:
            assert_clear(error)
            refused += 1
        else:
            found = read_checkpoint(package.checkpoint)
            for name, array in original.trainable.items():
                assert found.trainable[name].shape == array.shape
                assert found.trainable[name].dtype == np.float32
    assert refused > 0.4 * count


@pytest.mark.parametrize("count", split([60, 250], lambda count: count == 60))
@pytest.mark.parametrize("name", NAMES[:3])
def test_forged_models(built, tmp_path, name, count):
    """Their hashes are right, so that they are parsed; ONNX Runtime sees a few, apart."""
    folder = Path(shutil.copytree(built, tmp_path / "package"))
    data = (built / name).read_bytes()
    refused = run = 0
    for change in mutations.byte_changes(seed=6, count=count):
        (folder / name).write_bytes(change(data))
        mutations.rehash(folder, name)
        try:
            read(folder)
        except OdtpackError as error:
            assert_clear(error)
            refused += 1
            continue
        if run < 3:
            run += 1
            try:
                verify_package(folder)
            except OdtpackError as error:
                assert_clear(error)
    assert refused > 0.24 * count
    assert run
