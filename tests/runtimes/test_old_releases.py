"""Real packages are trained on old releases of ONNX Runtime: ``make runtimes``.

Each release lies in ``.venv-runtimes`` (scripts/old_runtimes.py). Where a package's manifest says
that a release is too old, that release must refuse it, so that the manifest asks for no more than
is needed either.
"""

import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from odtpack import targets
from scripts.old_runtimes import CACHE, REFUSING, ROOT, TRAINED
from tests.programs import ran
from tests.runtimes.packages import MODELS, STEPS, Trained

RECORD = ROOT / "docs" / "runtimes.json"
WORKER = Path(__file__).with_name("worker.py")
INSTALLED = ".".join(onnxruntime.__version__.split(".")[:2])
RELEASES = (*REFUSING, *TRAINED, INSTALLED)
TOLERANCE = 1e-6
"""Relative: what the order of a sum in float32 makes."""

pytestmark = pytest.mark.runtimes


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("packages")
    return {name: Trained(name, folder / name.replace(" ", "-")) for name in MODELS}


@pytest.fixture(scope="module")
def record(packages: dict[str, Trained]) -> Iterator[dict[str, Any]]:
    """What the releases did; written for the documentation if ``make runtimes`` asks for it."""
    ran: dict[str, Any] = {}
    yield ran
    if os.environ.get("ODTPACK_RECORD") and len(ran) == len(RELEASES):
        content = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{platform.system()} {platform.machine()}",
            "steps": STEPS,
            "tolerance": TOLERANCE,
            "packages": {
                name: {"title": MODELS[name][0], "minimum": minimum(trained)}
                for name, trained in packages.items()
            },
            "releases": ran,
        }
        RECORD.write_text(json.dumps(content, indent=1) + "\n")


def minimum(trained: Trained) -> str:
    return trained.package.manifest.minimum_onnxruntime


def run(release: str, packages: dict[str, Trained], folder: Path) -> dict[str, Any]:
    python = Path(sys.executable) if release == INSTALLED else CACHE / release / "bin" / "python"
    if not python.exists():
        pytest.skip(f"ONNX Runtime {release} is not installed (run: make runtimes)")
    job = folder / "job.json"
    job.write_text(json.dumps({name: trained.job for name, trained in packages.items()}))
    done = ran(python, WORKER, job)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_trains_what_the_manifest_says_and_nothing_else(
    release, packages, record, tmp_path
):
    told = run(release, packages, tmp_path)
    assert told["version"].startswith(f"{release}.")
    outcomes: dict[str, float | None] = {}
    for name, trained in packages.items():
        result = told["results"][name]
        if targets.parsed(release) < targets.parsed(minimum(trained)):
            assert "error" in result, f"{name} says {minimum(trained)}, and {release} trains it"
            outcomes[name] = None
            continue
        assert "error" not in result, f"{name} on {release}: {result['error']}"
        np.testing.assert_allclose(
            result["losses"], trained.expected, rtol=TOLERANCE, err_msg=f"{name} on {release}"
        )
        assert result["losses"][-1] < result["losses"][0]
        differences = np.abs(np.subtract(result["losses"], trained.expected))
        outcomes[name] = float((differences / np.abs(trained.expected)).max())
    record[told["version"]] = outcomes
