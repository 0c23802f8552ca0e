"""What privacy costs in accuracy: the same clients under FedAvg, SecAgg+ and differential privacy.

    python -m benchmarks.federated_privacy [--clients 20] [--rounds 15]

Flower plays them in .venv-federated (make federated); the clients' package and data are those of
its tests.
"""

import sys
from pathlib import Path
from typing import Any

from scripts.harness import head, options, row, scratch
from tests.federated.play import installed, play

FLEET = """\
seed = 3
[population]
clients = {clients}
[population.data]
samples = [60, 80]
dirichlet = 1.0
[training]
batch_size = 16
[federation]
clients = {clients}
"""


def prepare(folder: Path, clients: int) -> dict[str, Any]:
    """Write the digits, a package and a fleet; return what all jobs share."""
    import numpy as np

    from odtpack_runtime.package.package import Package
    from odtpack_simulator.fleet.population import load_fleet_data
    from tests.fleet.fleets import write_digits

    write_digits(folder, width=(16, 32))
    (folder / "fleet.toml").write_text(FLEET.format(clients=clients))
    data = load_fleet_data(Package.open(folder / "package"), folder / "digits.npz", 3)
    held_out = {name: array[data.held_out] for name, array in data.arrays.items()}
    np.savez(folder / "held_out.npz", **held_out)
    return {
        "clients": clients, "package": folder / "package", "data": folder / "digits.npz",
        "held_out": folder / "held_out.npz", "fleet": folder / "fleet.toml",
        "out": folder / "federated.ckpt",
        "client": {"batch_size": 16, "epochs": 3, "learning_rate": 0.1, "seed": 3},
    }  # fmt: skip


def ways(clients: int) -> dict[str, dict[str, Any]]:
    """The rows of the table, and the jobs that they are."""
    shares = {"num_shares": 1.0, "reconstruction_threshold": 0.6, "max_weight": 100}
    rows: dict[str, dict[str, Any]] = {
        "FedAvg": {"task": "simulate"},
        "SecAgg+": {"task": "secure", "diverged": (), "secure": shares},
    }
    for noise in (0.1, 0.3, 1.0):
        settings = {"noise_multiplier": noise, "clipping_norm": 1.0, "num_sampled_clients": clients}
        rows[f"differential privacy, noise {noise:g}"] = {
            "task": "simulate", "mods": ["fixedclipping_mod"],
            "private": ["DifferentialPrivacyClientSideFixedClipping", settings],
        }  # fmt: skip
    return rows


def main() -> None:
    given = options(__doc__, clients=20, rounds=15)
    if not installed():
        sys.exit("Flower is not installed in .venv-federated: run make federated")
    print(f"{given.clients} clients, {given.rounds} rounds\n")
    print(head("", "accuracy:", "loss:"))
    with scratch() as folder:
        common = prepare(folder, given.clients)
        for name, job in ways(given.clients).items():
            found = play(folder, rounds=given.rounds, **common, **job)
            last = found["server"][str(given.rounds)]
            print(row(name, f"{last['accuracy']:.1%}", f"{last['loss']:.3f}"), flush=True)


if __name__ == "__main__":
    main()
