"""Simulate the published trainings: every network at both ends of the batch sizes, by profile.

    python -m benchmarks.published [--networks Lenet ...]

writes ``simulated.json``, of which ``scripts/generate_docs.py`` makes docs/published-phones.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.fidelity.models import build
from benchmarks.published.networks import NETWORKS
from odtpack_runtime.files.atomic import atomic_write
from odtpack_simulator.device.profile import load_profile
from odtpack_simulator.latency.latency import carry, measure_host
from odtpack_simulator.memory.memory_plan import plan_memory

SIMULATED = Path(__file__).with_name("simulated.json")
DEVICE = "xiaomi/mi-9"
ENDS = (1, 16)
"""Batch sizes that are timed: both ends of what was published. Those between lie on the line."""


def simulate(name: str) -> dict[str, Any]:
    """Time a network here at both ends, carry it to the device, and plan its memory."""
    built = build(NETWORKS[name])
    profile = load_profile(DEVICE)
    steps: dict[int, dict[str, float] | None] = {}
    for batch_size in ENDS:
        with tempfile.TemporaryDirectory(prefix="odtpack-bench-") as folder:
            host = measure_host(built.job(Path(folder), batch_size, task="time"))
        found = carry(host, profile).step_ms
        steps[batch_size] = found.model_dump(mode="json") if found else None
        print(name, batch_size, f"here {host.median_ms:.1f} ms", found or host.steady.busy)
    peaks = {
        size: plan_memory(built.package, built.shapes(size)).peak.nbytes
        for size in NETWORKS[name].batches
    }
    return {"device": DEVICE, "step_ms": steps, "peak_bytes": peaks}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    known = json.loads(SIMULATED.read_text()) if SIMULATED.exists() else {}
    for name in parser.parse_args().networks:
        known[name] = simulate(name)
        with atomic_write(SIMULATED) as stream:
            stream.write((json.dumps(known, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
