"""What ``odtpack diff`` finds in two packages."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from odtpack.build import build_package
from odtpack.choices import OrtFormat
from odtpack.optimizers import SGD, AdamW
from odtpack.update.diff import PackageDiff, ValueChange, diff_packages, markdown, plain
from odtpack.update.release import new_key, sign_package
from odtpack_runtime.checkpoint import writer
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_runtime.package.manifest import Manifest
from odtpack_runtime.package.package import Package
from tests.model_text import retyped, with_arrays
from tests.packages.mutations import rehash
from tests.packages.samples import build, list_extra, renamed, small_model, with_values
from tests.refused import refused


def compared(tmp_path: Path, old: dict[str, object], new: dict[str, object]) -> PackageDiff:
    build(tmp_path / "old", **old)  # type: ignore[arg-type]
    build(tmp_path / "new", **new)  # type: ignore[arg-type]
    found = diff_packages(tmp_path / "old", tmp_path / "new")
    # The same facts from the other side.
    back = diff_packages(tmp_path / "new", tmp_path / "old")
    assert (found.old_size, found.new_size) == (back.new_size, back.old_size)
    assert {p.name for p in found.parameters} == {p.name for p in back.parameters}
    assert [(c.name, c.old, c.new) for c in sorted(found.settings, key=lambda c: c.name)] == [
        (c.name, c.new, c.old) for c in sorted(back.settings, key=lambda c: c.name)
    ]
    assert {(o.model, o.domain, o.added, o.removed) for o in found.operators} == {
        (o.model, o.domain, o.removed, o.added) for o in back.operators
    }
    assert PackageDiff.model_validate_json(found.model_dump_json()) == found
    return found


def test_nothing(tmp_path):
    found = compared(tmp_path, {}, {})
    assert found.same
    assert not any((found.operators, found.versions, found.settings, found.parameters))
    assert not any(file.changed for file in found.files)
    assert found.unchanged_parameters == 6
    assert not found.app.calls_change
    assert not found.app.reduced_runtime_rebuild
    assert "nothing to do" in markdown(found)


def _with_tanh(model: onnx.ModelProto) -> onnx.ModelProto:
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Tanh"
    return model


def _renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same with other names for what lies between inputs and outputs."""
    kept = {value.name for value in model.graph.output}
    names = {y: f"other/{y}" for node in model.graph.node for y in node.output if y not in kept}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


@pytest.mark.parametrize(
    ("new", "notes"),
    [({"model": _with_tanh(small_model())}, ["the model computes something else"]),
     ({"loss_options": {"label_smoothing": 0.1}}, ["the loss has other options"]),
     ({"model": with_values(small_model())}, []), ({"optimizer": SGD()}, []),
     ({"model": _renamed(small_model())}, []),
     ({"outputs": [small_model().graph.node[0].output[0]]}, [])],
    ids=["another operator", "loss options", "values", "optimizer", "names", "one more output"],
)  # fmt: skip
def test_a_model_that_computes_something_else(new, notes, tmp_path):
    """It takes the same parameters, and they were fitted to another function."""
    found = compared(tmp_path, {}, new).verdict
    assert [note.partition(";")[0].partition(":")[0] for note in found.notes] == notes


def test_a_signature_shows(tmp_path):
    for name in ("old", "new"):
        build(tmp_path / name)
    new_key(tmp_path / "key.pem")
    sign_package(tmp_path / "new", tmp_path / "key.pem")
    found = diff_packages(tmp_path / "old", tmp_path / "new")
    assert found.same  # what the manifests say
    assert [(each.name, each.old, each.new) for each in found.versions] == [
        ("signature", None, "present")
    ]
    assert "| signature | none | present |" in markdown(found)


def test_sizes_are_those_of_the_files(tmp_path):
    found = compared(tmp_path, {}, {"model": small_model(hidden=9), "nominal": True})
    sizes = {file.file: (file.old_size, file.new_size) for file in found.files}
    for name in ("training_model", "eval_model", "optimizer_model"):
        assert sizes[name] == tuple(
            (tmp_path / folder / f"{name}.onnx").stat().st_size for folder in ("old", "new")
        )
    assert sizes["nominal_checkpoint"] == (
        None, (tmp_path / "new" / "nominal_checkpoint").stat().st_size
    )  # fmt: skip
    for folder, total in (("old", found.old_size), ("new", found.new_size)):
        files = [path for path in (tmp_path / folder).iterdir() if path.name != "manifest.json"]
        assert total == sum(path.stat().st_size for path in files)


def test_operators_are_those_of_the_models(tmp_path):
    found = compared(tmp_path, {"optimizer": SGD()}, {"optimizer": AdamW(), "loss": "mse"})

    def names(folder: str, model: str) -> set[str]:
        graph = onnx.load(tmp_path / folder / f"{model}.onnx").graph
        return {node.op_type for node in graph.node}

    for model in ("training_model", "eval_model", "optimizer_model"):
        old, new = names("old", model), names("new", model)
        (change,) = (c for c in found.operators if c.model == model)
        assert change.domain == "ai.onnx"
        assert set(change.added) == new - old
        assert set(change.removed) == old - new
    every = [
        set().union(*(names(f, m) for m in ("training_model", "eval_model", "optimizer_model")))
        for f in ("old", "new")
    ]
    assert set(found.app.reduced_runtime) == {f"ai.onnx.{name}" for name in every[1] - every[0]}
    assert found.app.reduced_runtime_rebuild


def _operators(graph: onnx.GraphProto) -> set[str]:
    """Operators of all nodes, those in branches included."""
    inner = (a.g for node in graph.node for a in node.attribute if a.HasField("g"))
    return {node.op_type for node in graph.node}.union(*map(_operators, inner))


def test_operators_of_the_step_model(tmp_path):
    """It is compared as the other models are, and one that comes or goes with all it needs."""
    found = compared(tmp_path, {"step_model": "always"}, {"loss": "mse", "step_model": "always"})
    names = [
        _operators(onnx.load(tmp_path / folder / "step_model.onnx").graph)
        for folder in ("old", "new")
    ]
    (change,) = (change for change in found.operators if change.model == "step_model")
    assert set(change.added) == names[1] - names[0]
    assert set(change.removed) == names[0] - names[1]
    assert change.removed
    build(tmp_path / "without", loss="mse", step_model="never")
    (change,) = diff_packages(tmp_path / "without", tmp_path / "new").operators
    assert (change.model, set(change.added), change.removed) == ("step_model", names[1], ())


def test_operators_that_only_move_between_models_need_no_rebuild(tmp_path):
    """A reduced build has an operator or has it not, whichever model uses it."""
    found = compared(tmp_path, {"optimizer": AdamW()}, {"optimizer": SGD()})
    assert found.operators
    assert not found.app.reduced_runtime_rebuild


def test_opsets(tmp_path):
    found = compared(tmp_path, {}, {"model": small_model(opset=21)})
    changes = {change.name: (change.old, change.new) for change in found.versions}
    assert changes["opset ai.onnx"] == (17, 21)
    assert found.app.reduced_runtime_rebuild
    assert found.verdict.level == "compatible"
    old, new = found.app.old_minimum_onnxruntime, found.app.new_minimum_onnxruntime
    higher = [int(part) for part in new.split(".")] > [int(part) for part in old.split(".")]
    assert found.app.newer_onnxruntime_needed == higher


def test_settings(tmp_path):
    found = compared(
        tmp_path, {"optimizer": AdamW()}, {"optimizer": AdamW(beta1=0.5), "loss": "mse"}
    )
    changes = {change.name: (change.old, change.new) for change in found.settings}
    assert changes["optimizer.beta1"] == (0.9, 0.5)
    assert changes["loss"] == ("cross_entropy", "mse")
    assert found.app.calls_change
    text = " ".join(found.app.calls)
    assert "input 'labels' is gone" in text
    assert "input 'target' is new: float32[batch, 3] (target)" in text
    # A list of layers, or the text of a configuration, makes no line of any length.
    names = [f"layers.{index}.q_proj" for index in range(50)]
    for old, new, parts in (
        (names, "one\ntwo", ("layers.0.q_proj", "one two")),
        (names, [*names[:40], "head", *names[41:]], ("layers.40.q_proj", "head")),
        ("a" * 70, "a" * 70 + " and more", ("aaa", "aaa and more")),
    ):
        wide = ValueChange(name="adapter.layers", old=old, new=new)
        shown = plain(found.model_copy(update={"settings": (wide,)}))
        (row,) = (line for line in shown.splitlines() if "adapter.layers" in line)
        assert len(row) < 150
        assert all(part in row for part in parts)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [({"prediction": False}, {}, "output 'output' is new: float32[batch, 3] (prediction)"),
     ({}, {"model": small_model(classes=5)},
      "input 'labels' changes from int64[batch] (labels, class_count 3) to int64[batch] "
      "(labels, class_count 5)"),
     ({"model": small_model(size=12)}, {},
      "input 'input' changes from float32[batch, 1, 12, 12] (data) to "
      "float32[batch, 1, 8, 8] (data)"),
     ({}, {"accumulation_steps": 4}, "the batches of a step change from 1 to 4"),
     ({"accumulation_steps": 4}, {}, "the batches of a step change from 4 to 1"),
     ({}, {"privacy_clip": 1.0},
      "a step now takes private gradients only: make it with train_step")],
    ids=["output", "classes", "shape", "more batches", "one batch", "private"],
)  # fmt: skip
def test_calls(tmp_path, old, new, words):
    found = compared(tmp_path, old, new)
    assert found.app.calls_change
    assert words in found.app.calls


def test_an_output_may_become_that_of_the_accuracy(tmp_path):
    named: dict[str, object] = {"outputs": ["output"]}
    compared(tmp_path, named, named)
    path = tmp_path / "old" / "manifest.json"
    manifest = Manifest.from_json(path.read_bytes(), str(path))
    loss, output = manifest.outputs
    outputs = (loss, dataclasses.replace(output, role="additional"))  # as without an accuracy
    path.write_text(dataclasses.replace(manifest, outputs=outputs).to_json())
    found = diff_packages(tmp_path / "old", tmp_path / "new")
    packages = (Package.open(tmp_path / folder).manifest for folder in ("old", "new"))
    assert [each.outputs[1].role for each in packages] == ["additional", "prediction"]
    assert not found.app.calls_change
    back = diff_packages(tmp_path / "new", tmp_path / "old")
    assert "output 'output' changes" in " ".join(back.app.calls)  # it has no accuracy any more


def test_a_free_size_takes_what_a_fixed_one_took(tmp_path):
    fixed = small_model()
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    build(tmp_path / "old", fixed)
    build(tmp_path / "new")
    assert not diff_packages(tmp_path / "old", tmp_path / "new").app.calls_change
    assert diff_packages(tmp_path / "new", tmp_path / "old").app.calls_change


def test_values(tmp_path):
    moves = np.zeros((4, 1, 3, 3), np.float32)
    moves[0, 0, 1, 2], moves[3, 0, 2, 2] = 0.5, -2.25
    model = small_model()
    other = with_arrays(model, lambda name, a: a + moves if name == "conv1.weight" else a)
    found = compared(tmp_path, {"model": model}, {"model": other})
    (change,) = found.parameters
    assert (change.name, change.elements, change.changed_elements) == ("conv1.weight", 36, 2)
    assert change.largest_change == pytest.approx(2.25, rel=1e-6)
    assert found.unchanged_parameters == 5
    assert found.verdict.level == "compatible"
    assert "| conv1.weight | float32\\[4, 1, 3, 3\\] trainable |" in markdown(found)
    assert "| 2 of 36 | 2.25 |" in markdown(found)


def rewrite_checkpoint(folder: Path, name: str, array: np.ndarray) -> None:
    """Put another value into a package's checkpoint and let the manifest know."""
    data = read_checkpoint(folder / "checkpoint")
    data.trainable[name] = array
    write_checkpoint(folder / "checkpoint", data)
    rehash(folder, "checkpoint")


def test_values_that_are_not_finite(tmp_path):
    build(tmp_path / "old")
    build(tmp_path / "new")
    rewrite_checkpoint(tmp_path / "old", "fc.bias", np.array([np.nan, 1, 0], np.float32))
    rewrite_checkpoint(tmp_path / "new", "fc.bias", np.array([np.nan, np.inf, -0.0], np.float32))
    (change,) = diff_packages(tmp_path / "old", tmp_path / "new").parameters
    assert (change.changed_elements, change.largest_change) == (1, None)


def test_a_checkpoint_that_contradicts_the_manifest(tmp_path):
    build(tmp_path / "old")
    build(tmp_path / "new")
    rewrite_checkpoint(tmp_path / "new", "fc.bias", np.zeros(4, np.float32))
    with refused("package-inconsistent", r"fc\.bias"):
        diff_packages(tmp_path / "old", tmp_path / "new")


def test_values_in_a_data_file(tmp_path, monkeypatch):
    """They are read from there; the checkpoint has their digest."""
    monkeypatch.setattr(writer, "EXTERNAL_DATA_THRESHOLD", 0)
    model = small_model()
    found = compared(tmp_path, {"model": model}, {"model": with_values(model, "fc.bias")})
    assert [change.name for change in found.parameters] == ["fc.bias"]
    assert {each.file for each in found.files if each.changed} == {"checkpoint", "checkpoint_data"}


def test_parameters_by_role_and_shape(tmp_path):
    found = compared(
        tmp_path, {"train": ["fc.*"]}, {"model": small_model(hidden=4), "train": ["fc1.*"]}
    )
    changes = {change.name: change for change in found.parameters}
    assert changes["fc.weight"].new is None
    assert changes["fc1.weight"].old is None
    assert changes["fc1.weight"].new.role == "trainable"
    assert found.verdict.level == "incompatible"


def test_the_type_that_models_compute_in(tmp_path):
    """The checkpoint stays float32, so training goes on."""
    found = compared(tmp_path, {}, {"model": retyped(small_model(), np.float16)})
    assert {p.new.model_dtype for p in found.parameters if p.new} == {"float16"}
    assert "trainable, computed in float16" in markdown(found)
    assert found.verdict.level == "compatible"
    assert found.app.calls_change


def test_extra_files_are_known_by_what_they_are(tmp_path):
    list_extra(build(tmp_path / "old", ort_format=OrtFormat()))
    list_extra(build(tmp_path / "new", small_model(hidden=4), ort_format=OrtFormat()))
    found = diff_packages(tmp_path / "old", tmp_path / "new")
    assert any(file.file.startswith("ort_model ") and file.changed for file in found.files)


def test_markdown_tables_hold_together(tmp_path):
    """Whatever a parameter is called, a row has as many cells as its header, and links nothing."""
    name = "a|b\\|`c`<img> http://evil.e www.evil.e @user #1"
    model = renamed(small_model(), "fc.bias", name)
    build_package(model, tmp_path / "old", loss="cross_entropy")
    build_package(with_values(model), tmp_path / "new", loss="cross_entropy")
    text = markdown(diff_packages(tmp_path / "old", tmp_path / "new"))
    assert "evil.e" in text
    for live in ("<img>", "://", "www.", "@user", "#1"):
        assert live not in text
    width = 0
    for line in text.splitlines():
        cells = line.replace("\\\\", "").replace("\\|", "").count("|")
        if line.startswith("|"):
            assert width in (0, cells)
        width = cells if line.startswith("|") else 0


def test_the_schema_describes_every_field():
    """A reader of the schema meets no field that it does not explain."""
    schema = PackageDiff.model_json_schema()
    assert schema["$defs"].pop("JsonValue") == {}
    for name, part in {**schema["$defs"], "PackageDiff": schema}.items():
        assert part["additionalProperties"] is False, name
        assert part.get("description"), name


def test_unlike_packages_are_not_equal(tmp_path):
    assert not compared(tmp_path, {}, {"model": with_values(small_model())}).same
