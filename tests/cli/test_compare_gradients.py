"""``odtpack compare-gradients`` names what an export lost, and the option that restores it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

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


def write(folder: Path) -> tuple[Path, Path]:
    import torch

    from tests.exported.export import export

    file = folder / "twin.py"
    file.write_text(SOURCE)
    names: dict[str, object] = {}
    exec(SOURCE, names)  # noqa: S102 - as the command runs it
    net = names["Net"]().eval()  # type: ignore[operator]
    tokens = {"tokens": torch.zeros(3, 4, dtype=torch.int64)}
    return export(net, tokens, folder / "model.onnx", "torchscript"), file


def test_every_loss_is_named_and_restored(run: Run, tmp_path: Path) -> None:
    model, file = write(tmp_path)
    command = "compare-gradients", model, "--loss", "cross_entropy", "--torch"
    restore: list[str] = []
    reasons = [
        ("temperature", "a buffer in PyTorch: --freeze 'temperature'", ["--freeze", "temperature"]),
        ("inner.weight", "--stop-gradient", ["--stop-gradient", "/Sigmoid_output_0"]),
        (
            "embedding.weight", "--freeze-row embedding.weight=0",
            ["--freeze-row", "embedding.weight=0"],
        ),
    ]  # fmt: skip
    for name, why, options in reasons:
        outcome = run(*command, f"{file}:build", *restore, "--json")
        assert outcome.code == 1
        different = {each["name"]: each["why"] for each in outcome.json()["different"]}
        assert why in different[name]
        restore += options
    outcome = run(*command, f"{file}:build", *restore)
    assert outcome.code == 0, outcome.err
    assert "5 of 5 gradients are those of PyTorch" in outcome.out
    outcome = run("build", model, "--loss", "cross_entropy", "--out", tmp_path / "p", *restore)
    assert outcome.code == 0
    outcome = run("compare-gradients", tmp_path / "p", "--torch", f"{file}:training", "--json")
    assert outcome.code == 1
    (why,) = {each["why"] for each in outcome.json()["different"]}
    assert "Dropout is in training mode" in why


def test_what_does_not_train_is_named(run: Run, tmp_path: Path) -> None:
    model, file = write(tmp_path)
    outcome = run(
        "compare-gradients", model, "--loss", "cross_entropy", "--torch", f"{file}:build",
        "--train", "outer.*", "--json",
    )  # fmt: skip
    found = outcome.json()
    assert found["equal"] == ["outer.weight", "outer.bias"]
    assert {each["name"] for each in found["different"]} == {
        "embedding.weight", "inner.weight", "inner.bias",
    }  # fmt: skip
    assert all("not in the package" in each["why"] for each in found["different"])


@pytest.mark.parametrize(
    ("function", "code"),
    [("broken", "torch-step-failed"), ("missing", "torch-step-failed"), ("a b", "bad-option")],
)
def test_steps_that_cannot_be_taken(function: str, code: str, run: Run, tmp_path: Path) -> None:
    model, file = write(tmp_path)
    outcome = run(
        "compare-gradients", model, "--loss", "cross_entropy", "--torch", f"{file}:{function}"
    )
    assert outcome.code == 2
    assert f"error[{code}]" in outcome.err
