"""Federated averaging of the digits against the same written down in PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.fleet_file import parse_fleet
from tests.fleet.fleets import IDEAL, write_digits

ROUNDS, BATCH, RATE, SEED = 20, 16, 0.1, 3


def forward(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for layer in ("conv1", "conv2"):
        x = functional.conv2d(x, p[f"{layer}.weight"], p[f"{layer}.bias"], padding=1)
        x = functional.max_pool2d(functional.relu(x), 2)
    return functional.linear(x.flatten(1), p["fc.weight"], p["fc.bias"])


def test_twenty_rounds_are_those_of_pytorch(tmp_path: Path) -> None:
    write_digits(tmp_path)
    text = IDEAL.replace("rounds = 3", f"rounds = {ROUNDS}").replace("epochs = 2", "epochs = 1")
    text = text.replace("samples = [20, 40]", "samples = [80, 100]")
    text = text.replace("learning_rate = 0.1", f"learning_rate = {RATE}")
    fleet = Federation(tmp_path / "package", tmp_path / "digits.npz", parse_fleet(text.encode()))
    result, state = fleet.simulate()

    data = np.load(tmp_path / "digits.npz")
    images, labels = torch.from_numpy(data["input"]), torch.from_numpy(data["labels"])
    model = {name: torch.from_numpy(array.copy()) for name, array in fleet.initial.items()}
    clients = [fleet.population.client(number).samples() for number in range(6)]
    for round_number in range(1, ROUNDS + 1):
        answers = []
        for number, samples in enumerate(clients):
            own = {name: value.clone().requires_grad_() for name, value in model.items()}
            order = np.random.default_rng([SEED, 2, round_number, number]).permutation(samples)
            for start in range(0, len(order), BATCH):
                batch = order[start : start + BATCH]
                loss = functional.cross_entropy(forward(own, images[batch]), labels[batch])
                gradients = torch.autograd.grad(loss, list(own.values()))
                with torch.no_grad():
                    for value, gradient in zip(own.values(), gradients, strict=True):
                        value.sub_(RATE * gradient)
            answers.append({name: value.detach() for name, value in own.items()})
        weights = [len(samples) for samples in clients]
        model = {
            name: sum(w * a[name] for w, a in zip(weights, answers, strict=True)) / sum(weights)
            for name in model
        }
    for name, value in model.items():
        np.testing.assert_allclose(state.arrays[name], value.numpy(), rtol=2e-4, atol=2e-5)
    held_out = fleet.data.held_out
    right = (forward(model, images[held_out]).argmax(1) == labels[held_out]).float().mean()
    assert result.rounds[-1].accuracy is not None
    assert abs(result.rounds[-1].accuracy - float(right)) < 0.005
    assert result.accuracy_before is not None
    assert float(right) > 2 * result.accuracy_before  # it has learned
