"""Replays: real training in a child, measured, held to limits, and always brought to an end."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from odtpack_runtime import CheckpointState, Module, OdtpackError, Optimizer
from odtpack_runtime.apart import worker
from odtpack_simulator.measure.calibration import model_runs
from odtpack_simulator.memory.memory_plan import plan_memory
from odtpack_simulator.replay.executor import LocalExecutor
from odtpack_simulator.replay.job import Job, Message
from odtpack_simulator.replay.replay import (
    ReplayResult,
    final_loss,
    run_child,
    run_training_child,
    write_data,
)
from odtpack_simulator.result import SimulationResult
from tests.packaging_tools import open_training
from tests.refused import refused
from tests.simulator.changed import changed
from tests.simulator.factory import make_result
from tests.simulator.figures.test_judge import DEVICE
from tests.simulator.judged import check, judged
from tests.simulator.packages import Case
from tests.sweep import split

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def measured(mlp: Case, tmp_path_factory: pytest.TempPathFactory) -> ReplayResult:
    job = mlp.job(tmp_path_factory.mktemp("run_training_child"), logits=1, labels=1)
    return run_training_child(job)


def train_here(case: Case, job: Job) -> tuple[list[float], list[float], list[float]]:
    """Losses, evaluation losses and accuracies of the same training in this process."""
    package = case.package
    _, module, optimizer = open_training(package.path)
    optimizer.set_learning_rate(job.learning_rate)

    def evaluate() -> tuple[float, float]:
        module.eval()
        total = right = count = 0.0
        for indices in job.schedule.held_out_batches():
            loss, scores = module(case.inputs[indices], case.labels[indices])
            total += float(loss) * len(indices)
            right += (scores.argmax(axis=1) == case.labels[indices]).sum()
            count += len(indices)
        module.train()
        return total / count, right / count

    before = evaluate()
    losses = []
    for indices in job.schedule.training_batches(0):
        loss, _ = module(case.inputs[indices], case.labels[indices])
        optimizer.step()
        module.lazy_reset_grad()
        losses.append(float(loss))
    after = evaluate()
    return losses, [before[0], after[0]], [before[1], after[1]]


class TestTraining:
    def test_is_the_training_that_this_process_would_make(self, mlp, measured, tmp_path):
        job = mlp.job(tmp_path)
        losses, evaluations, accuracies = train_here(mlp, job)
        assert measured.outcome == "completed"
        assert measured.steps_done == job.schedule.steps == len(losses)
        assert measured.losses == pytest.approx(losses, rel=1e-6)
        assert [measured.before.loss, measured.after.loss] == pytest.approx(evaluations, rel=1e-6)
        assert [measured.before.metric, measured.after.metric] == accuracies
        assert final_loss(measured) == measured.losses[-1]
        assert measured.detail == ""

    def test_counts_are_those_of_the_metric(self, mlp, measured):
        right, total = measured.after.right, measured.after.total
        assert total == mlp.schedule.held_out_samples
        assert measured.after.metric == right / total

    def test_the_curve_ends_in_the_evaluations_before_and_after(self, measured):
        first, last = measured.curve[0], measured.curve[-1]
        assert (first.step, last.step) == (0, measured.steps_done)
        assert (first.loss, first.metric) == (measured.before.loss, measured.before.metric)
        assert (last.loss, last.metric) == (measured.after.loss, measured.after.metric)

    def test_the_curve_is_what_shorter_trainings_end_with(self, mlp, tmp_path):
        """The evaluation after each epoch, against a training that ends there."""
        options = {"logits": 1, "labels": 1}
        result = run_training_child(mlp.job(tmp_path, epochs=3, **options))
        each = mlp.schedule.steps
        assert [point.step for point in result.curve] == [0, each, 2 * each, 3 * each]
        for epochs in (1, 2):
            shorter = run_training_child(mlp.job(tmp_path, epochs=epochs, **options))
            assert result.curve[epochs].loss == shorter.after.loss
            assert result.curve[epochs].metric == shorter.after.metric
            assert result.losses[: each * epochs] == shorter.losses
        assert len({point.loss for point in result.curve}) == 4

    def test_many_epochs_have_a_short_curve(self, mlp, tmp_path):
        result = run_training_child(mlp.job(tmp_path, epochs=40, samples=20, batch_size=16))
        assert result.steps_done == 40
        steps = [point.step for point in result.curve]
        assert steps == [0, 3, 7, 10, 14, 18, 21, 25, 29, 32, 36, 40]
        assert result.after.total is None  # no output has a score per class here

    def test_data_in_pieces(self, mlp, tmp_path):
        """Two pieces are two trainings, the second with the later half of the samples."""
        job = mlp.job(tmp_path, pieces=2, epochs=2, batch_size=50)
        result = run_training_child(job)
        assert result.outcome == "completed"
        schedule = job.schedule
        held_out = {i for b in schedule.held_out_batches() for i in b.tolist()}
        train = [i for i in range(schedule.samples) if i not in held_out]
        half = len(train) - len(train) // 2
        package = mlp.package
        state = CheckpointState.load_checkpoint(package.checkpoint)
        module = Module(package.training_model, state)
        optimizer = Optimizer(package.optimizer_model, module)
        optimizer.set_learning_rate(job.learning_rate)
        losses = []
        for piece, part in enumerate((train[:half], train[half:])):
            for epoch in range(2):
                batches = list(schedule.training_batches(epoch, piece))
                assert sorted(i for b in batches for i in b.tolist()) == part
                for indices in batches:
                    losses.append(float(module(mlp.inputs[indices], mlp.labels[indices])[0]))
                    optimizer.step()
                    module.lazy_reset_grad()
        assert result.losses == pytest.approx(losses, rel=1e-6)
        assert [point.step for point in result.curve] == [0, 2, 4, 6, 8]

    def test_a_few_steps_only(self, mlp, tmp_path):
        """Every phase of a training, and the first of its steps."""
        options = {"batch_size": 10, "epochs": 2, "logits": 1, "labels": 1}
        whole = run_training_child(mlp.job(tmp_path, **options))
        events: list[str] = []
        job = mlp.job(tmp_path, max_steps=2, **options)
        result = run_training_child(job, on_message=lambda message: events.append(message["event"]))
        assert result.outcome == "completed"
        assert result.losses == whole.losses[:2]
        assert [point.step for point in result.curve] == [0, 2]
        assert result.after.total == 20  # two batches of the held-out samples
        assert events.count("saved") == 1
        if result.peak_bytes is not None:
            assert result.phase_peaks.keys() == whole.phase_peaks.keys()
        assert CheckpointState.load_checkpoint(tmp_path / "checkpoint").optimizer.step == 2

    def test_without_evaluations(self, mlp, measured, tmp_path):
        """And the checkpoint that is saved continues."""
        result = run_training_child(mlp.job(tmp_path, evaluate=False))
        assert result.curve == []
        assert result.losses == measured.losses
        state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
        assert state.optimizer.step == measured.steps_done

    def test_without_an_evaluation(self, mlp, tmp_path):
        result = run_training_child(mlp.job(tmp_path, samples=4))
        assert result.outcome == "completed"
        assert result.steps_done == 1
        assert (result.before.loss, result.after.metric) == (None, None)

    def test_diverged_loss_is_none(self, mlp, tmp_path):
        result = run_training_child(mlp.job(tmp_path, learning_rate=1e30, epochs=2))
        assert result.outcome == "completed"
        assert result.losses[0] is not None
        assert None in result.losses
        assert final_loss(result) is None


@linux
class TestMemory:
    @pytest.mark.parametrize(
        "name", split(["mlp", "cnn", "mobilenet", "transformer"], lambda name: name != "mobilenet")
    )
    def test_prediction(self, name, case, tmp_path):
        """The prediction made before anything ran, against the process.

        The bytes of tensors are exact (see test_allocation); what remains is the
        model of what sessions and Python take, a few hundred kilobytes.
        """
        this = case(name)
        predicted = plan_memory(this.package, this.shapes).peak.nbytes
        measured = run_training_child(this.job(tmp_path)).peak_bytes
        assert abs(predicted - measured) <= max(0.2 * measured, 3_000_000)

    def test_repeats(self, mlp, measured, tmp_path):
        again = run_training_child(mlp.job(tmp_path))
        assert again.peak_bytes == pytest.approx(measured.peak_bytes, abs=500_000)

    def test_phases(self, measured):
        assert set(measured.phase_peaks) == {"loading", "evaluation", "step", "saving"}
        assert max(measured.phase_peaks.values()) == measured.peak_bytes

    @pytest.mark.parametrize("name", ["mlp", "transformer"])
    def test_too_little_memory(self, name, case, tmp_path):
        this = case(name)
        need = plan_memory(this.package, this.shapes).peak.nbytes
        result = run_training_child(this.job(tmp_path, limit_bytes=int(0.7 * need)))
        assert result.outcome == "killed"
        assert result.steps_done == 0
        assert result.peak_bytes is None
        # The watchdog, or the training itself at the end of a phase: who comes first.
        assert re.match("out of memory in |the process was ended by ", result.detail)

    def test_enough_memory(self, mlp, measured, tmp_path):
        options = {"limit_bytes": int(1.5 * measured.peak_bytes), "logits": 1, "labels": 1}
        result = run_training_child(mlp.job(tmp_path, **options))
        assert result.outcome == "completed"
        assert result.losses == measured.losses
        assert result.after.metric == measured.after.metric
        assert result.peak_bytes == pytest.approx(measured.peak_bytes, abs=500_000)

    def test_more_threads(self, mlp, measured, tmp_path):
        """Stacks of threads are not held against the limit."""
        job = mlp.job(tmp_path, threads=2, limit_bytes=int(1.5 * measured.peak_bytes))
        assert run_training_child(job).outcome == "completed"


class Interrupt:
    """Does something to the child at its first step."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.pid = 0
        self._act = act

    def __call__(self, message: Message) -> None:
        if message["event"] == "started":
            self.pid = message["pid"]
        if message["event"] == "step" and message["index"] == 0:
            self._act(self.pid)


class TestEnd:
    """Whatever happens, the outcome is told and nobody is left behind."""

    def test_killed(self, mlp, tmp_path):
        interrupt = Interrupt(lambda pid: os.kill(pid, signal.SIGKILL))
        result = run_training_child(mlp.job(tmp_path, epochs=200), on_message=interrupt)
        assert result.outcome == "killed"
        assert 1 <= result.steps_done < 600
        assert result.detail.startswith("the process was ended by SIGKILL in ")
        assert result.losses[0] is not None
        assert not is_running(interrupt.pid)

    def test_crashed(self, mlp, tmp_path):
        interrupt = Interrupt(lambda pid: os.kill(pid, signal.SIGTERM))
        with refused("replay-crashed", "exit code -15"):
            run_training_child(mlp.job(tmp_path, epochs=200), on_message=interrupt)

    @linux
    @pytest.mark.parametrize(("patience", "seconds", "words"), [
        ("odtpack_simulator.replay.replay._STALL_SECONDS", 2, "silent for 2 s"),
        ("odtpack_runtime.apart.worker.STOPPED_SECONDS", 1.0, "SIGSTOP"),
    ], ids=["silent", "stopped"])  # fmt: skip
    def test_stalled(
        self, patience, seconds, words, mlp, tmp_path,
        monkeypatch,
    ):  # fmt: skip
        """It may be silent for long, but not because somebody stopped it."""
        monkeypatch.setattr(patience, seconds)
        interrupt = Interrupt(lambda pid: os.kill(pid, signal.SIGSTOP))
        start = time.monotonic()
        with refused("replay-stalled", words):
            run_training_child(mlp.job(tmp_path, epochs=200), on_message=interrupt)
        assert time.monotonic() - start < 60
        assert not is_running(interrupt.pid)

    @linux
    def test_interrupted_here(self, mlp, tmp_path):
        def interrupted(pid: int) -> None:
            raise KeyboardInterrupt

        interrupt = Interrupt(interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_training_child(mlp.job(tmp_path, epochs=200), on_message=interrupt)
        assert not is_running(interrupt.pid)

    @linux
    def test_parent_killed(self, mlp, tmp_path):
        mlp.job(tmp_path, epochs=10_000).write(tmp_path / "outer.json")
        script = (
            "import sys\n"
            "from pathlib import Path\n"
            "from odtpack_simulator.replay.job import Job\n"
            "from odtpack_simulator.replay.replay import run_training_child\n"
            "run_training_child(Job.read(Path(sys.argv[1])), on_message=lambda m: print(\n"
            "    m['pid'] if m['event'] == 'started' else 'x', flush=True))\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "outer.json")], stdout=subprocess.PIPE
        ) as parent:
            pid = int(parent.stdout.readline())
            parent.stdout.readline()
            assert is_running(pid)
            parent.kill()
        for _ in range(100):
            if not is_running(pid):
                break
            time.sleep(0.05)
        assert not is_running(pid)


class TestErrors:
    """Mistakes of the package or the data arrive as what they are."""

    def test_models(self, mlp, tmp_path):
        with refused("model-not-found", r"no model .*gone\.onnx", where=tmp_path / "gone.onnx"):
            run_training_child(mlp.job(tmp_path, training_model=str(tmp_path / "gone.onnx")))
        (tmp_path / "broken.onnx").write_bytes(b"nonsense")
        with refused("model-not-loadable") as caught:
            run_training_child(mlp.job(tmp_path, eval_model=str(tmp_path / "broken.onnx")))
        assert caught.value.hint

    @pytest.mark.parametrize(("file", "code", "words"), [
        ("labels.npy", "label-out-of-range", "label 77"),
        ("absent.npy", "replay-crashed", "FileNotFoundError"),
    ])  # fmt: skip
    def test_labels(self, mlp, tmp_path, file, code, words):
        np.save(tmp_path / "labels.npy", np.full_like(mlp.labels, 77))
        data = {**mlp.job(tmp_path).data, "labels": str(tmp_path / file)}
        with refused(code, words):
            run_training_child(mlp.job(tmp_path, data=data))

    def test_child_that_does_not_start(self, mlp, tmp_path, monkeypatch):
        (tmp_path / "json.py").write_text("raise SystemExit('no json today')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(OdtpackError, match="exit code 1") as caught:
            run_training_child(mlp.job(tmp_path))
        assert caught.value.hint == "its last words were: no json today"

    def test_messages_are_json_lines(self, mlp, tmp_path):
        events = [message["event"] for message in run_child(mlp.job(tmp_path))]
        assert events[0] == "started"
        assert events[-3:] == ["trained", "compared", "exit"]
        assert events.count("step") == mlp.schedule.steps

    def test_job_survives_its_file(self, mlp, tmp_path):
        job = mlp.job(tmp_path, limit_bytes=5, logits=1, memory_warnings=[2], pause_in_save=0.1)
        job.write(tmp_path / "job.json")
        assert Job.read(tmp_path / "job.json") == job
        assert json.loads((tmp_path / "job.json").read_text())["limit_bytes"] == 5


# What a disk without space left does to a simulation: one clear error.


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """Let the system write no more than so many bytes of any file, as a disk that is full."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
@pytest.mark.parametrize("room", [0, 4096])
def test_data_that_cannot_be_copied(tmp_path, room):
    arrays = {"input": np.zeros((1000, 10), np.float32)}
    with files_of_at_most(room), refused("data-not-written", where=tmp_path, hint="40.0 kB"):
        write_data(arrays, tmp_path)


def test_a_profile_that_was_not_written_whole(tmp_path):
    file = tmp_path / "training.json"
    file.write_text('[{"cat": "Node", "name": "Ma', encoding="utf-8")
    with refused("profile-not-whole", what="28 bytes", hint="TMPDIR"):
        model_runs(file)


# A child that somebody stops (SIGSTOP) is noticed: with the limit of a minute or less.


def test_the_limit_is_below_a_minute():
    assert worker.STOPPED_SECONDS < 60


def _sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_worker_of_a_pool(monkeypatch):
    monkeypatch.setattr(worker, "STOPPED_SECONDS", 1.0)

    def stop() -> None:
        time.sleep(5)
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGSTOP)

    threading.Thread(target=stop).start()
    start = time.monotonic()
    with refused("worker-lost", what="SIGSTOP"):
        LocalExecutor(2).map(_sleep, [60.0, 60.0])
    assert time.monotonic() - start < 30


# Whether the held-out samples are enough to tell a metric from its floor.


def learned(metric: float, held_out: int) -> SimulationResult:
    training = {"metric_after": metric, "metric_interval": wilson(metric, held_out)}
    data = {"held_out_samples": held_out, "evaluated_samples": held_out}
    return changed(make_result([DEVICE]), training=training, data=data)


def wilson(share: float, n: int) -> tuple[float, float]:
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


@pytest.mark.parametrize(("floor", "metric"), [(0.9, 0.92), (0.9, 0.88), (0.99, 0.98), (0.5, 0.6)])
def test_little_data_say_how_many_samples_would_tell(floor, metric):
    """With one sample fewer than advised the floor is inside of the interval, and then outside."""
    result = judged(learned(metric, 20), f"[budgets]\naccuracy_floor = {floor}")
    found = check(result, "small_data")
    assert (found.status, found.level, found.actual) == ("fail", "warn", 20)
    assert check(result, "accuracy_floor").status == ("pass" if metric >= floor else "fail")
    needed = int(found.limit or 0)
    assert f"about {needed} samples" in (found.advice or "")
    for held_out, status in ((needed - 1, "fail"), (needed, "pass")):
        again = judged(learned(metric, held_out), f"[budgets]\naccuracy_floor = {floor}")
        assert check(again, "small_data").status == status, held_out


def test_a_floor_at_the_metric_itself_is_never_told():
    result = judged(learned(0.9, 100_000), "[budgets]\naccuracy_floor = 0.9")
    assert check(result, "small_data").status == "fail"
    assert check(result, "small_data").limit is None
    assert check(result, "accuracy_floor").status == "pass"
    assert result.verdict == "warn"
