"""``odtpack fleet``: simulate the federated training of a package by a fleet of devices."""

from __future__ import annotations

from odtpack.cli._options import examples, group
from odtpack.cli.fleet.run import compare, demo, fit, run

fleet = group("Simulate federated training by a fleet of devices.")
fleet.command(
    epilog=examples(
        "odtpack fleet run package --fleet fleet.toml --data digits.npz",
        "odtpack fleet run package --fleet fleet.toml --data digits.npz --out build/fleet \\",
        "    --report html:fleet.html --report json:fleet.json",
        "odtpack fleet run package --fleet fleet.toml --data digits.npz --out build/fleet --resume",
    )
)(run)
fleet.command(
    epilog=examples(
        "odtpack fleet compare before.json fleet.json",
        "odtpack fleet compare before.json fleet.json --accuracy 0.9 --format markdown",
    )
)(compare)
fleet.command(
    epilog=examples(
        "odtpack fleet fit package --fleet fleet.toml --data digits.npz",
        "odtpack fleet fit package --fleet fleet.toml --data digits.npz --clients 10 \\",
        "    --clients 20 --epochs 1 --epochs 3 --lr 0.05 --lr 0.1 --seeds 3 --json > fit.json",
    )
)(fit)
fleet.command(epilog=examples("odtpack fleet demo --out build/fleet-demo"))(demo)
