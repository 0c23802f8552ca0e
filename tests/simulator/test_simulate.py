"""A whole simulation: prediction, timing, free training, limits near the peak, interruptions."""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import odtpack_simulator as sim
from odtpack.adapters import AdapterSpec
from odtpack.build import build_package
from odtpack.fit.search_context import Trial, train
from odtpack_runtime import Package
from odtpack_runtime.training.schedules import Cosine, ScheduleSpec
from odtpack_simulator import simulation as module
from odtpack_simulator.campaign import run_campaign
from odtpack_simulator.device.profile import DeviceProfile
from odtpack_simulator.figures import advice
from odtpack_simulator.figures.judge import judge
from odtpack_simulator.memory.memory_plan import MemoryPlan, plan_memory
from odtpack_simulator.replay import replay
from odtpack_simulator.replay.executor import LocalExecutor, RayExecutor
from odtpack_simulator.replay.job import Job, SamplePlan
from odtpack_simulator.replay.replay import Progress, ReplayResult, run_training_child
from odtpack_simulator.reports import render_report
from odtpack_simulator.reports.simulation import key_figures, simulation_report
from odtpack_simulator.result import DeviceResult, PhasePeak, Policy, SimulationResult, load_result
from odtpack_simulator.simulation import _sha256, simulate
from tests import zoo
from tests.adapters import llama
from tests.kits.harness import OVERFLOWS
from tests.packaging_tools import open_training
from tests.programs import ran
from tests.refused import refused
from tests.simulator.changed import changed
from tests.simulator.factory import make_result
from tests.simulator.graphs import weighted
from tests.simulator.judged import check
from tests.simulator.packages import Case
from tests.simulator.profiles import make_profile
from tests.training.test_not_finite import rooted

PROFILES = [
    make_profile("large", 10**9), make_profile("same", 10**9), make_profile("tiny", 6_000_000),
    make_profile("near", 12_000_000), make_profile("unknown", None, rates=False),
]  # fmt: skip
INTERRUPTIONS = 3
ARGUMENTS = {"batch_size": 64, "epochs": 2, "learning_rate": 0.001, "seed": 4}


@dataclass
class Done:
    result: SimulationResult
    progress: list[Progress]

    def device(self, name: str) -> DeviceResult:
        return next(d for d in self.result.devices if d.name == f"test/{name}")


def simulated(mlp: Case, *profiles: DeviceProfile, **more: Any) -> SimulationResult:
    return simulate(mlp.folder / "package", mlp.data, profiles, **(ARGUMENTS | more))


@pytest.fixture(scope="module")
def done(mlp: Case) -> Done:
    progress: list[Progress] = []
    more = {"interruptions": INTERRUPTIONS, "progress": progress.append}
    return Done(simulated(mlp, *PROFILES, **more), progress)


def test_schedule_and_package(done, mlp):
    result = done.result
    assert (result.data.samples, result.data.held_out_samples) == (241, 48)
    assert result.data.steps == len(result.training.losses) == 8  # 193 samples, twice
    assert result.package.trainable_parameters == 784 * 500 + 500 + 500 * 10 + 10
    files = sum(f.stat().st_size for f in (mlp.folder / "package").iterdir())
    assert result.package.package_bytes == files
    assert (result.package.loss, result.package.optimizer) == ("cross_entropy", "adamw")
    assert result.host.threads == 1


def test_training(done):
    training = done.result.training
    assert training.metric_name == "accuracy"
    assert 0 <= training.metric_before <= 1
    assert None not in (training.eval_loss_before, training.eval_loss_after)


def test_memory(done):
    memory = done.result.memory
    assert memory.predicted.peak_bytes == memory.predicted.breakdown.total
    assert memory.measured_peak_bytes == pytest.approx(memory.predicted.peak_bytes, abs=3e6)
    peaks = {device.memory.predicted_peak_bytes for device in done.result.devices}
    assert peaks == {memory.predicted.peak_bytes}


def test_an_evaluation_is_planned_as_it_occurs(mlp, monkeypatch):
    """48 samples are held out, fewer than a batch, or none; three batches and a part are left."""

    class StoppedError(Exception):
        pass

    asked: list[object] = []

    def planned(*_: object, evaluated: int, samples: set[int], steps: int, **__: object) -> None:
        asked.append((evaluated, samples, steps))
        raise StoppedError

    monkeypatch.setattr("odtpack_simulator.simulation.plan_memory", planned)
    for share in (0.2, 0.0):
        with pytest.raises(StoppedError):
            simulated(mlp, PROFILES[0], holdout=share)
    assert asked == [(48, {193}, 8), (0, {241}, 8)]


def test_data_have_a_digest(done, mlp):
    with np.load(mlp.data) as data:
        arrays = dict(data)
    assert done.result.data.sha256 == _sha256(arrays, 0)
    others = {**arrays, "labels": arrays["labels"][::-1]}
    assert len({_sha256(each, apart) for each in (arrays, others) for apart in (0, 48)}) == 4


def test_device_with_room(done):
    device = done.device("large")
    assert (device.training.outcome, device.training.steps_done) == ("completed", 8)
    assert device.training.final_loss == done.result.training.losses[-1]
    assert device.memory.measured_peak_bytes is not None
    assert device.latency.step_ms is not None


def test_device_without_room(done):
    device = done.device("tiny")
    assert device.training.outcome == "completed"
    assert "not enough by the plan" in device.training.detail
    assert next(d for d in judge(done.result).devices if d.name == device.name).memory.outcome == (
        "over"
    )


def test_device_about_which_nothing_is_known(done):
    device = done.device("unknown")
    assert device.memory.limit_bytes is None
    assert device.memory.measured_peak_bytes == done.result.memory.measured_peak_bytes
    assert device.latency.not_judged
    assert "unknown" in device.training.detail


def test_devices_share_what_is_computed(done):
    peaks = {d.memory.measured_peak_bytes for d in done.result.devices}
    assert peaks == {done.result.memory.measured_peak_bytes}  # one training for all of them
    assert [now.stage for now in done.progress if now.step == 0] == [
        *("predicting", "timing", "measuring", "replaying")
    ]


def test_only_near_limits_are_held(done):
    tiny, near, large = (done.device(name) for name in ("tiny", "near", "large"))
    assert tiny.memory.held is None
    assert near.memory.held is not None
    assert near.memory.held_bytes == near.memory.room_bytes
    assert large.memory.held is None
    assert "far above" in large.training.detail


def test_interruptions(done):
    info = done.result.interruption
    assert [each.at for each in info.interruptions].count("save") == 1
    assert len(info.interruptions) == INTERRUPTIONS
    assert info.equal is True


def test_campaigns(done):
    campaign = done.device("large").campaign
    assert campaign.active_s is not None
    trained = done.result.training.curve
    assert [point.step for point in campaign.curve] == [point.step for point in trained]
    assert campaign.curve[-1].metric == done.result.training.metric_after
    unknown = done.device("unknown").campaign
    assert unknown.active_s is None
    assert "active_s" in {each.figure for each in unknown.not_judged}


def test_phases_and_metric_interval(done):
    memory = done.result.memory
    phases = memory.phases
    assert max(phase.predicted_bytes for phase in phases) == memory.predicted.peak_bytes
    measured = [phase.measured_bytes for phase in phases if phase.measured_bytes is not None]
    assert max(measured) == memory.measured_peak_bytes
    compared = [phase.predicted_bytes for phase in phases if phase.measured_bytes is not None]
    assert memory.replayed_bytes == max(compared)
    later = PhasePeak(phase="exporting", predicted_bytes=10**9, measured_bytes=None)
    predicted = memory.predicted.model_copy(update={"peak_bytes": 10**9})
    longer = memory.model_copy(update={"phases": [*phases, later], "predicted": predicted})
    figures = key_figures(done.result.model_copy(update={"memory": longer}))
    (said,) = (remark for name, _, remark in figures if name.startswith("Peak memory"))
    assert "without exporting" in said
    assert f"({100 * (max(compared) / max(measured) - 1):+.1f} %)" in said
    training = done.result.training
    assert training.metric_interval[0] < training.metric_after < training.metric_interval[1]


def test_progress(done):
    assert [now.run for now in done.progress] == sorted(now.run for now in done.progress)
    assert {now.runs for now in done.progress} == {done.progress[-1].run} == {4}
    measuring = [now for now in done.progress if now.stage == "measuring"]
    assert [now.step for now in measuring] == list(range(9))
    assert [now.loss for now in measuring[1:]] == done.result.training.losses
    assert (done.progress[-1].step, done.progress[-1].steps) == (2, 2)


def test_the_number_of_devices_adds_no_replays(mlp, monkeypatch, done):
    """Fifty limits around the peak take one replay, and their verdicts have one threshold."""
    peak = done.result.memory.predicted.peak_bytes
    held: list[int | None] = []
    hold = replay.hold

    def counted(job: Job) -> ReplayResult:
        held.append(job.limit_bytes)
        return hold(job)

    monkeypatch.setattr(replay, "hold", counted)
    profiles = [make_profile(f"d{n}", int(peak * (0.5 + n / 50))) for n in range(50)]
    result = simulated(mlp, *profiles)
    assert len(held) == 1
    outcomes = [d.memory.outcome for d in judge(result).devices]
    assert outcomes == sorted(outcomes, key=["over", "close", "fits"].index)
    assert set(outcomes) == {"over", "close", "fits"}


def test_a_plan_that_is_too_low_is_told(mlp, monkeypatch, done):
    """Replays are ended where it fits: these devices fail, and the check asks for a report."""
    plan = module.plan_memory

    def low(*args: object, **kwargs: object) -> MemoryPlan:
        found = plan(*args, **kwargs)  # type: ignore[arg-type]
        phases = tuple(
            replace(phase, items=tuple(replace(i, nbytes=i.nbytes * 3 // 5) for i in phase.items))
            for phase in found.phases
        )
        return replace(found, phases=phases)

    monkeypatch.setattr(module, "plan_memory", low)
    peak = done.result.memory.predicted.peak_bytes
    profiles = [make_profile("low", int(0.65 * peak)), make_profile("high", int(0.85 * peak))]
    result = judge(simulated(mlp, *profiles))
    assert [d.memory.outcome for d in result.devices] == ["killed", "killed"]
    for device in result.devices:
        (found,) = [c for c in device.checks if c.metric == "memory_limit"]
        assert (found.status, device.verdict) == ("fail", "fail")
        assert "please report" in found.message
    detail = result.devices[0].memory.detail
    assert "MB" in detail or "out of memory" in detail


def test_pieces_and_background(mlp):
    policy = Policy(state="background", pieces=3, save_every=2, sessions_per_day=2)
    result = simulated(mlp, PROFILES[0], policy=policy)
    assert result.data.steps == len(result.training.losses) == 8  # of 65, 64 and 64 samples, twice
    (device,) = result.devices
    # The first piece has a sample more, and two batches in each epoch: four steps of eight.
    sessions = {point.step: point.session for point in device.campaign.curve}
    assert sessions == {0: 1, 2: 1, 4: 1, 5: 2, 6: 2, 7: 3, 8: 3}
    assert (device.memory.limit_state, device.memory.limit_bytes) == ("background", None)
    assert result.policy == policy


@pytest.mark.parametrize(("pieces", "largest"), [(1, 193), (10, 20)])
def test_memory_is_planned_for_the_largest_batch_that_occurs(mlp, pieces, largest):
    def peak(size: int) -> SimulationResult:
        policy = Policy(pieces=pieces)
        return simulated(mlp, PROFILES[0], policy=policy, batch_size=size, epochs=1)

    asked, real = peak(2_000_000), peak(largest)
    assert (asked.data.batch_size, asked.data.asked_batch_size) == (largest, 2_000_000)
    assert asked.memory.predicted == real.memory.predicted
    assert real.data.smaller_batch is None
    few = f"memory is that of evaluations of {real.data.held_out_samples} samples"
    assert (few in str(real.data.small_evaluation)) == (real.data.held_out_samples < largest)
    words = f"largest batch has {largest} samples, not the 2,000,000 asked for"
    assert words in simulation_report(asked).summary
    for form in ("markdown", "html"):
        assert words in render_report(asked, form).decode()


def test_side_by_side_is_the_same(mlp, done):
    more = {"interruptions": INTERRUPTIONS, "executor": LocalExecutor(2)}
    again = simulated(mlp, PROFILES[0], **more)
    assert again.interruption.interruptions == done.result.interruption.interruptions
    assert again.training == done.result.training


@pytest.mark.sweep  # test_executor has what is particular to Ray
def test_on_ray(mlp, done):
    """A simulation whose replays run on a cluster, which sees none of this machine's files."""
    ray = pytest.importorskip("ray", reason="Ray has no build for this Python")
    more = {"interruptions": INTERRUPTIONS, "executor": RayExecutor("local", 2)}
    try:
        again = simulated(mlp, PROFILES[3], **more)
    finally:
        ray.shutdown()
    assert again.interruption.interruptions == done.result.interruption.interruptions
    assert again.interruption.equal is True
    assert [d.memory.held is not None for d in again.devices] == [True]


def test_verdicts_come_from_judge(done, tmp_path):
    assert done.result.verdict == "not judged"
    judged = judge(done.result)
    assert [d.verdict for d in judged.devices] == ["pass", "pass", "fail", "pass", "not judged"]
    assert judged.over_budget
    path = tmp_path / "result.json"
    path.write_text(judged.to_json())
    assert load_result(path) == judged


def test_same_seed_same_training(done, mlp):
    again = simulate(mlp.folder / "package" / "manifest.json", mlp.data, [], **ARGUMENTS)
    assert again.training == done.result.training
    assert again.memory.predicted == done.result.memory.predicted
    assert again.memory.timeline == done.result.memory.timeline
    assert again.package.manifest_sha256 == done.result.package.manifest_sha256


@pytest.mark.parametrize(("changes", "code"), [
    ({"learning_rate": float("nan")}, "bad-learning-rate"),
    ({"learning_rate": -1.0}, "bad-learning-rate"),
    ({"threads": 0}, "bad-threads"),
    ({"interruptions": -1}, "bad-interruptions"),
    ({"policy": Policy(pieces=10_000)}, "too-few-samples"),
    ({"batch_size": 0}, "bad-batch-size"),
    ({"profiles": [PROFILES[0], PROFILES[0]]}, "device-twice"),
    ({"data_path": "gone.npz"}, "data-not-found"),
    ({"package_path": "gone"}, "package-not-found"),
])  # fmt: skip
def test_bad_arguments(changes, code, mlp):
    given = {"package_path": mlp.folder / "package", "data_path": mlp.data, "profiles": []}
    with refused(code):
        simulate(**given | ARGUMENTS | changes)  # type: ignore[arg-type]


def test_data_that_do_not_fit(mlp, tmp_path):
    np.savez(tmp_path / "data.npz", input=mlp.inputs)
    with refused("data-missing", "labels"):
        simulate(mlp.folder / "package", tmp_path / "data.npz", [], **ARGUMENTS)


def test_free_training_that_is_killed(mlp, monkeypatch):
    """Without a limit, running out of memory is a failure of this machine."""
    run_training_child = module.run_training_child

    def starved(job: Job, **rest: object) -> object:
        return run_training_child(replace(job, limit_bytes=1_000_000), **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "run_training_child", starved)
    with refused("replay-killed", "killed without any limit"):
        simulated(mlp)


def test_a_million_epochs_are_extrapolated_from_a_part(mlp):
    """Losses are those of the part, times those of the whole schedule; and it says so."""
    result = simulated(mlp, make_profile("large", 10**9), most_steps=8, epochs=10**6)
    assert (result.data.steps, result.data.trained_steps) == (4 * 10**6, 8)
    assert len(result.training.losses) == 8
    assert str(result.data.extrapolated).startswith("8 of 4,000,000 steps were trained:")
    (device,) = judge(result).devices
    assert "steps_done" not in [check.metric for check in device.checks if check.status == "fail"]
    least = 4e6 * device.latency.step_ms.low / 1e3
    assert device.campaign.active_s.low == pytest.approx(least, rel=0.01)


def test_a_language_model_has_tokens_and_an_adapter(tmp_path):
    model = llama.exported(llama.llama(), tmp_path / "model.onnx")
    adapter = AdapterSpec("lora", on=("*.q_proj",), rank=2)
    build_package(model, tmp_path / "package", loss="next_token", adapter=adapter)
    ids = np.random.default_rng(0).integers(0, llama.VOCABULARY, (12, llama.LENGTH))
    np.savez(tmp_path / "tokens.npz", input_ids=ids, labels=ids)
    result = simulate(
        tmp_path / "package", tmp_path / "tokens.npz", [make_profile("large", 10**9)],
        batch_size=3, epochs=1, seed=0,
    )  # fmt: skip
    assert result.data.tokens_per_step == 3 * llama.LENGTH
    rows = llama.WIDTH + llama.WIDTH  # of A and of B, each of rank numbers of four bytes
    layers = len(Package.open(tmp_path / "package").manifest.adapter.layers)  # type: ignore[union-attr]
    assert result.package.adapter_bytes == layers * 2 * 4 * rows
    figures = {name: figure for name, figure, _ in key_figures(result)}
    step = result.devices[0].latency.step_ms
    number, _, unit = figures["Tokens a second, slowest device"].partition(" ")
    shown = float(number) * {"": 1, "k": 1e3, "M": 1e6}[unit]
    assert shown == pytest.approx(3 * llama.LENGTH / step.typical * 1e3, rel=0.01)


# Replays and searches say which steps were not made because something was not finite.


@pytest.fixture
def poisoned(tmp_path: Path) -> Case:
    """A training each of whose gradients of ``second`` is infinite, and no loss is."""
    build_package(
        rooted(), tmp_path / "package", loss="cross_entropy", step_model="never", self_check=False
    )
    random = np.random.default_rng(1)
    inputs, labels = random.standard_normal((40, 4), np.float32), random.integers(0, 3, 40)
    for name, array in (("input", inputs), ("labels", labels)):
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "data.npz", input=inputs, labels=labels)
    (tmp_path / "child").mkdir()
    return Case("rooted", tmp_path, 8, inputs, labels)


def test_a_replay(poisoned, tmp_path):
    job = poisoned.job(tmp_path / "child")
    found = run_training_child(job)
    assert found.steps_done == job.steps > 1
    assert None not in found.losses
    assert found.skipped == job.steps
    # Nothing is counted as made: each is the first.
    assert found.not_finite == "step 1: not finite: gradient of second"


def test_a_search(poisoned, tmp_path):
    job = poisoned.job(tmp_path / "child")
    found = train(Trial(str(tmp_path / "package"), job.data, job.schedule, 0.01))
    assert found.loss is None
    assert found.problem == (
        f"{job.steps} batches were skipped, the last in step 1: not finite: gradient of second"
    )


def test_a_simulation(poisoned, tmp_path):
    data = tmp_path / "data.npz"
    result = judge(simulate(tmp_path / "package", data, [], epochs=1, batch_size=8, seed=0))
    assert result.training.skipped_batches == len(result.training.losses) > 1
    finite = check(result, "finite_loss")
    assert (finite.status, finite.actual) == ("fail", result.training.skipped_batches)
    assert "gradient of second" in finite.message
    assert "a gradient was not finite" in str(finite.advice)


@pytest.mark.parametrize(("skipped", "words"), [(1, "1 batch was"), (3, "3 batches were")])
def test_losses_and_gradients_are_counted_once(skipped, words):
    update = {"losses": [2.3, None, 2.2], "skipped_batches": skipped, "not_finite": "step 3: why"}
    finite = check(judge(changed(make_result([]), training=update)), "finite_loss")
    assert finite.actual == skipped
    assert finite.message.endswith(f"; {words} skipped, the last in step 3: why")


# A replay follows the recipe of the package: schedule, accumulation and element type.

SAMPLES, BATCH, ACCUMULATE, EPOCHS, SEED, RATE = 50, 4, 3, 2, 5, 0.02
SPEC = ScheduleSpec("cosine", {"warmup_steps": 2, "floor": 0.1}, RATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float64 package with accumulation and a schedule, and its data."""
    folder = tmp_path_factory.mktemp("recipe")
    text = """net (double[batch, 5] x) => (double[batch, 3] y) {
        hidden = MatMul (x, w)
        bent = Tanh (hidden)
        y = MatMul (bent, v)
    }"""
    random = np.random.default_rng(1)
    model = weighted(
        text, {"w": random.standard_normal((5, 7)), "v": random.standard_normal((7, 3))}
    )
    options = {"loss": "mse", "schedule": SPEC, "accumulation_steps": ACCUMULATE}
    build_package(model, folder / "package", **options)
    x, target = random.standard_normal((SAMPLES, 5)), random.standard_normal((SAMPLES, 3))
    np.savez(folder / "data.npz", x=x, target=target)
    return folder


def of_recipe(folder: Path, *profiles: DeviceProfile, **more: Any) -> SimulationResult:
    arguments = {"batch_size": BATCH, "epochs": 1, "seed": SEED} | more
    return simulate(folder / "package", folder / "data.npz", profiles, **arguments)


def expected_losses(folder: Path, rate: float) -> list[float]:
    """Mean loss of the batches of each step, at the rates that the schedule's formula gives."""
    _, module, optimizer = open_training(folder / "package")
    data = np.load(folder / "data.npz")
    steps = EPOCHS * 4  # 40 samples are 10 batches: three steps of three, and one of one
    schedule = Cosine(warmup_steps=2, floor=0.1, total_steps=steps)
    losses = []
    for epoch in range(EPOCHS):
        batches = list(SamplePlan(SAMPLES, BATCH, EPOCHS, SEED).training_batches(epoch))
        assert len(batches) == 10
        for start in range(0, 10, ACCUMULATE):
            group = batches[start : start + ACCUMULATE]
            optimizer.set_learning_rate(rate * schedule.factor(len(losses)))
            losses.append(float(np.mean([module(data["x"][i], data["target"][i]) for i in group])))
            optimizer.step()
            module.lazy_reset_grad()
    assert len(losses) == steps
    return losses


@pytest.mark.parametrize("state", ["foreground", "background"])
def test_times_are_those_of_a_step_that_occurs(folder, state):
    """40 samples are 2 batches of 32, fewer than a step accumulates; or 10 of 4 in 4 steps."""
    profile, policy = make_profile("large", 10**9), Policy(state=state, save_every=2)
    few, many = (
        of_recipe(folder, profile, batch_size=size, epochs=3, policy=policy) for size in (32, BATCH)
    )
    assert (few.data.step_samples, few.data.steps) == (40, 3)
    assert "a pass has 2 batches, fewer than the 3 to accumulate" in simulation_report(few).summary
    assert (many.data.step_samples, many.data.smaller_batch) == (12, None)
    latency, saved = many.devices[0].latency, many.latency_host.checkpoint_bytes or 0
    share = 10 / 12 if state == "foreground" else 1.0
    mean = latency.model_copy(update={"step_ms": latency.step_ms.scaled(share)})
    more = {"steps": [12], "checkpoint_bytes": saved, "curve": []}
    campaign = run_campaign(profile, mean, many.policy, **more)
    assert many.devices[0].campaign.active_s == campaign.active_s
    if state == "foreground":
        whole = run_campaign(profile, latency, policy, **more).active_s
        assert whole.typical > campaign.active_s.typical


@pytest.mark.parametrize("rate", [None, 0.3])
def test_losses_are_those_of_the_recipe(folder, rate):
    phone = make_profile("large", 10**9)
    result = of_recipe(folder, phone, epochs=EPOCHS, learning_rate=rate)
    expected = expected_losses(folder, RATE if rate is None else rate)
    assert result.training.losses == pytest.approx(expected, rel=1e-12)
    assert (result.data.steps, result.data.accumulation_steps) == (8, 3)
    assert len(result.latency_host.steps_ms) > 0
    device = result.devices[0]
    assert device.training.steps_done == 8
    # 5 x 7 and 7 x 3 elements of 8 bytes.
    assert result.package.parameter_bytes == 448
    assert "take 448 B of" in advice.for_package_size(result)


def test_a_step_calls_the_optimizer_once(folder):
    """Operators are counted over whole steps: three batches and one update each."""
    calls: Counter[str] = Counter()
    for cost in of_recipe(folder).latency_host.by_operator:
        calls[cost.op_type] += cost.calls
    # The model has one Tanh; AdamW's bias correction has two, and the step takes two roots.
    assert calls["Tanh"] % 5 == 0
    assert calls["Sqrt"] * 5 == calls["Tanh"] * 2


def test_a_warm_up_that_does_not_fit(folder):
    with refused("bad-schedule", "total_steps") as caught:
        of_recipe(folder, batch_size=40)
    assert caught.value.hint == "the training makes 1 steps: replay more epochs"


def test_working_memory_of_the_optimizer_counts_elements_of_eight_bytes(folder):
    package = Package.open(folder / "package")
    plan = plan_memory(package, {"x": (BATCH, 5), "target": (BATCH, 3)})
    phase = next(phase for phase in plan.phases if phase.name == "optimizer step")
    # 35 and 21 elements, each rounded up to 64 bytes: 320 + 192.
    held = [item for item in phase.items if item.kind == "activations"]
    assert [item.nbytes for item in held if item.name != "kept by the arena"] == [512]


# What ``import odtpack_simulator`` gives, and what it costs.


def test_all_names_are_there():
    from odtpack_simulator import simulation
    from odtpack_simulator.figures.judge import judge
    from odtpack_simulator.result import load_result

    assert sim.simulate is simulation.simulate
    assert sim.judge is judge
    assert sim.load_result is load_result
    for name in sim.__all__:
        assert callable(getattr(sim, name)), name
        assert name in dir(sim)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        sim.simulat  # noqa: B018


def test_the_import_alone_loads_nothing_else():
    code = (
        "import sys; before = set(sys.modules)\n"
        "import odtpack_simulator as sim\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))\n"
        "print([name for name in sys.modules if name.startswith('odtpack')])"
    )
    done = ran(sys.executable, "-c", code)
    assert done.stdout == "['odtpack_simulator']\n['odtpack_simulator']\n"


def test_an_overflow_of_mixed_precision_is_no_fault(poisoned, tmp_path):
    options = {"loss": "cross_entropy", "precision": "mixed", "self_check": False}
    with OVERFLOWS:
        build_package(zoo.mlp((4, 5, 3)), tmp_path / "mixed", **options)
    data = poisoned.folder / "data.npz"
    result = judge(simulate(tmp_path / "mixed", data, [], epochs=1, batch_size=8, seed=0))
    assert (result.training.skipped_batches, result.training.overflows) == (0, 1)
    finite = check(result, "finite_loss")
    assert (finite.status, finite.actual) == ("pass", 0)
    assert "1 more only lowered the loss scale" in finite.message
