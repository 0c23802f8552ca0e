"""Interrupted trainings: really killed, and equal to the undisturbed one to the last bit."""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack.build import build_package
from odtpack_runtime import CheckpointState, OdtpackError
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_simulator.replay import interruption
from odtpack_simulator.replay.child import training_run
from odtpack_simulator.replay.interruption import (
    OWN_GENERATOR,
    interrupt,
    plan_interruptions,
    unrepeatable_operators,
)
from odtpack_simulator.replay.job import PROPERTY, Message, load_position, run_digest
from odtpack_simulator.replay.paired_loss import first_difference
from odtpack_simulator.replay.replay import run_child, run_training_child
from tests import zoo
from tests.programs import ran
from tests.refused import refused
from tests.simulator.graphs import weighted
from tests.simulator.interrupted import dropout_job, long_job, small_job
from tests.simulator.packages import change

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")


class TestPlan:
    @given(
        steps=st.integers(1, 500), save_every=st.integers(1, 600), count=st.integers(0, 40),
        seed=st.integers(0, 2**31 - 1),
    )  # fmt: skip
    @settings(max_examples=50)
    def test_every_kind_at_places_where_it_can_be(self, steps, save_every, count, seed):
        plan = plan_interruptions(steps, save_every, count, seed)
        assert plan == plan_interruptions(steps, save_every, count, seed)
        assert [each.step for each in plan] == sorted(each.step for each in plan)
        kinds = [each.at for each in plan]
        assert kinds.count("save") == (count + 1) // 3
        assert kinds.count("memory warning") == (count // 3 if steps > 1 else 0)
        assert len(plan) == count
        for each in plan:
            assert 1 <= each.step <= steps
            if each.at == "save":
                assert each.step % save_every == 0 or each.step == steps
                assert 0 <= each.share < 1
            if each.at == "memory warning":
                assert each.step < steps

    def test_the_seed_decides(self):
        assert plan_interruptions(90, 5, 9, 1) != plan_interruptions(90, 5, 9, 2)


class TestInterrupt:
    @pytest.mark.parametrize(("save_every", "count"), [(3, 6), (20, 4)])
    def test_ends_with_the_same_bits(self, undisturbed, save_every, count):
        kept, losses = undisturbed
        messages: list[Message] = []
        info = interrupt(
            kept, seed=5, count=count, save_every=save_every, on_message=messages.append
        )
        assert info.equal is True, info.detail
        plan = plan_interruptions(14, save_every, count, 5)
        asked = [(each.at, each.step) for each in plan]
        assert [(each.at, each.step) for each in info.interruptions] == asked
        saved = 0
        for each in info.interruptions:
            # Saves at multiples, and at every warning: what lies behind one is never lost.
            expected = each.step
            if each.at != "memory warning":
                expected = max(saved, (each.step - 1) // save_every * save_every)
            else:
                saved = each.step
            assert each.resumed_from_step == expected
            assert each.repeated_steps == each.step - expected
        codes = [m["code"] for m in messages if m["event"] == "exit"]
        kills = sum(each.at != "memory warning" for each in plan)
        assert codes == [-signal.SIGKILL] * kills + [0]
        assert info.saves == sum(m["event"] == "saved" for m in messages)
        steps = [m for m in messages if m["event"] == "step"]
        assert all(m["loss"] == losses[m["index"]] for m in steps)
        assert len(steps) == 14 + sum(each.repeated_steps for each in info.interruptions)

    def test_does_not_train_twice_where_the_end_is_kept(self, kept, monkeypatch):
        def refuse(*arguments: object, **options: object) -> None:
            raise AssertionError("trained again")

        monkeypatch.setattr(interruption, "run_training_child", refuse)
        before = kept.saved_checkpoint.read_bytes()
        assert interrupt(kept, seed=0, count=1, save_every=4).equal
        assert kept.saved_checkpoint.read_bytes() == before
        with pytest.raises(AssertionError, match="trained again"):
            interrupt(change(kept, keep_checkpoint=None), seed=0, count=1, save_every=4)

    def test_trains_where_none_is_kept(self, mlp, tmp_path):
        job = long_job(mlp, tmp_path, keep_checkpoint=str(tmp_path / "absent"))
        info = interrupt(job, seed=1, count=2, save_every=5)
        assert info.equal is True
        assert [each.at for each in info.interruptions].count("save") == 1
        assert not (tmp_path / "absent").exists()
        assert [path.name for path in tmp_path.iterdir()] == []

    def test_one_bit_is_seen(self, kept, tmp_path):
        state = CheckpointState.load_checkpoint(kept.saved_checkpoint)
        name, array = next(iter(state.arrays(trainable=True).items()))
        array.view(np.uint8).reshape(-1)[-4] ^= 1
        CheckpointState.save_checkpoint(state, tmp_path / "end", include_optimizer_state=True)
        job = change(kept, keep_checkpoint=str(tmp_path / "end"))
        info = interrupt(job, seed=0, count=1, save_every=4)
        assert info.equal is False
        assert f"the first difference is in parameter '{name}'" in info.detail

    def test_running_statistics(self, tmp_path):
        shapes = {"k": (4, 3, 3, 3), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,)}
        job = small_job(tmp_path, (3, 6, 6), shapes, """spread = Conv (input, k)
            normal, mean_out, var_out = BatchNormalization <training_mode = 1>
                (spread, scale, shift, mean, var)
            bent = Relu (normal)
            pooled = GlobalAveragePool (bent)
            features = Flatten (pooled)
            output = MatMul (features, w)""")  # fmt: skip
        info = interrupt(job, seed=3, count=3, save_every=3)
        assert info.equal is True, info.detail
        run_training_child(change(job, evaluate=False))
        first, last = (read_checkpoint(p).frozen for p in (job.checkpoint, job.saved_checkpoint))
        assert set(first) == {"mean", "var"}
        assert all(not np.array_equal(first[name], last[name]) for name in first)

    @linux
    def test_memory_goes_down_on_a_warning(self, kept):
        freed: list[Message] = []

        def listen(message: Message) -> None:
            if message["event"] == "freed":
                freed.append(message)

        info = interrupt(kept, seed=1, count=3, save_every=4, on_message=listen)
        assert len(freed) == 1
        # The parameters, gradients and moments of the MLP alone take 6.4 MB.
        assert freed[0]["before_bytes"] - freed[0]["after_bytes"] > 6_000_000
        assert "on a low-memory warning the training's memory went from" in info.detail
        assert "did not go down" not in info.detail

    def test_none(self, kept):
        info = interrupt(kept, seed=0, count=0, save_every=4)
        assert (info.interruptions, info.saves, info.equal) == ([], 4, True)

    @pytest.mark.parametrize(
        "arguments", [{"count": -1}, {"count": True}, {"save_every": 0}, {"seed": -1}]
    )
    def test_bad_arguments(self, kept, arguments):
        with refused("bad-interruptions"):
            interrupt(kept, **({"seed": 0, "count": 1, "save_every": 4} | arguments))

    def test_end_of_another_training(self, kept):
        with refused("other-run"):
            interrupt(change(kept, seed=8), seed=0, count=1, save_every=4)
        with refused("bad-position", "ends at 5"):
            interrupt(change(kept, max_steps=5), seed=0, count=1, save_every=4)

    def test_a_child_that_fails_is_an_error(self, kept):
        with refused("model-not-found"):
            interrupt(change(kept, optimizer_model="gone.onnx"), seed=0, count=1, save_every=4)


class TestDropout:
    def test_masks_are_a_function_of_the_position(self, tmp_path):
        job = dropout_job(tmp_path, "")
        assert interrupt(job, seed=0, count=3, save_every=3).equal is True
        one, same, other = (run_training_child(change(job, seed=seed)).losses for seed in (1, 1, 2))
        assert one == same != other
        still = change(job, learning_rate=0.0, batch_size=32, epochs=3)
        assert len(set(run_training_child(still).losses)) == 3

    def test_masks_of_a_seeded_node_start_anew(self, tmp_path):
        """Its generator belongs to the session: the result says why nothing can be expected."""
        job = dropout_job(tmp_path, "<seed = 4>")
        info = interrupt(job, seed=0, count=2, save_every=3)
        assert info.equal is None
        assert "with the attribute seed draws random numbers from a generator" in info.detail
        assert "the first difference is in" in info.detail

    def test_operators_with_a_generator_of_their_own(self, tmp_path):
        assert "RandomNormalLike" in OWN_GENERATOR
        text = """g (float[N] x, bool c) => (float[N] y) {
            y = If (c) <
                then_branch = a () => (float[N] p) { p = RandomNormalLike (x) },
                else_branch = b () => (float[N] q) { q = Identity (x) } >
        }"""
        onnx.save(weighted(text), tmp_path / "inner.onnx")
        assert (unrepeatable_operators(tmp_path / "inner.onnx") or "").startswith("RandomNormal")
        onnx.save(weighted(text.replace("RandomNormalLike", "Neg")), tmp_path / "plain.onnx")
        assert unrepeatable_operators(tmp_path / "plain.onnx") is None


def test_first_difference(kept):
    one = read_checkpoint(kept.saved_checkpoint)

    def other() -> CheckpointState:
        return CheckpointState.load_checkpoint(kept.saved_checkpoint)

    assert first_difference(one, other().snapshot(True)) is None
    state = other()
    name = next(iter(state.optimizer.moments))
    state.optimizer.moments[name][1].reshape(-1)[0] = -0.0
    one.optimizer.moments[name][1].reshape(-1)[0] = 0.0  # type: ignore[union-attr]
    assert first_difference(one, state.snapshot(True)) == f"moment 1 of '{name}'"
    state = other()
    state.optimizer.learning_rate += 1  # type: ignore[union-attr]
    one = read_checkpoint(kept.saved_checkpoint)
    assert first_difference(one, state.snapshot(True)) == "the optimizer's learning rate"
    lacks = first_difference(one, state.snapshot(False))
    assert lacks.endswith("which one of them lacks")


# Killed trainings go on from the last whole checkpoint, and from no other.


class TestKill:
    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    def test_in_the_middle_of_a_save(self, mlp, tmp_path, share):
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
        assert [m["step"] for m in run_child(job) if m["event"] == "begun"] == [3]
        assert not torn.exists()

    def test_before_the_first_save(self, mlp, tmp_path):
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

    def test_a_training_that_is_over_makes_no_step(self, kept):
        before = kept.saved_checkpoint.read_bytes()
        events = [m["event"] for m in run_child(change(kept, resume=True))]
        assert "step" not in events
        assert events[-3:] == ["trained", "compared", "exit"]
        assert kept.saved_checkpoint.read_bytes() == before

    def test_no_process_kills(self, monkeypatch):
        monkeypatch.setattr(training_run, "PATIENCE_SECONDS", 0)
        tell = mock.Mock()
        with pytest.raises(OdtpackError, match="did not end the training"):
            training_run.wait_to_be_killed(tell, step=3, written=None)
        tell.assert_called_once_with("paused", step=3, written=None)


def _pid(torn: Path) -> int:
    return int(torn.name.split(".")[2].split("-")[0])


def _tensor_bytes(checkpoint: Path) -> int:
    data = read_checkpoint(checkpoint)
    moments = [moment for own in data.optimizer.moments.values() for moment in own]
    return sum(a.nbytes for a in (*data.trainable.values(), *data.frozen.values(), *moments))


class TestPosition:
    """Checkpoints that a training must not go on from."""

    @pytest.mark.parametrize(("position", "problem"), [
        (None, "does not say at which step"), ("", "is not a position"),
        ("[]", "is not a position"), ("[" * 100_000, "is not a position"),
        ('{"step": 3}', "is not a position"),
        ('{"step": 3, "optimizer_step": 3, "run": "x", "more": 1}', "is not a position"),
        ({"step": True}, "is not a position"), ({"step": 3.0}, "is not a position"),
        ({"run": 7}, "is not a position"), ({"step": -1}, "step -1 is not one of the 14 steps"),
        ({"step": 15}, "step 15 is not one of the 14 steps"),
        ({"optimizer_step": 13}, "has made 14 steps, and the position says 13"),
    ])  # fmt: skip
    def test_bad(self, kept, position, problem):
        state = CheckpointState.load_checkpoint(kept.saved_checkpoint)
        good = json.loads(str(state.properties[PROPERTY]))
        del state.properties[PROPERTY]
        if isinstance(position, dict):
            position = json.dumps(good | position)
        if position is not None:
            state.properties[PROPERTY] = position
        with refused("bad-position", problem) as caught:
            load_position(state, kept, run_digest(kept))
        assert caught.value.hint == "remove it to begin the training anew"

    def test_without_the_optimizers_state(self, kept):
        state = CheckpointState.load_checkpoint(kept.saved_checkpoint)
        state.optimizer = None
        with pytest.raises(OdtpackError, match="has made no steps"):
            load_position(state, kept, run_digest(kept))

    def test_of_another_package(self, kept, case, tmp_path):
        """The child says it in one clear error, before it changes anything."""
        (tmp_path / "checkpoint").write_bytes(kept.saved_checkpoint.read_bytes())
        job = case("cnn").job(tmp_path, resume=True)
        with refused("other-run", "another package", where=tmp_path / "checkpoint"):
            run_training_child(job)
        assert (tmp_path / "checkpoint").read_bytes() == kept.saved_checkpoint.read_bytes()

    def test_a_packages_checkpoint(self, mlp, tmp_path):
        (tmp_path / "checkpoint").write_bytes(Path(mlp.package.checkpoint).read_bytes())
        with refused("bad-position"):
            run_training_child(mlp.job(tmp_path, resume=True))

    def test_no_checkpoint(self, mlp, tmp_path):
        (tmp_path / "checkpoint").write_bytes(b"nonsense")
        with refused("checkpoint-corrupt"):
            run_training_child(mlp.job(tmp_path, resume=True))

    @pytest.mark.parametrize(
        "changes",
        [{"seed": 9}, {"epochs": 2}, {"batch_size": 13}, {"learning_rate": 0.5}, {"pieces": 1}],
    )
    def test_digest_tells_trainings_apart(self, kept, changes):
        assert run_digest(change(kept, **changes)) != run_digest(kept)
        assert run_digest(change(kept, save_every=2, threads=2)) == run_digest(kept)


# The guide's program for surviving an interruption, killed and started again.

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "app-developer.md"

KILLED = """
import os, signal
from odtpack_runtime import CheckpointState, Optimizer
from odtpack_runtime.checkpoint.writer import write_checkpoint
from odtpack_simulator.replay.child.training_run import stopping_write

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

made = 0
step = Optimizer.step

def torn(state, path, include_optimizer_state):
    write_checkpoint(
        path, state.snapshot(include_optimizer_state), open_file=stopping_write(3000, die)
    )

def counted(self):
    global made
    step(self)
    made += 1
    if made == {at} and not {in_save}:
        die()
    if made == {at}:
        CheckpointState.save_checkpoint = torn

Optimizer.step = counted
"""


def run(program: str, folder: Path) -> int:
    return ran(sys.executable, "-c", program, code=None, cwd=folder).returncode


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the program begins."""
    folder = tmp_path_factory.mktemp("guide")
    model = zoo.cnn(size=8, width=(4, 4), hidden=16)
    build_package(model, folder / "package", loss="cross_entropy")
    random = np.random.default_rng(0)
    images = random.random((800, 1, 8, 8), np.float32)
    np.savez(folder / "digits.npz", input=images, labels=random.integers(0, 10, 800))
    return folder


def test_ends_with_the_same_bits(start, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (program,) = (block for block in blocks if "go on from where the last process" in block)
    shutil.copytree(start, tmp_path / "free")
    assert run(program, tmp_path / "free") == 0
    shutil.copytree(start, tmp_path / "killed")
    # Before the first save, in the first; and, counted from step 20 on, in the last.
    for at, in_save in ((4, False), (10, True), (27, False), (30, True)):
        killed = KILLED.format(at=at, in_save=in_save) + program
        assert run(killed, tmp_path / "killed") == -signal.SIGKILL
        assert bool(list((tmp_path / "killed").glob(".training.ckpt.*.tmp"))) == in_save
    assert run(program, tmp_path / "killed") == 0
    ends = [read_checkpoint(tmp_path / name / "training.ckpt") for name in ("free", "killed")]
    assert ends[0].optimizer.step == 50 == ends[0].properties["app.step"]
    assert first_difference(*ends) is None
    assert ends[0].properties == ends[1].properties
