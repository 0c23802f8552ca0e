"""A replay takes budgets, devices and batch from a recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.cli.conftest import arrays
from tests.recipe.conftest import Run, Write

MORE = """
[batch]
size = 12
micro_batch = 6

[target]
devices = ["raspberrypi/pi-5"]

[budgets]
package_size = "1 kB"
"""


def test_budgets_devices_and_batch_are_those_of_the_recipe(
    run: Run, folder: Path, write: Write
) -> None:
    recipe = write(MORE)
    np.savez(folder / "data.npz", allow_pickle=False, **arrays())
    assert run("build", "--recipe", recipe).code == 0
    command = "simulate", folder / "package", "--data", folder / "data.npz", "--epochs", 1
    outcome = run(*command, "--recipe", recipe, "--json")
    assert outcome.code == 1, outcome.err  # over budget
    content = outcome.json()
    assert [device["name"] for device in content["devices"]] == ["raspberrypi/pi-5"]
    line = recipe.read_text().splitlines().index('package_size = "1 kB"') + 1
    assert f"recipe.toml:{line}" in outcome.out
    assert '"batch_size": 6' in outcome.out
    (folder / "wide.toml").write_text('[budgets]\npackage_size = "1 GB"\n')
    options = "--budget", folder / "wide.toml", "--device", "pi-4", "--batch-size", 4
    outcome = run(*command, "--recipe", recipe, "--json", *options)
    assert outcome.code == 0, outcome.err
    assert [device["name"] for device in outcome.json()["devices"]] == ["raspberrypi/pi-4"]
    assert '"batch_size": 4' in outcome.out
