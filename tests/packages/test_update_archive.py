"""Updates between packages: what comes out is the new package to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odtpack import artifacts
from odtpack.build import build_package
from odtpack.optimizers import SGD, AdamW
from odtpack.ort.choices import OrtFormat
from odtpack.update.update_archive import UpdateSummary, write_update
from odtpack_runtime import OdtpackError
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.package.apply_update import apply_update
from odtpack_runtime.package.update_archive import INDEX_NAME
from tests import zoo
from tests.packages.samples import build, check_update, list_extra, small_model, tree, with_values


def held(made: UpdateSummary) -> set[str]:
    """The files that an update holds, checked against what any unzip finds in it."""
    with zipfile.ZipFile(made.path) as archive:
        assert set(archive.namelist()) == {INDEX_NAME, *made.stored_bytes}
        assert archive.testzip() is None
    return set(made.stored_bytes)


def test_nothing_changed(tmp_path: Path) -> None:
    made = check_update(build(tmp_path / "old"), build(tmp_path / "new"), tmp_path / "work")
    assert held(made) == {"manifest.json"}


def test_all_weights_changed(tmp_path: Path) -> None:
    new = build(tmp_path / "new", with_values(small_model()))
    made = check_update(build(tmp_path / "old"), new, tmp_path / "work")
    assert held(made) == {"manifest.json", "checkpoint"}


def test_the_bytes_say_nothing_of_where_and_when(tmp_path: Path) -> None:
    old, new = build(tmp_path / "old"), build(tmp_path / "new", small_model(hidden=4))
    write_update(old, new, tmp_path / "first")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in (old, new):
        shutil.copytree(folder, elsewhere / folder.name)
        for path in (elsewhere / folder.name).iterdir():
            os.utime(path, (0, 0))
            path.chmod(0o400)
    write_update(elsewhere / "old", elsewhere / "new", tmp_path / "again")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()


def test_the_specification_s_index(tmp_path: Path) -> None:
    """What the page says of the archive, read with nothing of this project."""
    old, new = build(tmp_path / "old"), build(tmp_path / "new", small_model(hidden=4))
    write_update(old, new, tmp_path / "update")
    with zipfile.ZipFile(tmp_path / "update") as archive:
        index = json.loads(archive.read("odtpack-update.json"))
        assert archive.namelist()[0] == "odtpack-update.json"
        assert index["format"] == "odtpack-update"
        assert index["version"] == 1
        digest = hashlib.sha256((old / "manifest.json").read_bytes()).hexdigest()
        assert index["base"] == digest
        assert index["manifest"] == "manifest.json"
        assert [file["path"] for file in index["files"]] == sorted(tree(new))
        for file in index["files"]:
            data = (new / file["path"]).read_bytes()
            assert file["size_bytes"] == len(data)
            assert file["sha256"] == hashlib.sha256(data).hexdigest()
            if file["path"] in archive.namelist():
                assert archive.read(file["path"]) == data
            else:
                assert data in tree(old).values()


@pytest.mark.parametrize(
    ("new_model", "options"),
    [
        (small_model(width=(4, 12)), {}),
        (small_model(hidden=6), {}),
        (small_model(opset=20), {}),
        (zoo.mlp((12, 6, 3)), {}),
        (small_model(), {"loss": "mse"}),
        (small_model(), {"optimizer": SGD()}),
        (small_model(), {"optimizer": AdamW(beta1=0.8), "outputs": ["output"]}),
        (small_model(), {"nominal": True}),
    ],
    ids=["width", "layer", "opset", "mlp", "loss", "optimizer", "settings", "nominal"],
)
def test_model_or_recipe_changed(
    tmp_path: Path, new_model: onnx.ModelProto, options: dict[str, object]
) -> None:
    old, new = build(tmp_path / "old"), build(tmp_path / "new", new_model, **options)
    check_update(old, new, tmp_path / "there")
    check_update(build(tmp_path / "new"), build(tmp_path / "old", new_model, **options),
                tmp_path / "back")  # fmt: skip


def test_packages_with_prefixes_share_a_folder(tmp_path: Path) -> None:
    """The package beside stays as it is, and so do files that are of no package."""

    def both(folder: Path, loss: artifacts.LossType) -> Path:
        for prefix in ("a_", "b_"):
            artifacts.generate_artifacts(
                small_model(),
                requires_grad=["fc.weight", "fc.bias"],
                frozen_params=["conv1.weight", "conv1.bias"],
                loss=loss if prefix == "a_" else artifacts.LossType.CrossEntropyLoss,
                optimizer=artifacts.OptimType.AdamW,
                artifact_directory=folder,
                prefix=prefix,
            )
        (folder / "notes.txt").write_text("mine")
        (folder / "photos").mkdir()
        (folder / "photos" / "one").write_text("cat")
        return folder

    old = both(tmp_path / "old", artifacts.LossType.CrossEntropyLoss)
    new = both(tmp_path / "new", artifacts.LossType.MSELoss)
    write_update(old / "a_manifest.json", new / "a_manifest.json", tmp_path / "update")
    apply_update(old, tmp_path / "update", tmp_path / "beside")
    expected = {n: b for n, b in files(new).items() if n.startswith("a_")}
    assert files(tmp_path / "beside") == expected
    apply_update(old / "a_manifest.json", tmp_path / "update")
    assert files(old) == files(new)
    assert (old / "photos" / "one").read_text() == "cat"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def test_another_prefix(tmp_path: Path) -> None:
    """Files of other names with the same bytes are taken from the old package as well."""
    for name, seed in (("old", 0), ("new", 1)):
        artifacts.generate_artifacts(
            with_values(small_model(), "fc.bias", seed=seed),
            requires_grad=["fc.weight", "fc.bias"],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=artifacts.OptimType.SGD,
            artifact_directory=tmp_path / name,
            prefix=f"{name}_",
        )
    made = check_update(tmp_path / "old", tmp_path / "new", tmp_path / "work")
    assert held(made) == {"new_manifest.json", "new_checkpoint"}


def test_ort_files(tmp_path: Path) -> None:
    old = list_extra(build(tmp_path / "old", ort_format=OrtFormat()))
    new = list_extra(build(tmp_path / "new", small_model(width=(4, 12)), ort_format=OrtFormat()))
    made = held(check_update(old, new, tmp_path / "work"))
    assert any(name.endswith(".ort") for name in made)


def test_external_checkpoint_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 0)
    model = small_model(width=(16, 32))
    old = build(tmp_path / "old", model)
    new = build(tmp_path / "new", with_values(model, "conv1.bias"))
    made = check_update(old, new, tmp_path / "work")
    assert "checkpoint.data" in held(made)
    # From a checkpoint of two files to one of one, and back.
    monkeypatch.undo()
    check_update(build(tmp_path / "one", model), new, tmp_path / "to-two")
    check_update(new, build(tmp_path / "single", model), tmp_path / "to-one")


def test_signature_goes_along(tmp_path: Path) -> None:
    old, new = build(tmp_path / "old"), build(tmp_path / "new", small_model(hidden=4))
    (old / "manifest.sig").write_bytes(b"old signature")
    write_update(old, new, tmp_path / "unsigned")
    (new / "manifest.sig").write_bytes(b"new signature")
    check_update(build(tmp_path / "copy"), new, tmp_path / "work")
    apply_update(old, tmp_path / "unsigned")
    assert not (old / "manifest.sig").exists()


_OPTIMIZERS = st.sampled_from([SGD(), AdamW(), AdamW(beta1=0.5)])


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_pairs(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any package becomes any other."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("old", "new"):
        opset = data.draw(st.integers(13, 21), label="opset")
        kind = data.draw(st.sampled_from(["cnn", "mlp", "transformer"]), label="kind")
        if kind == "cnn":
            width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
            model = small_model(width=width, classes=data.draw(st.integers(2, 5)), opset=opset)
        elif kind == "mlp":
            model = zoo.mlp(data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=4)),
                            opset=opset)  # fmt: skip
        else:
            model = zoo.transformer_encoder(vocab=11, T=6, d=8, layers=1, heads=2, ff=16)
        if data.draw(st.booleans()):
            model = with_values(model, seed=data.draw(st.integers(0, 9)))
        build_package(
            model,
            folder / name,
            loss=data.draw(st.sampled_from(["cross_entropy", "mse"])),
            optimizer=data.draw(_OPTIMIZERS),
            nominal=data.draw(st.booleans()),
        )
    check_update(folder / "old", folder / "new", folder / "work")


def refused(code: str, *arguments: Path | None) -> OdtpackError:
    with pytest.raises(OdtpackError) as caught:
        apply_update(*arguments)  # type: ignore[arg-type]
    assert caught.value.code == code
    return caught.value


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A package, another one, and the update from the one to the other."""
    old, new = build(tmp_path / "old"), build(tmp_path / "new", small_model(hidden=4))
    write_update(old, new, tmp_path / "update")
    return old, new, tmp_path / "update"


class TestRefusals:
    def test_another_base(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        third = build(tmp_path / "third", loss="mse")
        before = tree(third)
        refused("delta-base", third, pair[2])
        assert tree(third) == before

    def test_the_new_package_beside(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        refused("delta-base", pair[1], pair[2], tmp_path / "out")

    def test_a_changed_base(self, pair: tuple[Path, Path, Path]) -> None:
        path = pair[0] / "checkpoint"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        before = tree(pair[0])
        refused("package-changed", pair[0], pair[2])
        path.unlink()
        refused("package-incomplete", pair[0], pair[2])
        path.symlink_to(pair[1] / "checkpoint")
        refused("package-path", pair[0], pair[2])
        path.unlink()
        path.write_bytes(before["checkpoint"])
        assert tree(pair[0]) == before

    def test_a_changed_new_package_is_not_taken_for_done(
        self, pair: tuple[Path, Path, Path]
    ) -> None:
        (pair[1] / "checkpoint").write_bytes(b"x")
        refused("package-changed", pair[1], pair[2])

    def test_no_package(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        refused("package-not-found", tmp_path / "empty", pair[2])
        refused("package-not-found", tmp_path / "absent", pair[2])

    def test_no_update(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        refused("delta-not-found", pair[0], tmp_path / "absent")
        refused("delta-unreadable", pair[0], pair[1])
        refused("delta-damaged", pair[0], pair[0] / "manifest.json")

    def test_out_that_is_taken(self, pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        refused("folder-not-empty", pair[0], pair[2], tmp_path / "file")
        refused("folder-not-empty", pair[0], pair[2], pair[1])
        (tmp_path / "made").mkdir()
        apply_update(pair[0], pair[2], tmp_path / "made")
        assert tree(tmp_path / "made") == tree(pair[1])

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        old, new = build(tmp_path / "old"), build(tmp_path / "new", nominal=True)
        write_update(old, new, tmp_path / "update")
        (old / "nominal_checkpoint").write_text("mine")
        before = tree(old)
        error = refused("folder-not-empty", old, tmp_path / "update")
        assert "nominal_checkpoint" in error.what
        assert tree(old) == before

    @pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_cannot_be_written(
        self, pair: tuple[Path, Path, Path], tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o500)
        try:
            refused("package-not-written", pair[0], pair[2])
        finally:
            tmp_path.chmod(0o700)

    def test_a_disk_without_room(
        self, pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = shutil.disk_usage(pair[0])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        before = tree(pair[0])
        assert "100 are free" in refused("package-not-written", pair[0], pair[2]).what
        assert tree(pair[0]) == before

    def test_names_that_an_update_cannot_hold(self, tmp_path: Path) -> None:
        old = list_extra(build(tmp_path / "old", ort_format=OrtFormat()))
        content = json.loads((old / "manifest.json").read_text())
        content.pop("digest", None)
        (old / "sub").mkdir()
        first = content["files"]["extra"][0]
        (old / first["path"]).rename(old / "sub" / "model.ort")
        first["path"] = "sub/model.ort"
        (old / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(OdtpackError) as caught:
            write_update(old, old, tmp_path / "update")
        assert caught.value.code == "delta-path"
        assert "sub/model.ort" in caught.value.what
        assert not (tmp_path / "update").exists()


def test_the_standard_library_is_enough() -> None:
    """Beyond what the training core needs anyway nothing is imported."""
    code = (
        "import sys, odtpack_runtime; before = set(sys.modules)\n"
        "import odtpack_runtime.package.apply_update, odtpack_runtime.checkpoint.carry_over\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'odtpack_runtime'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
