"""What ``import odtpack_simulator`` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import odtpack_simulator as sim


def test_all_names_are_there() -> None:
    from odtpack_simulator import simulation
    from odtpack_simulator.figures.judge import judge
    from odtpack_simulator.result.result import load_result

    assert sim.simulate is simulation.simulate
    assert sim.judge is judge
    assert sim.load_result is load_result
    for name in sim.__all__:
        assert callable(getattr(sim, name)), name
        assert name in dir(sim)


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        sim.simulat  # noqa: B018


def test_the_import_alone_loads_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import odtpack_simulator as sim\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))\n"
        "print([name for name in sys.modules if name.startswith('odtpack')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['odtpack_simulator']\n['odtpack_simulator']\n"
