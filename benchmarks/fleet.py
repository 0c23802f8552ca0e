"""A large fleet against Flower's own simulation engine, with the same clients.

    python -m benchmarks.fleet [--clients 10000] [--rounds 100] [--per-round 100]
    python -m benchmarks.fleet --clients 1000000 --only odtpack --a-day 1000

Both train the demo's CNN on the digits, the same clients as many times each, in two processes.
Flower's engine runs in .venv-federated (make federated). Devices are ideal: it has none. With
``--a-day`` so many clients take part per simulated day.
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import apart
from scripts.harness import head, options, row, scratch
from tests.federated.play import ENVIRONMENT, ROOT, SETTINGS, installed

FLEET = """\
[population]
clients = {population}
[population.data]
samples = 32
dirichlet = 0.5
[training]
batch_size = 16
epochs = 1
learning_rate = 0.1
[federation]
clients = {per_round}
rounds = {rounds}
evaluate_every = {rounds}
"""


def prepare(folder: Path, given: argparse.Namespace) -> None:
    from tests.fleet.fleets import write_digits

    write_digits(folder, width=(16, 32))
    text = FLEET.format(population=given.clients, per_round=given.per_round, rounds=given.rounds)
    if given.a_day:
        text += f'every = "{24 * given.per_round / given.a_day:g} h"\n'
    (folder / "fleet.toml").write_text(text)


def odtpack(*, folder: str, jobs: int, **_: Any) -> dict[str, Any]:
    """The fleet's own engine."""
    from odtpack_simulator.fleet.federation import Federation
    from odtpack_simulator.fleet.fleet_file import read_fleet
    from odtpack_simulator.replay.executor import LocalExecutor

    root = Path(folder)
    start = time.perf_counter()
    fleet = read_fleet(root / "fleet.toml")
    federation = Federation(root / "package", root / "digits.npz", fleet)
    result, _ = federation.simulate(executor=LocalExecutor(jobs))
    return {
        "seconds": time.perf_counter() - start, "trained": result.ends()["averaged"],
        "accuracy": result.rounds[-1].accuracy, "peak_mb": peak_mb(),
        "took_part": result.took_part, "days": result.days,
    }  # fmt: skip


def flower(
    *, folder: str, clients: int, per_round: int, rounds: int, jobs: int, **_: Any
) -> dict[str, Any]:
    """Flower's simulation of the same clients; runs in its environment."""
    import logging

    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from odtpack.flower import client_app, fleet_data, guarded, initial_arrays, server_evaluation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    package, data = Path(folder, "package"), Path(folder, "digits.npz")
    own_data = fleet_data(Path(folder, "fleet.toml"), package, data)
    app, server = client_app(package, own_data, batch_size=16, learning_rate=0.1), ServerApp()
    found: dict[str, Any] = {}

    @server.main()
    def main(grid: Any, context: Any) -> None:
        evaluate = server_evaluation(package, data)
        strategy = FedAvg(
            fraction_train=per_round / clients, fraction_evaluate=0.0, min_available_nodes=clients
        )
        result = guarded(strategy, package).start(
            grid, initial_arrays(package), num_rounds=rounds,
            evaluate_fn=lambda number, arrays: (
                evaluate(number, arrays) if number == rounds else None
            ),
        )  # fmt: skip
        found.update(result.evaluate_metrics_serverapp[rounds])

    start = time.perf_counter()
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": jobs}}
    run_simulation(server, app, num_supernodes=clients, backend_config=backend)
    return {"seconds": time.perf_counter() - start, "trained": per_round * rounds,
            "accuracy": found["accuracy"], "peak_mb": peak_mb()}  # fmt: skip


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    given = options(__doc__, clients=10_000, per_round=100, rounds=100, jobs=2, a_day=0,
                    only=("", "odtpack", "flower"))  # fmt: skip
    if given.only != "odtpack" and not installed():
        sys.exit("Flower is not installed in .venv-federated: run make federated")
    print(f"{given.clients:,} clients, {given.per_round} a round, {given.rounds} rounds, "
          f"{given.jobs} processes\n")  # fmt: skip
    print(head("", "seconds:", "ms a client:", "accuracy:", "peak:", "took part:", "days:"))
    paths = os.pathsep.join(map(str, (ROOT / "packager", ROOT / "runtime", ROOT)))
    with scratch() as folder:
        prepare(folder, given)
        for engine in (odtpack, flower):
            if given.only not in ("", engine.__name__):
                continue
            python = ENVIRONMENT / "bin" / "python" if engine is flower else sys.executable
            found = apart.call(
                engine, python=python, environment=SETTINGS | {"PYTHONPATH": paths},
                folder=folder, **vars(given),
            )  # fmt: skip
            seconds, days = found["seconds"], found.get("days")
            each, took_part = 1e3 * seconds / found["trained"], found.get("took_part", "")
            print(row(engine.__name__, f"{seconds:.1f}", f"{each:.2f}", f"{found['accuracy']:.1%}",
                      f"{found['peak_mb']:.0f} MB", took_part, f"{days:.1f}" if days else ""),
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
