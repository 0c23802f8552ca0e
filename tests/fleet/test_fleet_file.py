"""Fleet files and traces come from outside: each mistake is one error that says where."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odtpack_simulator.fleet.fleet_file import parse_fleet, read_fleet
from odtpack_simulator.fleet.population import (
    NS,
    Population,
    read_trace,
    shuffled,
    split_data,
    uniforms,
)
from tests.fleet.fleets import fleet_of, toy_data
from tests.refused import refused

GOOD = """seed = 1
[population]
clients = 100
[federation]
clients = 10
"""
HOUR = 3600


@pytest.mark.parametrize(("old", "new", "line", "words"), [
    ("clients = 100", "clients = 0", 3, "at least 1"),
    ("clients = 100", "clients = 100\nlots = 0.5", 4, "did you mean 'lost'"),
    ("clients = 100", 'clients = 100\nstate = "asleep"', 4, "'background'"),
    ("clients = 100", "clients = 100\n[population.data]\nsamples = [9, 3]", 4, "above the second"),
    ("clients = 100", "clients = 100\n[population.data]\ndirichlet = nan", 5, "finite"),
    ("clients = 100", "clients = 100\n[population.availability]\nidle = [0.5]", 5,
     "must have at least 24 values, found 1"),
    ("clients = 100", "clients = 100\n[population.data]\nsamples = [1, 2, 3]", 5,
     "at most 2 values"),
    ("clients = 100", "clients = 100\n[population.device]\nprofile = 'a'", 4,
     "must be a list of tables, each under [[population.device]]"),
    ("clients = 100", "clients = 100\n[population.availability]\nidle = {a = 1}", 5,
     "must be a list, found"),
    ("clients = 10\n", "clients = 10\ndeadline = 600\n", 6, '"10 min"'),
    ("clients = 10\n", 'clients = 10\ndeadline = "5 parsecs"\n', 6, "is not a unit"),
    ("clients = 10\n", 'clients = 10\n[traffic]\nup = "9 Mbit/s"\n', 7, "8 Mbit are 1 MB; allowed"),
    ("clients = 10\n", 'clients = 10\n[traffic]\nup = "9 Mb/s"\n', 7, "8 Mbit are 1 MB; allowed"),
    ("clients = 10\n", 'clients = 10\ndeadline = "5 bits"\n', 6, "unit of duration, did you"),
    ("clients = 10\n", 'clients = 10\ndeadline = "0 s"\n', 6, "more than nothing"),
    ("clients = 10\n", 'clients = 10\nretry = "1 ms"\n', 6, "must be at least 1 s"),
    ("clients = 10\n", 'clients = 10\n[traffic]\nup = "0.1 B/s"\n', 7, "must be at least 1 B/s"),
    ("clients = 10\n", 'clients = 10\n[traffic]\nradio_power = "9e9 W"\n', 7, "at most 1000000"),
    ("clients = 10\n", "clients = 10\nminimum = 11\n", 4, "more than the 10 clients"),
    ("clients = 10\n", "clients = 10\nbuffer = 11\n", 4, "more than the 10 clients"),
    ("clients = 10\n", "clients = 10\nmost_staleness = 2\n", 4, "set buffer as well"),
    ("clients = 10\n", 'clients = 10\nbuffer = 2\nevery = "1 h"', 4, "leave out every"),
    ("clients = 10\n", "clients = 200\nbuffer = 101", None, "the population has 100"),
    ("clients = 10\n", "clients = 200\nminimum = 101", None, "the population has 100"),
    ("clients = 10\n", "clients = 10\n[budgets]\ndays = 3\n", 6, "set accuracy as well"),
    ("clients = 10\n", "clients = true\n", 5, "must not be true or false, found True"),
    ("clients = 10\n", "clients = 10\ndays = true\n", 6, "must not be true or false"),
    ("clients = 10\n", "clients = 10\n[budgets]\naccuracy = true\n", 7, "true or false"),
    ("clients = 100", "clients = 100\n[population.data]\nsamples = true", 5, "true or false"),
    (
        "clients = 100",
        "clients = 100\n[population.data]\nsamples = [true, 3]",
        5,
        "must not be true or false",
    ),
    ("[federation]\nclients = 10\n", "", None, "is missing"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_line(old, new, line, words):
    assert parse_fleet(GOOD.encode()).federation.deadline == 600
    with refused("fleet-invalid", "fleet file is wrong", what=words) as error:
        parse_fleet(GOOD.replace(old, new, 1).encode())
    assert error.value.where == ("fleet.toml" if line is None else f"fleet.toml:{line}")


def test_a_file_that_is_no_fleet_is_refused(tmp_path):
    path = tmp_path / "fleet.toml"
    for content, code in (
        (b"\xff", "fleet-malformed"), (b"a = ", "fleet-malformed"),
        (b"[" * 5000, "fleet-malformed"), (b"#" * 300_000, "fleet-too-large"),
    ):  # fmt: skip
        path.write_bytes(content)
        with refused(code):
            read_fleet(path)
    with refused("fleet-missing"):
        read_fleet(tmp_path / "absent.toml")


def test_clients_are_what_the_file_says():
    fleet = fleet_of(
        population={
            "clients": 100_000,
            "device": [{"profile": "a", "share": 3}, {"profile": "b", "share": 1}],
            "data": {"samples": [10, 19], "dirichlet": 0.1},
        },
        traffic={"up": ["1 kB/s", "1 MB/s"]},
    )
    population = Population(fleet, toy_data(400, 4))
    models = population.models(np.arange(100_000))
    assert np.bincount(models) / 100_000 == pytest.approx([0.75, 0.25], abs=0.01)
    clients = population.sample(2000)
    assert len({client.number for client in clients}) == 2000
    assert sorted({client.examples for client in clients}) == list(range(10, 20))
    rates = np.log10([client.rates()[1] for client in clients])
    assert rates.min() >= 3
    assert rates.max() <= 6
    assert rates.mean() == pytest.approx(4.5, abs=0.1)
    shares = np.array([client.label_shares() for client in clients])
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    # Of a symmetric Dirichlet distribution: variance (K - 1) / (K² (K c + 1)), c = 0.1, K = 4.
    assert shares.var(axis=0) == pytest.approx(np.full(4, 3 / (16 * 1.4)), rel=0.1)
    labels = population.data.arrays["labels"]
    for client in clients[:200]:
        samples = client.samples()
        assert len(samples) == client.examples
        assert set(samples) <= set(population.data.train)
        # None of a class that it has next to nothing of.
        missing = np.flatnonzero(client.label_shares() < 1e-6)
        assert not set(labels[samples]) & set(missing)
        np.testing.assert_array_equal(samples, population.client(client.number).samples())


@pytest.mark.parametrize("ignored", [-100, 9])
def test_a_label_that_is_ignored_is_no_class(ignored):
    labels = np.arange(200, dtype=np.int64) % 4
    labels[::5] = ignored
    data = split_data({"input": np.zeros((200, 1)), "labels": labels}, 0, ignored)
    population = Population(fleet_of(population={"data": {"dirichlet": 0.5}}), data)
    assert len(data.classes) == 4
    assert sum(map(len, data.classes)) == np.count_nonzero(labels[data.train] != ignored)
    for client in population.sample(50):
        assert ignored not in labels[client.samples()]
    unknown = split_data(data.arrays, 0)
    assert len(unknown.classes) == (0 if ignored < 0 else 10)


@given(st.integers(1, 5000), st.integers(0, 2**31), st.integers(1, 100))
def test_an_order_has_every_client_once(count, seed, piece):
    found = np.concatenate(
        [shuffled((seed, 1), start, start + piece, count) for start in range(0, count, piece)]
    )
    assert sorted(found.tolist()) == list(range(count))
    drawn = uniforms((seed, 2), np.arange(count))
    assert ((drawn >= 0) & (drawn < 1)).all()


MESSAGES = """2020-01-31 20:00:00\tscreen_lock
2020-01-31 22:00:00\tbattery_charged_on
2020-01-31 23:00:00\twifi
2020-01-31 23:10:00\t85%
2020-02-01 02:00:00\t4G
2020-02-01 03:00:00\tWIFI
2020-02-01 06:30:00\tscreen_unlock
2020-02-01 20:00:00\tbattery_charged_off
"""


def write_trace(path: Path, **devices: object) -> str:
    path.write_text(json.dumps({name: {"messages": text} for name, text in devices.items()}))
    return str(path)


def test_a_trace_says_when_a_device_is_there(tmp_path):
    everything = ("idle", "charging", "unmetered")
    path = write_trace(tmp_path / "state_traces.json", one=MESSAGES)
    trace = read_trace(path, everything, 0)
    clients = np.arange(5)

    def there(hour: float, trace=trace) -> bool:
        (absent,) = trace.absences(clients, int(hour * HOUR * NS)).values()
        assert absent.all() or not absent.any()
        return not absent.any()

    assert [there(hour) for hour in (20, 22.5, 23.5, 25.9, 26.5, 28, 30.4, 30.6, 40)] == [
        *(False, False, True, True, False, True, True, False, False)
    ]
    assert there(23.5 + 24)  # it begins anew
    assert trace.leaves(0, int(23.5 * HOUR) * NS, 48 * HOUR * NS) == 26 * HOUR * NS
    assert trace.leaves(0, int(23.5 * HOUR) * NS, 25 * HOUR * NS) is None
    loose = read_trace(path, ("idle", "charging"), 0)
    assert loose.leaves(0, 23 * HOUR * NS, 48 * HOUR * NS) == int(30.5 * HOUR) * NS


@pytest.mark.parametrize(("content", "words"), [
    ("nothing", "not JSON"),
    ("[]", "not an object"),
    ('{"one": {}}', "no text 'messages'"),
    ('{"one": {"messages": 3}}', "no text 'messages'"),
    ('{"one": {"messages": "2020-01-31 20:00:00 wifi"}}', "a time, a tab and a state"),
    ('{"one": {"messages": "yesterday\\twifi"}}', "does not match format"),
    (
        '{"one": {"messages": "2020-01-31 20:00:00\\twifi\\n2020-01-30 20:00:00\\twifi"}}',
        "after a later time",
    ),
    ('{"one": {"messages": ""}}', "no device is ever idle"),
])  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path, content, words):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with refused("fleet-trace", "trace of states is wrong", what=words):
        read_trace(str(path), ("idle",), 0)
