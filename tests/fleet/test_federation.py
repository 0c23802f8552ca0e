"""Federations from their first round to their last: stopped, resumed, in several processes."""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from odtpack.cli import main
from odtpack.flower import client, fedavg, guarded, server
from odtpack_runtime import CheckpointState, OdtpackError, Package
from odtpack_runtime.session.graph_signature import LOSS_SCALE_NAMES
from odtpack_simulator.fleet import federation as federation_module
from odtpack_simulator.fleet.federation import Federation, FleetProgress
from odtpack_simulator.fleet.fleet_file import FleetBudgets, FleetFile
from odtpack_simulator.fleet.judge import judge_fleet
from odtpack_simulator.fleet.local_training import LocalSettings, LocalTrainer, crossing
from odtpack_simulator.fleet.result import FleetResult, load_fleet_result
from odtpack_simulator.fleet.round_clock import ENDS
from odtpack_simulator.fleet.updates import ServerOptimizer, refusals, weighted_mean
from odtpack_simulator.replay.executor import LocalExecutor, RayExecutor
from tests.fleet.fleets import (
    IDEAL,
    UNJUDGED,
    assert_same_bits,
    command,
    device,
    fleet_of,
    ideal,
    on_digits,
    write_digits,
    write_normalized,
    write_states,
)
from tests.packages.samples import build, small_model, with_values
from tests.refused import refused

SKEWED = {
    "population": {
        "clients": 100,
        "lost": 0.1,
        "data": {"samples": [10, 40], "dirichlet": 0.3},
        "availability": {"idle": [0.5] * 24},
    },
    "federation": {"clients": 5, "over_selection": 1.4, "rounds": 4, "every": "1 h"},
    "training": {"learning_rate": 0.1},
}

BUFFERED = SKEWED | {"federation": {"clients": 6, "buffer": 4, "most_staleness": 1, "rounds": 5}}
FLEETS = pytest.mark.parametrize("tables", [SKEWED, BUFFERED], ids=["rounds", "buffer"])


def make(folder: Path, fleet: FleetFile) -> Federation:
    devices = [device("acme/one"), device("acme/two", step=50_000_000, limit_bytes=None)]
    return on_digits(folder, fleet, devices)


def text_of(result: FleetResult) -> str:
    return result.model_copy(update={"origin": type(result.origin)()}).to_json()


@FLEETS
def test_the_result_does_not_depend_on_the_number_of_processes(folder, tables):
    fleet = fleet_of(**tables)
    (one, first), (two, second) = (
        make(folder, fleet).simulate(executor=LocalExecutor(jobs)) for jobs in (1, 2)
    )
    assert text_of(one) == text_of(two)
    assert_same_bits(first.arrays, second.arrays)


@FLEETS
def test_a_result_counts_what_the_rounds_say_and_reads_back(folder, tmp_path, tables):
    federation = make(folder, fleet_of(**tables))
    result, state = federation.simulate()
    ends = result.ends()
    assert set(ends) <= set(ENDS)
    for end in ends:
        assert ends[end] == sum(each.ends.get(end, 0) for each in result.devices)
    visits = state.all_visits()
    assert sum(ends.values()) == len(visits)
    assert result.took_part == sum(each.took_part for each in result.devices)
    averaged = {int(v["client"]) for v in visits if ENDS[v["end"]] == "averaged"}
    assert result.took_part == len(averaged)
    assert result.chosen == len({int(v["client"]) for v in visits})
    spent: dict[int, float] = {}
    for visit in visits:
        spent[int(visit["client"])] = spent.get(int(visit["client"]), 0.0) + visit["energy"]
    assert result.energy_j.most == pytest.approx(max(spent.values()))
    assert result.energy_j.mean == pytest.approx(sum(spent.values()) / len(spent))
    assert result.fairness.worst_tenth <= result.fairness.mean
    path = tmp_path / "result.json"
    path.write_text(result.to_json())
    assert load_fleet_result(path) == result
    federation.save_checkpoint(state, tmp_path / "federated.ckpt")
    saved = CheckpointState.load_checkpoint(tmp_path / "federated.ckpt")
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(saved.parameters[name].data, array)


@FLEETS
def test_a_stopped_federation_goes_on_to_the_same_bits(folder, tmp_path, monkeypatch, tables):
    """Stopped at fifty random calls, in the middle of whatever these are part of."""
    federation = make(folder, fleet_of(**tables))
    whole, end = federation.simulate()
    path = tmp_path / "state.npz"
    order = random.Random(0)
    stops = 0
    resume = False
    while True:
        # Every client's training and every write is a place to stop.
        left = order.randint(1, 12) if stops < 50 else 10**9
        countdown = itertools.count(1)

        def counted(call: Callable[..., object], left: int = left, countdown=countdown):
            def wrapped(*arguments: object, **named: object) -> object:
                if next(countdown) > left:
                    raise KeyboardInterrupt
                return call(*arguments, **named)

            return wrapped

        with monkeypatch.context() as patch:
            patch.setattr(np, "savez", counted(np.savez))
            patch.setattr(
                federation_module.LocalTrainer,
                "train",
                counted(federation_module.LocalTrainer.train),
            )
            try:
                result, state = federation.simulate(state_path=path, resume=resume)
            except KeyboardInterrupt:
                stops += 1
                resume = path.exists()
                if stops == 50:
                    path.unlink(missing_ok=True)
                    resume = False
                continue
        if stops >= 50:
            break
        path.unlink()  # it came to its end: begin anew
        resume = False
    assert text_of(result) == text_of(whole)
    assert_same_bits(end.arrays, state.arrays)


@pytest.mark.parametrize(("federation", "count"), [
    ("buffer = 4\nmost_staleness = 3", 3),
    pytest.param("minimum = 6", 3, marks=pytest.mark.sweep),
    pytest.param("minimum = 6", 50, marks=pytest.mark.sweep),
    pytest.param("buffer = 4\nmost_staleness = 3", 50, marks=pytest.mark.sweep),
])  # fmt: skip
def test_a_killed_command_goes_on_to_the_same_bits(folder, tmp_path, federation, count):
    """Killed at random times, each after the state was written at least once more."""
    rounds = 12 * count
    text = UNJUDGED.replace("rounds = 3", f"rounds = {rounds}").replace("minimum = 6", federation)
    (tmp_path / "fleet.toml").write_text(text.replace("samples = [20, 40]", "samples = 60"))

    def words(out: Path, *more: str) -> list[str]:
        files = ("--fleet", tmp_path / "fleet.toml", "--out", out, *more)
        return [sys.executable, "-m", "odtpack", *command(folder, "run", *files)]

    subprocess.run(words(tmp_path / "whole"), check=True, capture_output=True)
    out = tmp_path / "killed"
    state = out / "state.npz"
    delays = random.Random(0)
    kills = 0
    while kills < count:
        resume = ["--resume"] if state.exists() else []
        seen = state.stat().st_mtime_ns if resume else 0
        process = subprocess.Popen(words(out, *resume), stderr=subprocess.DEVNULL)
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == seen):
            time.sleep(0.002)
        time.sleep(delays.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            break  # it came to its end
        kills += 1
    assert kills > count / 2
    subprocess.run(words(out, "--resume"), check=True, capture_output=True)
    whole, resumed = (
        (folder / "federated.ckpt").read_bytes() for folder in (tmp_path / "whole", out)
    )
    assert whole == resumed
    assert_same_bits(*(np.load(each / "state.npz") for each in (tmp_path / "whole", out)))


@pytest.mark.parametrize(
    "damage", ["cut", "other", "visits", "text", "compressed", "model", "client", "start"]
)
def test_a_state_that_is_not_its_own_is_refused(folder, tmp_path, damage):
    fleet = fleet_of(**BUFFERED)
    path = tmp_path / "state.npz"
    federation = make(folder, fleet)
    with pytest.raises(KeyboardInterrupt):
        federation.simulate(state_path=path, progress=_stop_in_round(3))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "text":
        path.write_text("no archive")
    elif damage == "compressed":
        # As np.savez_compressed writes it, with its longest member damaged: zlib finds out.
        np.savez_compressed(path, **dict(np.load(path)))
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            longest = max(archive.infolist(), key=lambda member: member.compress_size)
        middle = longest.header_offset + 100 + longest.compress_size // 2
        content[middle : middle + 50] = bytes(50)
        path.write_bytes(content)
    elif damage in ("client", "start"):
        content = dict(np.load(path))
        record = json.loads(content["record"].tobytes())
        record["flights"][0][damage] = 10**30
        content["record"] = np.frombuffer(json.dumps(record).encode(), np.uint8)
        np.savez(path, **content)
    elif damage == "model":
        content = dict(np.load(path))
        content["parts"][~np.isin(content["parts"], ["", "server"])] = "99"
        np.savez(path, **content)
    elif damage == "other":
        fleet = fleet.model_copy(update={"seed": 4})
    else:
        content = dict(np.load(path))
        content["visits"]["end"] = 99
        np.savez(path, **content)
    with refused("fleet-state", "cannot continue"):
        make(folder, fleet).simulate(state_path=path, resume=True)


def _stop_in_round(number: int) -> Callable[[FleetProgress], None]:
    def stop(progress: FleetProgress) -> None:
        if progress.round_number == number:
            raise KeyboardInterrupt

    return stop


def test_rounds_with_too_few_answers_change_nothing(folder):
    fleet = fleet_of(
        population={"clients": 50, "lost": 1.0},
        federation={"clients": 5, "minimum": 5, "rounds": 2},
    )
    federation = make(folder, fleet)
    result, state = federation.simulate()
    assert result.ends() == {"lost": 10}
    assert [each.duration_s for each in result.rounds] == [600, 600]
    for name, array in federation.initial.items():
        np.testing.assert_array_equal(state.arrays[name], array)
    judged = judge_fleet(result, FleetBudgets())
    assert judged.verdict == "fail"
    assert "over_selection" in (judged.checks[0].advice or "")


def test_a_fleet_that_is_never_there_ends_without_a_round(folder):
    fleet = fleet_of(
        population={"availability": {"idle": [0.0] * 24}}, federation={"days": 2, "rounds": 5}
    )
    result, _ = make(folder, fleet).simulate()
    assert result.rounds == []
    assert judge_fleet(result, FleetBudgets()).verdict == "fail"


def test_a_client_that_diverges_is_refused_with_a_reason(folder):
    fleet = ideal(("learning_rate = 0.1", "learning_rate = 1e6"), ("seed = 3", "seed = 1"))
    result, state = on_digits(folder, fleet).simulate()
    assert result.ends()["refused"] > 0
    assert any("NaN" in reason or "norm" in reason for reason in result.rounds[0].refused)
    for array in state.arrays.values():
        assert np.isfinite(array).all()
    checks = judge_fleet(result, FleetBudgets()).checks
    assert any(check.metric == "refused" and check.status == "fail" for check in checks)


def test_updates_are_refused_for_what_they_hold():
    begun = {"w": np.zeros((2, 3), np.float32)}
    good = [{"w": np.full((2, 3), value, np.float32)} for value in (1, 2, 3)]
    bad = [
        ({"w": np.full((2, 3), np.inf, np.float32)}, "NaN"),
        ({"w": np.zeros((3, 2), np.float32)}, "should be"),
        ({"w": np.zeros((2, 3), np.float64)}, "should be"),
        ({"v": np.zeros((2, 3), np.float32)}, "not one of the package"),
        ({}, "missing"),
        ({"w": np.full((2, 3), 1e3, np.float32)}, "times the round's median"),
        ({"w": np.full((2, 3), 3e38, np.float32)}, "times the round's median"),
    ]
    reasons = refusals(begun, [*good, *(each for each, _ in bad)])
    assert reasons[:3] == [None] * 3
    for reason, (_, words) in zip(reasons[3:], bad, strict=True):
        assert reason is not None
        assert words in reason
    mean = weighted_mean(good, [1, 1, 2])["w"]
    np.testing.assert_allclose(mean, 2.25, rtol=1e-6)
    assert mean.dtype == np.float32


def test_answers_that_change_nothing_are_part_of_no_median():
    begun = {"w": np.ones((2, 3), np.float32)}

    def moved(by: float) -> dict[str, np.ndarray]:
        return {"w": begun["w"] + np.float32(by)}

    still = [begun] * 5
    assert refusals(begun, [*still, moved(0.3), moved(0.4)]) == [None] * 7
    assert refusals(begun, [*still, moved(0.3), moved(0.4), moved(0.2)]) == [None] * 8
    *others, huge = refusals(begun, [*still, moved(0.3), moved(0.4), moved(1e3), moved(0.2)])
    assert others[5:7] == [None] * 2
    # Norms by NumPy: sqrt(6) times 0.3, 0.4 and 0.2, and of a thousand.
    assert huge is None
    assert "more than 10 times the round's median of 0.857" in str(others[7])
    # With a known reason it is refused for that, and compared with nothing.
    reasons = refusals(begun, [moved(1e-6)] * 4 + [moved(0.3)], known=["no loss"] * 4)
    assert reasons == [*["no loss"] * 4, None]


def test_a_limit_by_the_models_norm_is_the_one_that_is_given():
    begun = {"w": np.ones((2, 3), np.float32)}
    answer = {"w": np.full((2, 3), 4, np.float32)}  # three times as long as the model
    assert "more than 2 times that of the model" in str(refusals(begun, [answer])[0])
    assert refusals(begun, [answer], most_times_model=3.5) == [None]


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam"])
def test_a_server_steps_what_is_trained_and_averages_what_is_counted(kind):
    """The steps written down in NumPy; a running variance is the mean of the answers."""
    random = np.random.default_rng(2)
    rate, beta = 0.7, 0.9
    server = ServerOptimizer(kind, rate, beta, {"w"})
    arrays = {"w": random.standard_normal(5), "variance": np.full(5, 1.0)}
    state = server.begin(arrays)
    assert not any("variance" in name for name in state)
    first, second, wanted = np.zeros(5), np.zeros(5), arrays["w"]
    for number in range(1, 9):
        mean = {"w": random.standard_normal(5), "variance": np.full(5, 0.3**number)}
        change = mean["w"] - wanted
        if kind == "fedavgm":
            first = beta * first + change
            wanted = wanted + rate * first
        else:
            first = 0.9 * first + 0.1 * change
            second = 0.99 * second + 0.01 * change**2
            bias = np.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
            wanted = wanted + rate * bias * first / (np.sqrt(second) + 1e-3)
        arrays, state = server.step(arrays, mean, state, number)
        np.testing.assert_allclose(arrays["w"], wanted, rtol=1e-9)
        np.testing.assert_array_equal(arrays["variance"], mean["variance"])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_an_update_of_the_weights_is_measured_without_statistics(scale):
    """And a statistic by itself, whatever the scale of the data."""
    random = np.random.default_rng(4)
    begun = {"w": np.ones(9, np.float32), "mean": np.zeros(3, np.float32)}
    begun["variance"] = np.ones(3, np.float32)

    def answer(times: float = 1, mean: float = 1, variance: float = 1) -> dict[str, np.ndarray]:
        arrays = {
            "w": 1 + 0.01 * times * random.uniform(1, 2, 9),
            "mean": scale * mean * random.uniform(1, 2, 3),
            "variance": 1 + scale**2 * variance * random.uniform(1, 2, 3),
        }
        return {name: array.astype(np.float32) for name, array in arrays.items()}

    answers = [*(answer() for _ in range(9)), answer(30), answer(mean=30), answer(variance=40)]
    *others, weights, mean, variance = refusals(begun, answers, trainable={"w"})
    assert others == [None] * 9
    for reason, words in (
        (weights, "the update has"), (mean, "the update of 'mean' has"),
        (variance, "the update of 'variance' has"),
    ):  # fmt: skip
        assert f"{words} a norm of" in str(reason)
        assert "more than 10 times the round's median" in str(reason)
    # Of two answers nothing says how far a statistic may go, and the weights' own norm counts.
    two = [answer(mean=1e3), answer(1e3)]
    still, far = refusals(begun, two, trainable={"w"})
    assert still is None
    assert "more than 2 times that of the model, 3," in str(far)
    two[0]["mean"][0] = np.inf
    assert "NaN or infinity" in str(refusals(begun, two, trainable={"w"})[0])


def test_what_a_client_keeps_to_itself_does_not_cross(tmp_path):
    """A carried state is what its samples left, a loss scale is that of its steps."""
    package = write_states(tmp_path) / "package"
    opened = Package.open(package)
    own = ["heard", *LOSS_SCALE_NAMES]
    names = [info.name for info in opened.manifest.parameters]
    assert set(own) < set(names)
    assert [name for name in names if name not in own] == list(crossing(opened.manifest))
    assert {n for n, t in crossing(opened.manifest).items() if not t} == {
        "running_mean", "running_var"
    }  # fmt: skip
    federation = Federation(package, tmp_path / "data.npz", ideal())
    result, state = federation.simulate()
    assert list(state.arrays) == list(crossing(opened.manifest))
    assert result.ends() == {"averaged": 18}
    assert result.package.crossing_parameters == 4 * 12 + 12 * 5 + 5
    federation.save_checkpoint(state, tmp_path / "federated.ckpt")
    fresh = CheckpointState.load_checkpoint(opened.checkpoint)
    saved = CheckpointState.load_checkpoint(tmp_path / "federated.ckpt")
    for name in own:
        np.testing.assert_array_equal(saved.parameters[name].data, fresh.parameters[name].data)
    # Whoever trained before: a client begins with the package's states, and so does an evaluation.
    trainer, indices = LocalTrainer(opened), np.arange(40)
    given = federation.initial, federation.data.arrays
    settings = LocalSettings(8, 1, 0.01)

    def train(client: int, samples: np.ndarray, **more: Any) -> dict[str, np.ndarray]:
        return trainer.train(
            *given, samples, settings, round_number=1, client=client, simulated=True, **more
        ).arrays

    first, kept = train(1, indices), trainer.optimizer_state()
    before = trainer.evaluate(*given, indices, 8).loss
    assert kept["mixed.good_steps"] == 5
    train(2, indices + 100)
    assert np.abs(trainer.module.state.parameters["heard"].data).max() > 0.1
    assert trainer.evaluate(*given, indices, 8).loss == before
    assert_same_bits(train(1, indices), first)
    # A client that keeps its optimizer goes on from its own loss scale.
    train(1, indices, optimizer_state=kept)
    assert trainer.optimizer_state()["mixed.good_steps"] == 10


@pytest.mark.parametrize(
    ("strategy", "counted", "epochs"),
    [("fedavgm", "minimum = 6", 2), ("fedadam", "minimum = 6", 2), ("fedavg", "buffer = 2", 6)],
)
def test_running_variances_stay_above_zero(strategy, counted, epochs, tmp_path):
    write_normalized(tmp_path)
    fleet = ideal(("rounds = 3", f'rounds = 8\nstrategy = "{strategy}"'), ("minimum = 6", counted),
                  ("epochs = 2", f"epochs = {epochs}"))  # fmt: skip
    result, state = on_digits(tmp_path, fleet).simulate()
    assert state.arrays["norm_running_var"].min() >= 0
    assert sum(result.staleness()[1:]) > 0 or "buffer" not in counted
    losses = [each.loss for each in result.rounds]
    assert np.isfinite(np.array(losses, np.float64)).all()
    assert all(np.isfinite(array).all() for array in state.arrays.values())


def test_budgets_are_judged_by_what_was_found(folder):
    result, _ = make(folder, fleet_of(**SKEWED)).simulate()
    last = result.rounds[-1].accuracy or 0.0
    kept = FleetBudgets(
        accuracy=last, participation="1 %", traffic_per_device="1 MB", days=30, learns=False
    )  # fmt: skip
    judged = judge_fleet(result, kept)
    assert {check.metric: check.status for check in judged.checks} == dict.fromkeys(
        ("answers", "finite_loss", "accuracy", "participation", "traffic_per_device", "days"),
        "pass",
    )
    broken = FleetBudgets(
        accuracy=1.0, rounds=3, participation="90 %", energy_per_device="1 mWh",
        traffic_per_device="1 B", worst_tenth=0.999, learns=False,
    )  # fmt: skip
    statuses = {c.metric: c.status for c in judge_fleet(result, broken).checks}
    assert statuses.pop("answers") == statuses.pop("finite_loss") == "pass"
    assert statuses.pop("energy_per_device") == "pass"
    assert set(statuses.values()) == {"fail"}
    assert judge_fleet(result, broken).over_budget
    without = result.model_copy(update={"energy_j": None})
    open_ = judge_fleet(without, FleetBudgets(energy_per_device="1 J", learns=False))
    assert open_.verdict == "not judged"
    assert json.loads(open_.to_json())["verdict"] == "not judged"


def test_a_client_without_a_finite_loss_is_refused(folder, tmp_path):
    """Its parameters are those that it was sent: that they are sound says nothing."""
    with np.load(folder / "digits.npz") as file:
        images, labels = file["input"], file["labels"]
    fleet = ideal(("rounds = 3", "rounds = 1"), ("= 0.5", "= 0.001"))  # a label each
    whole = on_digits(folder, fleet)
    held = [set(labels[whole.population.client(number).samples()]) for number in range(6)]
    alone = next(
        number
        for number, own in enumerate(held)
        if not own & set().union(*(other for other in held if other is not own))
    )
    images[np.isin(labels, list(held[alone]))] = 3e38  # finite, and its products are not
    np.savez(tmp_path / "digits.npz", input=images, labels=labels)
    result, state = Federation(folder / "package", tmp_path / "digits.npz", fleet).simulate()
    assert result.rounds[0].refused == [f"client {alone}: no batch of it has a finite loss"]
    assert (result.ends()["averaged"], result.ends()["refused"]) == (5, 1)
    assert np.isfinite(result.rounds[0].training_loss)
    assert all(np.isfinite(array).all() for array in state.arrays.values())


def test_private_clients_repeat_and_all_of_them_answer(tmp_path):
    """Of two samples, drawn with a probability of a half for two batches, often none is."""
    write_digits(tmp_path, privacy_clip=1.0, privacy_noise=1.0)
    fleet = ideal(("[20, 40]", 2), ("= 16\nepochs = 2", "= 1\nepochs = 1"),
                  ("clients = 6", "clients = 60"), ("rounds = 3", "rounds = 1"))  # fmt: skip
    one, two = (
        on_digits(tmp_path, fleet).simulate(executor=LocalExecutor(jobs)) for jobs in (1, 2)
    )
    assert text_of(one[0]) == text_of(two[0])
    assert_same_bits(one[1].arrays, two[1].arrays)
    assert one[0].ends() == {"averaged": 60}  # whatever they draw
    assert "odtpack privacy --noise 1 --samples N --batch-size 1 --epochs E" in one[0].unknown[-1]
    assert np.isfinite(one[0].rounds[0].training_loss)


def test_a_state_that_unpacks_to_too_much_is_refused_before(folder, tmp_path, monkeypatch):
    federation = on_digits(folder, ideal(("rounds = 3", "rounds = 1")))
    path = tmp_path / "state.npz"
    federation.simulate(state_path=path)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez_compressed(path, **arrays, more=np.zeros(10**7, np.uint8))
    assert path.stat().st_size < 10**6
    monkeypatch.setattr(federation_module, "MAX_STATE_BYTES", 10**6)
    with refused("fleet-state", "unpacks to more than"):
        federation.simulate(state_path=path, resume=True)


# A round of checkpoints that devices sent: what is averaged, and what is left out.


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return build(tmp_path / "package", small_model())


def moved(package: Path, path: Path, by: float) -> Path:
    """A checkpoint of the package with all parameters moved."""
    state = CheckpointState.load_checkpoint(package / "checkpoint")
    for _, parameter in state.parameters:
        parameter.data = parameter.data + np.float32(by)
    CheckpointState.save_checkpoint(state, path)
    return path


def values(path: Path) -> np.ndarray:
    state = CheckpointState.load_checkpoint(path)
    return np.concatenate([parameter.data.ravel() for _, parameter in state.parameters])


def test_a_checkpoint_of_mixed_precision_is_judged_by_its_weights(tmp_path):
    """Not by the number of its steps, nor by a loss scale that an overflow has lowered."""
    package = build(tmp_path / "package", small_model(), precision="mixed")

    def sent(name: str, by: float, steps: int, scale: float = 4096) -> tuple[Path, int]:
        path = tmp_path / name
        state = CheckpointState.load_checkpoint(package / "checkpoint")
        for each, parameter in state.parameters:
            if each not in LOSS_SCALE_NAMES:
                parameter.data = parameter.data + np.float32(by)
        scale_of, steps_of = (state.parameters[name] for name in LOSS_SCALE_NAMES)
        scale_of.data, steps_of.data = np.float32([scale]), np.float32([steps])
        CheckpointState.save_checkpoint(state, path)
        return path, 30

    answers = [sent(name, 0.01, 40) for name in "abc"]
    answers += [sent("far", 3, 40), sent("overflow", 0.01, 0, 2048)]
    *others, far, overflow = fedavg(package, answers, tmp_path / "mean")
    assert others == [None] * 3
    assert "times the round's median" in str(far)
    assert overflow is None
    mean = CheckpointState.load_checkpoint(tmp_path / "mean").parameters
    assert [mean[name].data.item() for name in LOSS_SCALE_NAMES] == [4096, 0]


def test_only_sound_answers_are_averaged(package, tmp_path):
    other = build(tmp_path / "other", small_model(width=(2, 4)))
    (tmp_path / "noise").write_bytes(b"no checkpoint")
    answers = [
        (moved(package, tmp_path / "a", 0.1), 30),
        (moved(package, tmp_path / "nan", np.nan), 30),
        (tmp_path / "noise", 30),
        (moved(package, tmp_path / "b", 0.3), 10),
        (other / "checkpoint", 30),
        (moved(package, tmp_path / "huge", 1e3), 30),
        (moved(package, tmp_path / "none", 0.2), 0),
        (moved(package, tmp_path / "text", 0.2), "a"),
        (moved(package, tmp_path / "many", 0.2), 10**400),
        (moved(package, tmp_path / "long", 0.2), 10**5000),
        (moved(package, tmp_path / "unknown", 0.2), math.nan),
        (moved(package, tmp_path / "c", 0.1), 40),
    ]
    reasons = fedavg(package, answers, tmp_path / "mean")
    assert [reason is None for reason in reasons] == [
        True, False, False, True, False, False, False, False, False, False, False, True,
    ]  # fmt: skip
    for index, words in (
        (1, "NaN"), (4, "should be"), (5, "times the round"), (6, "samples"), (7, "'a'"),
        (8, "beyond 2^63"), (9, "beyond 2^63"), (10, "is nan"),
    ):  # fmt: skip
        assert words in str(reasons[index]), reasons
    wanted = values(package / "checkpoint") + 0.125
    np.testing.assert_allclose(values(tmp_path / "mean"), wanted, rtol=1e-5, atol=1e-6)


def test_an_error_of_a_private_client_does_not_show_its_data(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(client, "warn", lambda text, *what: said.append(text % what))
    bad = OdtpackError("data-not-finite", "The inputs hold NaN, first in sample 17.")
    assert client._reason(bad, private=False) == f"data-not-finite: {bad.what}"
    assert client._reason(bad, private=True) == "data-not-finite"
    assert "sample 17" in said[0]
    asked = OdtpackError("fleet-config", "The server's configuration has lr = 'much'.")
    assert client._reason(asked, private=True).endswith("lr = 'much'.")


def test_a_strategy_that_steps_statistics_is_found_inside_a_wrapper(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(server, "warn", lambda text, *what: said.append(text % what))
    steps, plain = SimpleNamespace(m_t=None), SimpleNamespace()
    assert server._stepped_statistics(SimpleNamespace(strategy=steps), ["mean"]) == ["mean"]
    assert server._stepped_statistics(SimpleNamespace(strategy=plain), ["mean"]) == []
    noisy = SimpleNamespace(strategy=steps, noise_multiplier=1.0)
    assert server._stepped_statistics(noisy, []) == []
    assert said == []
    assert server._stepped_statistics(noisy, ["mean"]) == []
    assert "adds noise" in said[0]


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
def test_the_noise_of_a_mean_hides_nobody_in_another_aggregate(aggregate):
    """One of five clients moves the median by five times what Flower computes its noise for."""
    noisy = SimpleNamespace(strategy=SimpleNamespace(), noise_multiplier=1.0)
    with refused("bad-aggregate", "adds the noise that hides a client in a mean"):
        guarded(SimpleNamespace(strategy=noisy), "package", aggregate=aggregate)


def test_answers_of_other_packages_are_left_out(tmp_path):
    """One with other frozen values, which do not cross, and one with further parameters."""
    models = small_model(), with_values(small_model(), "conv1.weight")
    own, other = (
        build(tmp_path / f"package-{number}", model, train=["fc.*"])
        for number, model in enumerate(models)
    )
    larger = build(tmp_path / "larger", small_model(hidden=4))
    count = np.int64(30)  # of NumPy, as from a table
    answers = [(each / "checkpoint", count) for each in (own, other, larger)]
    first, *others = fedavg(own, answers, tmp_path / "mean")
    assert first is None
    assert all("belongs to another package" in str(reason) for reason in others)


def test_the_round_begins_where_one_says(package, tmp_path):
    """A long update from the package's own checkpoint is short from where the round began."""
    begun = moved(package, tmp_path / "begun", 100.0)
    answers = [(moved(package, tmp_path / str(i), 100 + 0.1 * i), 1) for i in range(1, 4)]
    answers.append((moved(package, tmp_path / "stale", 0.1), 1))
    reasons = fedavg(package, answers, tmp_path / "mean", begun=begun)
    assert [reason is None for reason in reasons] == [True, True, True, False]


def test_a_round_without_a_sound_answer_is_an_error(package, tmp_path):
    answers = [(moved(package, tmp_path / "nan", np.nan), 30)]
    for given in (answers, []):
        with refused("fleet-arrays", "No answer can be averaged"):
            fedavg(package, given, tmp_path / "mean")
    assert not (tmp_path / "mean").exists()


# Federated averaging of the digits against the same written down in PyTorch.

ROUNDS, BATCH, RATE, SEED = 20, 16, 0.1, 3


def forward(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for layer in ("conv1", "conv2"):
        x = functional.conv2d(x, p[f"{layer}.weight"], p[f"{layer}.bias"], padding=1)
        x = functional.max_pool2d(functional.relu(x), 2)
    return functional.linear(x.flatten(1), p["fc.weight"], p["fc.bias"])


def test_twenty_rounds_are_those_of_pytorch(folder):
    fleet = on_digits(folder, ideal(
        ("rounds = 3", f"rounds = {ROUNDS}"), ("epochs = 2", "epochs = 1"),
        ("samples = [20, 40]", "samples = [80, 100]"), ("rate = 0.1", f"rate = {RATE}"),
    ))  # fmt: skip
    result, state = fleet.simulate()
    data = np.load(folder / "digits.npz")
    images, labels = torch.from_numpy(data["input"]), torch.from_numpy(data["labels"])
    model = {name: torch.from_numpy(array.copy()) for name, array in fleet.initial.items()}
    clients = [fleet.population.client(number).samples() for number in range(6)]
    for round_number in range(1, ROUNDS + 1):
        answers = []
        for number, samples in enumerate(clients):
            own = {name: value.clone().requires_grad_() for name, value in model.items()}
            order = np.random.default_rng([SEED, 2, round_number, number]).permutation(samples)
            for start in range(0, len(order), BATCH):
                batch = order[start : start + BATCH]
                loss = functional.cross_entropy(forward(own, images[batch]), labels[batch])
                gradients = torch.autograd.grad(loss, list(own.values()))
                with torch.no_grad():
                    for value, gradient in zip(own.values(), gradients, strict=True):
                        value.sub_(RATE * gradient)
            answers.append({name: value.detach() for name, value in own.items()})
        weights = [len(samples) for samples in clients]
        model = {
            name: sum(w * a[name] for w, a in zip(weights, answers, strict=True)) / sum(weights)
            for name in model
        }
    for name, value in model.items():
        np.testing.assert_allclose(state.arrays[name], value.numpy(), rtol=2e-4, atol=2e-5)
    held_out = fleet.data.held_out
    right = (forward(model, images[held_out]).argmax(1) == labels[held_out]).float().mean()
    assert abs(result.rounds[-1].accuracy - float(right)) < 0.005
    assert float(right) > 2 * result.accuracy_before  # it has learned


# A federation whose clients train on a Ray cluster of two nodes, each in processes of its own.

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


def test_an_error_ends_calls_and_never_this_process(address):
    executor = RayExecutor(address)
    for _ in range(100):
        numbers: list[int] = []
        with pytest.raises(OdtpackError, match="number 99"):
            numbers.extend(executor.in_order(told, [(1,), (99,), (2,), (3,)]))
        assert numbers == [1]
    assert executor.map(str, range(9)) == list("012345678")


def test_two_nodes_come_to_the_bits_of_this_process(address, folder, tmp_path):
    executor = RayExecutor(address)
    assert executor.jobs == 2
    assert len(set(executor.in_order(whose, [(number,) for number in range(16)]))) == 2
    with pytest.raises(OdtpackError, match="number 99"):
        list(executor.in_order(whose, [(1,), (99,), (2,)]))
    here, state = on_digits(folder, ideal()).simulate()
    there, other = on_digits(folder, ideal()).simulate(executor=executor)
    assert there.rounds == here.rounds
    assert_same_bits(state.arrays, other.arrays)
    (tmp_path / "fleet.toml").write_text(UNJUDGED)
    files = ("--fleet", tmp_path / "fleet.toml", "--out", tmp_path / "run")
    assert main([*command(folder, "run", *files), "--ray", address]) == 0
    trained = CheckpointState.load_checkpoint(tmp_path / "run" / "federated.ckpt")
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(trained.parameters[name].data, array)


def test_a_cluster_that_does_not_answer_is_said_first(folder, tmp_path, capsys):
    pytest.importorskip("ray", reason="Ray has no build for this Python")
    (tmp_path / "fleet.toml").write_text(IDEAL)
    more = ("--fleet", tmp_path / "fleet.toml", "--ray", "127.0.0.1:1", "--out", tmp_path / "out")
    assert main(command(folder, "run", *more)) == 2
    assert "ray-unreachable" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("every", [1, 5])
def test_a_loss_that_is_not_finite_is_reported(folder, monkeypatch, every):
    """The last one is null, not NaN, which is not JSON; also where the days end before its turn."""
    evaluate = Federation._evaluate
    monkeypatch.setattr(
        Federation, "_evaluate", lambda *given: replace(evaluate(*given), loss=math.nan)
    )
    table = {"clients": 5, "rounds": 9, "every": "12 h", "days": 1, "evaluate_every": every}
    result, _ = make(folder, fleet_of(**(SKEWED | {"federation": table}))).simulate()
    assert 0 < len(result.rounds) < 5
    last = json.loads(result.to_json())["rounds"][-1]
    assert (last["loss"], last["accuracy"] is None) == (None, False)


def test_ideal_devices_are_lost_too(folder):
    """They take no time, and a lost one gives no answer all the same."""
    population = {"clients": 40, "lost": 1.0, "data": {"samples": [10, 40]}}
    fleet = fleet_of(population=population, federation={"clients": 5, "minimum": 1, "rounds": 2})
    result, _ = on_digits(folder, fleet).simulate()
    assert [each.ends["lost"] for each in result.rounds] == [5, 5]
