"""Interrupted trainings: really killed, and equal to the undisturbed one to the last bit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace as change
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_runtime import CheckpointState, OdtpackError
from odtpack_runtime.checkpoint.format import read_checkpoint
from odtpack_simulator.replay import interruption
from odtpack_simulator.replay.interruption import (
    OWN_GENERATOR,
    interrupt,
    plan_interruptions,
    unrepeatable_operators,
)
from odtpack_simulator.replay.job import Job, Message
from odtpack_simulator.replay.paired_loss import first_difference
from odtpack_simulator.replay.replay import run_training_child
from tests.simulator.interrupted import dropout_job, long_job, small_job
from tests.simulator.packages import Case

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")


@pytest.fixture(scope="module")
def mlp(case: Callable[[str], Case]) -> Case:
    return case("mlp")


class TestPlan:
    @given(
        steps=st.integers(1, 500),
        save_every=st.integers(1, 600),
        count=st.integers(0, 40),
        seed=st.integers(0, 2**31 - 1),
    )
    @settings(max_examples=50)
    def test_every_kind_at_places_where_it_can_be(
        self, steps: int, save_every: int, count: int, seed: int
    ) -> None:
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
                assert each.share is not None
                assert 0 <= each.share < 1
            if each.at == "memory warning":
                assert each.step < steps

    def test_the_seed_decides(self) -> None:
        assert plan_interruptions(90, 5, 9, 1) != plan_interruptions(90, 5, 9, 2)


class TestInterrupt:
    @pytest.mark.parametrize(("save_every", "count"), [(3, 6), (20, 4)])
    def test_ends_with_the_same_bits(
        self, undisturbed: tuple[Job, list[float | None]], save_every: int, count: int
    ) -> None:
        kept, losses = undisturbed
        messages: list[Message] = []
        info = interrupt(
            kept, seed=5, count=count, save_every=save_every, on_message=messages.append
        )
        assert info.equal is True, info.detail
        plan = plan_interruptions(14, save_every, count, 5)
        assert [(each.at, each.step) for each in info.interruptions] == [
            (each.at, each.step) for each in plan
        ]
        saved = 0
        for each in info.interruptions:
            # Saves at multiples, and at every warning: what lies behind one is never lost.
            expected = each.step
            if each.at != "memory warning":
                whole = (each.step - 1) // save_every * save_every
                expected = max(saved, whole)
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

    def test_does_not_train_twice_where_the_end_is_kept(
        self, kept: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: object, **options: object) -> None:
            raise AssertionError("trained again")

        monkeypatch.setattr(interruption, "run_training_child", refuse)
        before = kept.saved_checkpoint.read_bytes()
        assert interrupt(kept, seed=0, count=1, save_every=4).equal
        assert kept.saved_checkpoint.read_bytes() == before
        with pytest.raises(AssertionError, match="trained again"):
            interrupt(change(kept, keep_checkpoint=None), seed=0, count=1, save_every=4)

    def test_trains_where_none_is_kept(self, mlp: Case, tmp_path: Path) -> None:
        job = long_job(mlp, tmp_path, keep_checkpoint=str(tmp_path / "absent"))
        info = interrupt(job, seed=1, count=2, save_every=5)
        assert info.equal is True
        assert [each.at for each in info.interruptions].count("save") == 1
        assert not (tmp_path / "absent").exists()
        assert [path.name for path in tmp_path.iterdir()] == []

    def test_one_bit_is_seen(self, kept: Job, tmp_path: Path) -> None:
        state = CheckpointState.load_checkpoint(kept.saved_checkpoint)
        name, array = next(iter(state.arrays(trainable=True).items()))
        array.view(np.uint8).reshape(-1)[-4] ^= 1
        CheckpointState.save_checkpoint(state, tmp_path / "end", include_optimizer_state=True)
        job = change(kept, keep_checkpoint=str(tmp_path / "end"))
        info = interrupt(job, seed=0, count=1, save_every=4)
        assert info.equal is False
        assert f"the first difference is in parameter '{name}'" in info.detail

    def test_running_statistics(self, tmp_path: Path) -> None:
        job = small_job(
            tmp_path,
            (3, 6, 6),
            {"k": (4, 3, 3, 3), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,)},
            """spread = Conv (input, k)
            normal, mean_out, var_out = BatchNormalization <training_mode = 1>
                (spread, scale, shift, mean, var)
            bent = Relu (normal)
            pooled = GlobalAveragePool (bent)
            features = Flatten (pooled)
            output = MatMul (features, w)""",
        )
        info = interrupt(job, seed=3, count=3, save_every=3)
        assert info.equal is True, info.detail
        run_training_child(change(job, evaluate=False))
        first, last = (read_checkpoint(p).frozen for p in (job.checkpoint, job.saved_checkpoint))
        assert set(first) == {"mean", "var"}
        assert all(not np.array_equal(first[name], last[name]) for name in first)

    @linux
    def test_memory_goes_down_on_a_warning(self, kept: Job) -> None:
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

    def test_none(self, kept: Job) -> None:
        info = interrupt(kept, seed=0, count=0, save_every=4)
        assert (info.interruptions, info.saves, info.equal) == ([], 4, True)

    @pytest.mark.parametrize(
        "arguments", [{"count": -1}, {"count": True}, {"save_every": 0}, {"seed": -1}]
    )
    def test_bad_arguments(self, kept: Job, arguments: dict[str, int]) -> None:
        with pytest.raises(OdtpackError) as caught:
            interrupt(kept, **({"seed": 0, "count": 1, "save_every": 4} | arguments))
        assert caught.value.code == "bad-interruptions"

    def test_end_of_another_training(self, kept: Job) -> None:
        with pytest.raises(OdtpackError) as caught:
            interrupt(change(kept, seed=8), seed=0, count=1, save_every=4)
        assert caught.value.code == "other-run"
        with pytest.raises(OdtpackError, match="ends at 5") as caught:
            interrupt(change(kept, max_steps=5), seed=0, count=1, save_every=4)
        assert caught.value.code == "bad-position"

    def test_a_child_that_fails_is_an_error(self, kept: Job) -> None:
        with pytest.raises(OdtpackError) as caught:
            interrupt(change(kept, optimizer_model="gone.onnx"), seed=0, count=1, save_every=4)
        assert caught.value.code == "model-not-found"


class TestDropout:
    def test_masks_are_a_function_of_the_position(self, tmp_path: Path) -> None:
        job = dropout_job(tmp_path, "")
        assert interrupt(job, seed=0, count=3, save_every=3).equal is True
        one, same, other = (run_training_child(change(job, seed=seed)).losses for seed in (1, 1, 2))
        assert one == same != other
        masks_differ = run_training_child(
            change(job, learning_rate=0.0, batch_size=32, epochs=3)
        ).losses
        assert len(set(masks_differ)) == 3

    def test_masks_of_a_seeded_node_start_anew(self, tmp_path: Path) -> None:
        """Its generator belongs to the session: the result says why nothing can be expected."""
        job = dropout_job(tmp_path, "<seed = 4>")
        info = interrupt(job, seed=0, count=2, save_every=3)
        assert info.equal is None
        assert "with the attribute seed draws random numbers from a generator" in info.detail
        assert "the first difference is in" in info.detail

    def test_operators_with_a_generator_of_their_own(self, tmp_path: Path) -> None:
        assert "RandomNormalLike" in OWN_GENERATOR
        text = """<ir_version: 8, opset_import: ["": 17]> g (float[N] x, bool c) => (float[N] y) {
            y = If (c) <
                then_branch = a () => (float[N] p) { p = RandomNormalLike (x) },
                else_branch = b () => (float[N] q) { q = Identity (x) } >
        }"""
        onnx.save(onnx.parser.parse_model(text), tmp_path / "inner.onnx")
        assert (unrepeatable_operators(tmp_path / "inner.onnx") or "").startswith("RandomNormal")
        plain = onnx.parser.parse_model(text.replace("RandomNormalLike", "Neg"))
        onnx.save(plain, tmp_path / "plain.onnx")
        assert unrepeatable_operators(tmp_path / "plain.onnx") is None


def test_first_difference(kept: Job) -> None:
    one = read_checkpoint(kept.saved_checkpoint)

    def other() -> CheckpointState:
        return CheckpointState.load_checkpoint(kept.saved_checkpoint)

    assert first_difference(one, other().snapshot(True)) is None
    state = other()
    assert state.optimizer is not None
    name = next(iter(state.optimizer.moments))
    state.optimizer.moments[name][1].reshape(-1)[0] = -0.0
    one.optimizer.moments[name][1].reshape(-1)[0] = 0.0  # type: ignore[union-attr]
    assert first_difference(one, state.snapshot(True)) == f"moment 1 of '{name}'"
    state = other()
    state.optimizer.learning_rate += 1  # type: ignore[union-attr]
    one = read_checkpoint(kept.saved_checkpoint)
    assert first_difference(one, state.snapshot(True)) == "the optimizer's learning rate"
    lacks = first_difference(one, state.snapshot(False))
    assert lacks is not None
    assert lacks.endswith("which one of them lacks")
