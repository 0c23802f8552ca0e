"""Whether a profile of this machine gives this machine's times: from a data sheet, and measured.

    python -m benchmarks.fidelity.profiles [--sheet FILE.toml] [--models NAME ...]

docs/fidelity.md has the targets. A busy machine gives no answer.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fidelity.models import CASES, build
from odtpack_simulator.device.profile import DeviceProfile, load_profile
from odtpack_simulator.latency import carry, measure_host
from odtpack_simulator.measure.measured_profile import Effort, measure_device
from scripts.harness import options, scratch

SHEETS = {("25", "1"): "epyc-7003.toml", ("25", "17"): "epyc-9004.toml"}
"""Data sheets of processors by family and model, as the kernel names them."""
MODELS = ("tabular", "lstm", "resnet18", "bert", "mobilenet-v3", "transfer-int8")


def main() -> None:
    given = options(__doc__, sheet=str, models=[str])
    sheet = given.sheet or _known_sheet()
    if sheet is None:
        sys.exit("no data sheet of this processor is known; --sheet FILE.toml names one")
    quick = Effort(repeats=3, convolution_seconds=0.05, file_bytes=2**20, syncs=2)
    with scratch() as folder:
        measured = measure_device(folder, threads=1, effort=quick)
    compare(given.models or MODELS, load_profile(sheet), measured)


def _known_sheet() -> str | None:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^cpu family\s*: (\d+)\nmodel\s*: (\d+)$", text, re.M)
    name = found and SHEETS.get((found[1], found[2]))
    return name and str(Path(__file__).with_name(name))


def compare(models: Sequence[str], sheet: DeviceProfile, measured: DeviceProfile) -> None:
    """Print each model's step, and what either profile says of it."""
    for name in models:
        with scratch() as folder:
            job = build(CASES[name]).job(folder, max(CASES[name].batches), task="time")
            host = measure_host(job)
        parts = [f"{name:16} {host.median_ms:9.3f} ms, waited {host.steady.waited:4.0%}"]
        for title, profile in (("data sheet", sheet), ("measured", measured)):
            found = carry(host, profile).step_ms
            if found is None:
                parts.append(f"{title}: not judged")
                continue
            inside = "inside" if found.low <= host.median_ms <= found.high else "OUTSIDE"
            ratio, width = found.typical / host.median_ms, found.high / found.low
            parts.append(f"{title}: {ratio - 1:+6.1%}, {inside}, width {width:.2f}")
        print("   ".join(parts), flush=True)


if __name__ == "__main__":
    main()
