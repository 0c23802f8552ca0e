"""Schedules against PyTorch's, against their formulas, and over an interruption."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from odtpack_runtime import (
    CheckpointState,
    LinearLRScheduler,
    LRScheduler,
    Module,
    OdtpackError,
    Optimizer,
)
from odtpack_runtime.checkpoint.state import SCHEDULE_PROPERTY
from odtpack_runtime.training.schedules import (
    Constant,
    Cosine,
    Linear,
    MultiStep,
    ScheduleSpec,
    Step,
    make_schedule,
)
from tests.refused import refused
from tests.runtime import models

RATE = 0.03
Torch = torch.optim.lr_scheduler
MakeTorch = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def open_optimizer(files, checkpoint=None, kind="adamw"):
    state = CheckpointState.load_checkpoint(checkpoint or files.checkpoint)
    return Optimizer(getattr(files, kind), Module(files.training, state))


@pytest.mark.parametrize(("schedule", "make"), [
    (Constant(), lambda o: Torch.ConstantLR(o, factor=1.0)),
    (Linear(0, 20), lambda o: Torch.LinearLR(o, 1.0, 0.0, total_iters=20)),
    (Cosine(0, 30), lambda o: Torch.CosineAnnealingLR(o, T_max=30)),
    (Cosine(0, 30, floor=0.2), lambda o: Torch.CosineAnnealingLR(o, 30, eta_min=0.2 * RATE)),
    (Step(period=7, gamma=0.5), lambda o: Torch.StepLR(o, 7, 0.5)),
    (MultiStep(milestones=(3, 3, 11, 20), gamma=0.3),
     lambda o: Torch.MultiStepLR(o, [3, 3, 11, 20], 0.3)),
    (Cosine(5, 25), lambda o: Torch.LambdaLR(
        o, lambda s: s / 5 if s < 5 else 0.5 * (1 + math.cos(math.pi * (s - 5) / 20)))),
    (Constant(6), lambda o: Torch.LambdaLR(o, lambda s: min(1.0, s / 6))),
])  # fmt: skip
def test_follows_pytorch(schedule, make, regression):
    optimizer = open_optimizer(regression)
    ours = LRScheduler(optimizer, schedule, RATE)
    theirs_optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    theirs = make(theirs_optimizer)
    end = getattr(schedule, "total_steps", 28)
    for _ in range(end + 1):
        expected = theirs_optimizer.param_groups[0]["lr"]
        assert optimizer.get_learning_rate() == pytest.approx(expected, rel=1e-6, abs=1e-9)
        optimizer.step()
        theirs_optimizer.step()
        ours.step()
        theirs.step()


@pytest.mark.parametrize(
    ("schedule", "last"),
    [(Linear(2, 10), 0.0), (Cosine(2, 10), 0.0), (Cosine(0, 10, floor=0.25), 0.25)],
)
def test_after_the_end(schedule, last):
    assert [schedule.factor(step) for step in (10, 11, 1000)] == [last] * 3
    assert schedule.factor(9) > last


@pytest.mark.parametrize(
    "schedule", [Linear(4, 4), Cosine(4, 4), Step(4, period=2), MultiStep(4, milestones=(2,))]
)
def test_warm_up_comes_first(schedule):
    assert [schedule.factor(step) for step in range(4)] == [0.0, 0.25, 0.5, 0.75]
    assert schedule.factor(4) < 1


@pytest.mark.parametrize("schedule", [
    Constant(3), Linear(3, 17), Cosine(3, 17, floor=0.1), Step(3, period=4, gamma=0.7),
    MultiStep(3, milestones=(5, 8, 13), gamma=1 / 3),
])  # fmt: skip
def test_an_interrupted_run_goes_on_bit_by_bit(schedule, regression, tmp_path):
    def run(optimizer: Optimizer, steps: range) -> tuple[list[float], dict[str, bytes]]:
        scheduler = LRScheduler.restore(optimizer)
        assert scheduler.schedule == schedule
        state = optimizer.checkpoint_state
        module, rates = Module(regression.training, state), []
        for index in steps:
            module(*models.feeds(index))
            rates.append(optimizer.get_learning_rate())
            optimizer.step()
            scheduler.step()
            module.lazy_reset_grad()
        return rates, {name: p.data.tobytes() for name, p in state.parameters}

    rate = 0.1 / 3  # no float32
    straight = open_optimizer(regression)
    LRScheduler(straight, schedule, rate)
    rates, values = run(straight, range(16))
    assert len(set(rates)) > 2

    first = open_optimizer(regression)
    LRScheduler(first, schedule, rate)
    head, _ = run(first, range(7))
    CheckpointState.save_checkpoint(first.checkpoint_state, tmp_path / "c", True)
    second = open_optimizer(regression, tmp_path / "c")
    assert second.get_learning_rate() == first.get_learning_rate()
    tail, resumed = run(second, range(7, 16))
    assert head + tail == rates
    assert resumed == values


def test_without_a_schedule_nothing_is_restored(regression):
    assert LRScheduler.restore(open_optimizer(regression)) is None


@pytest.mark.parametrize("text", [
    "", "null", "[]", "{}", "[" * 100_000,
    '{"kind": "linear", "initial_lr": 1, "warmup_steps": 0, "total_steps": 5}',
    '{"kind": "linear", "initial_lr": NaN, "warmup_steps": 0, "total_steps": 5}',
    '{"kind": "linear", "initial_lr": 1e999, "warmup_steps": 0, "total_steps": 5}',
    '{"kind": "linear", "initial_lr": 0.1, "warmup_steps": 6, "total_steps": 5}',
    '{"kind": "linear", "initial_lr": 0.1, "total_steps": 5.0}',
    '{"kind": "linear", "initial_lr": 0.1, "total_steps": true}',
    '{"kind": "linear", "initial_lr": 0.1}',
    '{"kind": "linear", "initial_lr": 0.1, "total_steps": 5, "floor": 0}',
    '{"kind": "cosine", "initial_lr": 0.1, "total_steps": 5, "floor": "0"}',
    '{"kind": "cosine", "initial_lr": 0.1, "total_steps": 5, "floor": 2}',
    '{"kind": "step", "initial_lr": 0.1, "period": 0}',
    '{"kind": "step", "initial_lr": 0.1, "period": 1, "gamma": 0}',
    '{"kind": "multistep", "initial_lr": 0.1, "milestones": []}',
    '{"kind": "multistep", "initial_lr": 0.1, "milestones": [5, 3]}',
    '{"kind": "multistep", "initial_lr": 0.1, "milestones": ["5"]}',
    '{"kind": "multistep", "initial_lr": 0.1, "milestones": 5}',
    '{"kind": "sine", "initial_lr": 0.1}', '{"kind": ["sine"], "initial_lr": 0.1}',
    '{"initial_lr": 0.1}',
])  # fmt: skip
def test_properties_that_are_no_schedule(regression, text):
    optimizer = open_optimizer(regression)
    optimizer.checkpoint_state.properties[SCHEDULE_PROPERTY] = text
    with refused("bad-schedule"):
        LRScheduler.restore(optimizer)
    optimizer.checkpoint_state.properties[SCHEDULE_PROPERTY] = 7
    with pytest.raises(OdtpackError):
        LRScheduler.restore(optimizer)


@pytest.mark.parametrize(("text", "spec"), [
    ("constant", ScheduleSpec("constant", {})),
    ("linear:total=9,lr=0.5", ScheduleSpec("linear", {"total_steps": 9}, 0.5)),
    ("cosine:warmup=3,floor=0.1", ScheduleSpec("cosine", {"warmup_steps": 3, "floor": 0.1})),
    ("step:period=4,gamma=0.5", ScheduleSpec("step", {"period": 4, "gamma": 0.5})),
    ("multistep:milestones=3+8", ScheduleSpec("multistep", {"milestones": (3, 8)})),
])  # fmt: skip
def test_texts(text, spec):
    assert ScheduleSpec.parse(text) == spec


def test_the_run_sets_a_length_that_is_left_open():
    assert ScheduleSpec.parse("cosine:warmup=3").schedule(40) == Cosine(3, 40)
    assert ScheduleSpec.parse("cosine:total=20").schedule(40) == Cosine(0, 20)
    assert ScheduleSpec.parse("constant").schedule(40) == Constant(0)
    with pytest.raises(OdtpackError, match="total_steps"):
        ScheduleSpec.parse("linear:warmup=30").schedule(20)


def test_settings_make_the_schedule_again():
    for schedule in (Constant(3), Cosine(3, 17, 0.1), MultiStep(3, (5, 8), 0.5)):
        assert make_schedule(schedule.kind, schedule.settings()) == schedule


@pytest.mark.parametrize(("warmup", "total", "expected"), [
    (2, 6, [0, 0.1, 0.2, 0.15, 0.1, 0.05, 0, 0]), (0, 4, [0.2, 0.15, 0.1, 0.05, 0, 0]),
    (1, 2, [0, 0.2, 0, 0]), (3, 3, [0, 0.2 / 3, 0.4 / 3, 0, 0]), (0, 1, [0.2, 0, 0]),
])  # fmt: skip
def test_warm_up_and_decay(regression, warmup, total, expected):
    optimizer = open_optimizer(regression, kind="sgd")
    scheduler = LinearLRScheduler(optimizer, warmup, total, 0.2)
    seen = [optimizer.get_learning_rate()]
    for _ in expected[1:]:
        optimizer.step()
        scheduler.step()
        seen.append(optimizer.get_learning_rate())
    np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-9)


def test_a_resumed_run_stays_on_the_line(regression, tmp_path):
    optimizer = open_optimizer(regression, kind="sgd")
    scheduler = LinearLRScheduler(optimizer, 2, 10, 0.2)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    CheckpointState.save_checkpoint(optimizer.checkpoint_state, tmp_path / "c", True)
    resumed = open_optimizer(regression, tmp_path / "c", "sgd")
    assert resumed.get_learning_rate() == optimizer.get_learning_rate()
    LinearLRScheduler(resumed, 2, 10, 0.2)
    assert resumed.get_learning_rate() == optimizer.get_learning_rate()


def test_numbers_of_numpy_and_lists_are_taken():
    rate, counts = np.float32(0.5), np.array([3, 5])
    spec = ScheduleSpec("multistep", {"milestones": counts, "gamma": np.float64(0.1)}, rate)
    assert (spec.learning_rate, spec.schedule(9)) == (0.5, MultiStep(0, (3, 5), 0.1))
    assert MultiStep(np.int64(0), [3, 5]).settings() == MultiStep(0, (3, 5)).settings()
    with refused("bad-schedule", "a whole number"):
        Linear(0, np.float32(9))


@pytest.mark.parametrize(("warmup", "total"), [(5, 4), (-1, 4), (0, 0), (0, -1)])
def test_schedules_that_make_no_sense(regression, warmup, total):
    optimizer = open_optimizer(regression, kind="sgd")
    with refused("bad-schedule"):
        LinearLRScheduler(optimizer, warmup, total, 0.2)
    assert optimizer.get_learning_rate() == float(np.float32(0.001))
    with pytest.raises(OdtpackError):
        LinearLRScheduler(optimizer, 0, 4, float("nan"))
