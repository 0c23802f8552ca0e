"""``odtpack fleet demo``: a week of 500 phones that learn the digits together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from odtpack.cli import _console
from odtpack.cli._options import DEMO_FOLDER, RESULT_AS_JSON, TRAINERS
from odtpack.cli.fleet.run import run


def demo(
    out: Annotated[Path, DEMO_FOLDER] = Path("odtpack-fleet-demo"),
    jobs: Annotated[int, TRAINERS] = 0,
    as_json: Annotated[bool, RESULT_AS_JSON] = False,
) -> None:
    """Simulate a week of federated training on 500 phones of five models, with a report.

    The data are the 1,797 handwritten digits that ship with scikit-learn (pip install
    scikit-learn). It needs neither a server nor a network.
    """
    from odtpack.build import build_package
    from odtpack.cli.device.demo import DATA, MODEL, make_folder, read_digits, write_data
    from odtpack.optimizers import SGD
    from odtpack_runtime.files.atomic import atomic_write

    digits = read_digits()
    make_folder(out)
    write_data(digits, out / "digits.npz")
    build_package(MODEL, out / "package", loss="cross_entropy", optimizer=SGD())
    with atomic_write(out / "fleet.toml") as stream:
        stream.write((DATA / "fleet.toml").read_bytes())
    _console.wrote(out / "package", out / "digits.npz", out / "fleet.toml")
    run(
        out / "package",
        out / "digits.npz",
        out / "fleet.toml",
        report=[f"html:{out / 'fleet.html'}", f"json:{out / 'fleet.json'}"],
        out=out / "run",
        jobs=jobs,
        as_json=as_json,
    )
