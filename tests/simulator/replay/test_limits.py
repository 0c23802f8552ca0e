"""Every way to hold a child to a limit: it is really ended, or the refusal says why."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from odtpack_runtime.errors import OdtpackError
from odtpack_simulator.memory import process_memory
from odtpack_simulator.memory.process_memory import (
    Limiter,
    LimitMethod,
    anonymous_bytes,
    hold_memory,
    make_group,
    remove_group,
)
from odtpack_simulator.replay.replay import run_training_child
from tests.programs import ran
from tests.simulator.packages import Case, without_arena

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")

MOUNT = "30 23 0:26 / {} rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"


def _cgroups_permitted() -> bool:
    try:
        group = make_group(2**30)
    except OSError:
        return False
    remove_group(group)
    return True


CGROUPS = sys.platform == "linux" and _cgroups_permitted()
EXECUTABLE: list[LimitMethod] = [*(["cgroup"] if CGROUPS else []), "rlimit", "watchdog"]  # type: ignore[list-item]


@pytest.fixture(scope="module")
def plain(mlp: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same without an arena, which RLIMIT_DATA counts rightly."""
    return without_arena(mlp, tmp_path_factory.mktemp("plain") / "case")


@pytest.fixture(scope="module")
def need(mlp: Case, tmp_path_factory: pytest.TempPathFactory) -> int:
    return run_training_child(mlp.job(tmp_path_factory.mktemp("need"))).peak_bytes


@pytest.mark.parametrize("method", EXECUTABLE)
class TestChild:
    def test_is_ended(self, method, mlp, plain, need, tmp_path):
        # Enough steps for the watchdog, which looks now and then.
        this = plain if method == "rlimit" else mlp
        job = this.job(tmp_path, limit_bytes=int(0.6 * need), limit_methods=[method], epochs=100)
        result = run_training_child(job)
        assert result.outcome == "killed"
        assert result.limit_method == method
        assert result.steps_done < job.schedule.steps
        words = {"cgroup": "control group", "rlimit": "out of memory", "watchdog": "watchdog"}
        assert words[method] in result.detail

    def test_completes_with_enough(self, method, mlp, plain, need, tmp_path):
        this = plain if method == "rlimit" else mlp
        job = this.job(tmp_path, limit_bytes=2 * need, limit_methods=[method])
        result = run_training_child(job)
        assert (result.outcome, result.limit_method) == ("completed", method)
        assert result.detail == ""


@pytest.mark.skipif(CGROUPS, reason="control groups are permitted here")
def test_without_control_groups_the_next_way_is_taken(mlp, plain, need, tmp_path):
    result = run_training_child(plain.job(tmp_path, limit_bytes=2 * need))
    assert result.limit_method == "rlimit"
    # An arena takes address space that it never touches: what is resident counts.
    result = run_training_child(mlp.job(tmp_path, limit_bytes=int(1.03 * need)))
    assert (result.limit_method, result.outcome) == ("watchdog", "completed")
    result = run_training_child(mlp.job(tmp_path, limit_bytes=int(0.97 * need)))
    assert (result.limit_method, result.outcome) == ("watchdog", "killed")


def test_no_way_is_permitted(mlp, need, tmp_path):
    """The training goes on, and the result says that nothing held it."""
    result = run_training_child(mlp.job(tmp_path, limit_bytes=need // 2, limit_methods=[]))
    assert (result.outcome, result.limit_method) == ("completed", None)
    assert "not held" in result.detail


class TestLibraryThatEndsTheProcess:
    """glibc does, with exit code 127, where a thread's own data find no room."""

    @pytest.fixture(autouse=True)
    def child(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = tmp_path / "child.sh"
        words = "cannot allocate memory for thread-local data: ABORT"
        script.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 127\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    def test_under_a_limit_it_is_a_result(self, mlp, tmp_path):
        result = run_training_child(mlp.job(tmp_path, limit_bytes=10**6))
        assert result.outcome == "killed"
        assert "thread-local data" in result.detail

    def test_without_one_it_is_a_failure(self, mlp, tmp_path):
        with pytest.raises(OdtpackError, match="exit code 127"):
            run_training_child(mlp.job(tmp_path))


def test_without_a_limit_nothing_is_made(monkeypatch):
    monkeypatch.setattr(process_memory, "make_group", lambda _: pytest.fail("a group was made"))
    with Limiter(None) as limiter:
        assert limiter.environment == {}
        assert limiter.ended() == ""


class TestGroup:
    """Control groups, on a tree that stands for the kernel's."""

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Path:
        own = tmp_path / "cgroup" / "app" / "own"
        own.mkdir(parents=True)
        (own / "cgroup.subtree_control").write_text("")
        (own.parent / "cgroup.subtree_control").write_text("cpu memory\n")
        proc = "22 1 0:2 / /proc rw - proc proc rw\n"
        (tmp_path / "mounts").write_text(proc + MOUNT.format(tmp_path / "cgroup"))
        (tmp_path / "membership").write_text("4:memory:/other\n0::/app/own\n")
        return tmp_path

    @staticmethod
    def make(tree: Path) -> Path:
        return make_group(4096, mounts=tree / "mounts", membership=tree / "membership")

    @pytest.fixture
    def kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Folders come with the kernel's files, and go with them."""
        plain = Path.mkdir

        def mkdir(self: Path, *arguments: object, **options: object) -> None:
            plain(self, *arguments, **options)  # type: ignore[arg-type]
            if not self.name.startswith("odtpack-"):
                return
            for name in ("memory.max", "memory.swap.max", "cgroup.procs", "memory.events"):
                (self / name).write_text("")

        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", shutil.rmtree)

    @pytest.mark.usefixtures("kernel")
    def test_is_made_where_memory_is_delegated(self, tree):
        group = self.make(tree)
        assert group.parent == tree / "cgroup" / "app"
        assert (group / "memory.max").read_text() == "4096"
        assert (group / "memory.swap.max").read_text() == "0"
        remove_group(group)
        assert not group.exists()

    @pytest.mark.usefixtures("kernel")
    def test_child_joins_and_parent_cleans_up(self, tree, monkeypatch):
        monkeypatch.setattr(process_memory, "make_group", lambda _: self.make(tree))
        with Limiter(4096) as limiter:
            (name, folder), *_ = limiter.environment.items()
            monkeypatch.setenv(name, folder)
            assert hold_memory(4096) == {"method": "cgroup", "problem": None}
            assert (Path(folder) / "cgroup.procs").read_text() == str(os.getpid())
            assert limiter.ended() == ""
            (Path(folder) / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
            assert "control group" in limiter.ended()
        assert not Path(folder).exists()

    def test_nothing_is_left_of_one_without_memory(self, tree):
        """An ordinary folder has no memory.max, and none is made in it."""
        with pytest.raises(FileNotFoundError):
            self.make(tree)
        assert [p.name for p in (tree / "cgroup" / "app").iterdir() if p.is_dir()] == ["own"]

    def test_is_not_tried_where_memory_is_not_delegated(self, tree, monkeypatch):
        (tree / "cgroup/app/cgroup.subtree_control").write_text("cpu\n")
        monkeypatch.setattr(Path, "mkdir", lambda *_: pytest.fail("a folder was made"))
        with pytest.raises(OSError, match="memory is not controlled here"):
            self.make(tree)

    def test_needs_version_2(self, tree):
        (tree / "mounts").write_text("22 1 0:2 / /proc rw - proc proc rw\n")
        with pytest.raises(OSError, match="version 2 are not mounted"):
            self.make(tree)

    def test_stays_inside_its_tree(self, tree):
        """A process at the root has nothing beside it."""
        (tree / "membership").write_text("0::/\n")
        (tree / "cgroup/cgroup.subtree_control").write_text("")
        (tree / "cgroup.subtree_control").write_text("memory\n")
        with pytest.raises(OSError, match="memory is not controlled here"):
            self.make(tree)
        assert {p.name for p in tree.iterdir() if p.is_dir()} == {"cgroup"}


def test_a_group_that_cannot_be_joined_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("ODTPACK_CHILD_CGROUP", str(tmp_path / "missing"))
    answer = hold_memory(2**30, methods=["cgroup", "watchdog"])
    assert answer["method"] == "watchdog"
    assert answer["base_bytes"] > 2**20
    refused = hold_memory(2**30, methods=["cgroup"])
    assert refused["method"] is None
    assert "control group" in refused["problem"]


def test_anonymous_bytes():
    """In a process that does nothing else: in this one, other tests' memory may go meanwhile."""
    code = """
import os

from odtpack_simulator.memory.process_memory import anonymous_bytes

before = anonymous_bytes(os.getpid())
kept = b"1" * 2**25
print(before, anonymous_bytes(os.getpid()))
"""
    before, after = map(int, ran(sys.executable, "-c", code).stdout.split())
    assert before > 0
    assert 2**25 <= after - before <= 2**25 + 2**20


def test_anonymous_bytes_of_nobody(tmp_path):
    assert anonymous_bytes(1, tmp_path) is None


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child


def test_watchdog_leaves_a_process_below_the_limit_alone(waiting):
    with Limiter(2**40, ["watchdog"]) as limiter:
        threads = threading.active_count()
        limiter.take(waiting.pid, {"method": "watchdog", "base_bytes": 0})
        assert threading.active_count() == threads + 1
        waiting.communicate(b"\n")
        assert waiting.returncode == 0
        assert limiter.ended() == ""


def test_watchdog_ends_a_process_beyond_it(waiting):
    with Limiter(0, ["watchdog"]) as limiter:
        limiter.take(waiting.pid, {"method": "watchdog", "base_bytes": 0})
        assert waiting.wait(60) == -signal.SIGKILL
        assert "watchdog" in limiter.ended()
