"""The self-check of a package, and the inference template that it carries."""

from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from odtpack.build import build_package
from odtpack.optimizers import SGD
from odtpack_runtime import CheckpointState, OdtpackError, UnknownNameError
from odtpack_runtime.package.manifest import SelfCheckInfo
from odtpack_runtime.package.package import Package
from odtpack_runtime.package.self_check import made_up_batch, self_check
from odtpack_runtime.package.verify import verify_package, write_inference_model
from tests import zoo
from tests.model_text import computed, drawn, parsed
from tests.packages.mutations import edit
from tests.packages.samples import build, small_model
from tests.packaging_tools import built_package
from tests.refused import refused
from tests.training.forward import linear


def checked(folder: Path, **options: object) -> SelfCheckInfo:
    """The self-check of the small network's package."""
    info = Package.open(build(folder, **options)).manifest.self_check
    assert info is not None
    return info


def test_the_batch_follows_its_formula(tmp_path):
    """Against whole numbers of any size, one by one."""
    manifest = Package.open(build(tmp_path / "p")).manifest
    images, labels = made_up_batch(manifest.inputs, manifest.self_check.inputs)
    v = [((i + 1) * 2654435761) % 2**32 // 256 for i in range(images.size + labels.size)]
    assert images.dtype == np.float32
    assert images.ravel().tolist() == [x / 2**23 - 1 for x in v[: images.size]]
    assert labels.dtype == np.int64
    assert labels.tolist() == [x % 3 for x in v[images.size :]]


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer_encoder"])
def test_a_loop_that_does_not_learn_is_seen(name, tmp_path):
    """Losses move by far more than they may be off."""
    model = {
        "mlp": lambda: zoo.mlp((12, 8, 3)),
        "cnn": small_model,
        "transformer_encoder": lambda: zoo.transformer_encoder(
            vocab=20, d=8, layers=1, heads=2, T=6, ff=16, classes=3
        ),
    }[name]()
    for optimizer in (None, SGD()):
        info = checked(tmp_path / str(optimizer), model=model, optimizer=optimizer)
        assert info.reason is None
        assert max(info.tolerances) <= 1e-3
        assert abs(info.losses[0] - info.losses[4]) >= 10 * max(info.tolerances)


def test_batch_normalization_widens_the_tolerance(tmp_path):
    model = zoo.mobilenet_v2(size=32, classes=3, width_mult=0.25, batch_norm="train")
    info = checked(tmp_path / "p", model=model, optimizer=SGD())
    assert info.tolerances[0] <= 1e-3
    assert info.tolerances[4] > 10 * info.tolerances[0]


def test_a_run_that_contradicts_the_declared_rank(tmp_path):
    model = parsed("""(float[N, 4] x) => (float[N] y) <float[4] w = {1, 2, 3, 4}> {
            none = Constant <value_ints = [0]> () two = Constant <value_ints = [2]> ()
            long = Shape(x) product = Mul(x, w) s = Sign(product) same = Sub(s, s)
            zero = ReduceMax <axes = [0, 1], keepdims = 0> (same)
            number = Cast <to = 7> (zero) count = Add(number, two)
            shape = Slice(long, none, count) y = Reshape(product, shape) }""")
    with refused("shape-conflict", "'y' has 2 axes in a run, and 1 by its declaration"):
        build_package(model, tmp_path / "p", loss="mse")


def test_why_there_is_none(tmp_path):
    model = parsed("""(string[batch] word) => (float[batch, 2] output) {
        number = ai.onnx.ml.LabelEncoder<keys_strings = ["a", "b"], values_int64s = [0, 1],
            default_int64 = 2>(word)
        output = Gather(table, number)
    }""", domains={"ai.onnx.ml": 3}, **drawn(np.random.default_rng(0), table=(4, 2)))  # fmt: skip
    assert checked(tmp_path / "text", model=model) == SelfCheckInfo(reason="an input is text")
    with refused("no-self-check", "an input is text"):
        self_check(Package.open(tmp_path / "text"))
    assert verify_package(tmp_path / "text").steps.training_loss is not None
    build(tmp_path / "without", self_check=False)
    assert Package.open(tmp_path / "without").manifest.self_check is None
    with pytest.raises(OdtpackError, match="built without one"):
        self_check(Package.open(tmp_path / "without"))


@pytest.mark.parametrize(("node", "operator"), [
    ("Dropout(h, half, yes)", "Dropout"), ("Dropout(h, none, yes)", None),
    ("Dropout(h, half)", None), ("RandomNormalLike(h)", "RandomNormalLike"),
])  # fmt: skip
def test_what_draws_numbers_has_no_losses(node, operator, tmp_path):
    model = parsed(
        "(float[N, 8] x) => (float[N, 4] y) <float none = {0}, float half = {0.5}, bool yes = {1}> "
        f"{{ h = MatMul(x, body) d = {node} s = Add(h, d) y = MatMul(s, head) }}",
        **drawn(np.random.default_rng(0), body=(8, 32), head=(32, 4)),
    )
    info = checked(tmp_path / "p", model=model, optimizer=SGD(), train=["head"])
    reason = None if operator is None else f"what {operator} draws in training differs each time"
    assert info.reason == reason
    found = verify_package(tmp_path / "p")
    assert found.steps.training_loss is not None
    assert str(found.checked[-1]).endswith(reason or "against the losses of the self-check")


def test_verify_compares_the_losses(tmp_path):
    build(tmp_path / "p")
    found = verify_package(tmp_path / "p")
    losses = list(Package.open(tmp_path / "p").manifest.self_check.losses)
    assert found.steps.training_loss == pytest.approx(losses[0], rel=1e-5)
    losses[2] += 0.01
    edit(tmp_path / "p", lambda content: content["self_check"].update(losses=losses))
    with refused("self-check-failed", "training step 3"):
        verify_package(tmp_path / "p")


@pytest.mark.parametrize(("key", "value"), [
    ("losses", [1.0]), ("tolerances", []), ("learning_rate", None), ("inputs", []),
    ("reason", "both"),
])  # fmt: skip
def test_half_a_self_check_is_refused(key, value, tmp_path):
    build(tmp_path / "p")
    edit(tmp_path / "p", lambda content: content["self_check"].update({key: value}), sealed=False)
    with refused("manifest-invalid", "self_check"):
        Package.open(tmp_path / "p")


def test_some_outputs_of_the_template(tmp_path):
    """The forward model has two outputs; one of them, and its inputs, remain."""
    model = small_model()
    hidden = model.graph.node[-2].output[0]
    model.graph.output.append(onnx.ValueInfoProto(name=hidden))
    model = onnx.shape_inference.infer_shapes(model)
    package = built_package(model, tmp_path / "p")
    assert package.manifest.inference.outputs == ("output", hidden)
    state = CheckpointState.load_checkpoint(package.checkpoint)
    values = {name: item.data for name, item in state.parameters}
    x = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
    forward = dict(zip(("output", hidden), computed(model, input=x), strict=True))
    for names in (["output"], [hidden], [hidden, "output"], None):
        path = tmp_path / "m.onnx"
        write_inference_model(package, values, path, names)
        onnx.checker.check_model(str(path), full_check=True)
        kept = [value.name for value in onnx.load(path).graph.output]
        assert kept == [n for n in ("output", hidden) if names is None or n in names]
        for name, found in zip(kept, computed(path, input=x), strict=True):
            np.testing.assert_allclose(found, forward[name], 1e-5)
    with pytest.raises(UnknownNameError):
        write_inference_model(package, values, tmp_path / "no.onnx", ["conv1.weight"])
    del values["fc.bias"]
    with refused("model-mismatch", r"fc\.bias.*none"):
        write_inference_model(package, values, tmp_path / "no.onnx")
    assert not (tmp_path / "no.onnx").exists()


def test_a_model_that_ends_in_its_loss_has_no_template(tmp_path):
    model = parsed("""(float[batch, 3] x) => (float loss) <float[3] w = {1, 2, 3}>
        { y = Mul(x, w) loss = ReduceSumSquare<keepdims = 0>(y) }""")
    package = Package.open(build(tmp_path / "p", model=model, loss=None))
    assert package.manifest.inference is None
    assert package.manifest.files.inference_template is None
    with refused("no-outputs"):
        write_inference_model(package, {}, tmp_path / "m.onnx")


def test_a_domain_that_no_node_is_of_costs_no_self_check(tmp_path):
    model = zoo.mlp((12, 8, 3))
    model.opset_import.append(onnx.helper.make_opsetid("unused.domain", 1))
    info = checked(tmp_path / "package", model=model)
    assert info.reason is None
    assert len(info.losses) > 1


def test_a_model_may_predict_one_number(tmp_path):
    text = "(float[2, 3, 6] x) => (float y) { a = Mul(x, p) y = ReduceMax<keepdims = 0>(a) }"
    model = parsed(text, p=np.float32([0.5, -1.2, 0.3, 0.8, -0.4, 1.1]))
    manifest = build_package(model, tmp_path / "package", loss="mse", optimizer=SGD())
    assert [parameter.name for parameter in manifest.parameters] == ["p"]


def test_a_target_that_the_model_has_is_none_of_its_inputs_for_inference(tmp_path):
    model = linear(
        inputs=", float[N, 2] target",
        outputs="float[N, 2] y, float[N, 2] off",
        more="off = Sub(y, target)",
    )
    folder = build(tmp_path / "p", model=model, loss="mse", loss_inputs=("y",))
    info = Package.open(folder).manifest.inference
    assert info is not None
    assert (info.inputs, info.outputs) == (("x",), ("y",))
