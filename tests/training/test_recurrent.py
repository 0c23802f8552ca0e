"""Recurrent classifiers, as PyTorch exports them, follow PyTorch for ten steps."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from odtpack.build import build_package
from odtpack.optimizers import SGD
from tests.autodiff.recurrent_oracle import onnx_weights
from tests.sweep import split_rows
from tests.training import runs

STEPS, FEATURES, CLASSES, BATCH = 20, 10, 5, 6
RATE = 0.3


class Keywords(nn.Module):
    """Which word is spoken: a recurrent layer over frames of sound, a linear one at the end."""

    def __init__(self, kind: str, *, bidirectional: bool) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(FEATURES, 16, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(16 * (1 + bidirectional), CLASSES)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(frames)
        result: torch.Tensor = self.head(states.mean(1))
        return result


def export(network: nn.Module, path: Path, *, dynamo: bool) -> None:
    """Write the network; the batch, and without dynamo the length, are known when it runs."""
    sizes = {0: torch.export.Dim("batch")} if dynamo else {0: "batch", 1: "time"}
    kind = "dynamic_shapes" if dynamo else "dynamic_axes"
    with warnings.catch_warnings():  # the exporters warn about their own future
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network, (torch.randn(BATCH, STEPS, FEATURES),), path, dynamo=dynamo, verbose=False,
            input_names=["frames"], output_names=["scores"], **{kind: {"frames": sizes}},
            **({"external_data": False} if dynamo else {"opset_version": 17}),
        )  # fmt: skip


def parameters(network: Keywords) -> list[np.ndarray]:
    """Parameters of the network with the shapes that they have in ONNX."""
    head = (network.head.weight, network.head.bias)
    return [value.detach().numpy().copy() for value in (*onnx_weights(network.rnn), *head)]


@pytest.mark.parametrize(
    ("kind", "dynamo", "bidirectional"),
    # The newer exporter writes RNN out step by step.
    split_rows(
        [
            (kind, dynamo, bidirectional)
            for kind, dynamo in [("RNN", False), *itertools.product(("GRU", "LSTM"), (False, True))]
            for bidirectional in (False, True)
        ],
        lambda kind, dynamo, bidirectional: bidirectional == (kind == "LSTM") or kind == "RNN",
    ),
)
def test_ten_steps(kind: str, dynamo: bool, bidirectional: bool, tmp_path: Path) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(3)
    network = Keywords(kind, bidirectional=bidirectional).eval()
    export(network, tmp_path / "model.onnx", dynamo=dynamo)
    model = onnx.load(tmp_path / "model.onnx")
    assert kind in {node.op_type for node in model.graph.node}
    initial = runs.initial(model)
    build_package(
        tmp_path / "model.onnx", tmp_path / "package", loss="cross_entropy", optimizer=SGD()
    )
    random = np.random.default_rng(0)
    x = random.standard_normal((BATCH, STEPS, FEATURES), dtype=np.float32)
    labels = random.integers(0, CLASSES, BATCH)

    ours = runs.ours(tmp_path / "package", x, labels, RATE)

    start = parameters(network)
    network.double().train()
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    losses = []
    for _ in range(runs.STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(torch.from_numpy(x).double()), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    assert ours.losses == pytest.approx(losses, rel=1e-5)
    # The exporters name W, R and B as they like: by their values they are known.
    names = [
        next(name for name, value in initial.items() if np.array_equal(value, array))
        for array in start
    ]
    assert set(ours.values) == set(names)
    for name, expected in zip(names, parameters(network), strict=True):
        np.testing.assert_allclose(ours.values[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
        assert not np.allclose(expected, initial[name], rtol=1e-3, atol=1e-4), name
