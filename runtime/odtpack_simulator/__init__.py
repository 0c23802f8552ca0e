"""odtpack_simulator: replay a package's training under the limits of devices, and judge it.

::

    import odtpack_simulator as sim

    device = sim.load_profile("pixel-8a")
    measured = sim.simulate("package", "data.npz", [device], batch_size=32, epochs=4, seed=0)
    result = sim.judge(measured, sim.read_budgets("budgets.toml"))
    sim.write_report(result, "html:report.html")

A name is imported when it is first used: importing this package imports nothing else.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# As odtpack_runtime does, for modules that import onnxruntime before it.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from odtpack_simulator.device.profile import DeviceProfile, list_profiles, load_profile
    from odtpack_simulator.figures.judge import judge
    from odtpack_simulator.figures.limits import (
        Budgets,
        parse_budgets,
        read_budgets,
        suggest_budget,
    )
    from odtpack_simulator.figures.simulated import all_figures
    from odtpack_simulator.reports import write_report
    from odtpack_simulator.result import Policy, SimulationResult, load_result
    from odtpack_simulator.simulation import simulate
    from odtpack_simulator.values.figure import Figure

__all__ = [
    "Budgets",
    "DeviceProfile",
    "Figure",
    "Policy",
    "SimulationResult",
    "all_figures",
    "judge",
    "list_profiles",
    "load_profile",
    "load_result",
    "parse_budgets",
    "read_budgets",
    "simulate",
    "suggest_budget",
    "write_report",
]

_HOMES = {
    "figures.limits": ("Budgets", "parse_budgets", "read_budgets", "suggest_budget"),
    "figures.judge": ("judge",),
    "figures.simulated": ("all_figures",),
    "device.profile": ("DeviceProfile", "list_profiles", "load_profile"),
    "reports": ("write_report",),
    "result": ("Policy", "SimulationResult", "load_result"),
    "simulation": ("simulate",),
    "values.figure": ("Figure",),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
