"""Asynchronous rounds: who is at work when, what becomes of each, and what an answer weighs."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_simulator.fleet.devices import IDEAL
from odtpack_simulator.fleet.fleet_file import FederationTable, FleetFile
from odtpack_simulator.fleet.population import NS, Population
from odtpack_simulator.fleet.round_clock import ENDS, BufferedClock, PlayedRound, RoundClock
from odtpack_simulator.fleet.updates import discounted
from tests.fleet.fleets import assert_same_bits, device, fleet_of, on_digits, toy_data
from tests.fleet.test_round_clock import clock_of, fleets, phones

DATA = toy_data()


def play(clock: RoundClock) -> Iterator[PlayedRound]:
    """All rounds, from the first midnight on."""
    now, flights = 0, ()
    for number in range(1, clock.population.fleet.federation.rounds + 1):
        played = clock.play(number, now, flights)
        if played is None:
            return
        yield played
        now, flights = played.start + played.duration, played.flights


def with_federation(fleet: FleetFile, **table: Any) -> FleetFile:
    return fleet.model_copy(update={"federation": FederationTable.model_validate(table)})


@st.composite
def buffered(draw: st.DrawFn) -> FleetFile:
    """A random fleet without a round to wait for."""
    fleet = draw(fleets())
    clients = fleet.federation.clients
    buffer = draw(st.integers(1, min(clients, fleet.population.clients)))
    federation = {
        "clients": clients,
        "buffer": buffer,
        "most_staleness": draw(st.integers(0, 4)),
        "deadline": f"{draw(st.integers(1, 3600))} s",
        "rounds": draw(st.integers(1, 8)),
        "days": draw(st.sampled_from([0.01, 0.5])),
    }
    return with_federation(fleet, **federation)


@settings(deadline=None, max_examples=100)
@given(buffered(), st.lists(phones, min_size=2, max_size=2))
def test_every_client_that_begins_comes_to_one_end(fleet, devices):
    federation = fleet.federation
    rounds = list(play(clock_of(fleet, devices, BufferedClock)))
    begun = ended = 0
    for number, each in enumerate(rounds, 1):
        begun += each.looked_at - sum(each.absent.values())
        ended += len(each.visits)
        # Whoever has begun is at work or at its end, and nobody is both or works twice.
        assert begun == ended + len(each.flights)
        assert len(each.flights) <= federation.clients
        at_work = [flight.client for flight in each.flights]
        assert len(set(at_work)) == len(at_work)
        answered = [visit.client for visit in each.averaged]
        assert len(set(answered)) == len(answered)
        assert len(answered) == federation.buffer or (not answered and each is rounds[-1])
        assert each.duration >= 0
        for visit in each.visits:
            assert visit.end in ENDS
            assert 0 <= visit.staleness < number
            if visit.end in ("averaged", "given up"):
                assert visit.staleness <= federation.staleness_limit
            elif visit.end == "stale":
                assert visit.staleness > federation.staleness_limit
            if visit.end in ("averaged", "given up", "stale", "surplus"):
                assert visit.at <= federation.deadline * NS
                assert visit.work == devices[visit.model].session(visit.steps).duration
            if visit.end == "unfinished":
                assert number == federation.rounds
            watts = devices[visit.model].watts
            if watts is not None:
                joules = watts * visit.work / 1e9 + 1.0 * visit.radio / 1e9
                assert visit.energy_j == pytest.approx(joules)
    if rounds:
        assert not rounds[-1].flights or len(rounds) < federation.rounds
    # Either all rounds took place, or everyone who had begun has come to an end.
    assert begun == ended


@settings(deadline=None, max_examples=60)
@given(buffered(), st.lists(phones, min_size=2, max_size=2), st.data())
def test_a_clock_goes_on_from_what_is_kept_of_a_round(fleet, devices, data):
    """What a round leaves to the next is its end and who is at work, and nothing else."""
    rounds = list(play(clock_of(fleet, devices, BufferedClock)))
    if not rounds:
        return
    number = data.draw(st.integers(1, len(rounds)))
    now, flights = 0, ()
    if number > 1:
        before = rounds[number - 2]
        now = before.start + before.duration
        flights = tuple(
            type(flight).model_validate_json(flight.model_dump_json()) for flight in before.flights
        )
    again = clock_of(fleet, devices, BufferedClock).play(number, now, flights)
    assert again == rounds[number - 1]


def alike(clients: int, population: int, **changes: Any) -> tuple[FleetFile, FleetFile]:
    """The same fleet in synchronous rounds, and with a buffer for all that are at work."""
    tables: dict[str, Any] = {
        "population": {"clients": population, "data": {"samples": 24}},
        "training": {"learning_rate": 0.1},
    }
    fleet = fleet_of(**tables)
    usual = {"clients": clients, "rounds": 4, "deadline": "10000 h", "days": 3000} | changes
    return (
        with_federation(fleet, minimum=clients, **usual),
        with_federation(fleet, buffer=clients, **usual),
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20), st.integers(0, 100), phones)
def test_with_a_buffer_for_all_who_work_alike_rounds_are_synchronous(clients, others, phone):
    """Equal devices, samples and rates, always there and never lost: then rounds are the same."""
    able = phone.model_copy(update={"limit_bytes": None, "window": None})
    for each in (able, IDEAL):
        together, buffer = alike(clients, clients + others)
        wanted = list(play(clock_of(together, [each, each], RoundClock)))
        found = list(play(clock_of(buffer, [each, each], BufferedClock)))
        assert len(wanted) == 4
        assert found == wanted


@settings(deadline=None, max_examples=60)
@given(buffered(), phones, st.floats(1, 20))
def test_slower_devices_never_change_the_model_earlier(fleet, phone, factor):
    """Of equal devices, always there, with time enough."""
    own = fleet.federation
    patient = with_federation(
        fleet_of(seed=fleet.seed, population={"clients": fleet.population.clients}),
        clients=own.clients, buffer=own.buffer, rounds=own.rounds, deadline="10000 h", days=3000,
        most_staleness=1000,
    )  # fmt: skip
    able = phone.model_copy(update={"limit_bytes": None, "window": None})
    slower = able.model_copy(
        update={
            name: math.ceil(factor * getattr(able, name))
            for name in ("creation", "load", "first_step", "step", "save")
        }
    )
    fast, slow = (list(play(clock_of(patient, [d, d], BufferedClock))) for d in (able, slower))
    assert len(slow) <= len(fast)
    for one, other in zip(fast, slow, strict=False):
        assert one.start + one.duration <= other.start + other.duration


def test_staleness_discounts_an_update():
    begun = {"w": np.array([1.0, 2.0], np.float32)}
    current = {"w": np.array([10.0, 20.0], np.float32)}
    answer = {"w": np.array([3.0, -2.0], np.float32)}
    # (3, -2) - (1, 2) = (2, -4), halved for a staleness of three.
    np.testing.assert_array_equal(discounted(answer, begun, current, 3, {"w"})["w"], [11.0, 18.0])
    third = discounted(answer, begun, current, 8, {"w"})["w"]
    np.testing.assert_allclose(third, [10 + 2 / 3, 20 - 4 / 3], rtol=1e-7)
    assert third.dtype == np.float32
    assert discounted(answer, begun, current, 0, {"w"})["w"] is answer["w"]
    # Without a gradient: half of the current one, half of the answer.
    np.testing.assert_array_equal(discounted(answer, begun, current, 3, ())["w"], [6.5, 9.0])


@pytest.mark.parametrize("phone", [IDEAL, device()], ids=["ideal", "equal"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
def test_with_a_buffer_for_all_who_work_alike_the_bits_are_those_of_synchronous_rounds(
    folder, phone, strategy
):
    together, buffer = alike(5, 30)
    both = []
    for fleet in (together, buffer):
        table = fleet.federation.model_copy(update={"strategy": strategy})
        own = fleet.model_copy(update={"federation": table})
        federation = on_digits(folder, own, [phone, phone])
        both.append(federation.simulate())
    (wanted, synchronous), (found, asynchronous) = both
    assert_same_bits(synchronous.arrays, asynchronous.arrays)
    assert [each.staleness for each in found.rounds] == [[5]] * 4
    assert [each.model_copy(update={"staleness": []}) for each in found.rounds] == wanted.rounds


def test_an_asynchronous_federation_is_what_its_order_by_hand_gives(folder):
    """Two clients, one of which takes two and a half times as long; every answer counts at once.

    The fast one answers at 1, 2, 3, 4 and 5 s, the slow one at 2.5 and 5 s, shortly before.
    """
    seed = 0  # client 0 has the first model of device, client 1 the second
    while Population(toy := toy_fleet(seed), DATA).models(np.arange(2)).tolist() != [0, 1]:
        seed += 1
    devices = [
        device("fast", step=NS // 2, first_step=NS // 2, creation=0, load=0, save=0),
        device("slow", step=5 * NS // 4, first_step=5 * NS // 4, creation=0, load=0, save=0),
    ]
    federation = on_digits(folder, toy, devices)
    result, state = federation.simulate()
    by_hand = [(0, 0), (0, 1), (1, 0), (0, 2), (0, 4), (1, 3), (0, 5)]
    seconds = [1, 2, 2.5, 3, 4, 5, 5]
    for each, when in zip(result.rounds, seconds, strict=True):
        assert each.start_s + each.duration_s == pytest.approx(when, abs=1e-3)
    assert result.staleness() == [3, 2, 2]
    models = [{name: array.astype(np.float64) for name, array in federation.initial.items()}]
    for number, (client, version) in enumerate(by_hand, 1):
        sent = {name: array.astype(np.float32) for name, array in models[version].items()}
        answer = federation.trainer.train(
            sent, federation.data.arrays, federation.population.client(client).samples(),
            federation.settings, round_number=version + 1, client=client,
        )  # fmt: skip
        share = (1 + number - 1 - version) ** -0.5
        models.append(
            {
                name: array + share * (answer.arrays[name] - models[version][name])
                for name, array in models[-1].items()
            }
        )
    for name, array in state.arrays.items():
        np.testing.assert_allclose(array, models[-1][name], rtol=2e-5, atol=2e-6)
    # The slow one had just begun anew.
    assert result.ends() == {"averaged": 7, "unfinished": 1}


def toy_fleet(seed: int) -> FleetFile:
    fleet = fleet_of(
        seed=seed,
        population={"clients": 2, "data": {"samples": 32, "dirichlet": 0.5}},
        training={"batch_size": 16, "learning_rate": 0.1},
        traffic={"down": "1000 GB/s", "up": "1000 GB/s"},
    )
    return with_federation(fleet, clients=2, buffer=1, rounds=7)
