"""What a matrix of fifty devices costs beside a single one.

    python -m benchmarks.matrix [--rounds 3] [--jobs N]

The shipped profiles, filled up to fifty with copies whose memory limits lie around what the
training needs, so that limits really have to be held; judging and every report are included.
One device and fifty in turns, the same jobs for both.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from odtpack.build import build_package
from odtpack_simulator.device.profile import DeviceProfile, list_profiles, load_profile
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.replay.executor import default_jobs, make_executor
from odtpack_simulator.reports import render_report, report_formats
from odtpack_simulator.simulation import simulate
from odtpack_simulator.values.units import Quantity
from scripts.harness import head, options, row, scratch
from tests import zoo

DEVICES = 50
SAMPLES = 1000


def fifty(peak: int) -> list[DeviceProfile]:
    """The shipped profiles, and copies of one with limits from 0.7 to 1.4 times the peak."""
    profiles = [load_profile(name) for name in list_profiles()]
    model = load_profile("google/pixel-8a")
    for index in range(DEVICES - len(profiles)):
        share = 0.7 + 0.7 * index / (DEVICES - len(profiles))
        limit = Quantity(value=share * peak / 1e6, unit="MB", kind="assumed", source="benchmark")
        memory = model.memory.model_copy(update={"app_limit_foreground": limit})
        changes = {"name": f"bench/device-{index}", "title": f"Device {index}", "memory": memory}
        profiles.append(model.model_copy(update=changes))
    return profiles


def run(
    package: Path, data: Path, profiles: Sequence[DeviceProfile], jobs: int
) -> tuple[float, int]:
    """Simulate, judge and render every report; return the seconds and the measured peak."""
    started = time.perf_counter()
    result = judge(
        simulate(package, data, profiles, batch_size=32, epochs=3, seed=0, interruptions=3,
                 executor=make_executor(jobs))
    )  # fmt: skip
    for name in report_formats():
        render_report(result, name)
    return time.perf_counter() - started, result.memory.measured_peak_bytes or 0


def main() -> None:
    given = options(__doc__, rounds=3, jobs=default_jobs())
    random = np.random.default_rng(0)
    ratios = []
    with scratch() as folder:
        package, data = folder / "package", folder / "data.npz"
        build_package(zoo.cnn(), package, loss="cross_entropy", outputs=["output"])
        images = random.standard_normal((SAMPLES, 1, 28, 28)).astype(np.float32)
        np.savez(data, input=images, labels=random.integers(0, 10, SAMPLES))
        _, peak = run(package, data, [], given.jobs)  # files and libraries are warm now
        profiles = fifty(peak)
        print(head("round", "one device:", f"{DEVICES} devices:", "ratio:"))
        for number in range(1, given.rounds + 1):
            one, _ = run(package, data, profiles[:1], given.jobs)
            every, _ = run(package, data, profiles, given.jobs)
            ratios.append(every / one)
            print(row(number, f"{one:.1f} s", f"{every:.1f} s", f"{ratios[-1]:.2f}"), flush=True)
    print(f"median ratio {statistics.median(ratios):.2f}, target at most 2")


if __name__ == "__main__":
    main()
