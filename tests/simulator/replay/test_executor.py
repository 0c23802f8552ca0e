"""Work side by side gives what work one after the other gives, errors included."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.replay.executor import (
    Executor,
    LocalExecutor,
    RayExecutor,
    Shipment,
    default_jobs,
    make_executor,
    relocate,
)
from tests.programs import ran
from tests.refused import refused


@dataclass(frozen=True)
class Item:
    number: int
    file: str = ""


def square(item: Item) -> tuple[int, int]:
    return item.number**2, os.getpid()


def read(item: Item) -> tuple[str, str]:
    return Path(item.file).read_text("utf-8"), item.file


def refuse_odd(item: Item) -> int:
    if item.number % 2:
        raise OdtpackError(
            "bad-argument", f"{item.number} is odd", where="here", hint="use another"
        )
    return item.number


def die(item: Item) -> int:
    if item.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return item.number


@pytest.fixture(scope="module")
def ray_executor() -> Iterator[RayExecutor]:
    ray = pytest.importorskip("ray", reason="Ray has no build for this Python")
    yield RayExecutor("local", 2)
    ray.shutdown()


@pytest.fixture(params=["one", "two", "ray"])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "ray":
        ray: RayExecutor = request.getfixturevalue("ray_executor")
        return ray
    return LocalExecutor(1 if request.param == "one" else 2)


def test_results_in_order(executor):
    told: list[tuple[int, int]] = []
    results = executor.map(square, [Item(n) for n in range(5)], on_done=lambda *a: told.append(a))
    assert [value for value, _ in results] == [0, 1, 4, 9, 16]
    assert told[-1] == (5, 5)
    elsewhere = {process for _, process in results} - {os.getpid()}
    assert bool(elsewhere) == (not isinstance(executor, LocalExecutor) or executor.jobs > 1)


def test_no_items(executor):
    assert executor.map(square, []) == []


def test_an_error_keeps_its_parts(executor):
    with pytest.raises(OdtpackError, match="3 is odd") as caught:
        executor.map(refuse_odd, [Item(2), Item(3), Item(4)])
    error = caught.value
    assert (error.code, error.where, error.hint) == ("bad-argument", "here", "use another")


@pytest.mark.parametrize("executor", ["two", "ray"], indirect=True)
def test_a_process_that_dies(executor):
    with refused("worker-lost"):
        executor.map(die, [Item(0), Item(1), Item(2)])


def test_files_are_sent(ray_executor, tmp_path):
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "a.txt").write_text("hello", "utf-8")
    (folder / "link").symlink_to("/etc/hostname")
    results = ray_executor.map(read, [Item(0, str(folder / "inner" / "a.txt"))], files=[folder])
    text, place = results[0]
    assert text == "hello"
    assert not place.startswith(str(tmp_path))  # a copy was read, as another machine would


def test_only_regular_files_are_packed(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "kept").write_text("x", "utf-8")
    (folder / "link").symlink_to("/etc/hostname")
    place = Shipment.pack(folder).unpack(tmp_path / "there")
    assert [path.name for path in Path(place).iterdir()] == ["kept"]


def test_relocation_takes_whole_names_only():
    moved = {"/a/b": "/x"}
    assert relocate("/a/b/c", moved) == "/x/c"
    assert relocate("/a/bc", moved) == "/a/bc"
    assert relocate({"k": [Path("/a/b")]}, moved) == {"k": [Path("/x")]}
    assert relocate(Item(1, "/a/b"), moved) == Item(1, "/x")


def test_options(monkeypatch):
    undone = "odtpack_simulator.replay.executor.default_jobs", default_jobs
    monkeypatch.setattr(*undone)  # elsewhere tests work in one process
    assert isinstance(make_executor(2), LocalExecutor)
    cores = make_executor(0)
    assert isinstance(cores, LocalExecutor)
    assert cores.jobs == default_jobs() >= 1
    with pytest.raises(OdtpackError, match="between 1 and 4096"):
        make_executor(-1)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "here:port"])
def test_ray_that_does_not_answer(address):
    pytest.importorskip("ray", reason="Ray has no build for this Python")
    with refused("ray-unreachable"):
        make_executor(1, address)


# What a replay's process loads counts in its memory, and delays each of the replays.


@pytest.mark.parametrize("module", ["training_run", "timing_run"])
def test_a_replay_loads_no_more_than_the_app_and_the_clock(module):
    code = (
        f"import sys, odtpack_simulator.replay.child.{module}\n"
        "found = {'onnx', 'onnx_ir', 'pydantic', 'rich', 'typer', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(str(sorted(found)) if found else 0)"
    )
    ran(sys.executable, "-c", code)
