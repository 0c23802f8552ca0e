"""Published trainings on phones: what lies between two batch sizes, and what the plan needs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.published.networks import NETWORKS
from scripts.published_phones import line

ROWS = Path(__file__).parents[3] / "benchmarks/published/training.csv"


def published() -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    with ROWS.open(newline="") as stream:
        for row in csv.DictReader(stream):
            found.setdefault(row["model"], {})[int(row["batch"])] = float(row["ms_per_step"])
    return found


def test_every_row_names_its_source_and_a_network_that_is_rebuilt() -> None:
    with ROWS.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 25
    assert {row["model"] for row in rows} == set(NETWORKS)
    assert all("@" in row["source"] for row in rows)


def test_bracketing_beats_drawing_on_from_small_batches() -> None:
    """Within 10 % of what was published, of all rows that are not an end of the line."""
    bracketed, drawn_on = [], []
    for times in published().values():
        ends = {size: times[size] for size in (1, 16)}
        small = {size: times[size] for size in (1, 2)}
        bracketed += [line(ends, size) / times[size] - 1 for size in (2, 4, 8)]
        drawn_on += [line(small, size) / times[size] - 1 for size in (4, 8, 16)]
    good, poor = (sum(abs(e) <= 0.1 for e in errors) for errors in (bracketed, drawn_on))
    assert good >= 12
    assert good > poor + 3
    assert max(map(abs, bracketed)) < 0.2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("Squeezenet", 1_248_424), ("Alexnet", 61_100_840), ("Mobilenet", 3_504_872)],
)
def test_networks_are_those_of_the_papers(name: str, parameters: int) -> None:
    """Against the counts of torchvision's models of the same names."""
    module = NETWORKS[name].module()
    assert sum(value.numel() for value in module.parameters()) == parameters
