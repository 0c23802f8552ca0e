"""Flower plays the ClientApp: what it learns, whom it refuses, and what a fleet makes of it."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odtpack_runtime import CheckpointState
from odtpack_simulator.fleet.federation import Federation
from odtpack_simulator.fleet.fleet_file import parse_fleet
from tests.fleet.fleets import IDEAL, write_digits, write_normalized

pytestmark = pytest.mark.federated
Play = Callable[..., dict[str, Any]]
MOST_SAMPLES = 256
SETTINGS = {"batch_size": 16, "epochs": 2, "learning_rate": 0.1, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_digits(tmp_path_factory.mktemp("digits"))
    (made / "fleet.toml").write_text(IDEAL)
    # Enough of everything at each client that three rounds show whether it learns.
    even = IDEAL.replace("dirichlet = 0.5", "dirichlet = 100.0")
    even = even.replace("clients = 6\n[population.data]", "clients = 8\n[population.data]")
    (made / "even.toml").write_text(even.replace("[20, 40]", "[200, 240]"))
    return made


def files(folder: Path, fleet: str = "fleet.toml") -> dict[str, Path]:
    return {
        "package": folder / "package", "data": folder / "digits.npz", "fleet": folder / fleet,
        "out": folder / "federated.ckpt",
    }  # fmt: skip


def simulated(
    play: Play, folder: Path, fleet: str = "even.toml", rounds: int = 2, **job: Any
) -> dict[str, Any]:
    """What Flower's simulation of a fleet finds; with 8 clients where they have even shares."""
    clients = 8 if fleet == "even.toml" else 6
    usual = {"rounds": rounds, "clients": clients, "client": SETTINGS, **files(folder, fleet)}
    return play(task="simulate", **usual | job)


def parameters(path: Path) -> dict[str, np.ndarray]:
    state = CheckpointState.load_checkpoint(path)
    return {name: parameter.data for name, parameter in state.parameters}


@pytest.mark.parametrize(("strategy", "options", "keys", "tolerance"), [
    ("FedAvg", {}, "", 0.0),
    ("FedAvgM", {"server_momentum": 0.5, "server_learning_rate": 0.75},
     'strategy = "fedavgm"\nserver_momentum = 0.5\nserver_learning_rate = 0.75\n', 0.0),
    # Flower's goes on in float64.
    ("FedAdam", {"eta": 0.02}, 'strategy = "fedadam"\nserver_learning_rate = 0.02\n', 2e-5),
], ids=["FedAvg", "FedAvgM", "FedAdam"])  # fmt: skip
def test_a_fleet_of_ideal_devices_is_flowers_to_the_last_bit(
    folder, play, strategy, options, keys, tolerance
):
    job = {"strategy": strategy, "options": options, "processes": 2}
    flower = simulated(play, folder, "fleet.toml", 3, **job)
    settings = parse_fleet((IDEAL + keys).encode())
    result, state = Federation(folder / "package", folder / "digits.npz", settings).simulate()
    trained = parameters(folder / "federated.ckpt")
    before = parameters(folder / "package" / "checkpoint")
    assert state.arrays.keys() == trained.keys()
    for name, array in state.arrays.items():
        if tolerance:
            np.testing.assert_allclose(array, trained[name], rtol=tolerance, atol=tolerance)
        else:
            assert array.tobytes() == trained[name].tobytes(), name
        assert not np.array_equal(array, before[name]), name
    for each in result.rounds:
        assert each.training_loss == pytest.approx(flower["train"][str(each.number)]["loss"])
    if strategy == "FedAvg":  # the others need more rounds
        assert flower["server"]["3"]["accuracy"] > flower["server"]["0"]["accuracy"]


def test_running_statistics_are_those_of_a_fleet_under_a_strategy_that_steps(tmp_path, play):
    """Stepped with momentum, a variance became negative and the loss NaN."""
    write_normalized(tmp_path)
    (tmp_path / "fleet.toml").write_text(IDEAL)
    options = {"server_momentum": 0.9, "server_learning_rate": 1.0}
    simulated(play, tmp_path, "fleet.toml", 8, strategy="FedAvgM", options=options)
    text = IDEAL.replace("rounds = 3", 'rounds = 8\nstrategy = "fedavgm"')
    package, data = tmp_path / "package", tmp_path / "digits.npz"
    _, state = Federation(package, data, parse_fleet(text.encode())).simulate()
    trained = parameters(tmp_path / "federated.ckpt")
    for name, array in state.arrays.items():
        assert array.tobytes() == trained[name].tobytes(), name
    assert trained["norm_running_var"].min() >= 0


def test_answers_that_would_spoil_the_model_are_refused_and_the_rounds_go_on(folder, play):
    attacks = {"0": "nan", "2": "shape", "3": "huge", "5": "name", "6": "weight", "7": "loss"}
    found = simulated(play, folder, attacks=attacks)
    assert len(found["refused"]) == 2 * len(attacks)
    for number in (1, 2):
        reasons = [reason for when, _, reason in found["refused"] if when == number]
        for words in (
            "NaN", "should be", "times the round's median", "missing", "above nothing",
            "train_loss is not finite",
        ):  # fmt: skip
            assert sum(words in reason for reason in reasons) == 1, (words, reasons)
    for array in parameters(folder / "federated.ckpt").values():
        assert np.isfinite(array).all()
        assert np.abs(array).max() < 100
    assert found["server"]["2"]["loss"] < found["server"]["0"]["loss"]


def test_answers_that_flower_would_end_at_are_refused_and_the_rounds_go_on(folder, play):
    attacks = {"1": "metrics", "4": "archive", "5": "seconds", "6": "evaluation"}
    found = simulated(play, folder, evaluate=1.0, attacks=attacks)
    reasons = [reason for _, _, reason in found["refused"]]
    assert reasons.count("its seconds is not finite") == 2
    assert reasons.count("its loss is not finite") == 2  # of the evaluations
    assert sum("metrics are not those of most" in reason for reason in reasons) == 4, reasons
    assert sum("it is not an array" in reason for reason in reasons) == 2, reasons
    assert found["server"]["2"]["loss"] < found["server"]["0"]["loss"]
    assert found["clients"]["2"]["loss"] > 0


@pytest.mark.parametrize("job", [
    {"strategy": "QFedAvg", "options": {"client_learning_rate": 0.05, "q": 0.1}},
    {"private": ["DifferentialPrivacyServerSideFixedClipping",
                 {"noise_multiplier": 0.0, "clipping_norm": 1.0, "num_sampled_clients": 8}]},
], ids=["QFedAvg", "private"])  # fmt: skip
def test_a_strategy_that_goes_by_place_has_arrays_in_their_order(folder, play, job):
    found = simulated(play, folder, attacks={"2": "order"}, **job)
    assert found["refused"] == []
    assert found["server"]["2"]["loss"] < found["server"]["0"]["loss"]


def test_flower_accounts_for_no_privacy_around_a_guarded_strategy(folder, play):
    found = play(task="accounted", package=folder / "package")
    assert len(found["said"]) == 2
    assert all("requires a strategy using FedAvg.aggregate_train" in each for each in found["said"])


def test_an_update_of_mixed_precision_is_clipped_by_its_weights(tmp_path, play):
    """The number of its steps, 20 and more, is no part of the norm that is clipped."""
    moved = []
    settings = {"noise_multiplier": 0.0, "clipping_norm": 0.05, "num_sampled_clients": 6}
    for name, options in (("plain", {}), ("mixed", {"precision": "mixed"})):
        (tmp_path / name).mkdir()
        made = write_digits(tmp_path / name, **options)
        (made / "fleet.toml").write_text(IDEAL)
        private = ["DifferentialPrivacyClientSideFixedClipping", settings]
        client = SETTINGS | {"batch_size": 2}
        simulated(play, made, "fleet.toml", 1, client=client, mods=["fixedclipping_mod"],
                  private=private)  # fmt: skip
        before = parameters(made / "package" / "checkpoint")
        changes = [a - before[n] for n, a in parameters(made / "federated.ckpt").items()]
        moved.append(math.sqrt(sum(float((change**2).sum()) for change in changes)))
    assert moved[1] == pytest.approx(moved[0], rel=0.02)


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
def test_a_client_that_claims_most_samples_and_goes_back_does_not_own_the_model(
    folder, play, aggregate
):
    guarded = {"aggregate": aggregate, "most_times_median": 100.0}
    found = simulated(play, folder, attacks={"3": "owner"}, guarded=guarded)
    assert found["refused"] == []
    assert found["server"]["2"]["loss"] < found["server"]["0"]["loss"]


def test_a_configuration_that_no_client_understands_is_one_error(folder, play):
    job = {"clients": 2, "train_config": {"learning-rate": 0.1}}
    with pytest.raises(RuntimeError, match="unknown key 'learning-rate'"):
        simulated(play, folder, "fleet.toml", 1, **job)


@pytest.mark.parametrize(("strategy", "options"), [
    ("FedProx", {"proximal_mu": 0.1}),
    ("FedMedian", {}),
    ("QFedAvg", {"client_learning_rate": 0.05, "q": 0.1}),
])  # fmt: skip
def test_other_strategies_of_flower_learn(folder, play, strategy, options):
    job = {"strategy": strategy, "options": options, "evaluate": 1.0}
    found = simulated(play, folder, rounds=3, clients=6, **job)
    assert found["server"]["3"]["loss"] < found["server"]["0"]["loss"]
    # The clients' samples are drawn from those that the server evaluates on.
    assert found["clients"]["3"]["loss"] == pytest.approx(found["server"]["3"]["loss"], rel=0.1)
    assert 0 <= found["clients"]["3"]["accuracy"] <= 1
    assert found["train"]["3"]["peak-mb"] > 10


@pytest.mark.parametrize(
    ("side", "mods"), [("ServerSide", []), ("ClientSide", ["fixedclipping_mod"])]
)
def test_differential_privacy_of_flower_learns_less(folder, play, side, mods):
    """More noise is more privacy: the model that much noise spoils is worse than with little."""
    losses = []
    for noise in (0.001, 3.0):
        settings = {"noise_multiplier": noise, "clipping_norm": 1.0, "num_sampled_clients": 6}
        private = [f"DifferentialPrivacy{side}FixedClipping", settings]
        found = simulated(play, folder, rounds=3, clients=6, mods=mods, private=private)
        losses.append(found["server"]["3"]["loss"])
        assert found["refused"] == []
    assert losses[0] < found["server"]["0"]["loss"]
    assert losses[0] < losses[1]


def secure_and_plain(
    play: Play, job: dict[str, Any], out: Path, diverged: tuple[int, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """SecAgg+ into a checkpoint, and FedAvg into that of the job."""
    plain = play(task="simulate", attacks={str(number): "nan" for number in diverged}, **job)
    shares = {"num_shares": 5, "reconstruction_threshold": 3, "max_weight": MOST_SAMPLES}
    secure = play(task="secure", diverged=diverged, secure=shares, **job | {"out": out})
    return secure, plain


def test_secure_aggregation_hides_each_answer_and_learns_as_much(folder, play, tmp_path):
    job = {"rounds": 3, "clients": 8, "client": SETTINGS, **files(folder, "even.toml")}
    secure, plain = secure_and_plain(play, job, tmp_path / "secure.ckpt")
    hidden, seen = secure["server"]["3"], plain["server"]["3"]
    print(f"accuracy {hidden['accuracy']:.1%} by SecAgg+, {seen['accuracy']:.1%} by FedAvg")
    assert hidden["loss"] == pytest.approx(seen["loss"], rel=1e-3)
    assert hidden["accuracy"] == pytest.approx(seen["accuracy"], abs=0.005)
    assert seen["loss"] < plain["server"]["0"]["loss"]
    sent = [json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines()]
    for each in sent:
        assert each["arrays"] == 0
        assert all(set(metrics) == {"num_examples"} for metrics in each["metrics"])
    # What is sent lies evenly below 2^32, where parameters without a mask are around 2^21.
    masked = [each["masked"] for each in sent if each["masked"]]
    assert len(masked) == 3 * 8
    for means in masked:
        assert np.mean(means) / 2**32 == pytest.approx(0.5, abs=0.25)


def test_secure_aggregation_goes_on_without_a_client_that_diverges(folder, play, tmp_path):
    """The sum of the others is theirs, but for rounding to 2^22 steps between -8 and 8."""
    job = {"rounds": 1, "clients": 8, "client": SETTINGS, **files(folder, "even.toml")}
    secure_and_plain(play, job, tmp_path / "secure.ckpt", diverged=(2,))
    wanted = parameters(folder / "federated.ckpt")
    # A client's parameters are rounded once they are multiplied by its weight, 200 or more of 256.
    bound = 16 / 2**22 * MOST_SAMPLES / 200 + 1e-6
    for name, array in parameters(tmp_path / "secure.ckpt").items():
        np.testing.assert_allclose(array, wanted[name], rtol=0, atol=bound)


def test_a_client_keeps_its_optimizer_and_says_what_it_cannot_do(tmp_path, play):
    write_digits(tmp_path, optimizer="adamw")
    (tmp_path / "fleet.toml").write_text(IDEAL)
    found = play(
        task="by_hand", client=SETTINGS | {"keep_optimizer_state": True, "learning_rate": 0.001},
        configs=[{}, {"local-epochs": 3}, {"batch-size": 0}, {"lr": "much"}, {"learning-rate": 0.1},
                 {"epochs": 2}],
        **files(tmp_path),
    )  # fmt: skip
    first, second, third, fourth, *unknown, evaluation = found["steps"]
    assert evaluation["metrics"]["loss"] > 0
    assert first["metrics"]["train_loss"] == first["metrics"]["loss"]
    per_epoch = -(-first["metrics"]["num-examples"] // 16)
    assert first["step"] == 2 * per_epoch
    assert second["step"] == 5 * per_epoch  # goes on from the first round
    assert first["metrics"]["bytes"] > 1000
    assert (third["code"], fourth["code"]) == (100, 100)
    assert "batch-size" in third["reason"]
    assert "lr" in fourth["reason"]
    for each, key in zip(unknown, ("learning-rate", "epochs"), strict=True):
        assert each["code"] == 100
        assert f"unknown key '{key}'" in each["reason"]


def test_nobody_can_subtract_the_noise_of_a_private_client(tmp_path, play):
    """Answers to the same message, whatever the server asks for, differ by twice the noise."""
    rate, clip, noise, size = 0.1, 1.0, 10.0, 8
    write_digits(tmp_path, privacy_clip=clip, privacy_noise=noise)
    (tmp_path / "fleet.toml").write_text(IDEAL)
    same = {"server-round": 1}
    found = play(
        task="by_hand",
        client={"batch_size": size, "learning_rate": rate, "seed": 3},
        configs=[same, same, same | {"seed": 3}, {"local-epochs": 9}, {"batch-size": 999}],
        **files(tmp_path),
    )
    *answers, epochs, batch, evaluation = found["steps"]
    samples = {each["metrics"]["num-examples"] for each in answers}
    deviation = rate * clip * noise / size * math.sqrt(2 * math.ceil(samples.pop() / size))
    for one, other in itertools.combinations([np.array(each["moves"]) for each in answers], 2):
        assert (one - other).std() == pytest.approx(deviation, rel=0.15)
    assert all(set(each["metrics"]) <= {"num-examples", "seconds", "bytes", "peak-mb"}
               for each in answers)  # fmt: skip
    for each, words in (
        (epochs, "has local-epochs, and the package is private"),
        (batch, "has batch-size, and the package is private"),
        (evaluation, "an evaluation have no noise"),
    ):
        assert (each["code"], words in each["reason"]) == (100, True), each
