"""What the server makes of the mean of a round's answers: FedAvg, FedAvgM or FedAdam.

The formulas are those of Flower's strategies of these names, with its defaults: Hsu et al. 2019
(arXiv:1909.06335) and Reddi et al. 2021 (arXiv:2003.00295). Their state is kept by the name of
each parameter, float32 as the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from odtpack_runtime.checkpoint.parameters import Array
from odtpack_simulator.fleet.fleet_file import FederationTable
from odtpack_simulator.fleet.local_training import Arrays

_BETA_1: Final = 0.9
_BETA_2: Final = 0.99
_TAU: Final = 1e-3
_RATES: Final = {"fedavg": 1.0, "fedavgm": 1.0, "fedadam": 0.1}
_KEPT: Final = {"fedavg": (), "fedavgm": ("momentum",), "fedadam": ("first", "second")}


@dataclass(frozen=True)
class ServerOptimizer:
    """A strategy's step, once per round.

    Attributes:
        kind: ``fedavg``, ``fedavgm`` or ``fedadam``.
        rate: Learning rate of the server.
        momentum: Of ``fedavgm``.
    """

    kind: str
    rate: float
    momentum: float

    @classmethod
    def of(cls, table: FederationTable) -> ServerOptimizer:
        """What a fleet file asks for."""
        rate, momentum = table.server_learning_rate, table.server_momentum
        return cls(
            table.strategy,
            _RATES[table.strategy] if rate is None else rate,
            0.9 if momentum is None else momentum,
        )

    def begin(self, arrays: Mapping[str, Array]) -> Arrays:
        """Its state before the first round: zeros."""
        return {
            f"{what}.{name}": np.zeros_like(array)
            for what in _KEPT[self.kind]
            for name, array in arrays.items()
        }

    def step(
        self, begun: Mapping[str, Array], mean: Arrays, state: Mapping[str, Array], number: int
    ) -> tuple[Arrays, Arrays]:
        """The parameters after a round, and the state.

        Args:
            begun: The parameters that the round began with.
            mean: The weighted mean of its answers.
            state: The state before.
            number: Number of the round, from 1.
        """
        if self.kind == "fedavg":
            return mean, {}
        new: Arrays = {}
        kept: Arrays = {}
        for name, old in begun.items():
            if self.kind == "fedavgm":
                momentum = self.momentum * state[f"momentum.{name}"] + (old - mean[name])
                kept[f"momentum.{name}"] = np.asarray(momentum)
                new[name] = np.asarray(old - self.rate * momentum)
                continue
            change = mean[name] - old
            first = _BETA_1 * state[f"first.{name}"] + (1 - _BETA_1) * change
            second = _BETA_2 * state[f"second.{name}"] + (1 - _BETA_2) * change**2
            kept[f"first.{name}"], kept[f"second.{name}"] = np.asarray(first), np.asarray(second)
            # Flower counts the rounds of this correction from 2.
            corrected = math.sqrt(1 - _BETA_2 ** (number + 1)) / (1 - _BETA_1 ** (number + 1))
            new[name] = np.asarray(old + self.rate * corrected * first / (np.sqrt(second) + _TAU))
        return new, kept
