"""Optimizer blocks: what they compute, and how generate_artifacts takes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.nn import functional as F

from odtpack import artifacts, onnxblock
from odtpack.artifacts import LossType, OptimType
from odtpack.errors import OdtpackError
from odtpack.onnxblock import blocks, loss, optim
from odtpack_runtime.package.manifest import Manifest
from tests.onnxblock.nets import Forward, Twin, batch, built, mlp, names, run
from tests.packaging_tools import open_training
from tests.refused import refused
from tests.training.forward import contents

MOMENTS = ("first_order_moments", "second_order_moments")
PARAMETERS = ([onnx.numpy_helper.from_array(np.zeros((3, 2), np.float32), "w")], [])


def step(model: onnx.ModelProto, count: int = 9, number: int = 1) -> tuple[Any, Any]:
    """Feeds and results of one step over random vectors."""
    random = np.random.default_rng(0)
    feeds = {"learning_rate": np.float32([0.01]), "step": np.int64([number])}
    for name in ("params", "gradients", MOMENTS[0]):
        feeds[name] = random.standard_normal(count, np.float32)
    feeds[MOMENTS[1]] = random.random(count, np.float32)
    wanted = {value.name for value in model.graph.input}
    return feeds, run(model, {name: array for name, array in feeds.items() if name in wanted})


# What they compute


@pytest.mark.parametrize("max_norm", [None, 0.5, 100.0])
def test_sgd(max_norm):
    clip = None if max_norm is None else optim.ClipGradNorm(max_norm)
    model = built(optim.SGD(clip_grad=clip), PARAMETERS)
    onnx.checker.check_model(model, full_check=True)
    feeds, results = step(model)
    g = _clipped(feeds["gradients"], max_norm)
    assert list(results) == ["params.out"]
    np.testing.assert_allclose(results["params.out"], feeds["params"] - 0.01 * g, rtol=1e-6)


def _clipped(gradients: np.ndarray, max_norm: float | None) -> np.ndarray:
    """By torch.nn.utils.clip_grad_norm_, as two parameters."""
    if max_norm is None:
        return gradients.astype(np.float64)
    halves = [torch.zeros(4).double(), torch.zeros(len(gradients) - 4).double()]
    for half, part in zip(halves, (gradients[:4], gradients[4:]), strict=True):
        half.grad = torch.from_numpy(part).double()
    torch.nn.utils.clip_grad_norm_(halves, max_norm)
    return torch.cat([half.grad for half in halves]).numpy()


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_adamw(max_norm, bias_correction, number):
    clip = None if max_norm is None else optim.ClipGradNorm(max_norm)
    model = built(optim.AdamW(bias_correction, (0.8, 0.95), 1e-4, 0.1, clip), PARAMETERS)
    onnx.checker.check_model(model, full_check=True)
    feeds, results = step(model, number=number)
    assert list(results) == ["params.out", *(f"{name}.out" for name in MOMENTS)]
    g = _clipped(feeds["gradients"], max_norm)
    m = 0.8 * feeds[MOMENTS[0]] + 0.2 * g
    v = 0.95 * feeds[MOMENTS[1]] + 0.05 * g * g
    size = 0.01
    if bias_correction:
        size *= np.sqrt(1 - 0.95**number) / (1 - 0.8**number)
    p = feeds["params"] - size * m / (np.sqrt(v) + 1e-4)
    np.testing.assert_allclose(results["params.out"], p - 0.01 * 0.1 * p, rtol=1e-5)
    np.testing.assert_allclose(results[f"{MOMENTS[0]}.out"], m, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(results[f"{MOMENTS[1]}.out"], v, rtol=1e-5)


def test_usage_of_the_reference():
    """A forward block around the optimizer, given what TrainingBlock.parameters() returns."""

    wrapped = built(Forward(optim.AdamW()), PARAMETERS)
    assert wrapped == built(optim.AdamW(), PARAMETERS)
    assert {each.key for each in wrapped.metadata_props} >= {"odtpack.optimizer", "odtpack.state"}
    assert [value.name for value in wrapped.graph.input] == [
        *("learning_rate", "step", "params", "gradients"),
        *MOMENTS,
    ]


def test_nothing_to_train():
    with onnxblock.empty_base(), refused("nothing-to-train", "no trainable"):
        optim.SGD()(([], []))


# In generate_artifacts


def make(folder: Path, **arguments: Any) -> Path:
    model = mlp()
    given = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.SGD} | arguments
    artifacts.generate_artifacts(
        model, requires_grad=names(model), artifact_directory=folder, **given
    )
    return folder


@pytest.mark.parametrize(
    ("kind", "block"), [(OptimType.SGD, optim.SGD), (OptimType.AdamW, optim.AdamW)]
)
def test_a_plain_block_is_the_packagers_optimizer(kind, block, tmp_path):
    make(tmp_path / "kind", optimizer=kind)
    make(tmp_path / "block", optimizer=block())
    assert _described(tmp_path / "kind") == _described(tmp_path / "block")
    for name in ("training_model.onnx", "eval_model.onnx", "checkpoint"):
        assert (tmp_path / "kind" / name).read_bytes() == (tmp_path / "block" / name).read_bytes()
    results = [step(onnx.load(tmp_path / f / "optimizer_model.onnx"))[1] for f in ("kind", "block")]
    for name, result in results[0].items():
        np.testing.assert_array_equal(result, results[1][name])


def _described(folder: Path) -> Any:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]
    return manifest


@pytest.mark.parametrize(("kind", "block"), [
    (LossType.MSELoss, loss.MSELoss),
    (LossType.CrossEntropyLoss, loss.CrossEntropyLoss),
    (LossType.BCEWithLogitsLoss, loss.BCEWithLogitsLoss),
    (LossType.L1Loss, loss.L1Loss),
])  # fmt: skip
def test_a_loss_block_is_the_packagers_loss(kind, block, tmp_path):
    make(tmp_path / "kind", loss=kind)
    make(tmp_path / "block", loss=block())  # type: ignore[call-arg]
    manifests = [_described(tmp_path / folder) for folder in ("kind", "block")]
    for manifest in manifests:
        del manifest["outputs"]  # the name of the loss
        del manifest["recipe_digest"], manifest["digest"]  # one model came with its loss
    assert manifests[0] == manifests[1]
    x = batch(mlp())
    target = np.arange(7) % 5 if kind is LossType.CrossEntropyLoss else np.ones((7, 5), np.float32)
    results = []
    for folder in ("kind", "block"):
        state, module, _ = open_training(tmp_path / folder)
        results.append([module(x, target), *(p.grad.copy() for _, p in state.parameters)])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_clipping_through_training(tmp_path):
    """Ten steps with clipped gradients, beside PyTorch."""
    make(tmp_path, optimizer=optim.SGD(clip_grad=optim.ClipGradNorm(0.05)))
    _follows_torch(tmp_path, 0.5, max_norm=0.05)


def _follows_torch(folder: Path, rate: float, max_norm: float | None, **options: float) -> None:
    """Ten steps of SGD with these options."""
    state, module, optimizer = open_training(folder)
    optimizer.set_learning_rate(rate)
    twin, x, labels = Twin(mlp()), batch(mlp()), np.arange(7) % 5
    theirs = torch.optim.SGD(twin.parameters(), lr=rate, **options)
    for _ in range(10):
        value = module(x, labels)
        theirs.zero_grad()
        reference = F.cross_entropy(twin(torch.from_numpy(x).double()), torch.from_numpy(labels))
        reference.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        assert float(value) == pytest.approx(reference.item(), rel=1e-5)
        optimizer.step()
        module.lazy_reset_grad()
        theirs.step()
    for name, p in twin.p.items():
        ours = state.parameters[name.replace("_", ".", 1)].data
        np.testing.assert_allclose(ours, p.detach().numpy(), rtol=1e-5, atol=1e-6)


class CustomLoss(onnxblock.Block):
    """Two losses on two outputs; no super().__init__()."""

    def __init__(self) -> None:
        self.mse, self.entropy = loss.MSELoss(), loss.CrossEntropyLoss(ignore_index=-1)
        self.add = blocks.Add()

    def build(self, first: str, second: str) -> tuple[str, str]:
        entropy = self.entropy(second)
        return self.add(self.mse(first), entropy), entropy


def test_custom_loss(tmp_path):
    """It is called with all outputs of the model; what it returns besides is returned."""
    model = mlp(outputs=2)
    artifacts.generate_artifacts(
        model, requires_grad=names(model), loss=CustomLoss(), optimizer=OptimType.SGD,
        artifact_directory=tmp_path, additional_output_names=["output-0"],
    )  # fmt: skip
    manifest = Manifest.from_json((tmp_path / "manifest.json").read_bytes(), "m")
    assert (manifest.loss, manifest.loss_options) == ("custom", None)
    assert [(i.name, i.role, i.class_count, i.ignore_index) for i in manifest.inputs] == [
        ("input-0", "data", None, None),
        ("labels", "labels", 5, -1),
        ("target", "target", None, None),
    ]
    _, module, _ = open_training(tmp_path)
    x, labels, target = batch(model), np.arange(7) % 5 - 1, np.ones((7, 5), np.float32)
    value, entropy, output = module(x, labels, target)
    first, second = Twin(model)(torch.from_numpy(x).double())
    expected = F.cross_entropy(second, torch.from_numpy(labels), ignore_index=-1).item()
    assert float(entropy) == pytest.approx(expected, rel=1e-5)
    mse = F.mse_loss(first, torch.ones(7, 5).double()).item()
    assert float(value) == pytest.approx(expected + mse, rel=1e-5)
    np.testing.assert_allclose(output, first.detach().numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(OdtpackError, match="label 7"):
        module(x, labels + 8, target)


def test_custom_loss_over_named_inputs(tmp_path):
    model = mlp(outputs=3)
    artifacts.generate_artifacts(
        model, requires_grad=["fc4.weight", "fc3.weight"], loss=CustomLoss(),
        artifact_directory=tmp_path, loss_input_names=["output-2", "output-1"],
    )  # fmt: skip
    assert set(contents(tmp_path)) == {"training_model.onnx", "eval_model.onnx", "checkpoint"}


class Momentum(optim.Optimizer):
    """m <- 0.9 m + g; p <- p - lr m."""

    moments = ("first_order_moments",)

    def update(self, learning_rate, step, params, gradients, *moments):
        keep = blocks.Mul()(blocks.Constant(0.9)(), moments[0])
        velocity = blocks.Add()(keep, gradients)
        change = blocks.Mul()(velocity, learning_rate)
        return blocks.Sub()(params, change), velocity


@pytest.mark.parametrize("clip", [False, True])
def test_custom_optimizer(clip, tmp_path):
    make(tmp_path, optimizer=Momentum(optim.ClipGradNorm(0.1) if clip else None))
    model = onnx.load(tmp_path / "optimizer_model.onnx")
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert metadata.get("odtpack.elementwise") == ("false" if clip else None)
    assert json.loads((tmp_path / "manifest.json").read_text())["optimizer"] == {"kind": "custom"}
    _follows_torch(tmp_path, 0.1, max_norm=0.1 if clip else None, momentum=0.9)


class Sequences(onnxblock.ForwardBlock):
    """An optimizer over sequences of tensors, as the reference has them."""

    def build(self, parameters: Any) -> str:
        self.base.graph.input.append(
            helper.make_tensor_sequence_value_info("params", TensorProto.FLOAT, None)
        )
        self.base.graph.node.append(helper.make_node("SequenceLength", ["params"], ["length"]))
        return "length"


class Overtaking(optim.Optimizer):
    """The new moment is made of the new parameters, and they are not the last to be read."""

    moments = ("first_order_moments",)

    def update(self, learning_rate, step, params, gradients, *moments):
        return blocks.Sub()(params, gradients), blocks.Add()(moments[0], params)


@pytest.mark.parametrize(("optimizer", "error", "word"), [
    (Sequences(), RuntimeError, "over flat vectors"),
    (Overtaking(), RuntimeError, "in place"),
    (blocks.Add(), TypeError, "makes no model"),
    ("sgd", TypeError, "a block or one of"),
])  # fmt: skip
def test_optimizers_that_do_not_work(optimizer, error, word, tmp_path):
    with pytest.raises(error, match=word):
        make(tmp_path, optimizer=optimizer)
    assert contents(tmp_path) == {}


def test_betas_are_two():
    with refused("bad-hyperparameter", "two numbers"):
        optim.AdamW(betas=(0.9,))  # type: ignore[arg-type]


def test_losses_that_do_not_work(tmp_path):
    for bad, word in (("mse", "a block or one of"), (loss.MSELoss("none"), "must be a scalar")):
        with pytest.raises(RuntimeError, match=word):
            make(tmp_path, loss=bad)
    with onnxblock.base(mlp()), pytest.raises(RuntimeError, match="open already"):
        make(tmp_path, loss=loss.MSELoss())
    assert contents(tmp_path) == {}


def test_models_step_by_step_say_what_reads_whole_vectors():
    """Without it a runtime would clip the norm of each piece of the vector."""
    for clip, whole in ((None, False), (optim.ClipGradNorm(0.1), True)):
        model = built(optim.SGD(clip_grad=clip), PARAMETERS)
        said = {each.key: each.value for each in model.metadata_props}
        assert (said.get("odtpack.elementwise") == "false") == whole
