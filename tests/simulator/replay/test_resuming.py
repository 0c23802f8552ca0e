"""Killed trainings go on from the last whole checkpoint, and from no other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace as change
from pathlib import Path

import pytest

from odtpack_runtime import CheckpointState, OdtpackError
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_simulator.replay.child import training_run
from odtpack_simulator.replay.job import PROPERTY, Job, load_position, run_digest
from odtpack_simulator.replay.replay import run_child, run_training_child
from tests.simulator.interrupted import long_job
from tests.simulator.packages import Case


@pytest.fixture(scope="module")
def mlp(case: Callable[[str], Case]) -> Case:
    return case("mlp")


class TestKill:
    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    def test_in_the_middle_of_a_save(self, mlp: Case, tmp_path: Path, share: float) -> None:
        """The old checkpoint is whole, the new one partly written under its temporary name."""
        target = tmp_path / "checkpoint"
        job = long_job(mlp, tmp_path, save_every=3, resume=True, evaluate=False)
        whole = 0
        with closing(run_child(change(job, pause_at=6, pause_in_save=share))) as messages:
            for message in messages:
                if message["event"] == "saved":
                    assert message["step"] == 3
                    whole = target.stat().st_size
                if message["event"] == "paused":
                    (torn,) = tmp_path.glob(".checkpoint.*.tmp")
                    assert torn.stat().st_size == message["written"]
                    assert message["written"] == max(1, int(share * _tensor_bytes(target)))
                    assert 0 < message["written"] < whole
                    assert target.stat().st_size == whole
                    os.kill(_pid(torn), signal.SIGKILL)
                if message["event"] == "exit":
                    assert message["code"] == -signal.SIGKILL
        assert torn.exists()
        state = CheckpointState.load_checkpoint(target)
        assert load_position(state, job, run_digest(job)).step == 3
        begun = [m["step"] for m in run_child(job) if m["event"] == "begun"]
        assert begun == [3]
        assert not torn.exists()

    def test_before_the_first_save(self, mlp: Case, tmp_path: Path) -> None:
        job = long_job(mlp, tmp_path, save_every=3, resume=True, evaluate=False)
        for message in run_child(change(job, pause_at=2)):
            if message["event"] == "started":
                pid = message["pid"]
            if message["event"] == "paused":
                assert message["written"] is None
                os.kill(pid, signal.SIGKILL)
        assert not job.saved_checkpoint.exists()
        events = list(run_child(job))
        assert [m["step"] for m in events if m["event"] == "begun"] == [0]
        assert sum(m["event"] == "step" for m in events) == 14

    def test_a_training_that_is_over_makes_no_step(self, kept: Job) -> None:
        before = kept.saved_checkpoint.read_bytes()
        events = [m["event"] for m in run_child(change(kept, resume=True))]
        assert "step" not in events
        assert events[-3:] == ["trained", "compared", "exit"]
        assert kept.saved_checkpoint.read_bytes() == before

    def test_no_process_kills(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training_run, "PATIENCE_SECONDS", 0)
        told: list[object] = []
        with pytest.raises(OdtpackError, match="and was not"):
            training_run.wait_to_be_killed(
                lambda *a, **k: told.append((a, k)), step=3, written=None
            )
        assert told == [(("paused",), {"step": 3, "written": None})]


def _pid(torn: Path) -> int:
    return int(torn.name.split(".")[2].split("-")[0])


def _tensor_bytes(checkpoint: Path) -> int:
    data = read_checkpoint(checkpoint)
    assert data.optimizer is not None
    moments = [moment for own in data.optimizer.moments.values() for moment in own]
    return sum(a.nbytes for a in (*data.trainable.values(), *data.frozen.values(), *moments))


class TestPosition:
    """Checkpoints that a training must not go on from."""

    @pytest.mark.parametrize(
        ("position", "problem"),
        [
            (None, "does not say at which step"),
            ("", "is not a position"),
            ("[]", "is not a position"),
            ("[" * 100_000, "is not a position"),
            ('{"step": 3}', "is not a position"),
            ('{"step": 3, "optimizer_step": 3, "run": "x", "more": 1}', "is not a position"),
            ({"step": True}, "is not a position"),
            ({"step": 3.0}, "is not a position"),
            ({"run": 7}, "is not a position"),
            ({"step": -1}, "step -1 is not one of the 14 steps"),
            ({"step": 15}, "step 15 is not one of the 14 steps"),
            ({"optimizer_step": 13}, "has made 14 steps, and the position says 13"),
        ],
    )
    def test_bad(self, kept: Job, position: str | dict[str, object] | None, problem: str) -> None:
        state = CheckpointState.load_checkpoint(kept.saved_checkpoint)
        good = json.loads(str(state.properties[PROPERTY]))
        del state.properties[PROPERTY]
        if isinstance(position, dict):
            position = json.dumps(good | position)
        if position is not None:
            state.properties[PROPERTY] = position
        with pytest.raises(OdtpackError, match=problem) as caught:
            load_position(state, kept, run_digest(kept))
        assert caught.value.code == "bad-position"
        assert caught.value.hint == "remove it to begin the training anew"

    def test_without_the_optimizers_state(self, kept: Job) -> None:
        state = CheckpointState.load_checkpoint(kept.saved_checkpoint)
        state.optimizer = None
        with pytest.raises(OdtpackError, match="has made no steps"):
            load_position(state, kept, run_digest(kept))

    def test_of_another_package(
        self, kept: Job, case: Callable[[str], Case], tmp_path: Path
    ) -> None:
        """The child says it in one clear error, before it changes anything."""
        (tmp_path / "checkpoint").write_bytes(kept.saved_checkpoint.read_bytes())
        job = case("cnn").job(tmp_path, resume=True)
        with pytest.raises(OdtpackError, match="another package") as caught:
            run_training_child(job)
        assert caught.value.code == "other-run"
        assert caught.value.where == str(tmp_path / "checkpoint")
        assert (tmp_path / "checkpoint").read_bytes() == kept.saved_checkpoint.read_bytes()

    def test_a_packages_checkpoint(self, mlp: Case, tmp_path: Path) -> None:
        (tmp_path / "checkpoint").write_bytes(Path(mlp.package.checkpoint).read_bytes())
        with pytest.raises(OdtpackError) as caught:
            run_training_child(mlp.job(tmp_path, resume=True))
        assert caught.value.code == "bad-position"

    def test_no_checkpoint(self, mlp: Case, tmp_path: Path) -> None:
        (tmp_path / "checkpoint").write_bytes(b"nonsense")
        with pytest.raises(OdtpackError) as caught:
            run_training_child(mlp.job(tmp_path, resume=True))
        assert caught.value.code == "checkpoint-corrupt"

    @pytest.mark.parametrize(
        "changes",
        [{"seed": 9}, {"epochs": 2}, {"batch_size": 13}, {"learning_rate": 0.5}, {"pieces": 1}],
    )
    def test_digest_tells_trainings_apart(self, kept: Job, changes: dict[str, int]) -> None:
        assert run_digest(change(kept, **changes)) != run_digest(kept)
        assert run_digest(change(kept, save_every=2, threads=2)) == run_digest(kept)
