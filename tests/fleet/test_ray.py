"""A federation whose clients train on a Ray cluster of two nodes, each in processes of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from odtpack.cli import main
from odtpack_runtime import CheckpointState
from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.fleet_file import parse_fleet
from odtpack_simulator.replay.executor import RayExecutor
from tests.fleet.fleets import IDEAL, write_digits

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Two nodes with one processor core each."""
    ray = pytest.importorskip("ray", reason="Ray has no build for this Python")
    from ray.cluster_utils import Cluster

    paths = [ROOT / "packager", ROOT / "runtime", ROOT]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Beside other tests, workers at Ray's own niceness of 15 hardly run.
        patch.setenv("RAY_worker_niceness", "0")
        # What other programs take of the machine's memory is no reason to end workers.
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        cluster = Cluster()
        try:
            for _ in range(2):
                cluster.add_node(wait=False, num_cpus=1)
            cluster.wait_for_nodes(timeout=120)
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


def whose(number: int) -> str:
    import ray

    time.sleep(0.5)  # long enough that one node cannot take all
    if number == 99:
        raise OdtpackError("fleet-arrays", "number 99")
    return str(ray.get_runtime_context().get_node_id())


def told(number: int) -> int:
    if number == 99:
        raise OdtpackError("fleet-arrays", "number 99")
    return number


def test_an_error_ends_calls_and_never_this_process(address: str) -> None:
    executor = RayExecutor(address)
    for _ in range(100):
        numbers: list[int] = []
        with pytest.raises(OdtpackError, match="number 99"):
            numbers.extend(executor.in_order(told, [(1,), (99,), (2,), (3,)]))
        assert numbers == [1]
    assert executor.map(str, range(9)) == list("012345678")


def test_two_nodes_come_to_the_bits_of_this_process(address: str, tmp_path: Path) -> None:
    folder = write_digits(tmp_path)
    executor = RayExecutor(address)
    assert executor.cores == 2
    assert len(set(executor.in_order(whose, [(number,) for number in range(16)]))) == 2
    with pytest.raises(OdtpackError, match="number 99"):
        list(executor.in_order(whose, [(1,), (99,), (2,)]))
    files, fleet = (folder / "package", folder / "digits.npz"), parse_fleet(IDEAL.encode())
    here, state = Federation(*files, fleet).simulate()
    there, other = Federation(*files, fleet).simulate(ray=executor)
    assert there.rounds == here.rounds
    assert other.arrays.keys() == state.arrays.keys()
    for name, array in state.arrays.items():
        assert array.tobytes() == other.arrays[name].tobytes(), name
    (tmp_path / "fleet.toml").write_text(IDEAL)
    command = ["fleet", "run", str(files[0]), "--data", str(files[1])]
    command += ["--fleet", str(tmp_path / "fleet.toml"), "--out", str(tmp_path / "run")]
    assert main([*command, "--ray", address]) == 0
    trained = CheckpointState.load_checkpoint(tmp_path / "run" / "federated.ckpt")
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(trained.parameters[name].data, array)


def test_a_cluster_that_does_not_answer_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="Ray has no build for this Python")
    folder = write_digits(tmp_path)
    (tmp_path / "fleet.toml").write_text(IDEAL)
    command = ["fleet", "run", str(folder / "package"), "--data", str(folder / "digits.npz")]
    command += ["--fleet", str(tmp_path / "fleet.toml"), "--ray", "127.0.0.1:1"]
    assert main(command) == 2
    assert "ray-unreachable" in capsys.readouterr().err
    assert not (tmp_path / "package-fleet").exists()
