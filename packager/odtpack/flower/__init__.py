"""Federated training of a package on Flower: a ClientApp, and helpers for a ServerApp.

Needs the extra ``federated`` (``pip install flwr``), whose Flower pins older
versions of libraries that odtpack's commands use: give it a virtual environment of its own::

    # client.py
    from odtpack.flower import client_app

    app = client_app("package", my_data)  # my_data(context) returns arrays by name of input

    # server.py
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from odtpack.flower import guarded, initial_arrays, save_checkpoint, server_evaluation

    app = ServerApp()

    @app.main()
    def main(grid, context):
        strategy = guarded(FedAvg(fraction_evaluate=0.0), "package")
        result = strategy.start(
            grid,
            initial_arrays("package"),
            num_rounds=20,
            evaluate_fn=server_evaluation("package", "held_out.npz"),
        )
        save_checkpoint("package", result.arrays, "federated.ckpt")
"""

from odtpack.flower.client import client_app, fleet_data
from odtpack.flower.records import legacy_mod, named_arrays
from odtpack.flower.server import (
    carry_to,
    fedavg,
    guarded,
    initial_arrays,
    save_checkpoint,
    server_evaluation,
)

__all__ = [
    "carry_to",
    "client_app",
    "fedavg",
    "fleet_data",
    "guarded",
    "initial_arrays",
    "legacy_mod",
    "named_arrays",
    "save_checkpoint",
    "server_evaluation",
]
