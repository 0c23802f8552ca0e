"""A large fleet against Flower's own simulation engine, with the same clients.

    python -m benchmarks.fleet [--clients 10000] [--rounds 100] [--per-round 100]
    python -m benchmarks.fleet --clients 1000000 --only odtpack --a-day 1000

Both train the demo's CNN on the digits, the same clients as many times each, in two processes.
Flower's engine runs in .venv-federated (make federated). Devices are ideal: it has none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def prepare(folder: Path, arguments: argparse.Namespace) -> None:
    from tests.fleet.fleets import write_digits

    write_digits(folder, width=(16, 32))
    text = FLEET.format(
        population=arguments.clients, per_round=arguments.per_round, rounds=arguments.rounds
    )
    if arguments.a_day:
        hours = 24 * arguments.per_round / arguments.a_day
        text += f'every = "{hours:g} h"\n'
    (folder / "fleet.toml").write_text(text)


def odtpack(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The fleet's own engine."""
    from odtpack_simulator.fleet.federation import Federation
    from odtpack_simulator.fleet.fleet_file import read_fleet

    start = time.perf_counter()
    fleet = read_fleet(folder / "fleet.toml")
    federation = Federation(folder / "package", folder / "digits.npz", fleet)
    result, _ = federation.simulate(jobs=arguments.jobs)
    seconds = time.perf_counter() - start
    trained = result.ends()["averaged"]
    accuracy = result.rounds[-1].accuracy
    return {
        "seconds": seconds,
        "trained": trained,
        "accuracy": accuracy,
        "peak_mb": peak_mb(),
        "took_part": result.took_part,
        "days": result.days,
    }


def flower(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Flower's simulation of the same clients; runs in its environment."""
    import logging

    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from odtpack.flower import client_app, fleet_data, guarded, initial_arrays, server_evaluation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    package, data = folder / "package", folder / "digits.npz"
    app = client_app(
        package, fleet_data(folder / "fleet.toml", package, data), batch_size=16, learning_rate=0.1
    )
    server = ServerApp()
    found: dict[str, Any] = {}

    @server.main()
    def main(grid: Any, context: Any) -> None:
        evaluate = server_evaluation(package, data)
        strategy = FedAvg(
            fraction_train=arguments.per_round / arguments.clients,
            fraction_evaluate=0.0,
            min_available_nodes=arguments.clients,
        )
        result = guarded(strategy).start(
            grid,
            initial_arrays(package),
            num_rounds=arguments.rounds,
            evaluate_fn=lambda number, arrays: (
                evaluate(number, arrays) if number == arguments.rounds else None
            ),
        )
        found.update(result.evaluate_metrics_serverapp[arguments.rounds])

    start = time.perf_counter()
    run_simulation(
        server,
        app,
        num_supernodes=arguments.clients,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"num_cpus": arguments.jobs},
        },
    )
    seconds = time.perf_counter() - start
    trained = arguments.per_round * arguments.rounds
    return {
        "seconds": seconds,
        "trained": trained,
        "accuracy": found["accuracy"],
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """Most memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--a-day", type=int, help="clients that take part per simulated day")
    parser.add_argument("--only", choices=("odtpack", "flower"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.folder is not None:  # in a process of its own, by the call below
        done = {"odtpack": odtpack, "flower": flower}[arguments.only](arguments.folder, arguments)
        print("\n" + json.dumps(done))
        return
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, arguments)
        for name in ("odtpack", "flower"):
            if arguments.only in (None, name):
                rows[name] = in_process(name, folder, arguments)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(
        f"{arguments.clients:,} clients, {arguments.per_round} a round, {arguments.rounds} rounds, "
        f"{arguments.jobs} processes\n\n| | seconds | ms a client | accuracy | peak |\n"
        "|---|--:|--:|--:|--:|"
    )
    for name, row in rows.items():
        each = 1e3 * row["seconds"] / row["trained"]
        print(
            f"| {name} | {row['seconds']:.1f} | {each:.2f} | {row['accuracy']:.1%} | "
            f"{row['peak_mb']:.0f} MB |"
        )


def in_process(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    python = ENVIRONMENT / "bin" / "python" if name == "flower" else Path(sys.executable)
    if name == "flower" and not installed():
        sys.exit("Flower is not installed in .venv-federated: run make federated")
    paths = [str(ROOT / "packager"), str(ROOT / "runtime"), str(ROOT)]
    command = [str(python), "-W", "ignore", "-m", "benchmarks.fleet", "--only", name]
    command += ["--folder", str(folder), "--clients", str(arguments.clients)]
    command += ["--per-round", str(arguments.per_round), "--rounds", str(arguments.rounds)]
    done = subprocess.run(
        [*command, "--jobs", str(arguments.jobs)],
        cwd=ROOT,
        env=os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


if __name__ == "__main__":
    main()
