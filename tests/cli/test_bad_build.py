"""What cannot be built gets one clear error, exit code 2, and leaves nothing behind."""

from pathlib import Path
from typing import Any

import onnx.parser
import pytest

from odtpack.artifacts import LossType, generate_artifacts
from odtpack_runtime.apart import worker
from tests.cli.conftest import assert_refused, tree
from tests.model_text import parsed
from tests.refused import refused as raises_refused


def command(model: object, folder: Path, *more: object) -> tuple[object, ...]:
    return "build", model, "--out", folder / "new", "--loss", "cross_entropy", *more


# Options, the code of the error, and words that the error must contain.
OPTIONS: list[tuple[str, ...]] = [
    ("--train convolution1.*", "unknown-parameter", "--train 'convolution1.*'", "model.onnx",
     "conv1.weight", "odtpack inspect"),
    ("--freeze convolution1.*", "unknown-parameter", "--freeze 'convolution1.*'", "model.onnx",
     "conv1.weight", "odtpack inspect"),
    ("--train fc.* --freeze *.bias", "trained-and-frozen", "'fc.bias'", "--train 'fc.*'",
     "--freeze '*.bias'", "narrow"),
    ("--train fc.wieght", "unknown-parameter", "did you mean fc.weight?"),
    ("--freeze *", "nothing-to-train"),
    ("--output logits", "unknown-value", "--output", "'logits'", "'output'"),
    ("--onnxruntime 1.5", "target-too-old", "--onnxruntime 1.20"),
    ("--loss mse --loss-option delta=1", "unknown-loss-option", "reduction"),
    ("--loss huber --loss-option delta=0", "bad-loss-option", "above 0"),
    ("--loss huber --loss-option delta", "bad-loss-option", "key=value"),
    ("--loss mse --loss-option reduction=none", "loss-not-scalar", "'mean' or 'sum'"),
    ("--loss none --loss-option reduction=sum", "option-not-used", "'reduction'"),
    ("--optimizer sgd --beta1 0.8", "option-not-used", "--beta1", "sgd"),
    ("--optimizer sgd --epsilon 0.1", "option-not-used", "--epsilon", "sgd"),
    ("--optimizer adamw --momentum 0.9", "option-not-used", "--momentum", "adamw"),
    ("--optimizer lion --epsilon 0.1", "option-not-used", "--epsilon", "lion"),
    ("--optimizer adafactor --beta2 0.9", "option-not-used", "--beta2", "adafactor"),
    ("--optimizer adam --optimizer-option formula=pytorch", "option-not-used", "formula", "adam"),
    ("--beta1 1", "bad-hyperparameter", "beta1"),
    ("--beta2 -0.1", "bad-hyperparameter", "beta2"),
    ("--epsilon 0", "bad-hyperparameter", "epsilon"),
    ("--weight-decay nan", "bad-hyperparameter", "weight_decay"),
    ("--optimizer-option formula", "bad-option", "KEY=VALUE"),
    ("--optimizer-option formula=mine", "bad-hyperparameter", "mine"),
    ("--optimizer-option bias_correction=2", "bad-hyperparameter", "true or false"),
    ("--optimizer-option beta1=x", "bad-hyperparameter", "a number"),
    ("--beta1 0.8 --optimizer-option beta1=0.7", "bad-option", "second"),
    ("--optimizer sgd --optimizer-option nesterov=true", "bad-hyperparameter", "--momentum"),
    ("--optimizer sgd --momentum 1", "bad-hyperparameter", "momentum"),
    ("--clip-norm 0", "bad-hyperparameter", "clip-norm"),
    ("--clip-value nan", "bad-hyperparameter", "clip-value"),
    ("--clip-norm 1 --clip-value 1", "clipped-twice", "--clip-value"),
    ("--accumulate 0", "bad-accumulation", "--accumulate"),
    ("--group fc.*", "bad-group", "GLOB:lr=X"),
    ("--group fc.*:rate=2", "bad-group", "GLOB:lr=X"),
    ("--group fc.*:lr=1,lr=2", "bad-group", "GLOB:lr=X"),
    ("--group fc.*:lr=-1", "bad-group", "0 or more"),
    ("--group head.*:lr=2", "unknown-parameter", "head.*"),
    ("--group *:lr=2 --group fc.*:lr=3", "unknown-parameter", "narrower"),
    ("--schedule sine", "bad-schedule", "cosine"),
    ("--schedule cosine:warmup=a", "bad-schedule", "warmup=a"),
    ("--schedule cosine:warmup=9,total=5", "bad-schedule", "total_steps"),
    ("--schedule step:gamma=0.5", "bad-schedule", "period"),
    ("--schedule multistep:milestones=5+3", "bad-schedule", "rising"),
    ("--schedule constant:floor=1", "bad-schedule", "floor"),
    ("--schedule constant:lr=-1", "bad-schedule", "above 0"),
]  # fmt: skip


@pytest.mark.parametrize("row", OPTIONS, ids=[row[0] for row in OPTIONS])
def test_bad_options(refused, shared, tmp_path, row):
    options, code, *words = row
    refused(command(shared.model, tmp_path, *options.split()), code, *words, "help:")


@pytest.mark.parametrize(("content", "code", "words"), [
    (b"", "not-onnx", "help: pass the .onnx file"),
    (b"not a model at all\n", "not-onnx", "help: pass the .onnx file"),
    (b"\x89PNG\r\n\x1a\n" + bytes(64), "not-onnx", "help: pass the .onnx file"),
    (b"\x08", "not-onnx", "help: pass the .onnx file"),
    (None, "model-not-found", "help:"),
])  # fmt: skip
def test_files_that_are_no_models(refused, tmp_path, content, code, words):
    path = tmp_path / "model.onnx"
    if content is not None:
        path.write_bytes(content)
    refused(command(path, tmp_path), code, str(path), words)


def test_damaged_name(refused, shared, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(shared.model.read_bytes().replace(b"relu1", b"rel\xff1"))
    words = str(path), "rel\\xff1", "export or copy it again"
    refused(command(path, tmp_path), "invalid-model", *words)


def test_operator_without_gradient(refused, tmp_path):
    path = tmp_path / "wobbly.onnx"
    text = """<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        wobbly (float[batch, 4] input) => (float[batch, 4] output) <float[4, 4] w = {
            1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}>
        { h = MatMul(input, w)  [the_wobble] output = acme.Wobble(h) }"""
    onnx.save(onnx.parser.parse_model(text), path)
    refused(command(path, tmp_path), "no-gradient", "Wobble", "'the_wobble'", "acme", "help:")


def stored_as(kind: int, path: Path) -> Path:
    """A layer whose weight is stored in a type, and made float32 of where it is read."""
    node = "Cast<to = 1>(w)" if kind == onnx.TensorProto.BFLOAT16 else "DequantizeLinear(w, s)"
    text = f"{{ f = {node} output = MatMul(input, f) }}"
    model = parsed(f"(float[batch, 8] input) => (float[batch, 4] output) {text}")
    weight = onnx.helper.make_tensor("w", kind, (8, 4), [1] * 32)
    scale = onnx.helper.make_tensor("s", onnx.TensorProto.FLOAT, (), [0.1])
    model.graph.initializer.extend([weight, scale])
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("more", [(), ("--train", "c.*")])
def test_weights_that_are_integers(refused, tmp_path, more):
    path = stored_as(onnx.TensorProto.INT8, tmp_path / "integers.onnx")
    words = "stored as integers", "--adapter lora", "AddQDQPairToWeight"
    refused(command(path, tmp_path, *more), "nothing-to-train", str(path), *words)


def test_bfloat16_is_named_wherever_a_model_is_read(refused, tmp_path):
    path = stored_as(onnx.TensorProto.BFLOAT16, tmp_path / "brain.onnx")
    adapter = "--adapter", "lora", "--on", "*", "--base", "int8"
    for arguments in (
        command(path, tmp_path), command(path, tmp_path, *adapter),
        ("inspect", path), ("ops", "check", path),
    ):  # fmt: skip
        refused(arguments, "bfloat16-not-supported", "'w'", "float32")


@pytest.mark.parametrize(("name", "out", "code", "word"), [
    ("thesis.txt", "", "folder-not-empty", "--out"),
    ("new", "new", "package-not-written", "is a file"),
    ("file", "file/new", "package-not-written", "file"),
])  # fmt: skip
def test_places_that_are_taken(refused, shared, tmp_path, name, out, code, word):
    (tmp_path / name).write_text("years of work")
    refused(shared.build(tmp_path / out, loss="mse"), code, str(tmp_path), word)


WEB_APP = '{"name": "my web app", "start_url": "/"}'


@pytest.mark.parametrize(
    "text", [WEB_APP, "", "\0" * 99, '{"schema_version": 2}'], ids=["app", "empty", "0", "newer"]
)
def test_a_manifest_of_something_else_makes_no_package(refused, run, shared, tmp_path, text):
    """Nor does a damaged one: what lies beside it may be anybody's."""
    web = tmp_path / "web"
    web.mkdir()
    (web / "manifest.json").write_text(text)
    (web / "checkpoint").write_text("mine")
    words = "folder-not-empty", "manifest.json", "delete this one if it is a damaged package"
    refused(shared.build(web, loss="mse"), *words)
    refused(("import", tmp_path, "--out", web), *words)
    (web / "checkpoint").unlink()
    refused(("install", shared.package, "--android", web), *words)
    with raises_refused("folder-not-empty", "manifest.json"):
        options = {"loss": LossType.MSELoss, "artifact_directory": web}
        generate_artifacts(shared.model, ["fc.weight"], **options)
    (web / "manifest.json").unlink()
    (web / "manifest.json").symlink_to(shared.package / "manifest.json")
    refused(shared.build(web, loss="mse"), "folder-not-empty", "is a link")


def test_only_files_that_a_package_wrote_are_removed_or_replaced(
    run, shared, tmp_path, monkeypatch
):
    """A manifest of a stranger may list any name, and a user may have changed a file."""
    old = tmp_path / "old"
    build = "build", shared.model, "--out", old, "--loss", "mse"
    run(*build, "--ort-format", code=0)
    assert (old / "eval_model.ort").is_file()
    (old / "training_model.ort").write_text("mine")
    assert "note: training_model.ort stays: it is not the file that" in run(*build, code=0).err
    assert {path.name for path in old.glob("*.ort")} == {"training_model.ort"}
    before = tree(old)
    assert_refused(run(*build, "--ort-format"), "folder-not-empty", "'training_model.ort'", "move")
    (old / "nominal_checkpoint").write_text("mine")
    monkeypatch.setattr("odtpack.build.load", None)  # the refusal comes before the work
    assert_refused(run(*build, "--nominal"), "folder-not-empty", "'nominal_checkpoint'", "move")
    (old / "nominal_checkpoint").unlink()
    assert tree(old) == before


def test_conversion_that_fails_leaves_nothing(refused, shared, tmp_path, monkeypatch):
    call = worker.call

    def without_model(function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Let ONNX Runtime convert something that is no model."""
        if function == "odtpack.ort.format:save_optimized":
            kwargs["model"] = str(shared.data)
        return call(function, *args, **kwargs)

    monkeypatch.setattr(worker, "call", without_model)
    refused(command(shared.model, tmp_path, "--ort-format"), "ort-conversion-failed", "data.npz")


def test_a_release_that_is_not_known_is_remarked(run, shared, tmp_path):
    outcome = run(*command(shared.model, tmp_path, "--onnxruntime", "9.9"), code=0)
    assert "ONNX Runtime 9.9 is newer than" in outcome.err
