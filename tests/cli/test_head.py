"""``odtpack head`` gives an encoder the head that PyTorch would."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from odtpack.build import build_package
from odtpack.spec import Head
from odtpack_runtime import CheckpointState
from tests.exported.export import export
from tests.simulator.graphs import weighted

WIDTH, TOKENS, CLASSES = 16, 6, 3
LINEAR = ("weight", "bias")


class Encoder(nn.Module):
    """Token ids and a mask in, hidden states [batch, sequence, width] out."""

    def __init__(self, *, pooled: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pooled = pooled

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.embedding(input_ids) * (1 + attention_mask.unsqueeze(2))
        hidden = torch.tanh(self.linear(tokens))
        return hidden[:, 1] if self.pooled else hidden


def batch(samples: int = 5) -> dict[str, Tensor]:
    rng = np.random.default_rng(3)
    lengths = 1 + np.arange(samples) % TOKENS
    mask = (np.arange(TOKENS) < lengths[:, None]).astype(np.int64)
    ids = rng.integers(0, 20, (samples, TOKENS))
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def write(path: Path, module: Encoder, opset: int = 17) -> Path:
    axes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "sequence"}}
    return export(module.eval(), batch(), path, "torchscript", opset=opset, dynamic=axes)


def parameters(path: Path) -> dict[str, np.ndarray]:
    values = onnx.load(path).graph.initializer
    return {v.name: onnx.numpy_helper.to_array(v) for v in values if v.name.startswith("head.")}


@pytest.mark.parametrize("opset", [12, 17, 18])
@pytest.mark.parametrize("pool", ["mean", "cls", "none"])
def test_the_logits_are_those_of_pytorch(run, tmp_path, pool, opset):
    torch.manual_seed(0)
    module = Encoder(pooled=pool == "none")
    model, out = write(tmp_path / "encoder.onnx", module, opset), tmp_path / "model.onnx"
    run("head", model, "--pool", pool, "--classes", CLASSES, "--out", out, "--seed", 7, code=0)
    onnx.checker.check_model(out, full_check=True)

    linear = nn.Linear(WIDTH, CLASSES)
    given = parameters(out)
    bound = 1 / np.sqrt(WIDTH)
    assert np.abs(given["head.weight"]).max() <= bound
    assert np.ptp(given["head.weight"]) > bound
    assert not given["head.bias"].any()
    linear.load_state_dict({k[5:]: torch.tensor(v) for k, v in given.items() if k[5:] in LINEAR})
    data = batch()
    with torch.no_grad():
        hidden = module(**data)
        mask = data["attention_mask"].unsqueeze(2)
        pooled = {
            "mean": lambda: (hidden * mask).sum(1) / mask.sum(1),
            "cls": lambda: hidden[:, 0],
            "none": lambda: hidden,
        }[pool]()
        expected = linear(pooled).numpy()
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    assert [(o.name, o.shape[1]) for o in session.get_outputs()] == [("logits", CLASSES)]
    (logits,) = session.run(None, {name: value.numpy() for name, value in data.items()})
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("pool", ["global", "flatten"])
def test_a_head_on_a_feature_map(run, tmp_path, pool, opset):
    """The mean of each channel, or all numbers, and the linear layer."""
    model, out = tmp_path / "map.onnx", tmp_path / "model.onnx"
    text = f"""<ir_version: 8, opset_import: ["": {opset}]>
        g (float[batch, 4, 3, 5] x) => (float[batch, 4, 3, 5] y) {{ y = Tanh(x) }}"""
    onnx.save(weighted(text), model)
    run("head", model, "--pool", pool, "--classes", CLASSES, "--out", out, code=0)
    x = np.random.default_rng(2).standard_normal((2, 4, 3, 5), np.float32)
    hidden = np.tanh(x.astype(np.float64)).reshape(2, 4, 15)
    pooled = hidden.mean(2) if pool == "global" else hidden.reshape(2, -1)
    (logits,) = onnxruntime.InferenceSession(out).run(None, {"x": x})
    expected = pooled @ parameters(out)["head.weight"].T
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_a_feature_map_of_any_size_has_no_width_to_flatten(refused, tmp_path):
    model = tmp_path / "map.onnx"
    onnx.save(weighted("g (float[n, 4, h, 5] x) => (float[n, 4, h, 5] y) { y = Tanh(x) }"), model)
    words = ("head", model, "--pool", "flatten", "--classes", 2, "--out", tmp_path / "m.onnx")
    refused(words, "unknown-shape", "the axes but the first of 'y' are not fixed")


def test_the_head_trains_alone(run, tmp_path):
    torch.manual_seed(1)
    model, out = write(tmp_path / "encoder.onnx", Encoder()), tmp_path / "model.onnx"
    package, data = tmp_path / "package", tmp_path / "data.npz"
    assert run("head", model, "--pool", "mean", "--classes", 2, "--out", out).code == 0
    build = ("build", out, "--out", package, "--loss", "cross_entropy", "--train", "head.*")
    assert run(*build).code == 0
    arrays = {name: value.numpy() for name, value in batch(60).items()}
    labels = np.random.default_rng(4).integers(0, 2, 60)
    arrays["input_ids"] = arrays["input_ids"] % 10 + 10 * labels[:, None]  # words of two classes
    np.savez(data, allow_pickle=False, **arrays, labels=labels)
    trained = tmp_path / "trained.ckpt"
    train = "train", package, "--data", data, "--epochs", 10, "--lr", 0.05
    outcome = run(*train, "--out", trained, code=0)
    before, after = (float(loss) for loss in re.findall(r"eval loss ([0-9.]+)", outcome.err))
    assert after < 0.8 * before, outcome.err
    held = CheckpointState.load_checkpoint(trained).parameters
    names = {name for name, parameter in held if parameter.requires_grad}
    assert names == {"head.weight", "head.bias"}


def test_the_seed_decides_the_weight(run, tmp_path):
    model = write(tmp_path / "encoder.onnx", Encoder())
    files = [tmp_path / f"{i}.onnx" for i in range(3)]
    for seed, out in zip((1, 1, 2), files, strict=True):
        run("head", model, "--pool", "cls", "--classes", 2, "--out", out, "--seed", seed)
    first, again, other = (parameters(out)["head.weight"] for out in files)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_what_cannot_get_a_head_is_refused(run, refused, tmp_path):
    model, out = write(tmp_path / "encoder.onnx", Encoder()), tmp_path / "model.onnx"
    rest = ("--classes", 2, "--out", tmp_path / "not.onnx")
    head = "head", model, "--pool"
    refused((*head, "none", *rest), "head-without-input", "output", "[batch, w")
    refused((*head, "cls", "--input", "no", *rest), "unknown-output", "'no'")
    refused(("head", tmp_path / "absent", "--pool", "cls", *rest), "model-not-found")
    refused((*head, "cls", "--classes", 10**12, *rest[2:]), "model-too-large", "2 GB")
    refused((*head, "max", *rest), "usage", "max")
    refused((*head, "cls", "--classes", 0, *rest[2:]), "usage", "classes")
    assert run("head", model, "--pool", "cls", "--classes", 2, "--out", out).code == 0
    refused(("head", out, "--pool", "none", *rest), "head-name-taken", "head.")


@pytest.mark.parametrize("wrap", [lambda model: model, onnx_ir.from_proto], ids=["proto", "ir"])
def test_a_model_in_memory_gets_the_head_of_its_file(wrap, tmp_path):
    file = tmp_path / "model.onnx"
    export(Encoder(pooled=True).eval(), batch(), file, "torchscript")
    model, head = onnx.load(file), Head(pool="none", classes=CLASSES)
    before = model.SerializeToString()
    first = build_package(wrap(model), tmp_path / "a", loss="cross_entropy", head=head)
    second = build_package(file, tmp_path / "b", loss="cross_entropy", head=head)
    assert first.parameters == second.parameters
    assert model.SerializeToString() == before
