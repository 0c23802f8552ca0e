"""``odtpack fleet demo``: a week of 500 phones that learn the digits together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from odtpack.cli import _console
from odtpack.cli._options import DEMO_FOLDER, TRAINERS
from odtpack.cli.fleet.run import run

FLEET: Final = """\
# 500 phones of five models. Each holds few digits, mostly of few classes, and may train at night:
# while it lies idle, on its charger, in a network that costs nothing by the byte.
seed = 0

[population]
clients = 500
lost = 0.05

[[population.device]]
profile = "google/pixel-8a"
share = 30

[[population.device]]
profile = "samsung/galaxy-a12"
share = 25

[[population.device]]
profile = "apple/iphone-16-pro"
share = 20

[[population.device]]
profile = "samsung/galaxy-s23"
share = 15

[[population.device]]
profile = "google/pixel-7a"
share = 10

[population.data]
samples = [10, 50]
dirichlet = 0.5

# By the hour of the day, from midnight on: assumed, to be replaced by what your app sees.
[population.availability]
idle = [
    0.90, 0.95, 0.95, 0.95, 0.95, 0.90, 0.70, 0.50, 0.40, 0.40, 0.40, 0.40,
    0.35, 0.40, 0.40, 0.40, 0.40, 0.35, 0.30, 0.30, 0.30, 0.30, 0.50, 0.70,
]
charging = [
    0.70, 0.75, 0.80, 0.80, 0.80, 0.75, 0.60, 0.30, 0.15, 0.10, 0.10, 0.10,
    0.10, 0.10, 0.10, 0.10, 0.10, 0.15, 0.20, 0.20, 0.25, 0.30, 0.40, 0.55,
]
unmetered = [
    0.90, 0.90, 0.90, 0.90, 0.90, 0.90, 0.80, 0.60, 0.50, 0.50, 0.50, 0.50,
    0.50, 0.50, 0.50, 0.50, 0.50, 0.60, 0.70, 0.80, 0.85, 0.90, 0.90, 0.90,
]

[training]
batch_size = 16
epochs = 3
learning_rate = 0.1

[federation]
clients = 20
over_selection = 1.3
minimum = 10
deadline = "10 min"
every = "2 h"
rounds = 84
days = 7

[traffic]
down = ["0.5 MB/s", "20 MB/s"]
up = ["0.1 MB/s", "5 MB/s"]

[budgets]
accuracy = 0.9
worst_tenth = 0.8
days = 7
participation = "50 %"
traffic_per_device = "5 MB"
"""


def demo(
    out: Annotated[Path, DEMO_FOLDER] = Path("odtpack-fleet-demo"),
    jobs: Annotated[int, TRAINERS] = 0,
) -> None:
    """Simulate a week of 500 phones of five models that learn the digits, and write a report.

    The data are the 1,797 handwritten digits that ship with scikit-learn (pip install
    'odtpack[demo]'). It takes no server and no network.
    """
    from odtpack.build import build_package
    from odtpack.cli.device.demo import make_folder, read_digits, write_data
    from odtpack.demo.cnn import cnn
    from odtpack.optimizers import SGD
    from odtpack_runtime.files.atomic import atomic_write

    digits = read_digits()
    make_folder(out)
    write_data(digits, out / "digits.npz")
    build_package(
        cnn(size=8, width=(16, 32), seed=0), out / "package", loss="cross_entropy", optimizer=SGD()
    )
    with atomic_write(out / "fleet.toml") as stream:
        stream.write(FLEET.encode())
    _console.say(f"wrote {out / 'package'}, {out / 'digits.npz'} and {out / 'fleet.toml'}")
    run(
        out / "package",
        out / "digits.npz",
        out / "fleet.toml",
        report=[f"html:{out / 'fleet.html'}", f"json:{out / 'fleet.json'}"],
        out=out / "run",
        jobs=jobs,
    )
