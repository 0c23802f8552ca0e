"""Packages, built once for all tests of the simulator."""

import pytest

from odtpack_simulator.replay.job import Job
from odtpack_simulator.replay.replay import run_training_child
from tests.simulator.interrupted import long_job
from tests.simulator.packages import Case, Cases, make_case


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Build a case by name, once."""
    built: dict[str, Case] = {}

    def build(name: str) -> Case:
        if name not in built:
            built[name] = make_case(name, tmp_path_factory.mktemp(name))
        return built[name]

    return build


@pytest.fixture(scope="session")
def mlp(case: Cases) -> Case:
    return case("mlp")


@pytest.fixture(scope="session")
def undisturbed(
    case: Cases, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, list[float | None]]:
    """A job whose training is over, and its losses."""
    folder = tmp_path_factory.mktemp("kept")
    job = long_job(case("mlp"), folder, keep_checkpoint=str(folder / "end"))
    result = run_training_child(job)
    assert result.outcome == "completed"
    return job, result.losses


@pytest.fixture
def kept(undisturbed: tuple[Job, list[float | None]]) -> Job:
    return undisturbed[0]
