"""What would train in silence is said: unreached parameters, and gradients that stay zero."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.cli.conftest import Run, assert_refused
from tests.simulator.graphs import weighted

TWO_HEADS = """g (float["batch", 4] x) => (float["batch", 3] y, float["batch", 3] other) {
    h = MatMul(x, body)
    active = Relu(h)
    y = MatMul(active, head)
    other = MatMul(active, second_head)
}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two heads, of which a loss reads one; two units of the body are never active."""
    random = np.random.default_rng(0)
    body, *heads = (random.standard_normal(s).astype(np.float32) for s in ((4, 5), (5, 3), (5, 3)))
    weights = {"body": np.abs(body), "head": heads[0], "second_head": heads[1]}
    onnx.save(weighted(TWO_HEADS, weights), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def write_data(path: Path, x: np.ndarray) -> Path:
    np.savez(path, x=x.astype(np.float32), labels=np.zeros(len(x), np.int64))
    return path


@pytest.fixture
def build(run: Run, model: Path, tmp_path: Path) -> Run:
    """Build a package of the model, with further options."""
    words = "build", model, "--out", tmp_path / "package", "--loss", "cross_entropy"
    return lambda *more, code=0: run(*words, *more, code=code)


def test_what_no_gradient_reaches_is_noted_and_stays_constant(build):
    shown = build("--json")
    assert "the loss does not depend on second_head: not trained" in shown.err
    roles = {item["name"]: item["role"] for item in shown.json()["parameters"]}
    assert roles == {"body": "trainable", "head": "trainable"}


@pytest.mark.parametrize("pattern", ["second_head", "*head", "*"])
def test_what_is_asked_to_train_and_not_reached_is_an_error(build, tmp_path, pattern):
    assert_refused(build("--train", pattern, code=2), "not-reached", "'second_head'")
    assert not (tmp_path / "package").exists()
    code = 0 if pattern == "second_head" else 2
    build("--train", pattern, "--loss-input", "other", code=code)


def test_a_gradient_that_is_zero_on_sample_data_is_a_warning(build, tmp_path):
    silent = -np.ones((9, 4))  # no unit is active
    shown = build("--json", "--sample", write_data(tmp_path / "silent.npz", silent))
    assert shown.json()["zero_gradients"] == ["body", "head"]
    assert "the gradient of body is zero" in shown.err
    live = np.concatenate([-np.ones((4, 4)), np.ones((1, 4))])  # one sample of five is enough
    shown = build("--json", "--sample", write_data(tmp_path / "live.npz", live))
    assert shown.json()["zero_gradients"] == []
    assert "each of 2 trained parameters gets a gradient" in shown.err


def test_sample_data_that_do_not_fill_a_batch(build, model, tmp_path):
    proto = onnx.load(model)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(proto, model)
    data = write_data(tmp_path / "few.npz", np.ones((3, 4)))
    assert "batches of 8" in build("--sample", data, code=2).err


# ``odtpack compare-gradients`` names what an export lost, and the option that restores it.

SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("temperature", torch.tensor([0.5, 1.5, 2.5]))
        self.padding_idx = 1  # of a module without a weight, as those of transformers
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens):
        hidden = torch.tanh(self.inner(self.embedding(tokens).mean(dim=1)))
        gate = torch.sigmoid(hidden).detach()
        return self.outer(self.drop(hidden) * gate) / self.temperature

def step(module):
    tokens, labels = torch.arange(12).reshape(3, 4) % 9, torch.arange(3)
    loss = F.cross_entropy(module(tokens), labels)
    return module, loss, {"tokens": tokens, "labels": labels}

def build():
    return step(Net().eval())

def training():
    return step(Net().train())

def broken():
    return Net()
"""


def run_as_the_command_does(file: Path, source: str) -> dict[str, Any]:
    """Write a program, and return its names."""
    file.write_text(source)
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102
    return names


def write(folder: Path) -> tuple[Path, Path]:
    import torch

    from tests.exported.export import export

    file = folder / "twin.py"
    net = run_as_the_command_does(file, SOURCE)["Net"]().eval()
    tokens = {"tokens": torch.zeros(3, 4, dtype=torch.int64)}
    return export(net, tokens, folder / "model.onnx", "torchscript"), file


def test_every_loss_is_named_and_restored(run, tmp_path):
    model, file = write(tmp_path)
    command = "compare-gradients", model, "--loss", "cross_entropy", "--torch"
    restore: list[str] = []
    row = "embedding.weight=0"
    reasons = [
        ("temperature", "a buffer in PyTorch: --freeze 'temperature'", ["--freeze", "temperature"]),
        ("inner.weight", "--stop-gradient", ["--stop-gradient", "/Sigmoid_output_0"]),
        ("embedding.weight", f"--freeze-row '{row}'", ["--freeze-row", row]),
    ]
    for name, why, options in reasons:
        outcome = run(*command, f"{file}:build", *restore, "--json", code=1)
        assert why in {each["name"]: each["why"] for each in outcome.json()["different"]}[name]
        restore += options
    outcome = run(*command, f"{file}:build", *restore, code=0)
    assert "5 of 5 gradients are those of PyTorch" in outcome.out
    run("build", model, "--loss", "cross_entropy", "--out", tmp_path / "p", *restore, code=0)
    command = "compare-gradients", tmp_path / "p", "--torch"
    outcome = run(*command, f"{file}:training", "--json", code=1)
    (why,) = {each["why"] for each in outcome.json()["different"]}
    assert "Dropout is in training mode" in why


def test_parameters_with_further_axes_are_compared(run, tmp_path):
    """The scales of a GroupNorm have the shape [4, 1, 1] in the file."""
    from tests.exported.export import export

    source = """
        import torch

        def build(scale=1.0):
            torch.manual_seed(0)
            module = torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.Flatten())
            torch.nn.init.normal_(module[0].weight)
            module[0].weight.register_hook(lambda gradient: gradient * scale)
            x, target = torch.randn(3, 4, 5, 5), torch.randn(3, 100)
            loss = torch.nn.functional.mse_loss(module(x), target)
            return module, loss, {"x": x, "target": target}

        def scaled():
            return build(2.0)
    """
    file = tmp_path / "step.py"
    module, _, inputs = run_as_the_command_does(file, textwrap.dedent(source))["build"]()
    export(module.eval(), {"x": inputs["x"]}, tmp_path / "model.onnx", "torchscript")
    command = "compare-gradients", tmp_path / "model.onnx", "--loss", "mse", "--json", "--torch"
    found = run(*command, f"{file}:build", code=0).json()
    assert [*found["equal"], *found["not_compared"]] == ["0.weight", "0.bias"]
    found = run(*command, f"{file}:scaled", code=1).json()
    assert [each["name"] for each in found["different"]] == ["0.weight"]


TIED = """
import torch
from torch import nn

def build(padding=None):
    torch.manual_seed(0)
    table, last = nn.Embedding(10, 4), nn.Linear(4, 10)
    table.padding_idx, last.weight = padding, table.weight
    module = nn.Sequential(table, nn.Tanh(), nn.Flatten(0, 1), last)
    tokens, labels = torch.arange(24).reshape(4, 6) % 9, torch.arange(24) % 7
    loss = nn.functional.cross_entropy(module(tokens), labels)
    return module, loss, {"tokens": tokens, "labels": labels}

def padded():
    return build(0)
"""


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_a_tied_parameter_is_one(run, tmp_path, exporter):
    """Of padding_idx only the look-up's gradient is none, which --freeze-row does not give."""
    from tests.exported.export import export

    file = tmp_path / "tied.py"
    module, _, inputs = run_as_the_command_does(file, TIED)["build"]()
    model = tmp_path / "model.onnx"
    export(module.eval(), {"tokens": inputs["tokens"]}, model, exporter)
    command = "compare-gradients", model, "--loss", "cross_entropy", "--json", "--torch"
    found = run(*command, f"{file}:build", code=0).json()
    assert len(found["equal"]) == 2
    row = () if exporter == "dynamo" else ("--freeze-row", "0.weight=0")
    built = run("build", model, "--out", tmp_path / "package", "--loss", "cross_entropy", *row)
    assert ("stays as it is for all that read it" in built.err) == bool(row)
    for options in {(), row}:
        found = run(*command, f"{file}:padded", *options, code=1).json()
        assert ["the embedding is tied" in each["why"] for each in found["different"]] == [True]


def test_what_does_not_train_is_named(run, tmp_path):
    model, file = write(tmp_path)
    command = "compare-gradients", model, "--loss", "cross_entropy", "--torch", f"{file}:build"
    found = run(*command, "--train", "outer.*", "--json").json()
    assert found["equal"] == ["outer.weight", "outer.bias"]
    names = {"embedding.weight", "inner.weight", "inner.bias"}
    assert {each["name"] for each in found["different"]} == names
    assert all("not in the package" in each["why"] for each in found["different"])


@pytest.mark.parametrize(
    ("function", "code"),
    [("broken", "torch-step-failed"), ("missing", "torch-step-failed"), ("a b", "bad-option")],
)
def test_steps_that_cannot_be_taken(function, code, run, tmp_path):
    model, file = write(tmp_path)
    command = "compare-gradients", model, "--loss", "cross_entropy", "--torch"
    assert f"error[{code}]" in run(*command, f"{file}:{function}", code=2).err
