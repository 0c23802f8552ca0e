"""What must hold of every fleet: every client is accounted for, and less never gives more."""

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_simulator.fleet.devices import FleetDevice
from odtpack_simulator.fleet.fleet_file import FleetFile
from odtpack_simulator.fleet.population import NS, Population, make_availability
from odtpack_simulator.fleet.round_clock import (
    ENDS,
    NEVER_STARTED,
    BufferedClock,
    PlayedRound,
    RoundClock,
)
from odtpack_simulator.fleet.updates import (
    ROBUST,
    capped,
    coordinate_median,
    refusals,
    trimmed_mean,
    weighted_mean,
)
from tests.fleet.fleets import device, fleet_of, toy_data

DATA = toy_data()
ROUNDS = 3
HOUR = 3600


def clock_of(
    fleet: FleetFile, devices: list[FleetDevice], kind: type[RoundClock] = RoundClock
) -> RoundClock:
    return kind(
        Population(fleet, DATA), devices, make_availability(fleet),
        lambda examples: fleet.training.epochs * math.ceil(examples / fleet.training.batch_size),
        100_000,
    )  # fmt: skip


def play(fleet: FleetFile, devices: list[FleetDevice]) -> list[PlayedRound]:
    """Rounds that start on the hour, whatever the devices do."""
    clock = clock_of(fleet, devices)
    played = [clock.play(number, number * HOUR * NS) for number in range(1, ROUNDS + 1)]
    return [each for each in played if each is not None]


def participation(rounds: list[PlayedRound]) -> list[int]:
    return [len(each.averaged) for each in rounds]


hours = st.one_of(st.none(), st.lists(st.floats(0.2, 1), min_size=24, max_size=24))
phones = st.builds(
    device, step=st.integers(NS // 1000, NS), creation=st.integers(0, NS),
    window=st.one_of(st.none(), st.integers(NS, 100 * NS)),
    throttle_after=st.one_of(st.none(), st.integers(NS, 30 * NS)),
    sustained=st.sampled_from([1.0, 0.7, 0.4]),
    limit_bytes=st.one_of(st.none(), st.integers(40_000_000, 60_000_000)),
    watts=st.one_of(st.none(), st.floats(0.5, 8)),
    battery_j=st.one_of(st.none(), st.floats(10, 50_000)),
)  # fmt: skip


@st.composite
def fleets(draw: st.DrawFn) -> FleetFile:
    clients = draw(st.integers(1, 20))
    population: dict[str, Any] = {
        "clients": draw(st.integers(1, 300)),
        "lost": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "requires": draw(st.sampled_from([["idle"], ["idle", "charging"], []])),
        "data": {"samples": sorted(draw(st.lists(st.integers(0, 80), min_size=2, max_size=2)))},
    }
    availability = {name: draw(hours) for name in ("idle", "charging")}
    population["availability"] = {k: v for k, v in availability.items() if v is not None}
    return fleet_of(
        seed=draw(st.integers(0, 2**31 - 1)),
        population=population,
        federation={
            "clients": clients,
            "minimum": draw(st.integers(1, min(clients, population["clients"]))),
            "over_selection": draw(st.sampled_from([1.0, 1.3, 2.0])),
            "deadline": f"{draw(st.integers(1, HOUR))} s",
        },
        traffic={"up": ["10 kB/s", "1 MB/s"], "radio_power": "1 W"},
    )


def changed(fleet: FleetFile, **federation: Any) -> FleetFile:
    table = fleet.federation.model_copy(update=federation)
    return fleet.model_copy(update={"federation": table})


@settings(deadline=None, max_examples=60)
@given(fleets(), st.lists(phones, min_size=2, max_size=2))
def test_every_chosen_client_comes_to_one_end_and_takes_what_its_power_says(fleet, devices):
    for each in play(fleet, devices):
        numbers = [visit.client for visit in each.visits]
        assert len(set(numbers)) == len(numbers)
        assert numbers == sorted(numbers)
        assert all(0 <= number < fleet.population.clients for number in numbers)
        assert each.looked_at == len(numbers) + sum(each.absent.values())
        assert len(each.averaged) <= fleet.federation.clients
        assert each.duration <= fleet.federation.deadline * NS
        for visit in each.visits:
            assert visit.end in ENDS
            phone = devices[visit.model]
            if visit.end in NEVER_STARTED:
                assert (visit.work, visit.radio, visit.energy_j) == (0, 0, 0.0)
            elif phone.watts is None:
                assert visit.energy_j is None
            else:
                joules = phone.watts * visit.work / 1e9 + 1.0 * visit.radio / 1e9
                assert visit.energy_j == pytest.approx(joules)
            if visit.end in ("averaged", "surplus", "given up"):
                assert visit.at <= fleet.federation.deadline * NS
                assert visit.work == phone.session(visit.steps).duration
                assert visit.moved_bytes == 200_000
            elif visit.end == "late":
                assert visit.at > fleet.federation.deadline * NS


@pytest.mark.parametrize(
    ("clients", "over", "chosen"), [(100, 1.1, 110), (100, 1.0, 100), (10, 1.01, 11), (7, 1.3, 10)]
)
def test_over_selection_chooses_as_many_as_it_says(clients, over, chosen):
    """The product in decimal numbers, rounded up."""
    fleet = fleet_of(federation={"clients": clients, "over_selection": over})
    played = clock_of(fleet, [device(), device("acme/two")]).play(1, 0)
    assert len(played.visits) == chosen


@settings(deadline=None, max_examples=60)
@given(fleets(), st.lists(phones, min_size=2, max_size=2), st.floats(0.05, 1))
def test_a_shorter_deadline_never_raises_participation(fleet, devices, share):
    shorter = changed(fleet, deadline=fleet.federation.deadline * share)
    less, more = participation(play(shorter, devices)), participation(play(fleet, devices))
    assert all(a <= b for a, b in zip(less, more, strict=True))


@settings(deadline=None, max_examples=60)
@given(fleets(), st.lists(phones, min_size=2, max_size=2), st.integers(1, 60_000_000))
def test_a_lower_memory_limit_never_raises_participation(fleet, devices, limit):
    lowered = [
        each.model_copy(update={"limit_bytes": min(limit, each.limit_bytes or limit)})
        for each in devices
    ]
    less, more = participation(play(fleet, lowered)), participation(play(fleet, devices))
    assert all(a <= b for a, b in zip(less, more, strict=True))


@settings(deadline=None, max_examples=60)
@given(fleets(), phones, st.floats(1, 20))
def test_a_slower_device_never_finishes_earlier(fleet, phone, factor):
    times = {
        name: math.ceil(factor * getattr(phone, name))
        for name in ("creation", "load", "first_step", "step", "save")
    }
    slower = phone.model_copy(update=times)
    for fast, slow in zip(play(fleet, [phone, phone]), play(fleet, [slower, slower]), strict=True):
        assert fast.duration <= slow.duration or len(slow.averaged) < len(fast.averaged)
        ends = {visit.client: visit for visit in fast.visits}
        for visit in slow.visits:
            before = ends[visit.client]
            if visit.end in ("averaged", "surplus", "given up"):
                assert before.end in ("averaged", "surplus", "given up")
                assert before.at <= visit.at


def test_who_is_there_follows_the_hours_and_stays_through_the_night():
    night = [0.8] * 7 + [0.1] * 15 + [0.6] * 2
    model = make_availability(fleet_of(population={"availability": {"charging": night}}))
    clients = np.arange(20_000)
    for hour, wanted in ((3, 0.8), (13, 0.1), (23, 0.6)):
        # Half an hour of play: devices' hours begin at minutes of their own.
        absent = model.absences(clients, (24 + hour) * HOUR * NS)["not charging"]
        assert 1 - absent.mean() == pytest.approx(wanted, abs=0.25 if hour == 23 else 0.02)
    there = ~model.absences(clients, 25 * HOUR * NS)["not charging"]
    stays = [
        model.leaves(int(client), 25 * HOUR * NS, 28 * HOUR * NS) is None
        for client in clients[there][:200]
    ]
    assert all(stays)  # the share does not fall before seven
    leaving = [model.leaves(int(c), 25 * HOUR * NS, 34 * HOUR * NS) for c in clients[there][:200]]
    gone = [time for time in leaving if time is not None]
    assert 0.7 < len(gone) / 200 < 1  # one in eight charges all day
    assert all(6 * HOUR < time / NS - 24 * HOUR <= 7 * HOUR for time in gone)


@pytest.mark.parametrize("kind", [RoundClock, BufferedClock])
def test_memory_does_not_grow_with_the_population(kind):
    peaks = []
    for clients in (10_000, 1_000_000, 1_000_000_000):
        fleet = fleet_of(
            population={"clients": clients, "availability": {"idle": [0.02] * 24}},
            federation={"clients": 100, "rounds": 2}
            | ({"buffer": 100, "deadline": "1 min"} if kind is BufferedClock else {}),
        )
        clock = clock_of(fleet, [device(), device()], kind=kind)
        tracemalloc.start()
        played = [clock.play(number, number * HOUR * NS) for number in (1, 2)]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        for each in played:
            assert len(each.averaged) == 100
            assert each.looked_at > 2000
    assert max(peaks) < 1.2 * min(peaks) + 1_000_000


# What one answer can do to a round's model, with everything that it may lie about.


def rounds(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """A model, and answers that all say about the same."""
    random = np.random.default_rng(seed)
    begun = {"w": random.standard_normal((5, 4), np.float32), "b": np.ones(4, np.float32)}
    step = {name: random.standard_normal(array.shape) * 0.1 for name, array in begun.items()}
    answers = [
        {
            name: (array + step[name] + 0.01 * random.standard_normal(array.shape)).astype("f4")
            for name, array in begun.items()
        }
        for _ in range(count)
    ]
    return begun, answers


def pushed(begun: dict[str, np.ndarray], model: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([(model[name] - begun[name]).ravel() for name in begun])


def test_a_client_that_claims_many_samples_does_not_own_the_model():
    begun, answers = rounds(6)
    flipped = {name: 2 * begun[name] - array for name, array in answers[0].items()}
    weights = [20, 25, 30, 22, 28, 10**9]
    assert capped(weights) == [20, 25, 30, 22, 28, 79]
    assert capped([20, 25, 30]) == [20, 25, 30]
    assert capped([]) == []
    honest = pushed(begun, weighted_mean(answers[:5], weights[:5]))
    own = pushed(begun, weighted_mean([*answers[:5], flipped], weights))
    held = pushed(begun, weighted_mean([*answers[:5], flipped], capped(weights)))
    assert own @ honest < 0  # it owned the model
    assert held @ honest > 0


@pytest.mark.parametrize("count", [1, 2])
def test_few_answers_are_compared_with_the_model(count):
    begun, answers = rounds(count)
    assert refusals(begun, answers) == [None] * count
    far = {name: begun[name] + 1e6 * (array - begun[name]) for name, array in answers[0].items()}
    *others, reason = refusals(begun, [*answers[1:], far])
    assert others == [None] * (count - 1)
    assert reason is not None
    assert "times that of the model" in reason
    zeros = {name: np.zeros_like(array) for name, array in begun.items()}
    assert refusals(zeros, answers) == [None] * count  # nothing to compare with


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
@pytest.mark.parametrize("count", [5, 10])
def test_robust_aggregates_stay_among_what_the_others_say(name, count):
    begun, answers = rounds(count)
    bad = [
        {key: begun[key] - 9 * (array - begun[key]) for key, array in answer.items()}
        for answer in answers[: count // 5]
    ]
    assert refusals(begun, [*bad, *answers[len(bad) :]]) == [None] * count  # not long enough
    good = answers[len(bad) :]
    found = ROBUST[name]([*bad, *good])
    for key, array in found.items():
        assert array.dtype == np.float32
        stack = np.stack([answer[key] for answer in good])
        assert (stack.min(axis=0) - 1e-6 <= array).all()
        assert (array <= stack.max(axis=0) + 1e-6).all()
    mean = weighted_mean([*bad, *good], [1] * count)
    assert np.abs(pushed(found, mean)).max() > 0.05  # which the mean does not


def test_robust_aggregates_by_hand():
    answers = [{"w": np.array([value, -value], np.float32)} for value in (1, 2, 9, 4, 100)]
    np.testing.assert_array_equal(coordinate_median(answers)["w"], [4, -4])
    np.testing.assert_array_equal(trimmed_mean(answers)["w"], [5, -5])
    np.testing.assert_array_equal(trimmed_mean(answers, 0.4)["w"], [4, -4])
    np.testing.assert_array_equal(trimmed_mean(answers[:2], 0.4)["w"], [1.5, -1.5])
    np.testing.assert_array_equal(trimmed_mean(answers[:1])["w"], [1, -1])
